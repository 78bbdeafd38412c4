"""The quantized linear map in C++."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ..native import build, call
from ..native.build.openmp import threads
from ..native.call import ACTIVATIONS, FORMATS, HALVES, available, check_allocated, kernels, pointers, readable
from . import composed
from .operands import Map
from .packing import Packed


def why_not(r: Map) -> str:
    """Return why the kernels cannot serve these operands; empty if they can. Compiles them on first use."""
    if reason := call.unreadable(r.x, r.bias, r.quants, r.scales, r.factors):
        return reason
    if r.x.dtype not in HALVES:
        return "they take float32, bfloat16 or float16"
    if r.format not in FORMATS:
        return f"they do not read {r.format}"
    if not r.x.numel() or not r.outputs:
        return "there is nothing to compute"
    return "" if available("quantized/forward") else "they could not be compiled"


def step(r: Map) -> Tensor | None:
    """``attend`` if the kernels serve the call and are loaded, else None. It is written for speed."""
    if r.format not in FORMATS or not readable(r.x) or not r.x.numel() or not r.outputs:
        return None
    return attend(r) if build.loaded("quantized/forward") is not None and r.quants.is_cpu else None


def attend(r: Map) -> Tensor:
    """y (...,N). An output has the same bits for any number of threads and whatever rows are computed with it."""
    x, bias, quants, scales, factors, format, outputs, inputs, activations = r
    if x.dtype != torch.float32 or x.is_neg() or not x.is_contiguous():
        x = x.detach().float().resolve_neg().contiguous()
    bias = None if bias is None else bias.detach().float().resolve_neg().contiguous()
    # The kernel's output, independent of torch's default dtype and device.
    y = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device="cpu")
    sizes = (ctypes.c_long * 5)(x.numel() // inputs, inputs, outputs, FORMATS[format], ACTIVATIONS[activations])
    weight = [t.contiguous() for t in (quants, scales, factors)]
    failed = kernels("quantized/forward").longspan_quantized_forward(*pointers(x, *weight, bias, y), sizes, threads())
    check_allocated(failed, "activations")
    return y if r.x.dtype == torch.float32 else y.to(r.x.dtype)


def dequantized(weight: Packed, begin: int, end: int) -> Tensor:
    """``packing.rows`` of a weight that the kernels read, up to the rounding of the last bit."""
    # The kernel's output, independent of torch's default dtype and device.
    out = torch.empty(end - begin, weight.inputs, dtype=torch.float32, device="cpu")
    sizes = (ctypes.c_long * 5)(begin, end, weight.inputs, weight.outputs, FORMATS[weight.format])
    tensors = [t.contiguous() for t in (weight.quants, weight.scales, weight.factors)]
    check_allocated(kernels("quantized/forward").longspan_quantized_rows(*pointers(*tensors, out), sizes, threads()))
    return out


class Found(NamedTuple):
    """What one pass over a weight (N,K) finds of the logits z (M,N) of rows; p are their probabilities."""

    total: Tensor
    """(M,) float32, the logarithm of the sum of e^z"""
    picked: Tensor
    """(M,), z of the target"""
    mean: Tensor
    """(M,), of z"""
    pulled: Tensor | None
    """(M,K), the sum of rows of the weight times p and the slope of the cap, without the target"""
    even: Tensor | None
    """(M,K), the sum of rows of the weight times the slope of the cap"""


def entropy(r: Map, target: Tensor, cap: float, *, pulled: bool, even: bool) -> Found:
    """Read a weight once for the logits ``Map`` of rows (M,K), their exponentials and their gradient.

    Products of bfloat16 rows multiply bfloat16 numbers where the processor has an instruction for it, and add in
    float32. The error is that of rounding the weight and the exponentials, 2^-9 of each at most.

    Args:
        r: The operands.
        target: (M,) int64, 0 to N-1.
        cap: The cap of the logits; 0: no cap.
        pulled: Whether ``pulled`` is needed.
        even: Whether ``even`` is needed, which takes half as long again; it requires ``pulled``.
    """
    library, x = kernels("quantized/entropy"), r.x.detach()
    halves = x.dtype == torch.bfloat16 and bool(library.longspan_quantized_halves())
    x = composed.rounded_values(x.float(), r.activations).to(torch.bfloat16 if halves else torch.float32).contiguous()
    bias = None if r.bias is None else r.bias.detach().float().contiguous()
    # The kernel's output, independent of torch's default dtype and device.
    out = torch.empty(len(x), 3, dtype=torch.float32, device="cpu")
    sums = [torch.zeros(x.shape, dtype=torch.float32, device="cpu") if needed else None for needed in (pulled, even)]
    sizes = (ctypes.c_long * 4)(*x.shape, r.outputs, FORMATS[r.format])
    operands = x, *(t.contiguous() for t in (r.quants, r.scales, r.factors)), bias, target.contiguous(), out, *sums
    check_allocated(library.longspan_quantized_entropy(*pointers(*operands), sizes, cap, halves, threads()))
    return Found(*out.unbind(1), *sums)
