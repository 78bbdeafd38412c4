"""Triton kernels for CUDA GPUs: when they can serve a call, and with which precision they multiply.

Triton comes with torch for CUDA. It is imported on the first call that needs a kernel, so importing longspan stays
fast. With ``TRITON_INTERPRET=1`` in the environment, ``backend("triton")`` also serves tensors on the CPU: Triton then
interprets the kernels, slowly, which is how their values are tested without a GPU.
"""

import functools
import importlib
import importlib.util
import os

import torch
from torch import Tensor

from .. import operands
from ..backends import forced_backend, mark_dynamo_constant

FOR_CUDA = "they are for CUDA GPUs"
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 128  # channels of a head that the kernels take


def interpreted() -> bool:
    """Return whether Triton interprets kernels, on any device, instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@mark_dynamo_constant
def missing() -> str:
    """Return why Triton cannot be used; empty if it can."""
    version = _installed()
    if version is None:
        return "Triton is not installed; torch for CUDA brings it"
    # Kernels take tuples, such as the strides of a tensor.
    return "" if version >= (3, 3) else f"they need Triton 3.3, which torch 2.7 brings, not {version[0]}.{version[1]}"


@functools.cache
def _installed() -> tuple[int, int] | None:
    """Return the version of Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    # The name of the distribution differs between builds of torch.
    major, minor, *_ = importlib.import_module("triton").__version__.split(".")
    return int(major), int(minor)


def unreadable(*tensors: Tensor | None) -> str:
    """Return why no Triton kernel may read these tensors; empty if it may. Dtypes are not checked."""
    given = [t for t in tensors if t is not None]
    if not all(t.is_cuda for t in given) and not (forced_backend() == "triton" and interpreted()):
        return FOR_CUDA
    return operands.unreadable(given) or missing()


def why_not(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *others: Tensor | None) -> str:
    """Return why the kernels cannot serve these operands; empty if they can.

    Args:
        q: (B,H,N,D).
        k: (B,H,M,D).
        v: (B,H,M,E).
        state: The state, float32, or None.
        others: Mask, segments and gates of the call, as far as given.
    """
    if reason := unreadable(q, k, v, state, *others):
        return reason
    if any(t.dtype not in TYPES or t.dtype != v.dtype for t in (q, k, v)):
        return "they take float32, bfloat16 or float16, the same for queries, keys and values"
    if state is not None and state.dtype != torch.float32:
        return "they take a state in float32"
    if not (q.numel() and v.numel()):
        return "there is nothing to compute"
    if max(q.shape[-1], v.shape[-1]) > LARGEST:
        return f"they take at most {LARGEST} channels a head"
    return ""


def precision(dtype: torch.dtype) -> str:
    """Return ``input_precision`` of ``tl.dot``: three TF32 products for float32, one if torch allows TF32.

    The interpreter multiplies in float32 and takes any of them.
    """
    if dtype != torch.float32 or interpreted():
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
