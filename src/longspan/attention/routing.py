"""Softmax attention among the tokens of a cluster; the clusters are learned."""

from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.buckets import Rule, lists
from ..ops.rows import ragged
from ..ops.tensors import merge, split, upcast_half
from ..states import buckets as states
from ..states.buckets import Reader, Rings
from .base import Attention


class Statistics(NamedTuple):
    """The argument of ``Routing.update``; statistics of several calls can be added."""

    sums: Tensor  # (H,K,D) of the queries and keys of each cluster
    counts: Tensor  # (H,K) how many


class Routing(Attention[Rings]):
    r"""Each token sees the last tokens of its cluster, and the centers of the clusters follow the tokens.

    Queries and keys have mean 0 and norm $\sqrt D$ (a layer norm without weights). A token belongs to the cluster whose
    center $\mu_c$ is nearest by angle. It sees the last w members of the cluster up to itself. Causal queries are also
    the keys, and a token then sees itself only if it sees no other token, since its own logit $\sqrt D$ is the largest.
    The state is a ring of w keys and values per cluster.

    With ``published=True``, as in the paper, each center takes the w tokens nearest to it, including later ones. A
    token reads the mean over the lists that contain it, or 0 if there is none. In a causal model that leaks: with
    clusters=8, window=8 and 64 random tokens of which the later ones change, 36 % of the outputs before these change
    with 1 head, 79 % with 4 and 92 % with 8. This form has no state, since no step knows the lists. A bidirectional
    model always uses it, with a separate projection for its keys.

    Only ``update(record)`` moves the centers. Training calls it after each step with the statistics that the calls of
    the step have counted in ``record["statistics"]``. $\mu_c$ is a moving mean over members, in which the members of a
    step have the weight $1 - \lambda$. Processes of distributed training add their statistics; a cluster without
    members does not move. ``record["penalty"]``, which is added to the loss times about 1e-4, pulls tokens towards
    their centers.

    ``clusters``: K, the number of clusters. ``window``: w, members that a token sees. ``published``: use the paper's
    lists, also if causal. ``decay``: $\lambda$, weight of the old center in an update. ``seed``: seed of the first
    centers, together with the layer.

    Source: Roy et al. 2020, section 4.1 and algorithm 1. Centers are updated as there, and normalized by counts of
    members.

    Raises:
        ValueError: For sizes below 1, a ``decay`` outside 0 <= decay < 1, ``published`` without ``causal``, or a state
            with ``published``.
    """

    name, paper, cost = "routing", "2003.05997", "N (K + w) D"
    family = "content"
    equations = (
        r"o_i = \sum_{j \in S_i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \in S_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"S_i = \lbrace j < i : c(k_j) = c(q_i), \; r_i - r_j < w \rbrace, \quad "
        r"r_i = \sum_{j \le i} [c(k_j) = c(q_i)], \quad S_i = \lbrace i \rbrace \text{ where that is empty}",
        r"c(x) = \mathrm{argmax}_c \frac{x \cdot \mu_c}{\lVert \mu_c \rVert}, \quad \mu_c = \frac{m_c}{n_c}, \quad "
        r"m_c \leftarrow \lambda m_c + \frac{1 - \lambda}{2} (\sum_{c(q) = c} q + \sum_{c(k) = c} k), \quad "
        r"n_c \leftarrow \lambda n_c + \frac{1 - \lambda}{2} (\sum_{c(q) = c} 1 + \sum_{c(k) = c} 1)",
    )
    citation = (
        "Roy, Aurko and Saffar, Mohammad and Vaswani, Ashish and Grangier, David",
        "Efficient Content-Based Sparse Attention with Routing Transformers",
        2020,
    )
    examples = ("routing(clusters=3, window=5)", "routing(clusters=2, window=13)")
    states = (Rings,)
    penalty = "the mean squared distance of queries and keys to their centers, by channel"
    statistics = "the members of each cluster, and their number"

    sums: Tensor  # (H,K,D)
    counts: Tensor  # (H,K)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        clusters: int = 64,
        window: int = 64,
        published: bool = False,
        decay: float = 0.999,
        seed: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        for option, value in (("clusters", clusters), ("window", window)):
            if value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must satisfy 0 <= decay < 1")
        if published and not causal:
            raise ValueError("published=True needs causal=True; a bidirectional routing always has the published lists")
        self.layer, self.clusters, self.window, self.published = layer, clusters, window, published
        self.decay, self.seed = decay, seed
        if published:
            self.states = ()  # pyright: ignore[reportAttributeAccessIssue]  # none here
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        if not causal:
            self.key = nn.Linear(dim, dim)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        first = self._normal(torch.randn(heads, clusters, dim // heads, generator=generator))
        self.register_buffer("sums", first.to(self.out.weight))
        self.register_buffer("counts", torch.ones(heads, clusters).to(self.out.weight))

    def _normal(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    def centers(self) -> Tensor:
        """The centers of the clusters (H,K,D), float32 or wider."""
        return upcast_half(self.sums) / upcast_half(self.counts)[..., None]

    def scores(self, x: Tensor) -> Tensor:
        """The cosine similarity to each center, times the norm of the token: x (B,H,N,D) -> (B,H,N,K)."""
        with torch.autocast(x.device.type, enabled=False):
            x, towards = upcast_half(x.detach()), F.normalize(self.centers(), dim=-1)
            return x @ towards.to(x.dtype).mT

    def nearest(self, x: Tensor) -> Tensor:
        """The cluster of each token: x (B,H,N,D) -> (B,H,N) int64."""
        return self.scores(x).argmax(-1)

    def update(self, record: dict[str, Any]) -> None:
        """Move the centers by ``record["statistics"]``; call it after the optimizer's step.

        Args:
            record: A record whose ``statistics`` are the sum over all calls of the step. Every process of a distributed
                training must call; statistics are added across processes.

        Raises:
            ValueError: For a record without statistics.
        """
        if record.get("statistics") is None:
            raise ValueError("the record has no statistics; call the attention with record={'statistics': None}")
        found = Statistics(*(t.clone() for t in record["statistics"]))
        if distributed.is_available() and distributed.is_initialized():
            for t in found:
                distributed.all_reduce(t)
        # With every step, a cluster without members would come nearer to 0 / 0.
        some = found.counts > 0
        for old, new in ((self.counts, found.counts), (self.sums, found.sums)):
            moved = self.decay * upcast_half(old) + (1 - self.decay) * new
            old.copy_(torch.where(some.view(*some.shape, *(1,) * (old.dim() - 2)), moved, old))

    def _count(self, record: dict[str, Any], tokens: tuple[Tensor, ...], mask: Tensor | None) -> None:
        """Fill in ``penalty`` and ``statistics``: queries, and keys if they differ, (B,H,N,D); mask (B,N)."""
        centers, each = self.centers(), []
        loss, sums, counts = 0.0, torch.zeros_like(centers), torch.zeros_like(centers[..., 0])
        for x in map(upcast_half, tokens):
            real = torch.ones_like(x[:, 0, :, 0]) if mask is None else mask.to(x.dtype)
            x, real = x.transpose(0, 1).flatten(1, 2), real.flatten().expand(self.heads, -1)  # (H,BN,D), (H,BN)
            near = self.nearest(x[None])[0]
            at = near[..., None].expand_as(x)
            sums.scatter_add_(1, at, x.detach() * real[..., None])
            counts.scatter_add_(1, near, real)
            apart = (x - centers.to(x.dtype).gather(1, at)).square().mean(-1)
            loss = loss + (apart * real).sum() / (self.heads * real[0].sum()).clamp(min=1)
            each.append(x)
        if "penalty" in record:
            record["penalty"] = loss / len(each)
        if "statistics" in record:
            record["statistics"] = Statistics(sums / len(each), counts / len(each))

    def reader(self) -> Reader:
        """Options of the op: hash, buckets, rounds, visibility rule and scale."""
        rule = Rule(window=self.window, alone=True)
        scale = (self.dim // self.heads) ** -0.5
        return Reader(lambda q: self.nearest(q)[:, :, None], self.clusters, 1, rule, scale)

    def start(self, batch: int, capacity: int) -> Rings:
        if self.published:
            raise ValueError(
                "published=True has no state, since each center selects among all tokens; build routing with "
                "published=False"
            )
        return states.empty(self.reader(), batch, self.heads, self.dim // self.heads, self.weight_like)

    def attend(
        self,
        x: Tensor,
        state: Rings | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Rings | None]:
        q, v = self._normal(split(self.query(x), self.heads)), split(self.value(x), self.heads)
        k = q if self.causal else self._normal(split(self.key(x), self.heads))
        if record is not None and not record.keys().isdisjoint(("penalty", "statistics")):
            self._count(record, (q,) if self.causal else (q, k), mask)
        matrix = record if record and "matrix" in record else None
        if self.causal and not self.published:
            o, state = states.attend(
                q, k, v, state, self.reader(), mask=mask, segments=segments, record=matrix, donate=donate
            )
            return self.out(merge(o)), state
        if matrix is not None:
            states.record_matrix(q, k, v, self._weights, mask, segments, matrix)
        apart = x.numel() and not (mask is None and segments is None)
        o = ragged(q, k, v, self._listed, mask, segments, exact=True) if apart else self._listed(q, k, v)
        return self.out(merge(o)), None

    def _lists(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The w queries and the w keys that each center takes: indices (B,H,K,w)."""
        queries = lists.members(self.scores(q).mT, self.window)
        return queries, queries if self.causal else lists.members(self.scores(k).mT, self.window)

    def _weights(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return lists.matrix(q, k, *self._lists(q, k), causal=self.causal)

    def _listed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lists.attend(q, k, v, *self._lists(q, k), causal=self.causal)
