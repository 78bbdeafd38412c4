"""Softmax attention among tokens that random rotations put into one bucket."""

import torch
from torch import nn

from ..ops.buckets import Rule
from ..ops.tensors import merge, split, unit, upcast_half
from ..states import buckets as states
from ..states.buckets import Reader, Rings
from .base import Attention

# Pairs of rounds ask each other which tokens they share, so that time grows with the square of their number.
ROUNDS = 256


class Reformer(Attention):
    r"""Each token sees a few tokens that look like it: those that share its bucket in one of several random hashes.

    Queries are keys, up to their length: $k_j = \hat q_j$, so that one projection serves both. In each of R ``rounds``
    the hash $h_r$ puts a token into one of ``buckets`` by random rotations that never change. A bucket's tokens are cut
    into chunks of m, the ``chunk``, and a token sees those of its own chunk and of the chunk before. A pair that
    several rounds show counts once: the paper's log N_ij, and thus the softmax over the union of all rounds. A token
    sees itself only where it sees no other, since its own logit is the largest of all.

    A causal model counts chunks inside each bucket, so that what comes later moves nothing; the state is a ring of 2m
    keys and values for each bucket and round. ``published=True`` takes the paper's chunks in their place, which are
    cut from all tokens sorted by bucket, with the first chunk looking back at the last. That leaks, since later tokens
    decide where a chunk begins. With chunk=8, rounds=1, buckets=16 and 64 random tokens of which the later ones change,
    0.1 % of the outputs before these change with 1 head, 3 % with 4 and 9 % with 8. With buckets=4 it is 14, 28 and
    40 %. With ``cross=True``, where a chunk's tokens see other buckets', it is 52, 86 and 91 %. It has no state, as no
    step can know its chunk. A bidirectional model, which has no future to hide, always takes these chunks.

    ``factor``: for many buckets two smaller hashes, of ``factor`` and of buckets / factor, $h = h_1 + f h_2$.
    ``scale``: what $q_i \cdot \hat q_j$ is multiplied by. 1 is the authors' code (trax); other libraries divide by
    $\sqrt D$ once more. ``seed`` and the layer draw the rotations, which are part of the weights' file.

    Source: Kitaev et al. 2020, section 2 and appendix A; its causal chunks are ``published=True``. Raises ValueError
    for odd numbers of buckets, sizes below 1, more than 256 rounds, a ``factor`` that does not divide, options of the
    published chunks without them, and for a state of these.
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
            raise ValueError(
                f"rounds={rounds} are compared with each other, pair by pair; there may be {ROUNDS} at most"
            )
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets={buckets} are directions and their opposites, so an even number is needed")
        if factor > 1 and (factor % 2 or buckets % (2 * factor)):
            raise ValueError(f"factor={factor} must be even, and buckets={buckets} an even number of times as many")
        if published and not causal:
            raise ValueError("published=True is for causal=True; a bidirectional reformer has the published chunks")
        if cross and causal and not published:
            raise ValueError("cross=True lets chunks hold several buckets, as only published=True does here")
        self.layer, self.chunk, self.buckets, self.rounds, self.factor = layer, chunk, buckets, rounds, factor
        self.scale, self.published, self.cross, self.seed = scale, published, cross, seed
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        if published:
            self.states = ()  # type: ignore[misc]
        parts = (buckets,) if factor == 1 else (factor, buckets // factor)
        self.parts = parts
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        shape = heads, dim // heads, rounds, sum(parts) // 2
        self.register_buffer("rotations", torch.randn(shape, generator=generator).to(self.out.weight))

    @property
    def positional(self) -> bool:
        return True

    def hash(self, q: torch.Tensor) -> torch.Tensor:
        """The bucket of each token in each round: q (B,H,N,D) -> (B,H,R,N) int64. Longer or shorter q have the same."""
        with torch.autocast(q.device.type, enabled=False):
            x = upcast_half(q.detach())
            turned = torch.einsum("bhnd,hdrf->bhrnf", x, upcast_half(self.rotations).to(x.dtype))
        found, place = torch.zeros_like(turned[..., 0], dtype=torch.long), 1
        for part, y in zip(self.parts, turned.split([part // 2 for part in self.parts], -1), strict=True):
            found = found + place * torch.cat([y, -y], -1).argmax(-1)
            place *= part
        return found

    def reader(self) -> Reader:
        """Who sees whom, for the op."""
        whole = self.published or not self.causal
        rule = Rule(self.causal, self.chunk, whole=whole, cross=self.cross, wrap=whole, alone=True)
        return Reader(self.hash, self.buckets, self.rounds, rule, self.scale)

    def start(self, batch, capacity):
        if self.published:
            raise ValueError(
                "published=True cuts chunks from all tokens sorted by bucket, which no step can know: there is no "
                "state; build reformer with published=False"
            )
        return states.empty(self.reader(), batch, self.heads, self.dim // self.heads, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        q, v = (split(part(x), self.heads) for part in (self.query, self.value))
        given = {"mask": mask, "segments": segments, "record": record, "donate": donate}
        o, state = states.attend(q, unit(q), v, state, self.reader(), **given)
        return self.out(merge(o)), state
