"""Softmax attention within buckets: sort tokens by bucket and attend to neighbors, in one or several rounds."""

import torch
from torch import Tensor

from ..backends import select_backend
from ..operands import TRANSFORMED, materialize_neg, transformed
from ..tensors import per_root
from . import native, tiles
from .definition import weighted
from .places import Rule, SortedLayout, coded, find, first, pairs, ranked
from .windows import laid_out

OP, SERVED = "attention inside buckets", ("reference", "torch", "native")
__all__ = [
    "Rule",
    "SortedLayout",
    "attend",
    "coded",
    "find",
    "first",
    "multiplicity",
    "pairs",
    "ranked",
    "read",
    "reference",
]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    buckets: int,
    rule: Rule,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attend to the keys that share a bucket with the query and are near it, in any of R rounds.

    In each round, tokens are sorted by bucket, then by position. The fields of ``rule`` select the keys of a query:

    * ``chunk``: The tokens of a bucket are cut into chunks of this size. A query sees its own chunk and the
      ``lookback`` chunks before it. 0: no chunks.
    * ``window``: Without chunks, a query sees itself and the last window - 1 tokens of its bucket. 0: the whole bucket.
    * ``whole``: Chunks are cut from all sorted tokens instead. A query sees the tokens of its bucket in its own chunk
      and the ``lookback`` chunks before it. A token's chunk then depends on later tokens.
    * ``cross``: With ``whole``, a query also sees the tokens of other buckets in these chunks.
    * ``wrap``: With ``whole``, the first chunks look back at the last ones, and see no chunk twice.
    * ``causal``: Of these keys, a query sees those at its own position and before it.
    * ``alone``: A query sees its own key only if it sees no other.

    A pair that several rounds share counts once: the softmax is over the union of all rounds. This equals the sum over
    rounds weighted by $1 / N_{ij}$, where $N_{ij}$ is the number of rounds that share the pair.

    Takes O(R N (keys-per-query) D) time and sorting, and O(N D) memory and the logits of some tiles. The backward pass
    recomputes tiles. Transforms of ``torch.func`` and forward-mode derivatives use the plain form, O(R N^2).

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,N,D) keys.
        v: (B,H,N,E) values.
        groups: (B,H,R,N) int64 in 0 ... buckets - 1, the bucket of each token in each round.
        buckets: Number of buckets.
        rule: The keys that each query sees.
        mask: (B,N) bool, True on real tokens; None: all are. Masked tokens are ignored, and their output is undefined.
        scale: Factor of $q_i \cdot k_j$; None: $1 / \sqrt D$.

    Returns:
        The output (B,H,N,E), and the log-sum-exp of each row (B,H,N), in float32 or float64 and without a gradient.

    Raises:
        ValueError: For a rule that contradicts itself, and for too many buckets.

    References:
        Kitaev et al. 2020 (2001.04451), section 2 and appendix, for the pairs of several rounds.
    """
    check(rule, groups, mask)
    if not q.numel() or not v.numel():
        sums = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum()), sums
    return read(q, k[:, :, None], v[:, :, None], find(groups, buckets, rule, mask), rule, scale)


def check(rule: Rule, groups: Tensor, mask: Tensor | None = None) -> None:
    """Check a rule for contradictions, and that it fits the number of rounds and the mask. Raises ValueError."""
    if rule.chunk < 0 or rule.window < 0 or rule.lookback < 0:
        raise ValueError(f"chunk={rule.chunk}, window={rule.window} and lookback={rule.lookback} must not be negative")
    if rule.window and (rule.chunk or not rule.causal or groups.shape[2] > 1):
        raise ValueError("window= needs a causal rule without chunks, and one round")
    if rule.whole and not rule.chunk:
        raise ValueError("whole=True cuts the sorted tokens into chunks, so chunk= must be at least 1")
    if rule.wrap and mask is not None:
        raise ValueError("wrap=True looks back at a row's last tokens, so mask= must be None; see ops.rows.ragged")
    if (rule.cross or rule.wrap) and not rule.whole:
        raise ValueError("cross=True and wrap=True need whole=True, where chunks hold tokens of several buckets")


def read(
    q: Tensor, k: Tensor, v: Tensor, places: SortedLayout, rule: Rule, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """``attend`` for tokens that are already sorted.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,P,M,D) keys; the last N of the M tokens are those of the queries.
        v: (B,H,P,M,E) values.
        places: The sorted order of each round.
        rule: The keys that each query sees.
        scale: Factor of the logits; None: 1 / sqrt(D).

    Returns:
        The output (B,H,N,E) and the log-sum-exp of each row (B,H,N), without a gradient.
    """
    scale = per_root(q.shape[-1]) if scale is None else scale
    q, k, v = materialize_neg(q, k, v)
    why_not = native.why_not(q, k, v, laid_out(rule, k.shape[3]))
    backend = select_backend(OP, SERVED, "reference" if transformed() else "torch" if why_not else "native", why_not)
    if backend == "native" and why_not:
        raise ValueError(f"backend 'native' cannot serve this call of {OP}: {why_not}")
    if backend == "torch" and transformed():
        raise ValueError(f"backend 'torch' cannot serve this call of {OP}: {TRANSFORMED}")
    if backend == "reference":
        o, _, lse = reference(q, k, v, places, rule, scale)
        return o, lse.detach()
    numbers = [int(x) for x in rule]
    o, lse = tiles.attend(tiles.Tiles(q, k, v, *places, numbers, scale, backend == "native"))
    if rule.alone:
        blind, n = lse.detach() == -torch.inf, q.shape[2]
        # A single key has the weight 1, for any logit.
        o = torch.where(blind[..., None], v[:, :, 0, v.shape[3] - n :], o)
        lse = torch.where(blind, (q * k[:, :, 0, k.shape[3] - n :]).sum(-1).to(lse.dtype) * scale, lse)
    return o, lse.detach()


def reference(
    q: Tensor, k: Tensor, v: Tensor, places: SortedLayout, rule: Rule, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``read`` by its definition: output (B,H,N,E), weights (B,H,R,N,M), log-sum-exp of rows (B,H,N)."""
    n, m = q.shape[2], k.shape[3]
    seen = first(pairs(places, rule, n), places, rule, n)
    at = torch.arange(m, device=q.device)
    if rule.alone:
        own = (at[m - n :, None] == at) & ~seen.any(-1).any(2)[..., None]
        seen = torch.cat([seen[:, :, :1] | own[:, :, None], seen[:, :, 1:]], 2)
    return weighted(q, k, v, seen, scale)


def multiplicity(groups: Tensor, buckets: int, rule: Rule, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the pairs that ``attend`` uses.

    Args:
        groups: (B,H,R,N) int64, the bucket of each token in each round.
        buckets: Number of buckets.
        rule: The keys that each query sees.
        mask: (B,N) bool, True on real tokens; None: all are.

    Returns:
        The mask (B,H,N,N) bool, and the number of rounds that share each pair (B,H,N,N) int64. With ``alone``, a query
        that sees only its own key counts as one round.
    """
    check(rule, groups, mask)
    seen = pairs(find(groups, buckets, rule, mask), rule, groups.shape[-1])
    shown = seen.sum(2)
    if rule.alone:
        own = torch.eye(groups.shape[-1], dtype=torch.bool, device=groups.device)
        own = own if mask is None else own & mask[:, None, None, :]
        shown = shown + (own & ~shown.any(-1, keepdim=True))
    return shown > 0, shown
