"""The quantized linear map in C++."""

import ctypes

import torch
from torch import Tensor

from ..native import call
from ..native.build.openmp import threads
from ..native.call import HALVES, available, check_allocated, kernels, pointers
from .operands import Map

# As in native/quantized/product.h.
FORMATS = {"Q8_0": 1, "Q4_0": 2, "Q4_K": 3, "Q6_K": 4}
ACTIVATIONS = {"int16": 0, "int8": 1, "float32": 2}


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


def attend(r: Map) -> Tensor:
    """y (...,N). An output has the same bits for any number of threads and whatever rows are computed with it."""
    x = r.x.detach().float().contiguous()
    bias = None if r.bias is None else r.bias.detach().float().contiguous()
    y = torch.empty(*x.shape[:-1], r.outputs, dtype=torch.float32, device="cpu")
    quants, scales, factors = (t.contiguous() for t in (r.quants, r.scales, r.factors))
    sizes = x.numel() // r.inputs, r.inputs, r.outputs, FORMATS[r.format], ACTIVATIONS[r.activations]
    failed = kernels("quantized/forward").longspan_quantized_forward(
        *pointers(x, quants, scales, factors, bias, y), (ctypes.c_long * 5)(*sizes), threads()
    )
    check_allocated(failed, "activations")
    return y.to(r.x.dtype)
