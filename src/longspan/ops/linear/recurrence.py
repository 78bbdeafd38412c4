"""S_t = S_{t-1} + k_t v_t^T, o_t = S_t^T q_t: the definition (a loop), and a chunked form made of matrix products."""

import torch
from torch import Tensor

from .. import chosen, tell
from ..operands import transformed
from ..segments import Borders, borders_of, cut

CHUNK = 64  # tokens whose products are formed directly, as one small matrix
SPAN = 1024  # tokens worked on at once; the state at the start of each span is what the backward pass remembers


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    chunk: int = CHUNK,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal sum of outer products, read by the queries: o_t = S_t^T q_t with S_t = S_{t-1} + k_t v_t^T.

    q, k (B,H,N,D), v (B,H,N,E), state (B,H,D,E) or None for zeros -> o (B,H,N,E), state (B,H,D,E).

    ``segments`` (B,N) int64 is constant inside each packed sequence: the state starts from zero where it changes, the
    given state belongs to the first segment and the returned one to the last. Inputs share one dtype, float32 or
    float64. Time is O(N (D E + C (D + E))); memory of forward and backward is O(N (D + E) + D E N / 1024).
    ``donate=True`` lets a call with one token overwrite ``state``.

    Source: Katharopoulos et al. 2020 (2006.16236), eqs 9-15; the backward pass is three scans of the same kind.
    """
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    if chosen("scan") == "reference":
        return reference(q, k, v, state, segments)
    if q.shape[2] == 0:
        return torch.zeros_like(v), state.clone()
    if q.shape[2] == 1:
        return step(q, k, v, state, donate=donate and not transformed())
    if transformed():
        return plain(q, k, v, state, segments, chunk)
    return _Scan.apply(q, k, v, state, segments, chunk)  # type: ignore[return-value]


def reference(q: Tensor, k: Tensor, v: Tensor, state: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time. Shapes as in ``scan``."""
    out = []
    for t in range(q.shape[2]):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1]).to(state)[:, None, None, None]
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
    return (torch.stack(out, 2) if out else torch.zeros_like(v)), state.clone()


def plain(q: Tensor, k: Tensor, v: Tensor, state: Tensor, segments: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """The chunked form from plain operations alone, none of them in place. Shapes as in ``scan``."""
    out = []
    for start in range(0, q.shape[2], chunk):
        rows = slice(start, start + chunk)
        qs, ks, vs = (t[:, :, rows] for t in (q, k, v))
        scores, read, written, kept = (qs @ ks.mT).tril(), qs, ks, state
        if segments is not None:
            same, first, last, whole = (t[:, :, 0] for t in borders_of(segments, start, 1, qs.shape[2], q))
            scores, read, written, kept = scores * same, qs * first, ks * last, state * whole
        out.append(scores @ vs + read @ state)
        state = kept + written.mT @ vs
    return torch.cat(out, 2), state


def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, donate: bool = False) -> tuple[Tensor, Tensor]:
    """One token, N = 1: add its outer product to the state, read the state. Shapes as in ``scan``."""
    keys = k.transpose(-1, -2)  # (B,H,D,1)
    state = state.addcmul_(keys, v) if donate else torch.addcmul(state, keys, v)
    return q @ state, state


