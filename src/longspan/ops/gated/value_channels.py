r"""Decay attention whose state decays by the channels of its values, on the kernels of that by those of its keys.

    S_t = S_(t-1) Diag(e^(g_t)) + k_t v_t^T,    o_t = c S_t^T q_t

The transposed state T_t = Diag(e^(g_t)) T_(t-1) + v_t k_t^T is that of decay attention with the keys v and the values
k, whose decays are those of its key channels. Only the reads differ: for queries p it returns c T_t^T p_t, and here c
T_t q_t is wanted. That is the gradient of sum_t q_t . (c T_t^T p_t) by p_t, whatever p is: what the backward pass of
decay attention returns for its queries, given q as the gradient of its outputs.

The gradients follow from the same sum. With the gradients a_t of o_t for queries p_t, it is sum_t a_t . o_t. So the
forward pass of decay attention returns that of q, and its backward pass those of v, k, g and the state.

A channel of the values with its own decay is also a head with one channel and a decay per head. This is slower, and
serves as the definition, for ONNX, and for derivatives of higher order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from .. import forms, onnx
from ..arguments import StateOptions
from ..custom_ops import Kernel, contiguous_like, exported, kernel
from ..forms import Form, Forms
from ..native import call
from ..operands import transformed, zero_masked
from ..tensors import upcast_half
from . import chunks, definition, native, triton
from .decays import LOWEST
from .operands import Recurrence, prepared, scale_of, with_state


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    scale: float | None = None,
    donate: bool = False,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    r"""$S_t = S_{t-1} \mathrm{Diag}(e^{g_t}) + k_t v_t^\top$, $o_t = c \, S_t^\top q_t$, without checks.

    Args:
        q: (B,G,N,D), where G divides H.
        k: (B,G,N,D).
        v: (B,H,N,E).
        log_decay: $g_t \le 0$, (B,H,N,E). -inf clears the channel.
        scale: $c$; None is $1 / \sqrt D$.
        donate: Allows the call to overwrite the state.
        options: mask, segments, cu_seqlens and the state (B,H,D,E), as in ``decay_attention``.

    Returns:
        o (B,H,N,E) in v's dtype, and the state (B,H,D,E).

    Raises:
        ValueError: A forced backend cannot serve the call.
    """
    given: Any = {"state": None, **options}
    return serve(with_state(Recurrence(q, k, v, log_decay, None, **given, scale=scale_of(q, scale))), donate)


def serve(r: Recurrence, donate: bool = False) -> tuple[Tensor, Tensor]:
    """Compute checked operands by the fastest form."""
    return forms.serve(FORMS, r, donate)


def by_heads(form: Callable[[Recurrence], tuple[Tensor, Tensor]], r: Recurrence) -> tuple[Tensor, Tensor]:
    """Compute by a form of decay attention, with a head for each channel of the values."""
    assert r.log_decay is not None
    heads, channels = r.v.shape[1], r.v.shape[-1]
    v, log_decay = (t.mT.flatten(1, 2) for t in (r.v, r.log_decay))
    state = r.state.transpose(2, 3).flatten(1, 2)[..., None]
    o, end = form(r._replace(v=v[..., None], log_decay=log_decay, state=state))
    return o[..., 0].unflatten(1, (heads, channels)).mT, end[..., 0].unflatten(1, (heads, channels)).mT


def turned(r: Recurrence, query: Tensor) -> Recurrence:
    """Return the operands of the transposed recurrence for queries (B,H,N,E)."""
    return r._replace(q=query, k=r.v, v=repeated(r, r.k), state=r.state.mT.contiguous())


def repeated(r: Recurrence, x: Tensor) -> Tensor:
    """Repeat queries or keys (B,G,N,D) for the value heads that share them."""
    shared = r.v.shape[1] // r.k.shape[1]
    return x if shared == 1 else x.repeat_interleave(shared, 1)


def summed(r: Recurrence, x: Tensor) -> Tensor:
    """Sum gradients (B,H,N,D) over the value heads that share a query or key."""
    groups = r.k.shape[1]
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)


def on(
    name: str,
    inner: Kernel,
    of: Callable[[Recurrence], Any],
    again: Callable[[Recurrence], tuple[Tensor, Tensor]],
    prepare: Callable[[Recurrence], Recurrence] = lambda r: r,
) -> Kernel:
    """Return the recurrence on a kernel of decay attention, whose operands are ``of(r)``."""

    def forward(r: Recurrence, keeps: bool) -> tuple[Tensor, Tensor]:
        # Any queries serve; the values have their shape.
        other = of(turned(r, r.v))
        _, end, *kept = inner.forward(other, True)
        grads = repeated(r, r.q), torch.zeros_like(end)
        o = inner.backward(other, grads, kept, [True, *[False] * 5])[0]
        assert o is not None
        return o, end.mT.contiguous()

    def backward(
        r: Recurrence, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        dtype, grad = r.v.dtype, grads[0]
        if r.v.shape[1] > r.k.shape[1]:
            # Half precision is not enough for the sums over value heads that share a query.
            q, k, v, grad = (upcast_half(t) for t in (r.q, r.k, r.v, grad))
            r = r._replace(q=q, k=k, v=v)
        other = of(turned(r, grad))
        dq, _, *kept = inner.forward(other, True)
        above = repeated(r, r.q), grads[1].mT.contiguous()
        _, dv, dk, decay, _, first = inner.backward(other, above, kept, [False, *[True] * 5])
        assert dk is not None
        assert first is not None
        assert dv is not None
        made = (t.to(dtype) for t in (summed(r, dq), summed(r, dk), dv))
        return [*made, decay, None, first.mT.contiguous()]

    def shapes(r: Recurrence, keeps: bool) -> tuple[Tensor, Tensor]:
        return torch.empty_like(r.v), contiguous_like(r.state)

    def gradient_shapes(r: Recurrence) -> list[Tensor | None]:
        shared = r.v.shape[1] > r.k.shape[1]
        dq, dk = (r.k.new_empty(r.k.shape) if shared else torch.empty_like(r.k) for _ in range(2))
        assert r.log_decay is not None
        return [dq, dk, torch.empty_like(r.v), torch.empty_like(r.log_decay), None, contiguous_like(r.state)]

    return kernel(
        name,
        Recurrence,
        forward,
        backward,
        shapes=shapes,
        gradient_shapes=gradient_shapes,
        again=again,
        inputs=6,
        kept=0,
        prepare=prepare,
    )


def _composed(r: Recurrence) -> tuple[Tensor, Tensor]:
    return by_heads(chunks.composed, r)


def _chunked(r: Recurrence) -> chunks.Chunked:
    return chunks.Chunked(*r[:8], r.scale)


def _scanned(r: Recurrence) -> chunks.Chunked:
    return _chunked(r)._replace(kernels=True)


_in_chunks = on("value_decay_chunks", chunks.in_spans, _chunked, _composed)
_in_triton = on("value_decay_triton", chunks.in_spans, _scanned, _composed)
_native = on("value_decay", native.attend, lambda r: r, partial(prepared, _composed), native.attend.prepare)


def _attend(r: Recurrence, attend: Callable[[Recurrence], tuple[Tensor, Tensor]] = _in_chunks) -> tuple[Tensor, Tensor]:
    """The recurrence in chunks; time and memory as in ``chunks.attend``, for twice to three times the work."""
    if not r.state.numel() or not r.v.shape[2]:
        return torch.zeros_like(r.v), r.state.clone()
    return prepared(_composed if transformed() else attend, r)


def _why_not(r: Recurrence) -> str:
    reason = native.why_not(r)
    return reason or ("" if call.available("gated/backward") else "they could not be compiled")


def _step(r: Recurrence, donate: bool) -> tuple[Tensor, Tensor]:
    """One token, in few passes over the state, which ``donate`` overwrites."""
    q, k, v, log_decay = zero_masked(r.mask, r.q, r.k, r.v, r.log_decay)
    state, wide = r.state, r.state.dtype
    q, k = repeated(r, q.to(wide)) * r.scale, repeated(r, k.to(wide))
    alpha = log_decay.to(wide).clamp(min=LOWEST).exp()
    # -inf clears whatever is in the state.
    state = state.mul_(alpha) if donate else state * alpha
    state = state.addcmul_(k.mT, v.to(wide)) if donate else torch.addcmul(state, k.mT, v.to(wide))
    return (q @ state).to(v.dtype), state


FORMS = Forms(
    {
        "triton": Form(partial(_attend, attend=_in_triton), triton.why_not, _step),
        "native": Form(_native, _why_not, partial(native.step, by_value=True)),
        "torch": Form(_attend, step=_step),
        "reference": Form(partial(by_heads, definition.attend)),
    },
    exported("value_decay_recurrence", Recurrence, serve, inputs=6, like=2),
    onnx=partial(by_heads, onnx.linear_attention),
    prefers_step=True,
)
