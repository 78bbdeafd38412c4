"""Softmax attention of clusters of queries: by their means, exact on the keys that these weigh most, and causal."""

import functools

import torch
from torch import Tensor

from ....ops.compress import clusters as pack
from ....ops.compress import prototypes
from ....ops.linear.random_features import projection
from ..attention_registry import AttentionRegistry, Bool, Int, Optional
from ..events import EventDispatcher
from ..masking import BaseMask, keys_of
from .full_attention import SOFTMAX_PARAMETERS, Softmax


class Clusters(Softmax):
    """What clustered attentions have in common.

    Queries are divided in each sequence and head on their own into ``clusters``, by ``iterations`` of k-means among
    hashes of ``bits``, one for each random plane; ``hash_bias``: planes anywhere, else through zero. The planes are
    functions of their sizes, the first centroids hashes of the sequence, so nothing is random but dropout. Raises
    ValueError for sizes that cannot be.
    """

    def __init__(
        self,
        clusters: int,
        iterations: int,
        bits: int,
        hash_bias: bool,
        softmax_temp: float | None,
        attention_dropout: float,
        event_dispatcher: str | EventDispatcher,
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        prototypes.check(clusters, bits, iterations)
        self.clusters, self.iterations, self.bits, self.hash_bias = clusters, iterations, bits, hash_bias

    def divide(self, q: Tensor, query_lengths: BaseMask) -> Tensor:
        """Queries (N,H,L,E) -> their clusters (N,H,L); ``clusters`` for what ``query_lengths`` drops."""
        planes = _planes(self.bits, q.shape[-1]).to(q.device)
        if not self.hash_bias:
            planes = torch.cat([planes[:, :-1], torch.zeros_like(planes[:, -1:])], 1)
        return pack.assign(q, planes, self.clusters, self.iterations, mask=keys_of(query_lengths))

    def by_means(self, queries, keys, values, attn_mask, query_lengths, key_lengths, topk: int = 0) -> Tensor:
        if not attn_mask.all_ones:
            raise RuntimeError(f"{type(self).__name__} sees all keys; attn_mask must be all ones, FullMask(L, S)")
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        groups, p = self.divide(q, query_lengths), self.dropout.p if self.training else 0.0
        arguments = {"topk": topk, "mask": keys_of(key_lengths), "dropout": p}
        return prototypes.attend(self.scaled(q), k, v, groups, self.clusters, **arguments).transpose(1, 2).contiguous()


@functools.cache
def _planes(bits: int, size: int) -> Tensor:
    """(bits,size+1) float32."""
    return projection(bits, size + 1, rows="iid").float()


class ClusteredAttention(Clusters):
    """Every query reads what the mean of its cluster reads.

    Source: Vyas et al. 2020 (2007.04825), section 3.2.
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
        super().__init__(clusters, iterations, bits, hash_bias, softmax_temp, attention_dropout, event_dispatcher)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:
        """queries (N,L,H,E), keys (N,S,H,E), values (N,S,H,D) -> (N,L,H,D), zero for a query behind its length.

        Raises RuntimeError for an ``attn_mask`` that hides anything.
        """
        return self.by_means(queries, keys, values, attn_mask, query_lengths, key_lengths)


class Improved(Clusters):
    """What the two with ``topk`` keys of each cluster have in common. Raises ValueError for ``topk`` below one."""

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
            raise ValueError(f"topk={topk}: a cluster must have at least one key")
        self.topk = topk


class ImprovedClusteredAttention(Improved):
    """The same, but each query divides by itself what its cluster gives to the ``topk`` keys that it weighs most.

    Source: Vyas et al. 2020 (2007.04825), section 3.3.
    """

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:
        """queries (N,L,H,E), keys (N,S,H,E), values (N,S,H,D) -> (N,L,H,D), zero for a query behind its length.

        Raises RuntimeError for an ``attn_mask`` that hides anything.
        """
        return self.by_means(queries, keys, values, attn_mask, query_lengths, key_lengths, self.topk)


class ImprovedClusteredCausalAttention(Improved):
    """Each query sees those of the ``topk`` keys of its cluster that are not behind it, and no others.

    It leaks: the clusters and their keys are chosen with tokens of the future. What a weight falls on is never in the
    future, but which keys of the past are seen depends on it. A query whose keys are all in the future gets zero. For
    a model that generates, take another attention.
    """

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:
        """queries (N,L,H,E), keys (N,S,H,E), values (N,S,H,D) -> (N,L,H,D), zero for a query behind its length.

        Raises RuntimeError unless ``attn_mask`` is triangular.
        """
        if not attn_mask.lower_triangular:
            raise RuntimeError(
                f"{type(self).__name__} is causal; attn_mask must be triangular, TriangularCausalMask(L)"
            )
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        if not (q.numel() and k.numel()):
            return values.new_zeros(*queries.shape[:3], values.shape[-1])
        groups, mask = self.divide(q, query_lengths), keys_of(key_lengths)
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
