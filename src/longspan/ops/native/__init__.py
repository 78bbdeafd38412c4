"""C++ kernels for the CPU behind a plain C interface: no headers of torch, nothing to build at installation."""

import torch
from torch import Tensor

from . import build
from .openmp import threads

MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "exp": 3}  # as in maps.h
LARGEST = 1024  # channels of a head, plus one; below step.cpp's limit


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether there are kernels, compiled now if need be; a compiler takes the answer as it finds it."""
    return build.loaded() is not None


def steps(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> bool:
    """Whether ``linear_step`` can take this token: plain float32 tensors on the CPU, no gradients, nothing that traces.

    Asked once per token and layer, so it is written for speed.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and type(state) is Tensor):
        return False
    if not (q.is_cpu and k.is_cpu and v.is_cpu and state.is_cpu):
        return False
    if q.is_neg() or k.is_neg() or v.is_neg() or state.is_neg():
        return False
    wide = torch.float32
    if not (q.dtype is wide and k.dtype is wide and v.dtype is wide and state.dtype is wide):
        return False
    grads = q.requires_grad or k.requires_grad or v.requires_grad or state.requires_grad
    if (grads and torch.is_grad_enabled()) or not (q.numel() and v.numel()):
        return False
    return state.shape[-2] <= LARGEST and state.shape[-1] <= LARGEST and available()


def plain(x: Tensor) -> bool:
    """Whether ``x`` may be read beside operands that ``steps`` agrees to."""
    grads = x.requires_grad and torch.is_grad_enabled()
    return type(x) is Tensor and x.is_cpu and x.dtype is torch.float32 and not x.is_neg() and not grads


def linear_step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, feature_map: str, eps: float) -> Tensor:
    """One token, its feature map, the sums and the normaliser, in one pass over ``state``, which is overwritten.

    q, k (B,1,H*D), v (B,1,H*E) before the feature map, or (B,H,1,D) and (B,H,1,E), which is the same memory;
    state (B,H,D,E+1), contiguous -> o shaped like v.
    Equal to the torch form up to float32 rounding. Only for operands that ``steps`` agrees to.
    """
    batch, heads, keys, width = state.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    assert state.is_contiguous()
    out = torch.empty_like(v)
    kernels = build.loaded()
    assert kernels is not None
    failed = kernels.longspan_linear_step(
        state.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), batch * heads, keys, width - 1,
        MAPS[feature_map], eps, threads(),
    )  # fmt: skip
    assert not failed
    return out
