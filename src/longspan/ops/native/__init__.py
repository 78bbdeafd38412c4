"""C++ kernels for the CPU behind a plain C interface: no headers of torch, nothing to build at installation."""

import torch
from torch import Tensor

from ..operands import transformed
from . import build
from .openmp import threads

MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "exp": 3}  # as in maps.h
LARGEST = 1024  # channels of a head, plus one; below the limits of step.cpp and gated_step.cpp


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether there are kernels, compiled now if need be; a compiler takes the answer as it finds it."""
    return build.loaded() is not None


def readable(*tensors: Tensor | None) -> bool:
    """Whether a token step may read those that there are: plain float32 on the CPU, no gradients, nothing that follows.

    Asked once per token and layer, as all of a token step is, so it is written for speed.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transformed():
        return False
    grad, wide = torch.is_grad_enabled(), torch.float32
    for t in tensors:
        if t is None:
            continue
        if type(t) is not Tensor or t.dtype is not wide or not t.is_cpu or t.is_neg() or (grad and t.requires_grad):
            return False
    return True


def linear_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, feature_map: str, eps: float, donate: bool
) -> tuple[Tensor, Tensor] | None:
    """One token, its feature map, the sums and the normaliser, in one pass over the state.

    q, k (B,H,1,D) before the feature map, v (B,H,1,E), state (B,H,D,E+1) -> o (B,H,1,E), state, which is the given one
    overwritten where ``donate`` allows it. None for anything else, and where there are no kernels.
    Equal to the torch form up to float32 rounding.
    """
    feature = MAPS.get(feature_map)
    if feature is None or not readable(q, k, v, state) or not q.dim() == v.dim() == 4:
        return None
    batch, heads, tokens, keys = shape = q.shape
    values = v.shape[3]
    if k.shape != shape or v.shape != (batch, heads, 1, values) or state.shape != (batch, heads, keys, values + 1):
        return None
    if tokens != 1 or not batch * heads or not 0 < keys <= LARGEST or not 0 < values < LARGEST:
        return None
    if (kernels := build.loaded()) is None:
        return None
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    state = state.contiguous() if donate else state.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(v)
    failed = kernels.longspan_linear_step(
        state.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), batch * heads, keys, values,
        feature, eps, threads(),
    )  # fmt: skip
    assert not failed
    return out, state
