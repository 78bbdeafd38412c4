"""One small call of each family of native kernels: whole sequences with gradients, and a step.

As a program it runs families and prints, as JSON, their errors and whether threads change a bit.
"""

import json
import sys

import torch
from torch.nn.functional import normalize

import longspan
from longspan import Decoder, DecoderConfig, backend
from longspan.generation.native_decoder import Engine
from longspan.ops.native import build
from longspan.ops.quantized import formats, pack
from longspan.ops.quantized.native import ACTIVATIONS, FORMATS

BATCH, TOKENS, CHANNELS = 2, 70, 37
THREADS = (1, 2)


def linear(n, draw):
    # The last column of a state is the sum of the keys, which is positive.
    given = {part: draw(BATCH, 3, n, 37 if part != "value" else 21) for part in ("query", "key", "value")}
    return longspan.linear_attention, given | {"state": draw(BATCH, 3, 37, 22).abs()}


def gated(n, draw):
    given = {part: normalize(draw(BATCH, 2, n, 37), dim=-1) for part in ("query", "key")}
    given |= {"value": draw(BATCH, 4, n, 21), "beta": draw(BATCH, 4, n).sigmoid()}
    return longspan.delta_rule, given | {"log_decay": -draw(BATCH, 4, n, 37).abs(), "state": draw(BATCH, 4, 37, 21)}


def general(n, draw):
    given = {part: normalize(draw(BATCH, 2, n, 37), dim=-1) for part in ("query", "key", "read", "erase")}
    given |= {"value": draw(BATCH, 4, n, 21), "log_decay": -draw(BATCH, 4, n, 37).abs()}
    return longspan.general_delta_rule, given | {"state": draw(BATCH, 4, 37, 21)}


def convolution(n, draw):
    def call(**given):
        return longspan.causal_convolution(**given, activation="silu")

    weights = {"weight": draw(CHANNELS, 4), "bias": draw(CHANNELS)}
    return call, {"x": draw(BATCH, n, CHANNELS), **weights, "state": draw(BATCH, 3, CHANNELS)}


def diagonal(n, draw):
    given = {"x": draw(BATCH, n, CHANNELS), "log_decay": -draw(BATCH, n, CHANNELS).abs()}
    return longspan.diagonal_scan, given | {"state": draw(BATCH, CHANNELS)}


def selective(n, draw):
    def call(**given):
        return longspan.selective_scan(**given, softplus=True)

    given = {part: draw(BATCH, n, CHANNELS) for part in ("x", "dt", "z")}
    given |= {"A": -0.2 - draw(CHANNELS, 5).abs(), "B": draw(BATCH, n, 5), "C": draw(BATCH, n, 5)}
    given |= {"D": draw(CHANNELS), "dt_bias": draw(CHANNELS), "state": draw(BATCH, CHANNELS, 5)}
    return call, given


def pattern(n, draw):
    def call(**given):
        return longspan.sparse_attention(**given, pattern="causal - band(20)")

    return call, {part: draw(BATCH, 2, n, 37 if part != "value" else 21) for part in ("query", "key", "value")}


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

    def call(x):
        found = [longspan.quantized_linear(x, w, activations=kind) for w in weights for kind in ACTIVATIONS]
        # Divided by powers of two, so that errors of each count, and bfloat16 gradients are not rounded again.
        wide = [y.to(torch.promote_types(y.dtype, torch.float32)) for y in (found[0], *(y.detach() for y in found[1:]))]
        return torch.cat([y / 2 ** y.detach().abs().max().log2().ceil() for y in wide], -1)

    return call, {"x": x}


# By family; the decode kernels run whole models.
CALLS = {
    "linear": (linear,),
    "gated": (gated,),
    "general": (general,),
    "convolution": (convolution,),
    "scan": (diagonal, selective),
    "pattern": (pattern,),
    "quantized": (quantized,),
}


def waves(like, dtype):
    """Fixed numbers in the shape and dtype of a tensor, rounded to ``dtype``."""
    return torch.linspace(-1, 2, like.numel(), dtype=torch.float64).sin().view(like.shape).to(dtype).to(like.dtype)


def outcome(call, given, dtype):
    """Results by name: output, last state, and gradients of all operands for the same numbers in every backend."""
    leaves = {part: t.detach().requires_grad_() for part, t in given.items()}
    y, last = call(leaves)
    upstream = waves(y, dtype), waves(last, torch.float32)
    grads = torch.autograd.grad((y, last), list(leaves.values()), upstream)
    names = "y", "last", *(f"gradient of {part}" for part in leaves)
    return dict(zip(names, (y.detach(), last.detach(), *grads), strict=True))


def ran(make, n, dtype, way):
    """Results by name: of a sequence with gradients, of a single token without."""
    generator = torch.Generator().manual_seed(n)
    function, given = make(n, lambda *shape: torch.randn(shape, generator=generator))
    # States are float32 for all types of tokens.
    given = {part: t if part == "state" else t.to(dtype) for part, t in given.items()}
    if way == "reference":
        given = {part: t.double() for part, t in given.items()}

    def call(leaves):
        if "state" in leaves and make is not convolution:
            return function(**leaves, return_state=True)
        found = function(**leaves)
        return found if isinstance(found, tuple) else (found, found[:0])

    with backend(way):
        if n > 1:
            return outcome(call, given, dtype)
        with torch.no_grad():
            return dict(zip(("y", "last"), call(given), strict=True))


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
        f"{make.__name__} {'step' if n == 1 else 'sequence'} {name}": t
        for make in CALLS[family]
        # Patterns have no step: a step is softmax attention over the keys that are kept.
        for n in ((TOKENS,) if family == "pattern" else (TOKENS, 1))
        for name, t in ran(make, n, dtype, way).items()
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
