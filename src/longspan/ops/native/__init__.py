"""C++ kernels for the CPU behind a plain C interface: no headers of torch, nothing to build at installation."""

import torch
from torch import Tensor

from . import build

MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "exp": 3}  # as in step.cpp
LARGEST = 1024  # head size; step.cpp's limit


def why_not(feature_map: object, *tensors: Tensor) -> str:
    """Why the native step cannot serve these operands; "" where it can. Compiles the kernels on first use."""
    if torch.compiler.is_compiling():
        return "torch.compile traces tensors, not C calls"
    if not isinstance(feature_map, str):
        return "the feature map is a Python callable"
    if any(t.device.type != "cpu" or t.dtype != torch.float32 for t in tensors):
        return "it takes float32 on the CPU"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are recorded"
    return "" if build.loaded() else "the kernels could not be compiled"


def linear_step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, feature_map: str, eps: float) -> Tensor:
    """One token, its feature map, the sums and the normaliser, in one pass over ``state``, which is overwritten.

    q, k (B,1,H*D), v (B,1,H*E) before the feature map, state (B,H,D,E+1), contiguous -> o (B,1,H*E).
    Equal to the torch form up to float32 rounding. Raises ValueError for heads larger than 1024.
    """
    batch, heads, keys, width = state.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    assert state.is_contiguous()
    out = torch.empty_like(v)
    kernels = build.loaded()
    assert kernels is not None
    if kernels.longspan_linear_step(
        state.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), batch * heads, keys, width - 1,
        MAPS[feature_map], eps, torch.get_num_threads(),
    ):  # fmt: skip
        raise ValueError(f"heads of {keys} and {width - 1} channels are larger than the native step's {LARGEST}")
    return out
