"""Calls of the C functions: number types, pointers, strides, and checks whether kernels may read a tensor."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import operands
from ..backends import mark_dynamo_constant
from ..operands import followed, holds
from . import build
from .build.openmp import threads

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in the kernels
HALVES = TYPES | {torch.float16: 2}  # token steps and convolutions also take float16
WIDE = (torch.float32,)
MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "exp": 3}  # as in linear/maps.h
# As in quantized/product.h: the formats of weights that it reads, and what it rounds activations to.
FORMATS = {"Q8_0": 1, "Q4_0": 2, "Q4_K": 3, "Q6_K": 4}
ACTIVATIONS = {"int16": 0, "int8": 1, "float32": 2}
LARGEST = 1024  # channels of a head, plus one; below the limits of linear/step.cpp and gated/step.cpp


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Return the data pointers for a C function; null for None."""
    return [None if t is None else t.data_ptr() for t in tensors]


def strides(*tensors: Tensor) -> "ctypes.Array[ctypes.c_long]":
    """Return all strides in elements, tensor after tensor."""
    flat = [stride for t in tensors for stride in t.stride()]
    return (ctypes.c_long * len(flat))(*flat)


def unreadable(*tensors: Tensor | None) -> str:
    """Return why these kernels may not read these tensors; empty if they may. Dtypes are not checked."""
    given = [t for t in tensors if t is not None]
    if reason := operands.unreadable(given):
        return reason
    return "they are for the CPU" if any(t.device.type != "cpu" for t in given) else ""


def check_allocated(failed: int, what: str = "states") -> None:
    """Raise MemoryError if a kernel could not allocate what its threads need."""
    if failed:
        raise MemoryError(f"cannot allocate the {what} of {threads()} threads")


def why_not(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *others: Tensor | None, family: str) -> str:
    """Return why the kernels of a family cannot serve these operands; empty if they can. Compiles on first use."""
    if reason := unreadable(q, k, v, state, *others):
        return reason
    if any(t.dtype not in TYPES or t.dtype != v.dtype for t in (q, k, v)):
        return "they take float32 or bfloat16, the same for queries, keys and values"
    if state is not None and state.dtype != torch.float32:
        return "they take a state in float32"
    if not (q.numel() and v.numel()):
        return "there is nothing to compute"
    return "" if available(f"{family}/forward") else "they could not be compiled"


def kernels(unit: str) -> ctypes.CDLL:
    """Return the kernels of a unit for which ``available`` is true."""
    found = build.loaded(unit)
    assert found is not None
    return found


@mark_dynamo_constant
def available(*names: str) -> bool:
    """Return whether the kernels of units or families, by default all, can be used; compiles them on first use.

    torch.compile treats the result as a constant.
    """
    names = names or tuple(build.FAMILIES)
    return all(build.loaded(unit) is not None for name in names for unit in build.interface.units(name))


def readable(*tensors: Tensor | None, dtype: torch.dtype | None = None, wide: Sequence[Tensor | None] = ()) -> bool:
    """Return whether a token step may read these tensors: plain, on the CPU, without gradients, modes or transforms.

    It runs once per token and layer, so it is written for speed.

    Args:
        tensors: Tensors of one dtype.
        dtype: Their dtype; None allows each to have any of ``HALVES``.
        wide: Tensors in float32. The first is a state, whose memory was not freed.
    """
    if followed() or torch._C._len_torch_dispatch_stack():
        return False
    grad = torch.is_grad_enabled()
    for group, types in ((tensors, HALVES if dtype is None else (dtype,)), (wide, WIDE)):
        for t in group:
            if t is None:
                continue
            if type(t) is not Tensor or t.dtype not in types or not t.is_cpu or t.is_neg():
                return False
            if grad and t.requires_grad:
                return False
    return not wide or wide[0] is None or holds(wide[0])
