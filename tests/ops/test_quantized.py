"""Weights in blocks of few bits: known blocks, and the ``gguf`` package."""

import re

import pytest
import torch

from longspan.ops.quantized.formats import FORMATS, Blocks, check_blocks, dequantize, quantize


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
}  # fmt: skip


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
        (lambda: check_blocks(Blocks(torch.zeros(2, 33, dtype=torch.uint8), "Q8_0", 32)), "in uint8 (N, 34), not"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
