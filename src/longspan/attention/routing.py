"""Softmax attention among tokens that lie near the same learned centre."""

from typing import NamedTuple

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
    """What ``update`` takes; those of several calls may be added up."""

    sums: Tensor  # (H,K,D) of the queries and keys of each cluster
    counts: Tensor  # (H,K) how many


class Routing(Attention):
    r"""Each token sees the last tokens of its own cluster; the clusters' centres follow the tokens.

    Queries and keys have mean 0 and norm $\sqrt D$ (a layer norm without weights). A token belongs to the nearest of K
    ``clusters``, by the angle to the centre $\mu_c$, and sees the last w of its members up to itself: w is the
    ``window``. Causal queries are keys, and a token then sees itself only where it sees no other, since its own logit
    $\sqrt D$ is the largest there is. The state is a ring of w keys and values for each cluster.

    ``published=True``: as in the paper, each centre takes the w tokens nearest to it, whatever is still to come, and a
    token reads the mean over the lists that it is in, or 0 if it is in none. In a causal model that leaks: with
    clusters=8, window=8 and 64 random tokens of which the later ones change, 36 % of the outputs before these change
    with 1 head, 79 % with 4 and 92 % with 8. There is no state, as no step can know the lists. A bidirectional model
    always does so, with a projection for its keys.

    Centres move by ``update(record)`` alone, which training calls after each step with what the step's calls have
    counted in ``record["statistics"]``: $\mu_c$ is a mean over past members, in which a step's weigh $1 - \lambda$
    (``decay``), as they come. Processes of a distributed training add theirs up; a cluster without members stays.
    ``record["penalty"]``, to be added to the loss times 1e-4 or so, draws tokens to their centres. ``seed`` and the
    layer draw the first ones.

    Source: Roy et al. 2020, section 4.1 and algorithm 1; the centres' update as there, counted by members. Raises
    ValueError for sizes below 1, a ``decay`` outside 0 to 1, ``published`` without ``causal``, and for a state of it.
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
    penalty = "the mean squared distance of queries and keys to their centres, by channel"
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
            raise ValueError(
                f"decay={decay} is the share of a centre that a step leaves; it must lie in 0 <= decay < 1"
            )
        if published and not causal:
            raise ValueError("published=True is for causal=True; a bidirectional routing has the published lists")
        self.layer, self.clusters, self.window, self.published = layer, clusters, window, published
        self.decay, self.seed = decay, seed
        if published:
            self.states = ()  # type: ignore[misc]
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        if not causal:
            self.key = nn.Linear(dim, dim)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        first = self._normal(torch.randn(heads, clusters, dim // heads, generator=generator))
        self.register_buffer("sums", first.to(self.out.weight))
        self.register_buffer("counts", torch.ones(heads, clusters).to(self.out.weight))

    def _normal(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    def centres(self) -> Tensor:
        """The clusters' centres (H,K,D), float32 at least."""
        return upcast_half(self.sums) / upcast_half(self.counts)[..., None]

    def scores(self, x: Tensor) -> Tensor:
        """The cosine of the angle to each centre, up to the length of x (B,H,N,D) -> (B,H,N,K)."""
        with torch.autocast(x.device.type, enabled=False):
            x, towards = upcast_half(x.detach()), F.normalize(self.centres(), dim=-1)
            return x @ towards.to(x.dtype).mT

    def nearest(self, x: Tensor) -> Tensor:
        """The cluster of each token: x (B,H,N,D) -> (B,H,N) int64."""
        return self.scores(x).argmax(-1)

    def update(self, record: dict) -> None:
        """Move the centres by ``record["statistics"]``, on every process of a distributed training alike.

        Call it after the optimizer's step, once for all its calls, whose statistics are added up. Raises ValueError
        where the record has none.
        """
        if record.get("statistics") is None:
            raise ValueError("the record has no statistics; ask a call for them: record={'statistics': None}")
        found = Statistics(*(t.clone() for t in record["statistics"]))
        if distributed.is_available() and distributed.is_initialized():
            for t in found:
                distributed.all_reduce(t)
        # A cluster without members would come nearer to 0 / 0 with every step.
        some = found.counts > 0
        for old, new in ((self.counts, found.counts), (self.sums, found.sums)):
            moved = self.decay * upcast_half(old) + (1 - self.decay) * new
            old.copy_(torch.where(some.view(*some.shape, *(1,) * (old.dim() - 2)), moved, old))

    def _count(self, record, tokens: tuple[Tensor, ...], mask) -> None:
        """Write what the record asks for: tokens (B,H,N,D), queries and, if they are others, keys; mask (B,N)."""
        centres, each = self.centres(), []
        loss, sums, counts = 0.0, torch.zeros_like(centres), torch.zeros_like(centres[..., 0])
        for x in map(upcast_half, tokens):
            real = torch.ones_like(x[:, 0, :, 0]) if mask is None else mask.to(x.dtype)
            x, real = x.transpose(0, 1).flatten(1, 2), real.flatten().expand(self.heads, -1)  # (H,BN,D), (H,BN)
            near = self.nearest(x[None])[0]
            at = near[..., None].expand_as(x)
            sums.scatter_add_(1, at, x.detach() * real[..., None])
            counts.scatter_add_(1, near, real)
            apart = (x - centres.to(x.dtype).gather(1, at)).square().mean(-1)
            loss = loss + (apart * real).sum() / (self.heads * real[0].sum()).clamp(min=1)
            each.append(x)
        if "penalty" in record:
            record["penalty"] = loss / len(each)
        if "statistics" in record:
            record["statistics"] = Statistics(sums / len(each), counts / len(each))

    def reader(self) -> Reader:
        """Who sees whom, for the op."""
        rule = Rule(window=self.window, alone=True)
        scale = (self.dim // self.heads) ** -0.5
        return Reader(lambda q: self.nearest(q)[:, :, None], self.clusters, 1, rule, scale)

    def start(self, batch, capacity):
        if self.published:
            raise ValueError(
                "published=True lets each centre choose among all tokens, which no step can know: there is no state; "
                "build routing with published=False"
            )
        return states.empty(self.reader(), batch, self.heads, self.dim // self.heads, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        q, v = self._normal(split(self.query(x), self.heads)), split(self.value(x), self.heads)
        k = q if self.causal else self._normal(split(self.key(x), self.heads))
        if record is not None and not record.keys().isdisjoint(("penalty", "statistics")):
            self._count(record, (q,) if self.causal else (q, k), mask)
        told = record if record and "matrix" in record else None
        if self.causal and not self.published:
            given = {"mask": mask, "segments": segments, "record": told, "donate": donate}
            o, state = states.attend(q, k, v, state, self.reader(), **given)
            return self.out(merge(o)), state
        if told is not None:
            weights = lambda q, k: lists.matrix(q, k, *self._lists(q, k), causal=self.causal)  # noqa: E731
            states.record_matrix(q, k, v, weights, mask, segments, told)
        apart = x.numel() and not (mask is None and segments is None)
        o = ragged(q, k, v, self._listed, mask, segments, exact=True) if apart else self._listed(q, k, v)
        return self.out(merge(o)), None

    def _lists(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The lists of queries and of keys that each centre takes, (B,H,K,w)."""
        asks = lists.members(self.scores(q).mT, self.window)
        return asks, asks if self.causal else lists.members(self.scores(k).mT, self.window)

    def _listed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lists.attend(q, k, v, *self._lists(q, k), causal=self.causal)
