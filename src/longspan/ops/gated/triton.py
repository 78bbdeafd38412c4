"""Decay attention and the delta rule in Triton: sequences, forward and backward, and one token."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import triton
from ..backends import forced_backend
from ..operands import double_backward, mark_overwritten, stored, transformed
from . import chunks
from .chunks import CHUNK, composed
from .prepared import prepared

LARGEST = 1024  # channels of a head in a step, as in the C++ kernels


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    cu_seqlens: Tensor | None,
) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    return triton.why_not(q, k, v, state, log_decay, beta, mask, segments, cu_seqlens)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
    mask: Tensor | None,
    segments: Tensor | None,
    state: Tensor,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``gated.recur`` in Triton: q, k (B,G,N,D), v (B,H,N,E), of any strides, float32, bfloat16 or float16.

    -> o (B,H,N,E) with dtype and strides of v, state (B,H,D,E) float32. All sums are in float32. Time is
    O(N (D E + 64 (D + E))). Beyond inputs, output and gradients, memory is that of one state per head and 256 tokens;
    the gradient of decays takes one more per 64 tokens. Two runs give the same bits. Only for operands for which
    ``why_not`` is empty.
    """
    if beta is not None or (log_decay is not None and log_decay.dim() == 4):
        # Batched products inside chunks, and one kernel from chunk to chunk.
        options: dict[str, Any] = {"scale": scale, "mask": mask, "segments": segments, "state": state}
        options |= {"log_decay": log_decay, "beta": beta, "normalize": normalize, "cu_seqlens": cu_seqlens}
        return prepared(partial(chunks.attend, kernels=True), q, k, v, **options)
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    return _Attend.apply(q, k, v, log_decay, state, mask, segments, offsets, scale, normalize)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        offsets: Tensor | None,
        scale: float,
        normalize: bool,
    ) -> tuple[Tensor, Tensor]:
        run = _forward_op if torch.compiler.is_compiling() else _forward
        o, end, starts, wholes = run(q, k, v, log_decay, state, mask, segments, offsets, scale, normalize)
        ctx.save_for_backward(q, k, v, log_decay, state, mask, segments, offsets, starts, wholes)
        ctx.options = scale, normalize
        return o, end

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        grad, grad_end = upstream
        q, k, v, log_decay, state, mask, segments, offsets, starts, wholes = ctx.saved_tensors
        scale, normalize = ctx.options
        decays = ctx.needs_input_grad[3]
        if torch.is_grad_enabled():
            options: dict[str, Any] = {"mask": mask, "segments": segments, "scale": scale, "chunk": CHUNK}
            form = partial(prepared, composed, normalize=normalize, cu_seqlens=offsets)
            inputs = (q, k, v, log_decay, None, state)
            dq, dk, dv, ddecay, _, first = double_backward(form, inputs, (grad, grad_end), **options)
        else:
            run = _backward_op if torch.compiler.is_compiling() else _backward
            given = (q, k, v, log_decay, mask, segments, offsets, starts, wholes, scale, normalize)
            dq, dk, dv, first, *rest = run(grad, grad_end, *given, decays)
            ddecay = rest[0] if decays else None
        return dq, dk, dv, ddecay, first, None, None, None, None, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E), and for the backward pass the states before and shares of all spans."""
    from ..triton import decay

    with torch.cuda.device_of(q):
        return decay.forward(state, q, k, v, log_decay, mask, segments, offsets, scale, normalize)


def _backward(
    grad: Tensor,
    grad_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
    offsets: Tensor | None,
    starts: Tensor,
    wholes: Tensor,
    scale: float,
    normalize: bool,
    decays: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, of the first state, and with ``decays`` of log_decay."""
    from ..triton import decay

    with torch.cuda.device_of(q):
        given = (q, k, v, log_decay, mask, segments, offsets, scale, normalize)
        dq, dk, dv, ddecay, first = decay.backward(grad, grad_end, starts, wholes, decays, *given)
    return [t for t in (dq, dk, dv, first, ddecay) if t is not None]


_forward_op = torch.library.custom_op("longspan::triton_decay_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("longspan::triton_decay_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, _, v, _, state, _, _, offsets, _, _ = given
    batch, heads, n, values = v.shape
    span = min(SPAN, max(64, 1 << (n - 1).bit_length()))
    spans = -(-n // span) if offsets is None else n // span + len(offsets) - 1
    starts = state.new_empty(batch * heads, spans, q.shape[-1], values)
    end = torch.empty_like(state, memory_format=torch.contiguous_format)
    return torch.empty_like(v), end, starts, state.new_empty(batch * heads, spans)


@_backward_op.register_fake
def _(*given: Any) -> list[Tensor]:
    _, grad_end, q, k, v, log_decay, *_, normalize, decays = given
    # Gradients that are summed over value heads, or scaled afterwards, are contiguous.
    shared = v.shape[1] > q.shape[1] or normalize
    found = [t.new_empty(t.shape) if shared else torch.empty_like(t) for t in (q, k)]
    found += [torch.empty_like(v), torch.empty_like(grad_end, memory_format=torch.contiguous_format)]
    return [*found, log_decay.new_empty(log_decay.shape)] if decays and log_decay is not None else found


SPAN = 256  # as in the kernels


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    state: Tensor,
    donate: bool,
    normalize: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """One token of ``gated.recur`` in one launch and one pass over ``state`` (B,H,D,E), in place with ``donate``.

    q, k (B,G,1,D), v (B,H,1,E), in float32, bfloat16 or float16, log_decay (B,H,1) or (B,H,1,D), beta (B,H,1), state
    float32, all of any strides -> o (B,H,1,E) in v's dtype, state. Returns None for other operands. It runs once per
    token and layer, so it is written for speed.
    """
    if v.dtype not in triton.TYPES or not q.dtype == k.dtype == v.dtype or not q.dim() == v.dim() == 4:
        return None
    if state.dtype is not torch.float32 or not _readable(q, k, v, log_decay, beta, state) or not stored(state):
        return None
    batch, groups, tokens, keys = shape = q.shape
    _, heads, _, values = v.shape
    if k.shape != shape or v.shape != (batch, heads, 1, values) or state.shape != (batch, heads, keys, values):
        return None
    if tokens != 1 or not batch * groups or heads % groups or not (0 < keys <= LARGEST and 0 < values <= LARGEST):
        return None
    token = (batch, heads, 1)
    if log_decay is not None and (log_decay.shape not in (token, (*token, keys)) or not log_decay.is_floating_point()):
        return None
    if beta is not None and (beta.shape != token or not beta.is_floating_point()):
        return None
    from ..triton import gated_step

    factor = keys**-0.5 if scale is None else float(scale)
    with torch.cuda.device_of(q):
        found = gated_step.step(q, k, v, log_decay, beta, state, factor, donate, normalize)
    if donate:
        mark_overwritten(state)
    return found


def _readable(*tensors: Tensor | None) -> bool:
    """Return whether the step may read these tensors: plain, on one GPU, without gradients, modes or transforms."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transformed() or triton.missing():
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
