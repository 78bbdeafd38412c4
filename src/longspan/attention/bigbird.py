"""BigBird: block-sparse softmax attention with a window, global blocks and random blocks."""

from .. import patterns
from ..states import lookback
from .patterned import Patterned


class BigBird(Patterned):
    r"""Each block of queries sees the blocks around it, the first blocks, and a few random blocks.

    ``block``: b, the tokens per block. ``window``: w, the number of blocks of the window, with the query's own block u
    in the middle. ``globals``: g, the number of first blocks that see all blocks and are seen by all. ``random``: the
    number of different random blocks $R_u$, drawn from 0 to u for each u, head and layer. ``seed``: the seed of the
    random blocks.

    The keys are a set: a block that is chosen twice counts once. A causal layer sees the keys $j \le i$ of the set.

    The keys of a query do not depend on the length of the sequence. For this reason the last block is not global, other
    than in the paper, and random blocks come from the past in both forms. They may fall into the window, where they
    have no effect. The state is a ring of keys and values without random and global blocks, else all keys and values.

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
            raise ValueError(f"window={window} must be odd and positive: the query's own block is in the middle")
        if block < 1:
            raise ValueError(f"block={block} must be at least 1: it is the number of tokens per block")
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
        self.see(sees & patterns.causal() if causal else sees)
