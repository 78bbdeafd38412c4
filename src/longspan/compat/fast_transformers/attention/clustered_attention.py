"""Softmax attention of clusters of queries: clustered, improved and causal."""

import functools

import torch
from torch import Tensor

from ....ops.compress import clusters as pack
from ....ops.compress import prototypes
from ....ops.linear.random_features import projection
from ..attention_registry import AttentionRegistry, Bool, Int, Optional
from ..events import EventDispatcher
from ..masking import BaseMask, Masks, keys_of
from .attention_layer import SequenceAttention
from .full_attention import SOFTMAX_PARAMETERS, Softmax


class Clusters(Softmax, SequenceAttention):
    """Base class of clustered attentions.

    Each sequence and head divides its queries into clusters by k-means of their hashes. The planes depend only on their
    sizes, and the first centroids are hashes of the sequence, so only dropout is random.

    Args:
        clusters: number of clusters.
        iterations: number of iterations of k-means.
        bits: bits of a hash, one per random plane, from 1 to 63.
        hash_bias: planes with a bias, otherwise through zero.
        topk: keys per cluster, of the improved attentions.
        softmax_temp: factor of the products; None means 1 / sqrt(E).
        attention_dropout: probability of dropout of the weights.
        event_dispatcher: a dispatcher, or its name.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(
        self,
        clusters: int,
        iterations: int = 10,
        bits: int = 32,
        hash_bias: bool = True,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        prototypes.check(clusters, bits, iterations)
        self.clusters, self.iterations, self.bits, self.hash_bias = clusters, iterations, bits, hash_bias

    def divide(self, q: Tensor, query_lengths: BaseMask) -> Tensor:
        """Return the clusters (N,H,L) of queries (N,H,L,E); masked queries get the number ``clusters``."""
        planes = _planes(self.bits, q.shape[-1]).to(q.device)
        if not self.hash_bias:
            planes = torch.cat([planes[:, :-1], torch.zeros_like(planes[:, -1:])], 1)
        return pack.assign(q, planes, self.clusters, self.iterations, mask=keys_of(query_lengths))

    def by_means(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks, topk: int = 0) -> Tensor:
        if not masks.attention.all_ones:
            raise RuntimeError(f"{type(self).__name__} sees all keys; attn_mask must be all ones, FullMask(L, S)")
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        groups, p = self.divide(q, masks.queries), self.dropout.p if self.training else 0.0
        arguments = {"topk": topk, "mask": keys_of(masks.keys), "dropout": p}
        return prototypes.attend(self.scaled(q), k, v, groups, self.clusters, **arguments).transpose(1, 2).contiguous()


@functools.cache
def _planes(bits: int, size: int) -> Tensor:
    """Return planes (bits,size+1) in float32."""
    return projection(bits, size + 1, rows="iid").float()


class ClusteredAttention(Clusters):
    """Every query gets the output of the mean of its cluster; arguments as in ``Clusters``.

    References:
        Vyas et al. 2020 (2007.04825), section 3.2.
    """

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D); masked queries get zero.

        Raises:
            RuntimeError: ``attn_mask`` hides a key.
        """
        return self.by_means(queries, keys, values, masks)


class Improved(Clusters):
    """Base class of clustered attentions with ``topk`` keys per cluster; arguments as in ``Clusters``."""

    def __init__(
        self,
        clusters: int,
        iterations: int = 10,
        bits: int = 32,
        hash_bias: bool = True,
        topk: int = 32,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(clusters, iterations, bits, hash_bias, softmax_temp, attention_dropout, event_dispatcher)
        if topk < 1:
            raise ValueError(f"topk={topk} must be at least 1: a cluster has at least one key")
        self.topk = topk


class ImprovedClusteredAttention(Improved):
    """Clustered attention in which each query recomputes its weights of the cluster's ``topk`` best keys.

    Arguments are as in ``Clusters``.

    References:
        Vyas et al. 2020 (2007.04825), section 3.3.
    """

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D); masked queries get zero.

        Raises:
            RuntimeError: ``attn_mask`` hides a key.
        """
        return self.by_means(queries, keys, values, masks, self.topk)


class ImprovedClusteredCausalAttention(Improved):
    """Each query sees only those of its cluster's ``topk`` keys that do not come after it.

    It leaks: future tokens affect the choice of clusters and keys. No weight falls on a future key, but the choice of
    past keys depends on the future. A query whose keys are all in the future gets zero. Use another attention for a
    model that generates. Arguments are as in ``Clusters``.
    """

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D); masked queries get zero.

        Raises:
            RuntimeError: ``attn_mask`` is not triangular.
        """
        if not masks.attention.lower_triangular:
            raise RuntimeError(
                f"{type(self).__name__} is causal; attn_mask must be triangular, TriangularCausalMask(L)"
            )
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        if not (q.numel() and k.numel()):
            return values.new_zeros(*queries.shape[:3], values.shape[-1])
        groups, mask = self.divide(q, masks.queries), keys_of(masks.keys)
        _, top = prototypes.weigh(pack.mean(q, groups, self.clusters), k, self.topk, mask)
        p = self.dropout.p if self.training else 0.0
        out = prototypes.among(self.scaled(q), k, v, groups, top, mask=mask, causal=True, dropout=p)
        return out.transpose(1, 2).contiguous()


_CLUSTERED = [
    *SOFTMAX_PARAMETERS,
    ("clusters", Int),
    ("iterations", Optional(Int, 10)),
    ("bits", Optional(Int, 63)),
    ("hash_bias", Optional(Bool, True)),
]
_IMPROVED = [*_CLUSTERED, ("topk", Optional(Int, 32))]
AttentionRegistry.register("clustered", ClusteredAttention, _CLUSTERED)
AttentionRegistry.register("improved-clustered", ImprovedClusteredAttention, _IMPROVED)
AttentionRegistry.register("causal-improved-clustered", ImprovedClusteredCausalAttention, _IMPROVED)
