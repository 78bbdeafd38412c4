"""Softmax attention by blocks: a window around each, some that see and are seen by all, and some at random."""

from torch import nn

from .. import patterns
from ..ops.tensors import merge, split
from ..patterns import Pattern
from ..states import lookback
from .base import Attention


class BigBird(Attention):
    r"""Each block of queries sees the blocks around it, the first ones, and a few drawn at random.

    ``block``: tokens b of a block. ``window``: w blocks around the query's own block u. ``globals``: so many first
    blocks g see everything, and all see them. ``random``: so many different blocks $R_u$ are drawn from 0 to u, anew
    for each u, head and layer. ``seed``: of these draws. A block counts once, since
    the keys are a set. A causal one sees the keys $j \le i$ of that set.

    What a query sees never depends on the length. So the last block, global in the paper, is not so here, and random
    blocks are the past's in both directions; they may fall into the window, where they add nothing. Its state is a
    ring of keys and values where there are neither random nor global blocks, else all of them.

    Source: Zaheer et al. 2020, section 2 and appendix D; the paper has the bidirectional form only. Raises ValueError
    for a window that is not odd, and for negative numbers of blocks.
    """

    name, paper, cost = "bigbird", "2007.14062", "N b (w + g + r) D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"P_i = \lbrace j \in \mathcal{A}_i : \lvert c - u \rvert \le \frac{w - 1}{2} \text{ or } c < g \text{ or "
        r"} u < g \text{ or } c \in R_u \rbrace, \quad "
        r"u = \lfloor i / b \rfloor, \quad c = \lfloor j / b \rfloor",
    )
    citation = (
        "Zaheer, Manzil and Guruganesh, Guru and Dubey, Kumar Avinava and Ainslie, Joshua and Alberti, Chris and "
        "Ontanon, Santiago and Pham, Philip and Ravula, Anirudh and Wang, Qifan and Yang, Li and Ahmed, Amr",
        "Big Bird: Transformers for Longer Sequences",
        2020,
    )
    examples = ("bigbird(block=16, window=1, globals=0, random=1)",)
    states = lookback.STATES

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        block: int = 64,
        window: int = 3,
        globals: int = 1,
        random: int = 3,
        seed: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        if window < 1 or window % 2 == 0:
            raise ValueError(f"window={window} blocks have the query's own in their middle, so window must be odd")
        if block < 1:
            raise ValueError(f"block={block} must be a whole number of at least 1: tokens of a block")
        if globals < 0 or random < 0:
            raise ValueError(f"globals={globals} and random={random} are numbers of blocks and must not be negative")
        self.layer, self.block, self.window, self.globals = layer, block, window, globals
        self.random, self.seed = random, seed
        side = window // 2
        sees = patterns.local1d(block, side * block) if causal else patterns.blockwise(block, side)
        if globals:
            sees |= patterns.globals(globals * block)
        if random:
            sees |= patterns.random(random, seed, block)
        self.key_pattern: Pattern = sees & patterns.causal() if causal else sees
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def start(self, batch, capacity):
        return lookback.empty(self.key_pattern, batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        o, state = lookback.attend(
            q,
            k,
            v,
            state,
            self.key_pattern,
            layer=self.layer,
            mask=mask,
            segments=segments,
            record=record,
            donate=donate,
        )
        return self.out(merge(o)), state
