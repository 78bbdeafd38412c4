"""One small call of each family of native kernels: whole sequences with gradients, and a step.

As a program it runs families and prints, as JSON, their errors and whether threads change a bit.
"""

import json
import sys

import torch

import longspan
from longspan import Decoder, DecoderConfig, backend
from longspan.generation.native_decoder import Engine
from longspan.ops.linear import polynomial
from longspan.ops.native import build
from longspan.ops.quantized import formats, pack
from longspan.ops.quantized.native import ACTIVATIONS, FORMATS
from longspan.ops.softmax import path
from longspan.ops.tensors import unit, upcast_half
from ops.families import FAMILIES, cast

BATCH, TOKENS = 2, 70
THREADS = (1, 2)


def pattern(n, draw):
    def call(given):
        return longspan.sparse_attention(**given, pattern="causal - band(20)")

    return call, {part: draw(BATCH, 2, n, 37 if part != "value" else 21) for part in ("query", "key", "value")}


def powered(n, draw):
    """Attention by the features of power attention."""

    def call(given):
        q, k = (upcast_half(given[part]) for part in "qk")
        return polynomial.attend(q, k, given["v"], polynomial.power(9, 2, 10.0), causal=True)[0]

    return call, {part: draw(BATCH, 2, n, 9 if part != "v" else 21) for part in "qkv"}


def moved(n, draw):
    def call(given):
        q, k, v, w, beta = (given[part] for part in ("q", "k", "v", "w", "beta"))
        return path.causal(q, k, v, unit(w), beta.sigmoid())

    return call, {part: draw(BATCH, 2, n, 19) for part in "qkvw"} | {"beta": draw(BATCH, 2, n)}


def quantized(n, draw):
    """Every format and kind of activations, which are integers, so that they are rounded alike in any precision."""
    x = (40 * draw(BATCH, n, 512)).round().clamp(-127, 127)
    x[..., ::32] = 127.0
    # Bytes below 120, so that no float16 number of them is infinity or NaN.
    raw = (60 * draw(len(FORMATS), 37, 544)).long() % 120
    sizes = {name: formats.FORMATS[name].row_bytes(512) for name in FORMATS}
    weights = [
        pack(formats.Blocks(data[:, :size].byte(), name, 512))
        for data, (name, size) in zip(raw, sizes.items(), strict=True)
    ]

    def call(given):
        found = [longspan.quantized_linear(given["x"], w, activations=kind) for w in weights for kind in ACTIVATIONS]
        # Divided by powers of two, so that errors of each count, and bfloat16 gradients are not rounded again.
        wide = [y.to(torch.promote_types(y.dtype, torch.float32)) for y in (found[0], *(y.detach() for y in found[1:]))]
        return torch.cat([y / 2 ** y.detach().abs().max().log2().ceil() for y in wide], -1)

    return call, {"x": x}


# By family of kernels: names and widths of rows of ops/families.py, or functions; decode kernels run whole models.
CALLS = {
    "linear": (("linear", (37, 21)), ("powered", powered)),
    "gated": (("delta-channel", (37, 21)),),
    "general": (("general-channel", (37, 21)),),
    "convolution": (("convolution", (37, 4)),),
    "scan": (("diagonal", (37, 1)), ("selective", (37, 5))),
    "pattern": (("pattern", pattern), ("moved", moved)),
    "quantized": (("quantized", quantized),),
}


def waves(like, dtype):
    """Fixed numbers in the shape and dtype of a tensor, rounded to ``dtype``."""
    return torch.linspace(-1, 2, like.numel(), dtype=torch.float64).sin().view(like.shape).to(dtype).to(like.dtype)


def of_function(call, given, dtype):
    """The output of a function without a state, and with several tokens the gradients of its operands."""
    if not torch.is_grad_enabled():
        return {"output": call(given)}
    leaves = {part: t.detach().requires_grad_() for part, t in given.items()}
    y = call(leaves)
    grads = torch.autograd.grad(y, list(leaves.values()), waves(y, dtype))
    return {"output": y.detach()} | dict(zip(leaves, grads, strict=True))


def ran(name, made, n, dtype, way):
    """Results by name: of a sequence with gradients, of a single token without."""
    exact = torch.float64 if way == "reference" else None
    with torch.set_grad_enabled(n > 1), backend(way):
        if name not in FAMILIES:
            generator = torch.Generator().manual_seed(n)
            call, given = made(n, lambda *shape: torch.randn(shape, generator=generator))
            return of_function(call, {part: t.to(dtype).to(exact) for part, t in given.items()}, dtype)
        family = FAMILIES[name]
        options = {option: domain[0] for option, domain in family.options.items()}
        given = family.operands(n, made, batch=BATCH, dtype=dtype)
        given = cast(given, exact) if exact else given
        if n > 1:
            return family.outcome(way, given, **options)
        return dict(zip(("output", "end"), family.run(way, given, **options), strict=True))


def decoded(dtype, way):
    """The outputs of eight steps of a small decoder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(vocab=9, length=8, dim=96, heads=3, depth=2, attention="linear; softmax"))
    model, tokens = model.to(dtype).eval(), torch.stack([torch.arange(8), torch.arange(8).flip(0)])
    # Two sequences for each thread.
    tokens, outputs = tokens.repeat(2, 1), []
    model = model.double() if way == "reference" else model
    state, call = model.init_state(4), Engine(model) if way == "native" else model
    with backend("auto" if way == "native" else way), torch.no_grad():
        for token in tokens.split(1, dim=1):
            output, state = call(token, state)
            outputs.append(output)
    return {"y": torch.cat(outputs, dim=1)}


def results(family, dtype, way):
    """Results of a family by name."""
    if family == "decode":
        return {f"decode {name}": t for name, t in decoded(dtype, way).items()}
    return {
        f"{row} {'step' if n == 1 else 'sequence'} {name}": t
        for row, made in CALLS[family]
        # Patterns have no step: a step is softmax attention over the keys that are kept.
        for n in ((TOKENS,) if family == "pattern" else (TOKENS, 1))
        for name, t in ran(row, made, n, dtype, way).items()
    }


def errors(family, dtype):
    """Errors by name, relative to the largest value, and the names for which the number of threads changes a bit."""
    right, found = results(family, dtype, "reference"), []
    for count in THREADS:
        torch.set_num_threads(count)
        found.append(results(family, dtype, "native"))
    changed = [name for name, t in found[0].items() if not torch.equal(t, found[1][name])]
    sizes = {name: t.abs().max() for name, t in right.items() if t.numel()}
    off = {name: ((found[0][name].double() - right[name]).abs().max() / size).item() for name, size in sizes.items()}
    return off, changed


def main(*families):
    report = {family: {"isa": build.find(build.interface.units(family)[0]).isa} for family in families}
    for family in families:
        for dtype in (torch.float32, torch.bfloat16):
            off, changed = errors(family, dtype)
            report[family][str(dtype).removeprefix("torch.")] = {"errors": off, "changed": changed}
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
