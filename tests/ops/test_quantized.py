"""Weights in blocks of few bits: known blocks, the ``gguf`` package, and laws of products with them."""

import re

import pytest
import torch

from longspan import backend, quantized_linear
from longspan.ops.native.call import available
from longspan.ops.quantized import native, pack, packing
from longspan.ops.quantized.formats import FORMATS, Blocks, check_blocks, dequantize, quantize
from longspan.ops.quantized.operands import ACTIVATIONS


def _block(*parts):
    """Bytes of one block: numbers of float16, or bytes."""
    halves = (torch.tensor([p], dtype=torch.float16).view(torch.uint8) if isinstance(p, float) else p for p in parts)
    return torch.cat([p if isinstance(p, torch.Tensor) else torch.tensor(p, dtype=torch.uint8) for p in halves])[None]


def _bytes(*pairs):
    return [byte for byte, count in pairs for _ in range(count)]


# Weights by hand: the first two of the block, and the last one.
BLOCKS = {
    "Q8_0": (_block(0.5, [3, 255], _bytes((0, 29), (128, 1))), [1.5, -0.5], -64.0),
    "Q4_0": (_block(-2.0, [0x09, 0x18], _bytes((0, 13), (0xF0, 1))), [-2.0, 0.0], -14.0),
    "Q4_1": (_block(0.5, 10.0, [0x09, 0x18], _bytes((0, 13), (0xF0, 1))), [14.5, 14.0], 17.5),
    "Q5_0": (_block(2.0, [1, 0, 0, 128], [0x09, 0x18], _bytes((0, 13), (0xF0, 1))), [18.0, -16.0], 30.0),
    "Q5_1": (_block(2.0, 1.0, [1, 0, 0, 128], [0x09, 0x18], _bytes((0, 13), (0xF0, 1))), [51.0, 17.0], 63.0),
    # Scales 3 and 33, shifts 5 and 63 of the first and the last group of 32.
    "Q4_K": (
        _block(2.0, 0.5, [3, 0, 0, 128], [5, 0, 0, 192], [0, 0, 0, 0xF1], [0x09, 0x18], _bytes((0, 125), (0xF0, 1))),
        [51.5, 45.5],
        958.5,
    ),
    "Q5_K": (
        _block(
            *(2.0, 0.5, [3, 0, 0, 128], [5, 0, 0, 192], [0, 0, 0, 0xF1]),
            *(_bytes((1, 1), (0, 30), (128, 1)), [0x09, 0x18], _bytes((0, 125), (0xF0, 1))),
        ),
        [147.5, 45.5],
        2014.5,
    ),
    "Q6_K": (
        _block(
            *(_bytes((9, 1), (8, 1), (0, 125), (0xF0, 1)), _bytes((3, 1), (0, 62), (128, 1))),
            *(_bytes((2, 15), (254, 1)), 0.5),
        ),
        [25.0, -24.0],
        -15.0,
    ),
}


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_by_hand(format):
    data, first, last = BLOCKS[format]
    weight = dequantize(Blocks(data, format, FORMATS[format].block))[0]
    assert weight[:2].tolist() == first
    assert weight[-1] == last


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_those_of_gguf(format):
    quants, constants = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf.constants")
    form, kind = FORMATS[format], constants.GGMLQuantizationType[format]
    assert (kind, constants.GGML_QUANT_SIZES[kind]) == (form.number, (form.block, form.size))
    data = torch.randint(0, 256, (3, 2 * form.size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found, right = (
        dequantize(Blocks(data, format, 2 * form.block)),
        torch.from_numpy(quants.dequantize(data.numpy(), kind)),
    )
    assert found.nan_to_num(7.0).equal(right.nan_to_num(7.0))
    if form.write is not None:
        weight = torch.randn(5, 3 * form.block, generator=torch.Generator().manual_seed(1))
        weight[0, :32], weight[1, :2] = 0.0, torch.tensor([4.0, -4.0])
        assert quantize(weight, format).data.equal(torch.from_numpy(quants.quantize(weight.numpy(), kind)))


def test_rounding_by_hand():
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([127.0, -3.5, 2.5, -127.0])
    assert quantize(weight, "Q8_0").data[0].view(torch.int8)[2:6].tolist() == [127, -4, 3, -127]
    weight[0, :4] = torch.tensor([-8.0, 8.0, 0.4, 0.6])
    assert dequantize(quantize(weight, "Q4_0"))[0, :4].tolist() == [-8.0, 7.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.randn(2, 33), "Q8_0"), "33 inputs are not a multiple of 32, the block of Q8_0"),
        (lambda: quantize(torch.randn(2, 256), "Q4_K"), "are read, not written; choose one of: Q4_0, Q8_0"),
        (lambda: quantize(torch.randn(2, 32), "Q3"), "unknown format of blocks 'Q3'"),
        (lambda: quantize(torch.full((2, 32), torch.inf), "Q8_0"), "infinity or NaN"),
        (lambda: quantize(torch.zeros(32), "Q8_0"), "a weight must be floating-point (N, K)"),
        (lambda: quantized_linear(_x(2)[:, 1:], _weight("Q8_0")), "(..., K) = (..., 512), not"),
        (lambda: quantized_linear(_x(2), _weight("Q8_0"), torch.ones(3)), "(N,) = (37,), not"),
        (lambda: quantized_linear(_x(2), _weight("Q8_0"), activations="int4"), "unknown kind of activations 'int4'"),
        (
            lambda: quantized_linear(_x(2), pack(_weight("Q8_0"))._replace(outputs=99)),
            "quants of the packed weight must be",
        ),
        (lambda: check_blocks(Blocks(torch.zeros(2, 33, dtype=torch.uint8), "Q8_0", 32)), "in uint8 (N, 34), not"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


INPUTS, OUTPUTS = 512, 37


def _weight(format, outputs=OUTPUTS, seed=0):
    """Random blocks; no float16 number of bytes below 120 is infinity or NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = FORMATS[format].row_bytes(INPUTS)
    return Blocks(torch.randint(0, 120, (outputs, size), dtype=torch.uint8, generator=generator), format, INPUTS)


def _x(*shape, seed=1):
    return torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(seed))


def _forms(format):
    return ("native", "torch") if format in native.FORMATS and available("quantized/forward") else ("torch",)


def _error(found, right):
    return float((found.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("format", FORMATS)
def test_packed_rows_are_the_rows(format):
    blocks = _weight(format)
    weight, full = pack(blocks), dequantize(blocks)
    assert packing.rows(weight, 0, OUTPUTS).equal(full)
    assert packing.rows(weight, 16, 35).equal(full[16:35])
    at = torch.tensor([[3, 36, 0], [15, 16, 3]])
    assert packing.select(weight, at).equal(full[at])
    assert format not in packing.PACKED or weight.nbytes <= 1.05 * FORMATS[format].row_bytes(INPUTS) * 48


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_values_and_gradients_equal_the_definition(format, activations):
    blocks, x, bias = _weight(format), _x(2, 5), torch.linspace(-1, 1, OUTPUTS)
    weight, above, results = pack(blocks), torch.linspace(-1, 2, 10 * OUTPUTS).sin().view(2, 5, OUTPUTS), {}
    for form in ("reference", *_forms(format)):
        leaves = [t.clone().requires_grad_() for t in (x, bias)]
        with backend(form):
            y = quantized_linear(leaves[0], weight, leaves[1], activations=activations)
        results[form] = y.detach(), *torch.autograd.grad(y, leaves, above)
    exact = x.double() @ dequantize(blocks).double().T + bias
    # By the rounding of activations.
    assert _error(results["reference"][0], exact) < {"int16": 1e-4, "int8": 3e-2, "float32": 1e-6}[activations]
    right = results["reference"][0].double(), above.double() @ dequantize(blocks).double(), above.double().sum((0, 1))
    for form, found in results.items():
        assert all(_error(t, exact) < 1e-6 for t, exact in zip(found, right, strict=True)), form


@pytest.mark.skipif(not available("quantized/forward"), reason="no native kernels here")
def test_bits_depend_on_nothing_else(threads):
    """Neither on the rows computed together, nor on their number, strides, dtype or the threads."""
    weights = [pack(_weight(format)) for format in native.FORMATS]
    x, bias = _x(70), torch.ones(OUTPUTS)
    for weight, activations in [(w, kind) for w in weights for kind in ACTIVATIONS]:
        threads(1)
        with backend("native"):
            found = quantized_linear(x, weight, bias, activations=activations)
            for rows in (slice(69, 70), slice(3, 5), slice(1, 8), slice(0, 64)):
                assert quantized_linear(x[rows], weight, bias, activations=activations).equal(found[rows])
            threads(3)
            strided = torch.stack([x, x], -1).flatten(-2)[:, ::2].mT.contiguous().mT
            assert quantized_linear(strided, weight, bias, activations=activations).equal(found)
            half = x.bfloat16()
            right = quantized_linear(half.float(), weight, bias, activations=activations).bfloat16()
            assert quantized_linear(half, weight, bias, activations=activations).equal(right)
            plain = quantized_linear(x.requires_grad_(), weight, bias, activations=activations)
            assert plain.detach().equal(found)
            x = x.detach()


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("format", native.FORMATS)
def test_odd_numbers(format, activations):
    """Zeros, tiny numbers, infinity and NaN, the largest and smallest bytes, and scales below the normal float16."""
    blocks, x = _weight(format, 20), _x(6)
    x[1, :32], x[2, 3], x[3, 40], x[4] = 0.0, torch.nan, torch.inf, 1e-38
    blocks.data[0, :] = 0
    blocks.data[0, -1], blocks.data[1, 2], blocks.data[1, 5] = 1, 128, 255
    with backend("reference"):
        right = quantized_linear(x, pack(blocks), activations=activations)
    for form in _forms(format):
        with backend(form):
            found = quantized_linear(x, pack(blocks), activations=activations)
        assert not found[2:4].isfinite().any(), form
        assert all(_error(found[i], right[i].double()) < 2e-6 for i in (0, 1, 5)), form
        assert found[4].abs().max() < 1e-25, form
        assert quantized_linear(x[:0], pack(blocks), activations=activations).shape == (0, 20)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_exported_and_transformed_calls():
    weight, x = pack(_weight("Q8_0")), _x(5)
    expected = quantized_linear(x, weight)

    class Module(torch.nn.Module):
        def forward(self, x):
            return quantized_linear(x, weight)

    torch._dynamo.reset()
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    assert y.detach().equal(expected)
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    assert _error(grad, packing.rows(weight, 0, OUTPUTS).double().sum(0).expand(5, -1)) < 1e-6
    program = torch.export.export(Module(), (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},)).module()
    assert program(_x(9)).equal(quantized_linear(_x(9), weight))
    assert _error(torch.func.vmap(lambda row: quantized_linear(row, weight))(x), expected.double()) < 1e-6
    # Second derivatives: the gradient of the gradient of a linear map.
    leaf, above = x.clone().requires_grad_(), torch.ones(5, OUTPUTS, requires_grad=True)
    (first,) = torch.autograd.grad(quantized_linear(leaf, weight), leaf, above, create_graph=True)
    (second,) = torch.autograd.grad(first, above, x)
    assert _error(second, x.double() @ packing.rows(weight, 0, OUTPUTS).double().T) < 1e-6
