"""How the C functions are called: kinds of numbers, pointers, strides, and whether a tensor may be read at all."""

import ctypes

import torch
from torch import Tensor

from ..backends import mark_dynamo_constant
from ..operands import TRANSFORMED, transformed
from . import build

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in the kernels
HALVES = TYPES | {torch.float16: 2}  # what token steps and convolutions take, too
MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "exp": 3}  # as in linear/maps.h
LARGEST = 1024  # channels of a head, plus one; below the limits of linear/step.cpp and gated/step.cpp


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Where their numbers begin, as a C function takes it; null for None."""
    return [None if t is None else t.data_ptr() for t in tensors]


def strides(*tensors: Tensor) -> ctypes.Array:
    """All their strides, in elements, one tensor after the other."""
    flat = [stride for t in tensors for stride in t.stride()]
    return (ctypes.c_long * len(flat))(*flat)


def unreadable(*tensors: Tensor | None) -> str:
    """Why no kernel may read these; "" where it may, as far as that does not depend on their types."""
    given = [t for t in tensors if t is not None]
    if torch.compiler.is_exporting():
        return "an exported program must run without them"
    # Classes with a dispatch of their own, such as fake tensors, may have no memory to read.
    if not torch.compiler.is_compiling() and (
        torch._C._len_torch_dispatch_stack()
        or any(type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in given)  # type: ignore
    ):
        return "what counts or traces the operations of torch would see none of theirs"
    if transformed():
        return TRANSFORMED
    return "they are for the CPU" if any(t.device.type != "cpu" for t in given) else ""


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *others: Tensor | None,
    family: str,
) -> str:
    """Why the kernels of a family cannot serve these operands; "" where they can. Compiles them on first use."""
    if reason := unreadable(q, k, v, state, *others):
        return reason
    if any(t.dtype not in TYPES or t.dtype != v.dtype for t in (q, k, v)):
        return "they take float32 or bfloat16, one of them for queries, keys and values"
    if state is not None and state.dtype != torch.float32:
        return "they take a state in float32"
    if not (q.numel() and v.numel()):
        return "there is nothing to compute"
    return "" if available(family) else "they could not be compiled"


def kernels(family: str) -> ctypes.CDLL:
    """The kernels of a family for which ``available`` is true."""
    found = build.loaded(family)
    assert found is not None
    return found


@mark_dynamo_constant
def available(*families: str) -> bool:
    """Whether the kernels of ``families``, by default all, can be used; compiles them on first use.

    torch.compile keeps the answer as a constant.
    """
    return all(build.loaded(family) is not None for family in families or build.FAMILIES)


def readable(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a token step may read those that there are: plain ones on the CPU, no gradients, nothing that follows.

    Asked once per token and layer, as all of a token step is, so it is written for speed.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transformed():
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is None:
            continue
        if type(t) is not Tensor or t.dtype is not dtype or not t.is_cpu or t.is_neg() or (grad and t.requires_grad):
            return False
    return True