def total(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Every query reads the sum over all keys, or over those of its own segment.

    q (B,H,N,D), k (B,H,M,D), v (B,H,M,E) -> o (B,H,N,E), sum over all keys (B,H,D,E). With segments N = M.
    """
    sums = k.transpose(-1, -2) @ v
    if segments is None:
        tell("a sum over all keys", "torch")
        return q @ sums, sums
    past, _ = scan(q, k, v, segments=segments)
    # Both scans count the token itself, so it is taken out of one of them.
    later, _ = scan(q.flip(2), k.flip(2), v.flip(2), segments=-segments.flip(1))
    return past + later.flip(2) - (q * k).sum(-1, keepdim=True) * v, sums


def _prefix(parts: Tensor, start: Tensor, whole: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Running sums over chunks, each without its own part: (B,H,G,D,E), start (B,H,D,E) -> the sums, the total."""
    groups = parts.shape[2]
    out = torch.empty_like(parts)
    running = start
    for g in reversed(range(groups)) if reverse else range(groups):
        out[:, :, g] = running
        if whole is not None:
            running = running * whole[:, :, g]
        running = running + parts[:, :, g]
    return out, running


def _masked(products: Tensor, borders: Borders | None) -> Tensor:
    products = products.tril_()
    return products if borders is None else products.mul_(borders.same)


class _Scan(torch.autograd.Function):
    """The chunked scan. Forward keeps its inputs and one state per span; backward recomputes the rest span by span."""

    @staticmethod
    def forward(ctx, q, k, v, state, segments, chunk):
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        spans, starts, first = cut(q.shape[2], chunk, SPAN), [], state
        with torch.autocast(q.device.type, enabled=False):
            for start, groups, width in spans:
                starts.append(state)
                rows = slice(start, start + groups * width)
                qs, ks, vs = (t[:, :, rows].unflatten(2, (groups, width)) for t in (q, k, v))
                borders = None if segments is None else borders_of(segments, start, groups, width, q)
                written = ks if borders is None else ks * borders.last
                states, state = _prefix(written.mT @ vs, state, borders and borders.whole)
                carried = qs @ states
                if borders is not None:
                    carried *= borders.first
                out[:, :, rows] = carried.add_(_masked(qs @ ks.mT, borders) @ vs).flatten(2, 3)
        # The first state is kept as the input that it is, so that second derivatives reach it.
        ctx.save_for_backward(q, k, v, segments, first, *starts[1:])
        ctx.chunk = chunk
        return out, state

    @staticmethod
    def backward(ctx, grad, grad_state):
        q, k, v, segments, *starts = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_backward_by_scans(q, k, v, starts[0], segments, grad, grad_state, ctx.chunk), None, None)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        spans = cut(q.shape[2], ctx.chunk, SPAN)
        with torch.autocast(q.device.type, enabled=False):
            for i in reversed(range(len(spans))):
                start, groups, width = spans[i]
                rows = slice(start, start + groups * width)
                qs, ks, vs, gs = (t[:, :, rows].unflatten(2, (groups, width)) for t in (q, k, v, grad))
                borders = None if segments is None else borders_of(segments, start, groups, width, q)
                written, read = (ks, qs) if borders is None else (ks * borders.last, qs * borders.first)
                whole = borders and borders.whole
                states, _ = _prefix(written.mT @ vs, starts[i], whole)
                # grad_states: the gradient of the state that each chunk hands on, from all chunks after it.
                grad_states, grad_state = _prefix(read.mT @ gs, grad_state, whole, reverse=True)
                scores, grad_scores = _masked(qs @ ks.mT, borders), _masked(gs @ vs.mT, borders)
                parts = (gs @ states.mT, vs @ grad_states.mT, ks @ grad_states)
                if borders is not None:
                    parts = tuple(
                        p * m for p, m in zip(parts, (borders.first, borders.last, borders.last), strict=True)
                    )
                dq[:, :, rows] = parts[0].add_(grad_scores @ ks).flatten(2, 3)
                dk[:, :, rows] = parts[1].add_(grad_scores.mT @ qs).flatten(2, 3)
                dv[:, :, rows] = parts[2].add_(scores.mT @ gs).flatten(2, 3)
        return dq, dk, dv, grad_state, None, None


def _backward_by_scans(q, k, v, state, segments, grad, grad_state, chunk):
    """The same gradients as three more scans, which autograd can differentiate again (eqs 13-15)."""
    back = None if segments is None else -segments.flip(1)
    g, gs = grad, grad_state.mT
    dq, _ = scan(g, v, k, state.mT, segments=segments, chunk=chunk)
    dk, _ = scan(v.flip(2), g.flip(2), q.flip(2), gs, segments=back, chunk=chunk)
    dv, first = scan(k.flip(2), q.flip(2), g.flip(2), grad_state, segments=back, chunk=chunk)
    return dq, dk.flip(2), dv.flip(2), first
