"""Softmax attention within the buckets of random hashes (LSH attention)."""

from typing import Unpack

import torch
from torch import Tensor, nn

from ..ops.buckets import Rule
from ..ops.tensors import merge, split, unit, upcast_half
from ..states import buckets as states
from ..states.buckets import Reader, Rings
from .base import Attention, SequenceArguments

# Largest number of rounds: each pair of rounds is compared, so time grows with the square of their number.
ROUNDS = 256


class Reformer(Attention[Rings]):
    r"""Each token sees a few similar tokens: those in its bucket in at least one of several random hashes.

    Keys are the normalized queries, $k_j = \hat q_j$, so one projection serves both. In each of R ``rounds`` the hash
    $h_r$ assigns a token to one of ``buckets`` by fixed random rotations. The tokens of a bucket are cut into chunks of
    m, the ``chunk``. A token sees the tokens of its chunk and of the chunk before. A pair that is visible in several
    rounds counts once; this is the paper's log N_ij, and it makes the softmax one over the union of all rounds. A token
    sees itself only if it sees no other token, since its own logit is the largest.

    A causal model counts chunks within each bucket, so that later tokens change nothing. The state is a ring of 2m keys
    and values per bucket and round. ``published=True`` takes the paper's chunks instead, which are cut from all tokens
    sorted by bucket, and the first chunk sees the last. That leaks, since later tokens decide where a chunk begins.
    With chunk=8, rounds=1, buckets=16 and 64 random tokens of which the later ones change, 0.1 % of the outputs before
    these change with 1 head, 3 % with 4 and 9 % with 8. With buckets=4 it is 14, 28 and 40 %. With ``cross=True``,
    where the tokens of a chunk see those of other buckets, it is 52, 86 and 91 %. This form has no state, since no step
    knows its chunk. A bidirectional model always uses these chunks.

    ``chunk``: m, tokens per chunk. ``buckets``: buckets per round, an even number. ``rounds``: R, at most 256.
    ``factor``: for many buckets, use two smaller hashes, of ``factor`` and of buckets / factor, $h = h_1 + f h_2$.
    ``scale``: factor of $q_i \cdot \hat q_j$; 1 is the authors' code (trax), and other libraries also divide by $\sqrt
    D$. ``published``: use the paper's chunks, also if causal. ``cross``: let the tokens of a chunk see those of other
    buckets; only for the paper's chunks. ``seed``: seed of the rotations, together with the layer.

    The rotations are saved with the weights.

    Source: Kitaev et al. 2020, section 2 and appendix A; its causal chunks are ``published=True``.

    Raises:
        ValueError: For an odd number of buckets, sizes below 1, more than 256 rounds, a ``factor`` that does not
            divide, ``published`` without ``causal``, ``cross`` without the paper's chunks, or a state with
            ``published``.
    """

    name, paper, cost = "reformer", "2001.04451", "N log N D"
    family = "content"
    equations = (
        r"o_i = \sum_{j \in S_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in S_i} q_i \cdot \hat q_j, \quad \hat q_j = \frac{q_j}{\lVert q_j \rVert}",
        r"S_i = \lbrace j < i : h_r(q_j) = h_r(q_i), \; c_r(j) \ge c_r(i) - 1 \text{ for some } r \le R \rbrace, \quad "
        r"S_i = \lbrace i \rbrace \text{ where that is empty}",
        r"h_r(x) = \mathrm{argmax}_b [x R_r; -x R_r]_b, \quad "
        r"c_r(i) = \lfloor \frac{1}{m} \sum_{j < i} [h_r(q_j) = h_r(q_i)] \rfloor",
    )
    citation = (
        "Kitaev, Nikita and Kaiser, {\\L}ukasz and Levskaya, Anselm",
        "Reformer: The Efficient Transformer",
        2020,
    )
    examples = (
        "reformer(chunk=3, buckets=4, rounds=3)",
        "reformer(chunk=2, buckets=8, rounds=2, factor=2, scale=0.5)",
    )
    states = (Rings,)
    rotations: torch.Tensor  # (H,D,R,F)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        chunk: int = 32,
        buckets: int = 32,
        rounds: int = 4,
        factor: int = 1,
        scale: float = 1.0,
        published: bool = False,
        cross: bool = False,
        seed: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        for option, value in (("chunk", chunk), ("rounds", rounds), ("factor", factor)):
            if value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
        if rounds > ROUNDS:
            raise ValueError(f"rounds={rounds} must be at most {ROUNDS}, since each pair of rounds is compared")
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets={buckets} must be a positive even number: directions and their opposites")
        if factor > 1 and (factor % 2 or buckets % (2 * factor)):
            raise ValueError(f"factor={factor} must be even, and buckets={buckets} a multiple of {2 * factor}")
        if published and not causal:
            raise ValueError("published=True needs causal=True; a bidirectional form always has it")
        if cross and causal and not published:
            raise ValueError("cross=True with causal=True needs published=True, where chunks contain several buckets")
        self.layer, self.chunk, self.buckets, self.rounds, self.factor = layer, chunk, buckets, rounds, factor
        self.scale, self.published, self.cross, self.seed = scale, published, cross, seed
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        if published:
            self.states = ()  # pyright: ignore[reportAttributeAccessIssue]  # none here
        parts = (buckets,) if factor == 1 else (factor, buckets // factor)
        self.parts = parts
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        shape = heads, dim // heads, rounds, sum(parts) // 2
        self.register_buffer("rotations", torch.randn(shape, generator=generator).to(self.out.weight))

    @property
    def positional(self) -> bool:
        return True

    def hash(self, q: torch.Tensor) -> torch.Tensor:
        """The bucket of each token in each round: q (B,H,N,D) of any length -> (B,H,R,N) int64."""
        with torch.autocast(q.device.type, enabled=False):
            x = upcast_half(q.detach())
            turned = torch.einsum("bhnd,hdrf->bhrnf", x, upcast_half(self.rotations).to(x.dtype))
        found, place = torch.zeros_like(turned[..., 0], dtype=torch.long), 1
        for part, y in zip(self.parts, turned.split([part // 2 for part in self.parts], -1), strict=True):
            found = found + place * torch.cat([y, -y], -1).argmax(-1)
            place *= part
        return found

    def reader(self) -> Reader:
        """Options of the op: hash, buckets, rounds, visibility rule and scale."""
        whole = self.published or not self.causal
        rule = Rule(self.causal, self.chunk, whole=whole, cross=self.cross, wrap=whole, alone=True)
        return Reader(self.hash, self.buckets, self.rounds, rule, self.scale)

    def start(self, batch: int, capacity: int) -> Rings:
        if self.published:
            raise ValueError(
                "published=True has no state, since it cuts chunks from all tokens sorted by bucket; build with "
                "published=False"
            )
        return states.empty(self.reader(), batch, self.heads, self.dim // self.heads, self.weight_like)

    def attend(self, x: Tensor, state: Rings | None, **given: Unpack[SequenceArguments]) -> tuple[Tensor, Rings | None]:
        q, v = (split(part(x), self.heads) for part in (self.query, self.value))
        o, state = states.attend(q, unit(q), v, state, self.reader(), **given)
        return self.out(merge(o)), state
