"""The cross-entropy of a linear map against that of all its logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.ops import cross_entropy
from longspan.ops.native.call import available
from longspan.ops.quantized import formats, native, pack

ROWS, LEVELS, DIM = 23, 41, 6
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1, "reduction": "none"},
    "z": {"z_loss": 0.3},
    "capped": {"softcap": 1.5},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0, "ignore_index": 3},
    "all, none": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0, "reduction": "none"},
}


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 4 * LEVELS)


def operands(dtype=torch.float64, *, bias=True, ignored=0.3):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (torch.randn(*s, generator=generator) for s in ((ROWS, DIM), (LEVELS, DIM), (LEVELS,)))
    target = torch.randint(LEVELS, (ROWS,), generator=generator)
    target[torch.rand(ROWS, generator=generator) < ignored] = -100
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, *([offset] if bias else []))]
    return leaves, target


def whole(
    hidden, weight, bias, target, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None
):
    """The definition, from all logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    given = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, target, reduction="none", **given)
    loss = loss + torch.where(target == ignore_index, 0.0, z_loss * logits.logsumexp(-1).square())
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / (target != ignore_index).sum()}[reduction]


def compare(options, leaves, target, **tolerance):
    bias = leaves[2] if len(leaves) > 2 else None
    found = longspan.linear_cross_entropy(*leaves[:2], target, bias, **options)
    expected = whole(*leaves[:2], bias, target, **options)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    pairs = [(found, expected)]
    pairs += zip(*(torch.autograd.grad(loss, leaves, upstream.to(loss)) for loss in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_it_equals_the_loss_of_all_logits(options):
    leaves, target = operands()
    target[target == -100] = options.get("ignore_index", -100)
    compare(options, leaves, target, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_a_bias_and_without_ignored_positions(reduction):
    leaves, target = operands(bias=False, ignored=0.0)
    compare({"reduction": reduction}, leaves, target, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_narrow_types_are_summed_in_float32(dtype, reduction):
    leaves, target = operands(dtype)
    loss = longspan.linear_cross_entropy(*leaves[:2], target, leaves[2], reduction=reduction)
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss.sum(), leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = whole(*exact, target, reduction=reduction)
    limit = 16 * torch.finfo(dtype).eps
    assert (loss - expected).norm() <= limit * expected.norm()
    for a, b in zip(found, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert a.dtype == dtype
        assert (a - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_weight_in_blocks_equals_its_numbers(reduction):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator) for n in (ROWS, LEVELS))
    blocks = formats.quantize(weight, "Q8_0")
    leaves, target = [hidden.requires_grad_(), torch.randn(LEVELS).requires_grad_()], operands()[1]
    options = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 5.0}
    found = longspan.linear_cross_entropy(hidden, pack(blocks), target, leaves[1], activations="float32", **options)
    expected = longspan.linear_cross_entropy(hidden, formats.dequantize(blocks), target, leaves[1], **options)
    pairs = zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (found, expected)), strict=True)
    for a, b in [(found, expected), *pairs]:
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("format", native.FORMATS)
def test_a_weight_in_blocks_is_read_once(format, options, dtype):
    """Loss and gradient are those of the numbers, up to products of bfloat16 if the hidden states are bfloat16."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(
        0, 120, (LEVELS, formats.FORMATS[format].row_bytes(256)), dtype=torch.uint8, generator=generator
    )
    blocks = formats.Blocks(data, format, 256)
    numbers = formats.dequantize(blocks).double()
    hidden = (torch.randn(ROWS, 256, generator=generator) / numbers.norm(dim=1).mean()).to(dtype).requires_grad_()
    bias, target = torch.randn(LEVELS, generator=generator), operands()[1]
    target[target == -100] = options.get("ignore_index", -100)
    given = options | {"activations": "float32"}
    with longspan.ops.watch() as seen:
        found = longspan.linear_cross_entropy(hidden, pack(blocks), target, bias.to(dtype), **given)
    if available("quantized/entropy"):
        assert ("the loss of a quantized output layer", "native") in [use[:2] for use in seen]
    exact = hidden.detach().double().requires_grad_()
    expected = whole(exact, numbers, bias.to(dtype).double(), target, **options)
    upstream = torch.linspace(0.5, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    pairs = [(torch.autograd.grad(a, leaf, upstream.to(a))[0]) for a, leaf in ((found, hidden), (expected, exact))]
    for a, b in ((found, expected), pairs):
        assert (a.double() - b).norm() <= {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype] * b.norm()


@pytest.mark.skipif(not available("quantized/entropy"), reason="no native kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_the_bits_of_a_weight_in_blocks(dtype):
    generator, threads, found = torch.Generator().manual_seed(0), torch.get_num_threads(), []
    weight = pack(formats.quantize(torch.randn(1000, 288, generator=generator), "Q8_0"))
    hidden = torch.randn(150, 288, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(1000, (150,), generator=generator)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            loss = longspan.linear_cross_entropy(
                hidden, weight, target, label_smoothing=0.1, softcap=9.0, reduction="none"
            )
            found.append((loss, *torch.autograd.grad(loss.sum(), hidden)))
    finally:
        torch.set_num_threads(threads)
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    # Neither do other rows.
    alone = longspan.linear_cross_entropy(
        hidden[70:71], weight, target[70:71], label_smoothing=0.1, softcap=9.0, reduction="none"
    )
    assert alone.equal(found[0][0][70:71])


def test_it_never_holds_the_logits():
    leaves, target = operands(bias=False, ignored=0.0)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t))])
            return out

    for reduction in ("mean", "none"):
        with Watch():
            longspan.linear_cross_entropy(*leaves, target, reduction=reduction).sum().backward()
    assert largest == LEVELS * DIM < ROWS * LEVELS


def test_the_gradient_of_the_output_layer_is_there_once():
    (hidden, weight), target = operands(bias=False)
    loss = longspan.linear_cross_entropy(hidden, weight, target)
    (kept,) = (t for t in loss.grad_fn.saved_tensors if t is not None and t.shape == weight.shape)
    address = kept.data_ptr()
    del kept
    (loss / 2).backward()
    assert weight.grad.data_ptr() == address


def test_ignored_positions_may_hold_nan():
    leaves, target = operands()
    expected = torch.autograd.grad(longspan.linear_cross_entropy(*leaves[:2], target, leaves[2]), leaves)
    dirty = leaves[0].detach().clone()
    dirty[target == -100] = float("nan")
    given = [dirty.requires_grad_(), *leaves[1:]]
    found = torch.autograd.grad(longspan.linear_cross_entropy(*given[:2], target, given[2]), given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_positions_may_have_any_shape_and_strides():
    leaves, target = operands(bias=False)
    hidden = leaves[0][:20].detach().view(4, 5, DIM).transpose(0, 1)
    labels = target[:20].view(4, 5).t()
    found = longspan.linear_cross_entropy(hidden, leaves[1], labels, reduction="none")
    expected = longspan.linear_cross_entropy(leaves[0][:20], leaves[1], target[:20], reduction="none")
    assert torch.equal(found.t().reshape(-1), expected)


def test_nothing_to_predict():
    leaves, target = operands(ignored=1.1)
    assert longspan.linear_cross_entropy(*leaves[:2], target).isnan()
    assert longspan.linear_cross_entropy(*leaves[:2], target, reduction="sum") == 0
    assert longspan.linear_cross_entropy(leaves[0][:0], leaves[1], target[:0], reduction="none").shape == (0,)


def test_autocast_narrows_the_operands():
    leaves, target = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = longspan.linear_cross_entropy(*leaves[:2], target, leaves[2])
    narrow = [t.detach().bfloat16() for t in leaves]
    assert torch.equal(loss, longspan.linear_cross_entropy(*narrow[:2], target, narrow[2]))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(loss, leaves))


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_compiles_in_one_graph():
    leaves, target = operands(torch.float32)
    compiled = torch.compile(longspan.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for options in ({}, {"reduction": "none"}):
        found, expected = (
            f(*leaves[:2], target, leaves[2], **options) for f in (compiled, longspan.linear_cross_entropy)
        )
        torch.testing.assert_close(found, expected)
        pairs = zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (found, expected)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden": torch.zeros(2, 6, dtype=torch.int64)},
            r"hidden must be a floating-point \(\.\.\., D\), not torch.int64",
        ),
        ({"weight": torch.zeros(41, 5)}, r"weight must be torch.float32 \(V, 6\), not torch.float32 \(41, 5\)"),
        ({"weight": torch.zeros(41, 6).double()}, "weight must be torch.float32"),
        ({"bias": torch.zeros(40)}, r"bias must be torch.float32 \(41,\), not torch.float32 \(40,\)"),
        ({"target": torch.zeros(3).long()}, r"target must be int64 \(2,\), one per position, not torch.int64 \(3,\)"),
        ({"target": torch.tensor([0, 41])}, "target ranges from 0 to 41; it must be from 0 to 40, or -100"),
        ({"target": torch.tensor([0, -1])}, "target ranges from -1 to 0"),
        ({"target": torch.zeros(2).long().to("meta")}, "must be on one device, not on cpu and meta"),
        ({"reduction": "avg"}, "reduction='avg' must be mean, sum or none"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5 must be from 0 to 1"),
        ({"z_loss": float("nan")}, "z_loss=nan must be at least 0"),
        ({"softcap": 0.0}, "softcap=0.0 must be above 0, or None"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"hidden": torch.zeros(2, 6), "weight": torch.zeros(41, 6), "target": torch.zeros(2).long()} | change
    with pytest.raises(ValueError, match=message):
        longspan.linear_cross_entropy(**given)
