"""Public operations on abused operands: what is not refused by a ValueError equals the definition in float64.

Types, sizes of 0 and 1, views of any strides and signs, NaN at masked tokens, huge and tiny numbers, donated states
that share memory, and now and then an operand of another shape, type or device.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from longspan import backend, decay_attention, delta_rule, general_delta_rule, linear_attention, sparse_attention
from longspan.ops.native.call import available

from . import Case

SHORT, LONG = 120, 6000
OPERATIONS = ("linear", "decay", "delta", "general", "sparse")
PATTERNS = ("causal", "band(3)", "band(3, 2) | globals(2)", "random(2)", "causal & (band(2) | strided(16))", "block(5)")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    for i in range(count):
        dice = random.Random(f"{seed}-{i}")
        name = dice.choice(OPERATIONS)
        yield f"{i}-{name}", lambda name=name, i=i: attack(name, random.Random(f"{seed}-{i}-inside"), seed * 10**6 + i)


def attack(name: str, dice: random.Random, seed: int) -> str | None:
    """One call."""
    generator = torch.Generator().manual_seed(seed)
    options, spoilt = operands(name, dice, generator)
    # Copies, as a state may be overwritten; and torch itself loses a sign that is still to be changed in half types.
    exact = {k: t.resolve_neg().clone() if isinstance(t, Tensor) else t for k, t in options.items() if k != "donate"}
    exact = {k: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for k, t in exact.items()}
    shape = tuple(options["value"].shape)
    chosen = dice.choice(["auto", "auto", "torch", *(["native"] if available() else [])])
    try:
        with backend(chosen):
            found = call(name, options)
    except ValueError as error:
        return None if str(error).strip() else "a ValueError without a word"
    except Exception as error:  # any error counts as a failed answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]} (backend {chosen}, value {shape})"
    if spoilt:
        return f"took a {spoilt} (backend {chosen})"
    with backend("reference"):
        expected = call(name, exact)
    mask = options.get("mask")
    real = slice(None) if mask is None else mask[:, None].expand(found.shape[:3])
    return differs(found[real].double(), expected[real], TOLERANCES[found.dtype], chosen)


def call(name: str, options: dict) -> Tensor:
    functions = {
        "linear": linear_attention,
        "decay": decay_attention,
        "delta": delta_rule,
        "general": general_delta_rule,
        "sparse": sparse_attention,
    }
    return functions[name](**options)


def operands(name: str, dice: random.Random, generator: torch.Generator) -> tuple[dict, str]:
    """Keyword arguments, and in words what no operation may take, or ""."""
    b, h, n = dice.choice([0, 1, 2, 3]), dice.choice([1, 2, 4]), dice.choice([0, 1, 1, 2, 7, 33, 70])
    d, e, size = dice.choice([1, 4, 5, 16]), dice.choice([1, 3, 8]), dice.choice([1.0, 1.0, 1e-6, 30.0])
    dtype = dice.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    if dtype in (torch.bfloat16, torch.float16):
        size = min(size, 1.0)  # logits of thousands have no digits left there, by any form

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {"query": normal(b, h, n, d) * size, "key": normal(b, h, n, d) * size, "value": normal(b, h, n, e)}
    if name in ("decay", "delta", "general"):
        made["key"] = torch.nn.functional.normalize(made["key"], dim=-1)
        if name == "decay" or dice.random() < 0.7:
            made["log_decay"] = -normal(*dice.choice([(b, h, n), (b, h, n, d)])).abs() * dice.choice([0.1, 1.0, 100.0])
        if name == "delta":
            made["beta"] = normal(b, h, n).sigmoid()
        if name == "general":
            made["read"] = torch.nn.functional.normalize(normal(b, h, n, d), dim=-1)
            made["erase"] = made["read"] * normal(b, h, n, d).sigmoid()
    options: dict = {k: view(t.to(dtype), dice) for k, t in made.items()}
    if dice.random() < 0.4:
        options["mask"] = torch.rand(b, n, generator=generator) > 0.4
        content = dice.choice([float("nan"), float("inf"), 0.0])
        away = ~options["mask"][:, None, :, None]
        for k in made:
            options[k] = options[k].masked_fill(away if options[k].dim() == 4 else away[..., 0], content)
    if name == "sparse":
        options["pattern"] = dice.choice(PATTERNS)
        if dice.random() < 0.3:
            options["bias"] = normal(dice.choice([1, h]), n, n).to(dtype)
    elif dice.random() < 0.6:
        wide = torch.promote_types(dtype, torch.float32)
        options["state"] = view(normal(b, h, d, e + (name == "linear")).abs().to(wide), dice)
        options["donate"] = dice.random() < 0.3
    if name == "general":
        options["read_before_decay"] = dice.random() < 0.5
    return options, spoil(options, dice) if dice.random() < 0.25 else ""


def view(x: Tensor, dice: random.Random) -> Tensor:
    """The same numbers, in memory in another way."""
    match dice.randrange(6):
        case 0:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case 1:
            return x.mT.contiguous().mT
        case 2:
            return torch._neg_view(-x)
        case 3:
            return torch.stack([x, x * 3], -1)[..., 0]
        case 4:
            return torch.cat([x, x], 0)[len(x) :]
    return x


def spoil(options: dict, dice: random.Random) -> str:
    """Make one operand what it may not be -> what it is, in words."""
    name = dice.choice([k for k, t in options.items() if isinstance(t, Tensor)])
    x = options[name]
    how = dice.choice(["integer", "meta", "with one axis less", "with one more row", "shared"])
    match how:
        case "integer":
            options[name] = x.to(torch.int32)
        case "meta":
            options[name] = x.to("meta")
        case "with one axis less":
            options[name] = x.sum(-1) if x.is_floating_point() else x.any(-1)
            # A decay by channel without its channels is one by head.
            if name == "log_decay" and x.dim() == 4:
                return ""
        case "with one more row":
            # A bias for all heads with one more is a bias for each of two.
            if name == "bias" and len(x) + 1 == options["query"].shape[1]:
                return ""
            options[name] = torch.cat([x, x.new_ones(1, *x.shape[1:])])
        case "shared":
            state = options.get("state")
            if state is None or not state.numel() or not options["query"].numel():
                return ""
            options |= {"donate": True, "query": options["query"].to(state.dtype).clone()}
            n, d = options["query"].shape[2:]
            if n > state.shape[2] or d > state.shape[3] or state.dtype != options["value"].dtype:
                return ""
            options["query"] = state[:, :, :n, :d]
    return f"{name} that is {how}"


def differs(found: Tensor, expected: Tensor, tolerance: float, chosen: str) -> str | None:
    """In words, where numbers are not as near as their type allows; what is not finite must be so in both."""
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return f"{int((finite != found.isfinite()).sum())} numbers are finite in one alone (backend {chosen})"
    error = (found - expected)[finite].abs().max().item() if finite.any() else 0.0
    scale = max(1.0, expected[finite].abs().max().item()) if finite.any() else 1.0
    return None if error <= tolerance * scale else f"off by {error:.1e} of {scale:.1e} (backend {chosen})"
