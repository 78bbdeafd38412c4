"""States that no decoder made, given to the engine and to decoders: a ValueError or the right answer, no crash."""

import random
from collections.abc import Iterator
from pathlib import Path

import torch

from . import Case, _child

SHORT, LONG = 15, 3000
MODELS = ("linear", "softmax", "linear; softmax(kv_heads=1)", "local(window=3); gla")


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    yield from _child.cases(__name__, seed, count)


def attack(dice: random.Random) -> str | None:
    """One state, abused in one place, and a token read after it."""
    import longspan
    from longspan.generation.native_decoder import Engine
    from longspan.ops.native.call import available

    torch.manual_seed(0)
    text, positions = dice.choice(MODELS), dice.choice(["none", "learned", "sinusoidal", "rotary"])
    if "gla" in text and positions == "rotary":
        positions = "none"
    config = longspan.DecoderConfig(dim=8, heads=2, depth=2, vocab=5, attention=text, positions=positions, length=64)
    model = longspan.Decoder(config).eval()
    prompt = torch.randint(0, 5, (2, 5), generator=torch.Generator().manual_seed(dice.randrange(99)))
    token = prompt[:, :1].contiguous()
    with torch.no_grad():
        _, state = model(prompt, model.init_state(2, dice.choice([0, 5, 9])))
        expected, _ = model(token, state)
    leaves, tree = torch.utils._pytree.tree_flatten(state)
    counters = [n for n, t in enumerate(leaves) if t.dtype == torch.int64]
    # Half of them in what counts, where harm is done.
    which = dice.choice(counters) if dice.random() < 0.5 else dice.randrange(len(leaves))
    leaves[which], same = abuse(leaves[which], dice)
    state = torch.utils._pytree.tree_unflatten(leaves, tree)
    engine = dice.random() < 0.6 and available() and not Engine.why_not(model)
    try:
        with torch.no_grad():
            found, _ = Engine(model)(token, state) if engine else model(token, state, donate=dice.random() < 0.5)
    except ValueError as error:
        return None if str(error).strip() else "a ValueError without a word"
    except Exception as error:  # any error counts as a failed answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]} ({text}, {positions}, part {which})"
    if same is None:
        return None
    if not same:
        return f"took a state with an odd part {which} ({text}, {positions}, engine {engine})"
    near = torch.allclose(found, expected, atol=1e-4)
    return None if near else f"another answer from an equal state ({text}, {positions}, part {which}, engine {engine})"


def abuse(x: torch.Tensor, dice: random.Random) -> tuple[torch.Tensor, bool | None]:
    """A part of a state, abused; whether its values are unchanged (None: other values, which may be accepted)."""
    if x.dtype == torch.int64:
        row = dice.randrange(len(x))
        match dice.randrange(8):
            case 0 | 1 | 2:
                x = x.clone()
                x[row] = dice.choice([-1, -100, -(10**6), -(2**62)])
                return x, False
            case 3:
                x = x.clone()
                x[row] = dice.choice([10, 10**6, 2**62])  # a position may be any
                return x, None
            case 4:
                return x.to(dice.choice([torch.int32, torch.int8, torch.float32])), False
            case 5:
                return dice.choice([x[:1], x[:0], x[:, None], x.sum()]), False
            case 6:
                return x.to("meta"), False
        return torch.stack([x, x], 1)[:, 0], True
    match dice.randrange(6):
        case 0:
            return x.to("meta"), False
        case 1:
            return x[:1], False
        case 2:
            return x.long(), False
        case 3:
            return torch._neg_view(-x), True
        case 4:
            return torch.stack([x, x], -1)[..., 0], True
    return x.mT.contiguous().mT if x.dim() > 1 else x, True
