"""Softmax attention inside buckets of tokens: sort by bucket, look at what lies nearby, in one or several rounds."""

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
    r"""Softmax over the keys that share a bucket with a query and lie near it, in any of R rounds.

    q, k (B,H,N,D), v (B,H,N,E), groups (B,H,R,N) int64 in 0 ... buckets - 1: the bucket of each token in each round ->
    output (B,H,N,E) and log of each row's sum (B,H,N), float32 at least, without a gradient. mask (B,N) bool: a masked
    token does not exist; its output means nothing. ``scale`` multiplies $q_i \cdot k_j$; None: $1 / \sqrt D$.

    In a round tokens are sorted by bucket and then position. ``rule``:

    * ``chunk``: a bucket's tokens are cut into chunks of so many, and a query sees those of its own and ``lookback``
      chunks before; or, with ``window``, itself and the last window - 1 tokens of its bucket; 0 and 0: the bucket.
    * ``whole``: chunks are cut from all sorted tokens together instead, and a query sees the tokens of its bucket in
      its own and the chunks before, or with ``cross`` those of any bucket. ``wrap``: the first chunks look back at the
      last ones, and none twice. Which chunk a token is in then depends on tokens that come later.
    * ``causal``: of these, the ones at its own position and before it.
    * ``alone``: a query sees its own key only where it sees no other.

    Pairs that several rounds show count once: $\mathrm{softmax}$ over the union, which is the sum over rounds weighted
    by $1 / N_{ij}$ with N_ij the number of rounds that show a pair (Kitaev et al. 2020, 2001.04451, section 2 and
    appendix). Time O(R N (keys-per-query) D) and sorting; memory O(N D) and that of some tiles' logits; the backward
    computes tiles again. Transforms of ``torch.func`` and forward-mode derivatives take the plain form, O(R N^2).

    Raises ValueError for a rule that contradicts itself and for more buckets than can be told apart.
    """
    check(rule, groups, mask)
    if not q.numel() or not v.numel():
        sums = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum()), sums
    return read(q, k[:, :, None], v[:, :, None], find(groups, buckets, rule, mask), rule, scale)


def check(rule: Rule, groups: Tensor, mask: Tensor | None = None) -> None:
    """Raise ValueError for a rule that contradicts itself, or does not fit so many rounds."""
    if rule.chunk < 0 or rule.window < 0 or rule.lookback < 0:
        raise ValueError(f"chunk={rule.chunk}, window={rule.window} and lookback={rule.lookback} must not be negative")
    if rule.window and (rule.chunk or not rule.causal or groups.shape[2] > 1):
        raise ValueError("window= counts back in the one round of a causal rule without chunks")
    if rule.whole and not rule.chunk:
        raise ValueError("whole=True cuts the sorted tokens into chunks, so chunk= must be at least 1")
    if rule.wrap and mask is not None:
        raise ValueError("wrap=True looks back at a row's last tokens, so mask= must be None; see ops.rows.ragged")
    if (rule.cross or rule.wrap) and not rule.whole:
        raise ValueError("cross=True and wrap=True belong to whole=True, where chunks hold tokens of several buckets")


def read(
    q: Tensor, k: Tensor, v: Tensor, places: SortedLayout, rule: Rule, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """``attend`` for given places: q (B,H,N,D), k (B,H,P,M,D), v (B,H,P,M,E), whose last N tokens are the queries'."""
    scale = per_root(q.shape[-1]) if scale is None else scale
    q, k, v = materialize_neg(q, k, v)
    why_not = native.why_not(q, k, v, laid_out(rule, k.shape[3]))
    way = select_backend(OP, SERVED, "reference" if transformed() else "torch" if why_not else "native", why_not)
    if way == "native" and why_not:
        raise ValueError(f"backend 'native' cannot serve this call of {OP}: {why_not}")
    if way == "torch" and transformed():
        raise ValueError(f"backend 'torch' cannot serve this call of {OP}: {TRANSFORMED}")
    if way == "reference":
        o, _, lse = reference(q, k, v, places, rule, scale)
        return o, lse.detach()
    numbers = [int(x) for x in rule]
    o, lse = tiles.forward_op(q, k, v, places.order, places.code, places.group, numbers, scale, way == "native")
    if rule.alone:
        blind, n = lse.detach() == -torch.inf, q.shape[2]
        # Of a single key the weight is 1, whatever its logit.
        o = torch.where(blind[..., None], v[:, :, 0, v.shape[3] - n :], o)
        lse = torch.where(blind, (q * k[:, :, 0, k.shape[3] - n :]).sum(-1).to(lse.dtype) * scale, lse)
    return o, lse.detach()


def reference(
    q: Tensor, k: Tensor, v: Tensor, places: SortedLayout, rule: Rule, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: -> output (B,H,N,E), weights (B,H,R,N,M) of each round's keys, log of each row's sum (B,H,N)."""
    n, m = q.shape[2], k.shape[3]
    seen = first(pairs(places, rule, n), places, rule, n)
    at = torch.arange(m, device=q.device)
    if rule.alone:
        own = (at[m - n :, None] == at) & ~seen.any(-1).any(2)[..., None]
        seen = torch.cat([seen[:, :, :1] | own[:, :, None], seen[:, :, 1:]], 2)
    return weighted(q, k, v, seen, scale)


def multiplicity(groups: Tensor, buckets: int, rule: Rule, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What ``attend`` sees: mask bool (B,H,N,N), and N_ij, the number of rounds that show a pair, int64 (B,H,N,N).

    A key of one's own that is seen because no other is counts as shown by one round.
    """
    check(rule, groups, mask)
    seen = pairs(find(groups, buckets, rule, mask), rule, groups.shape[-1])
    shown = seen.sum(2)
    if rule.alone:
        own = torch.eye(groups.shape[-1], dtype=torch.bool, device=groups.device)
        own = own if mask is None else own & mask[:, None, None, :]
        shown = shown + (own & ~shown.any(-1, keepdim=True))
    return shown > 0, shown
