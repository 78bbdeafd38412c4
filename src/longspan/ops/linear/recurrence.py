"""The causal sum S_t = S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, and the sum over all keys."""

from torch import Tensor

from .. import gated
from ..backends import log_backend


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal sum of outer products, read by the queries: o_t = S_t^T q_t with S_t = S_{t-1} + k_t v_t^T.

    Inputs share one dtype, float32 or float64. Time is O(N (D E + C (D + E))) for chunks of C tokens.

    Args:
        q: (B,H,N,D).
        k: (B,H,N,D).
        v: (B,H,N,E).
        state: (B,H,D,E), or None for zeros.
        segments: (B,N) int64, constant inside each packed sequence. The state starts from zero at each border; the
            given state belongs to the first segment and the returned one to the last.
        donate: Allows a call with one token to overwrite ``state``.

    Returns:
        o (B,H,N,E) and the state (B,H,D,E).

    Raises:
        ValueError: a forced backend cannot serve the call.

    References:
        Katharopoulos et al. 2020 (2006.16236), eqs 9-15.
    """
    return gated.recur(q, k, v, scale=1.0, segments=segments, state=state, donate=donate)


def total(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum over all keys, or over those of the query's segment, read by the queries.

    q (B,H,N,D), k (B,H,M,D), v (B,H,M,E) -> o (B,H,N,E), sum over all keys (B,H,D,E). Segments (B,N) require N = M.
    """
    sums = k.transpose(-1, -2) @ v
    if segments is None:
        log_backend("a sum over all keys", "torch")
        return q @ sums, sums
    past, _ = scan(q, k, v, segments=segments)
    # Both scans include the token itself, so it is subtracted once.
    later, _ = scan(q.flip(2), k.flip(2), v.flip(2), segments=-segments.flip(1))
    return past + later.flip(2) - (q * k).sum(-1, keepdim=True) * v, sums
