"""The delta rule and decay per channel with Triton kernels: values and gradients against the loop in float64."""

from functools import partial

import ahead
import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan.ops.gated import chunks, definition, triton
from longspan.ops.gated.operands import Recurrence, prepared
from longspan.ops.triton import interpreted

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Compiled, a product of float32 is three of TF32, summed in another order.
LIMIT = 5e-7 if interpreted() else 3e-6
SERVED = [("none", True), ("head", True), ("channel", True), ("channel", False)]
OPTIONS = {"scale": 0.7}


def operands(n, decay, delta, *, repeats=1, sizes=(5, 3), dtype=torch.float32, strength=1.0, rows=2):
    """Operands of a call with 2 key heads and ``repeats`` value heads for each."""
    generator = torch.Generator().manual_seed(n)

    def random(*shape):
        return torch.randn(rows, *shape, generator=generator)

    (d, e), heads = sizes, 2 * repeats
    shapes = {"none": None, "head": (heads, n), "channel": (heads, n, d)}
    given = {
        "q": random(2, n, d).to(dtype),
        "k": F.normalize(random(2, n, d), dim=-1).to(dtype),
        "v": random(heads, n, e).to(dtype),
        "log_decay": None if shapes[decay] is None else -strength * random(*shapes[decay]).abs(),
        "beta": random(heads, n).sigmoid() if delta else None,
        "state": random(heads, d, e),
    }
    return {name: None if t is None else t.to(DEVICE) for name, t in given.items()}


def outcome(form, given, **options):
    """Outputs, the state and the gradients of all inputs from random ones of both."""
    inputs = {name: None if t is None else t.clone().requires_grad_() for name, t in given.items()}
    outputs = form(Recurrence(**inputs, **(OPTIONS | options)))
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [t for t in inputs.values() if t is not None], upstream)]


def served(given, chunk=64, **options):
    """``outcome`` of the kernels, which must be able to serve the call."""
    with longspan.backend("triton"):
        assert triton.why_not(Recurrence(**given, **options)) == ""
        form = triton.attend if chunk == 64 else partial(prepared, partial(chunks.chunked, kernels=True, chunk=chunk))
        return outcome(form, given, **options)


def exact(given, **options):
    return outcome(definition.attend, {name: None if t is None else t.double() for name, t in given.items()}, **options)


def errors(found, expected):
    assert len(found) == len(expected)
    assert all(a.shape == b.shape for a, b in zip(found, expected, strict=True))
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, expected, strict=True)]
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs]


def assert_exact(given, chunk=64, **options):
    """The kernels must be as close to the loop in float64 as the torch form in float32, or within the limit.

    Without decay a rounding error stays in the state, so that the torch form in float32 can be beyond the limit itself.
    """
    expected = exact(given, **options)
    error = max(errors(served(given, chunk=chunk, **options), expected))
    if error > LIMIT:
        assert error <= 1.5 * max(errors(outcome(partial(in_torch, chunk=chunk), given, **options), expected))


def in_torch(r, chunk=64):
    """The form in torch, which equals the loop within 1e-12 in float64 (tests/ops/test_gated.py), and is faster."""
    return prepared(partial(chunks.chunked, chunk=chunk), r)


@pytest.mark.parametrize("sizes", [(1, 1), (17, 33), (65, 20), (128, 128)])
@pytest.mark.parametrize(("decay", "delta"), [("channel", True), ("none", True)])
def test_sizes(sizes, decay, delta):
    assert_exact(operands(20, decay, delta, sizes=sizes, strength=0.1, rows=1), chunk=16)


@pytest.mark.parametrize("n", [15, 16, 65, 129])
def test_lengths(n):
    assert_exact(operands(n, "head", True, rows=1))


@pytest.mark.parametrize(("decay", "delta"), SERVED)
def test_states_pass_from_span_to_span(decay, delta, monkeypatch):
    monkeypatch.setattr(chunks, "SPAN", 32 * 4)
    monkeypatch.setattr(chunks, "TOGETHER", 0)
    given = operands(150 if DEVICE == "cpu" else 2000, decay, delta, strength=0.1)
    assert len(chunks.Chunked(**given, mask=None, segments=None, scale=1.0, chunk=16).places) > 2
    assert_exact(given, chunk=16)


def test_reasons_name_what_the_kernels_take():
    def reason(given):
        with longspan.backend("triton"):
            return triton.why_not(Recurrence(**given))

    given = operands(20, "head", True)
    assert reason(given) == ""
    assert "float32" in reason(given | {"state": given["state"].double()})
    assert "128 channels" in reason(operands(20, "none", True, sizes=(129, 3)))


@pytest.mark.full
def test_kernels_compile_for_both_generations_of_cards():
    from longspan.ops.triton import delta

    first = "u w keys whole first states values end".split()
    second = "upstream reads w keys whole after ahead values before".split()
    wanted, limits = [], []
    for capability in (80, 90):
        for channels in (64, 128):
            tile = delta.tiles(channels, channels)
            constants = {"DELTA": True, "DECAY": 2, "TURNS": 0, "BC": 64, "BD": 64, "TWO": channels > 64}
            constants |= {"BE": tile.value_block, "PREC": "tf32x3"}
            how = {"multiples": ["width", "channels", "size"], "capability": capability}
            how |= {"tuples": {"sizes": ("chunks", "width", "channels", "size", 1)}}
            how |= {"num_warps": tile.warps, "num_stages": tile.stages}
            for name, pointers in (("forward_kernel", first), ("backward_kernel", second)):
                kernel, types = f"longspan.ops.triton.delta:{name}", dict.fromkeys(pointers, "*fp32")
                wanted.append(ahead.request(kernel, types, constants, **how))
                limits.append((ahead.LIMITS[capability], 64 if channels == 64 or capability == 90 else 128))
    for build, (shared, stack) in zip(ahead.compiled_all(wanted), limits, strict=True):
        assert build.shared <= shared
        assert build.stack <= stack
        assert build.count("cp.async.cg.shared.global") + build.count("cp.async.ca.shared.global") > 0
