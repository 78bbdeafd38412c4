"""Decay attention and the delta rule in Triton: sequences, forward and backward, and one token."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .. import triton
from ..backends import forced_backend
from ..custom_ops import contiguous_like, kernel
from ..operands import followed, mark_overwritten, stored
from . import chunks
from .chunks import composed
from .operands import Recurrence, prepared, step_sizes

SPAN = 256  # as in the kernels


def why_not(r: Recurrence) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    return triton.why_not(r.q, r.k, r.v, r.state, *r[3:5], *r[6:9])


def attend(r: Recurrence) -> tuple[Tensor, Tensor]:
    """``gated.serve`` in Triton, for float32, bfloat16 or float16 of any strides.

    -> o (B,H,N,E) with dtype and strides of v, state (B,H,D,E) float32. All sums are in float32. Time is
    O(N (D E + 64 (D + E))). Beyond inputs, output and gradients, memory is that of one state per head and 256 tokens;
    the gradient of decays takes one more per 64 tokens. Two runs give the same bits. Only for operands for which
    ``why_not`` is empty.
    """
    if r.beta is not None or (r.log_decay is not None and r.log_decay.dim() == 4):
        # Batched products inside chunks, and one kernel from chunk to chunk.
        return prepared(partial(chunks.chunked, kernels=True), r)
    return _attend(r if r.cu_seqlens is None else r._replace(cu_seqlens=r.cu_seqlens.long()))


def _forward(r: Recurrence, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), and for the backward pass the states before and shares of all spans."""
    from ..triton import decay

    with torch.cuda.device_of(r.q):
        return decay.forward(decay.Call(*r[:4], *r[6:]), r.state)


def _backward(
    r: Recurrence, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    from ..triton import decay

    (grad, grad_end), (starts, wholes) = grads, kept
    with torch.cuda.device_of(r.q):
        call = decay.Call(*r[:4], *r[6:])
        dq, dk, dv, ddecay, first = decay.backward(call, grad, grad_end, starts, wholes, needed[3])
    return [dq, dk, dv, ddecay, None, first]


def _shapes(r: Recurrence, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, n, values = r.v.shape
    span = min(SPAN, max(64, 1 << (n - 1).bit_length()))
    spans = -(-n // span) if r.cu_seqlens is None else n // span + len(r.cu_seqlens) - 1
    starts = r.state.new_empty(batch * heads, spans, r.q.shape[-1], values)
    return torch.empty_like(r.v), contiguous_like(r.state), starts, r.state.new_empty(batch * heads, spans)


def _gradient_shapes(r: Recurrence) -> list[Tensor | None]:
    # Gradients that are summed over value heads, or scaled afterwards, are contiguous.
    shared = r.v.shape[1] > r.q.shape[1] or r.normalize
    dq, dk = (t.new_empty(t.shape) if shared else torch.empty_like(t) for t in (r.q, r.k))
    ddecay = None if r.log_decay is None else r.log_decay.new_empty(r.log_decay.shape)
    return [dq, dk, torch.empty_like(r.v), ddecay, None, contiguous_like(r.state)]


_attend = kernel(
    "triton_decay",
    Recurrence,
    _forward,
    _backward,
    shapes=_shapes,
    gradient_shapes=_gradient_shapes,
    again=partial(prepared, composed),
    inputs=6,
    kept=2,
)


def step(r: Recurrence, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token of ``gated.serve`` in one launch and one pass over the state (B,H,D,E), in place with ``donate``.

    q, k (B,G,1,D), v (B,H,1,E), in float32, bfloat16 or float16, log_decay (B,H,1) or (B,H,1,D), beta (B,H,1), state
    float32, all of any strides -> o (B,H,1,E) in v's dtype, state. Returns None for other operands. It runs once per
    token and layer, so it is written for speed.
    """
    q, k, v, log_decay, beta, state, _, _, _, scale, normalize = r
    if v.dtype not in triton.TYPES or not q.dtype == k.dtype == v.dtype or (found := step_sizes(r)) is None:
        return None
    if state.dtype is not torch.float32 or not _readable(q, k, v, log_decay, beta, state) or not stored(state):
        return None
    if log_decay is not None and not log_decay.is_floating_point():
        return None
    if beta is not None and (beta.shape != (found[0], found[2], 1) or not beta.is_floating_point()):
        return None
    from ..triton import gated_step

    with torch.cuda.device_of(q):
        after = gated_step.step(q, k, v, log_decay, beta, state, scale, donate, normalize)
    if donate:
        mark_overwritten(state)
    return after


def _readable(*tensors: Tensor | None) -> bool:
    """Return whether the step may read these tensors: plain, on one GPU, without gradients, modes or transforms."""
    if followed() or torch._C._len_torch_dispatch_stack() or triton.missing():
        return False
    grad, on_cpu = torch.is_grad_enabled(), forced_backend() == "triton" and triton.interpreted()
    first = tensors[0]
    assert first is not None
    if not (first.is_cuda or on_cpu):
        return False
    for t in tensors:
        if t is not None and (
            type(t) is not Tensor or t.device != first.device or t.is_neg() or (grad and t.requires_grad)
        ):
            return False
    return True
