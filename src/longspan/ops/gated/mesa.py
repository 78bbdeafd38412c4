r"""Ridge regression on all tokens so far, solved anew for each token.

    H_t = e^(g_t) H_(t-1) + b_t k_t k_t^T,    G_t = e^(g_t) G_(t-1) + b_t k_t v_t^T
    o_t = G_t^T (H_t + Diag(l))^-1 q_t

Conjugate gradients solve the systems of all tokens at once: a step needs H_t p_t for all t, which is decay attention
with the queries p, the keys b k and the values k. A token whose system is solved up to rounding takes no more steps.
For x_t = (H_t + Diag(l))^-1 q_t, o is decay attention with the queries x.

The gradients are those of the solution, not of the steps: given dx, they are those of -y . (H + Diag(l)) x for fixed x
and y, where y solves the same systems for dx.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..custom_ops import register
from ..operands import double_backward, followed, transformed
from . import recur
from .decays import LOWEST


class Systems(NamedTuple):
    """The systems (H_t + Diag(l)) x_t = q_t of all tokens, in float32 at least."""

    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,H,N,D)
    write: Tensor  # (B,H,N,D) b_t k_t
    log_decay: Tensor  # (B,H,N)
    ridge: Tensor  # (H,D) l > 0
    state: Tensor  # (B,H,D,D) H before the first token
    mask: Tensor | None
    segments: Tensor | None
    steps: int


SCHEMA = (
    "(Tensor q, Tensor k, Tensor write, Tensor log_decay, Tensor ridge, Tensor state, Tensor? mask, Tensor? segments, "
    "int steps) -> Tensor"
)
INPUTS = 6  # operands that may have gradients


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor,
    ridge: Tensor,
    steps: int,
    state: Tensor,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return $o_t = G_t^\top (H_t + \mathrm{Diag}(\lambda))^{-1} q_t$, after a number of steps of conjugate gradients.

    Args:
        q: (B,H,N,D), in float32 at least, as all others.
        k: (B,H,N,D).
        v: (B,H,N,E).
        beta: $\beta_t \ge 0$, (B,H,N).
        log_decay: $g_t \le 0$, (B,H,N).
        ridge: $\lambda > 0$, (H,D).
        steps: The most steps; D are exact, up to rounding.
        state: (B,H,D,D+E): H, and G beside it.
        mask: (B,N) bool, as in ``decay_attention``.
        segments: (B,N) int64, as there.
        donate: Allows the call to overwrite the state.

    Returns:
        o (B,H,N,E), the residuals $\lVert q_t - (H_t + \mathrm{Diag}(\lambda)) x_t \rVert$ (B,H,N), and the next state.

    References:
        von Oswald et al. 2025 (2506.05233), section 3.
    """
    size, write = q.shape[-1], k * beta[..., None]
    x = _solution(Systems(q, k, write, log_decay, ridge, state[..., :size].contiguous(), mask, segments, steps))
    both, end = recur(
        x,
        write,
        torch.cat([k, v], -1),
        log_decay=log_decay,
        scale=1.0,
        state=state,
        mask=mask,
        segments=segments,
        donate=donate,
    )
    product, o = both.split([size, v.shape[-1]], -1)
    residual = (q - product - ridge[:, None] * x).detach().norm(dim=-1)
    return o, residual if mask is None else residual.masked_fill(~mask[:, None], 0.0), end


def _product(x: Tensor, s: Systems) -> Tensor:
    """Return (H_t + Diag(l)) x_t for all tokens."""
    product, _ = recur(
        x, s.write, s.k, log_decay=s.log_decay, scale=1.0, state=s.state, mask=s.mask, segments=s.segments
    )
    return product + s.ridge[:, None] * x


def _solve(s: Systems) -> Tensor:
    """Return x by conjugate gradients from 0."""
    if s.q.shape[2] == 1 and s.mask is None:
        # One matrix serves all steps.
        matrix = s.state * s.log_decay.clamp(min=LOWEST).exp()[..., None] + s.write.mT @ s.k
        matrix = matrix + torch.diag_embed(s.ridge)

        def product(p: Tensor) -> Tensor:
            return p @ matrix
    else:

        def product(p: Tensor) -> Tensor:
            return _product(p, s)

    tiny, enough = torch.finfo(s.q.dtype).tiny, torch.finfo(s.q.dtype).eps ** 2
    x, residual = torch.zeros_like(s.q), s.q
    direction, size = residual, residual.square().sum(-1, keepdim=True)
    # Each token stops alone, so that its result does not depend on the others. The loop ends where that needs no wait.
    least, stops = size * enough, s.q.device.type == "cpu" and not followed()
    for _ in range(s.steps):
        if stops and bool((size <= least).all()):
            break
        ahead = product(direction)
        step = size / (direction * ahead).sum(-1, keepdim=True).clamp(min=tiny)
        step = step.masked_fill(size <= least, 0.0)
        x, residual = x + step * direction, residual - step * ahead
        before, size = size, residual.square().sum(-1, keepdim=True)
        direction = residual + size / before.clamp(min=tiny) * direction
    return x


def _solution(s: Systems) -> Tensor:
    # Transforms follow the steps.
    return _solve(s) if transformed() else _op(*s)


def _gradients(ctx: "torch.autograd.function.FunctionCtx", grad: Tensor) -> tuple[Tensor | None, ...]:
    *given, x = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] (made by register_autograd)
    s = Systems._make([*given, ctx.steps])  # pyright: ignore[reportAttributeAccessIssue]
    y = _solution(s._replace(q=grad))

    def product(*operands: Tensor) -> Tensor:
        return _product(x, Systems._make([s.q, *operands, *s[INPUTS:]]))

    return y, *double_backward(product, s[1:INPUTS], [-y]), None, None, None


def _keep(ctx: "torch.autograd.function.FunctionCtx", inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1], output)
    ctx.steps = inputs[-1]  # pyright: ignore[reportAttributeAccessIssue]


_op = register("mesa_solution", lambda *s: _solve(Systems(*s)), lambda *s: torch.empty_like(s[0]), SCHEMA)
_op.register_autograd(_gradients, setup_context=_keep)
