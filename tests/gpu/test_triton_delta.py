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


def masked(n):
    return (torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < 0.7).to(DEVICE)


def packed(n):
    return (torch.randint(0, 2, (2, n), generator=torch.Generator().manual_seed(n)).cumsum(1) // 7).to(DEVICE)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("around", ["plain", "mask", "segments", "both"])
@pytest.mark.parametrize(("decay", "delta"), SERVED)
def test_values_and_gradients_are_those_of_the_loop(decay, delta, around, repeats):
    options = {}
    if around in ("mask", "both"):
        options["mask"] = masked(43)
    if around in ("segments", "both"):
        options["segments"] = packed(43)
    assert_exact(operands(43, decay, delta, repeats=repeats), chunk=16, **options)


@pytest.mark.parametrize("sizes", [(1, 1), (16, 16), (17, 33), (64, 64), (65, 20), (128, 128)])
@pytest.mark.parametrize(("decay", "delta"), [("channel", True), ("none", True), ("channel", False)])
def test_sizes(sizes, decay, delta):
    assert_exact(operands(20, decay, delta, sizes=sizes, strength=0.1, rows=1), chunk=16)


@pytest.mark.parametrize("n", [1, 15, 16, 64, 65, 129])
def test_lengths(n):
    assert_exact(operands(n, "head", True, rows=1))


@pytest.mark.parametrize(("decay", "delta"), SERVED)
def test_states_pass_from_span_to_span(decay, delta, monkeypatch):
    monkeypatch.setattr(chunks, "SPAN", 32 * 4)
    monkeypatch.setattr(chunks, "TOGETHER", 0)
    given = operands(150 if DEVICE == "cpu" else 2000, decay, delta, strength=0.1)
    assert len(chunks.Chunked(**given, mask=None, segments=None, scale=1.0, chunk=16).places) > 2
    assert_exact(given, chunk=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "delta"), SERVED)
def test_half_precision_is_as_exact_as_the_torch_form(decay, delta, dtype):
    given = operands(43, decay, delta, dtype=dtype, sizes=(16, 16))
    expected = exact(given)
    found, plain = served(given, chunk=16), outcome(in_torch, given)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    for error, usual in zip(errors(found, expected), errors(plain, expected), strict=True):
        assert error <= max(1.5 * usual, LIMIT)


@pytest.mark.parametrize(("decay", "delta"), [("head", True), ("channel", True), ("channel", False)])
def test_strong_decays_clear_the_state(decay, delta):
    given = operands(43, decay, delta)
    strength = torch.tensor([0.0, 1.0, 1.0, 50.0, 1e4, torch.inf], device=DEVICE)
    choice = torch.randint(6, given["log_decay"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    picked = strength[choice]
    given["log_decay"] = torch.where(picked.isinf(), -picked, given["log_decay"] * picked)
    found = served(given, chunk=16)
    assert all(t.isfinite().all() for t in found)
    assert max(errors(found, exact(given))) <= 3e-6  # as for the torch form


def test_masked_numbers_are_not_read():
    mask, given = masked(43), operands(43, "head", True, repeats=2)
    expected = served(given, chunk=16, mask=mask)
    hidden = ~mask[:, None, :, None]
    for name, t in given.items():
        if name != "state":
            given[name] = t.masked_fill(hidden if t.dim() == 4 else hidden[..., 0], float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(served(given, chunk=16, mask=mask), expected, strict=True))


@pytest.mark.parametrize(("decay", "delta"), SERVED)
def test_the_same_bits_again(decay, delta):
    n, chunk = (43, 16) if DEVICE == "cpu" else (1000, 64)
    given, options = operands(n, decay, delta, repeats=2), {"mask": masked(n), "segments": packed(n)}
    again = zip(served(given, chunk, **options), served(given, chunk, **options), strict=True)
    assert all(torch.equal(a, b) for a, b in again)


def test_packed_sequences_with_separate_states():
    given = operands(43, "channel", True, rows=1)
    offsets = torch.tensor([0, 10, 10, 31, 43], device=DEVICE)
    given["state"] = given["state"].repeat(4, 1, 1, 1) * torch.arange(4, device=DEVICE)[:, None, None, None]
    options = {"cu_seqlens": offsets, "normalize": True}
    assert_exact(given, chunk=16, **options)


def test_operands_of_any_strides():
    given = operands(20, "head", True)
    expected = served(given)
    moved = {name: None if t is None else t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in given.items()}
    with longspan.backend("triton"):
        found = triton.attend(Recurrence(**moved, **OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=False))


@pytest.mark.parametrize(("decay", "delta"), SERVED)
def test_gradients_that_can_be_differentiated(decay, delta):
    def second(form, given):
        inputs = [t.requires_grad_() for t in given.values() if t is not None]
        o, end = form(Recurrence(**given, **OPTIONS))
        first = torch.autograd.grad(o.sin().sum() + end.square().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), inputs)]

    given = operands(29, decay, delta)
    wide = {name: None if t is None else t.double() for name, t in given.items()}
    assert max(errors(second(triton.attend, given), second(in_torch, wide))) <= 5e-6


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")  # torch's own
def test_compiles_as_one_graph():
    given = operands(70, "head", True)
    r = Recurrence(**given, **OPTIONS)
    call = torch.compile(triton.attend, fullgraph=True, backend="aot_eager")
    with longspan.backend("triton"):
        found, expected = call(r), triton.attend(r)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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
            constants = {"DELTA": True, "DECAY": 2, "TURNS": 0, "BC": 64, "BD": 64, "TWO": channels > 64, "share": 1}
            constants |= {"BE": tile.value_block, "PREC": "tf32x3"}
            how = {"multiples": ["width", "channels", "size"], "capability": capability}
            how |= {"num_warps": tile.warps, "num_stages": tile.stages}
            for name, pointers in (("forward_kernel", first), ("backward_kernel", second)):
                kernel, types = f"longspan.ops.triton.delta:{name}", dict.fromkeys(pointers, "*fp32")
                wanted.append(ahead.request(kernel, types, constants, **how))
                limits.append((ahead.LIMITS[capability], 64 if channels == 64 or capability == 90 else 128))
    for build, (shared, stack) in zip(ahead.compiled_all(wanted), limits, strict=True):
        assert build.shared <= shared
        assert build.stack <= stack
        assert build.count("cp.async.cg.shared.global") + build.count("cp.async.ca.shared.global") > 0
