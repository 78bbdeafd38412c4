"""Softmax attention in two sparse steps: near keys, and summary keys through which all others are reached."""

from .. import patterns
from .._utils.spec import known
from ..patterns import Pattern
from ..states import lookback
from .patterned import Patterned


class SparseTransformer(Patterned):
    r"""Each query sees near keys or every ``block``-th key, so that two steps reach the whole past.

    $P_i$ is made of the sets $A_1$ and $A_2$ of the keys $j \le i$.

    ``kind``: strided or fixed. ``block``: l, the stride, or the size of the fixed blocks. ``summary``: c, summary keys
    per fixed block. ``integration``: interleaved gives A1 to even layers and A2 to odd ones; merged gives every head
    the union; per_head gives A1 to even heads and A2 to odd ones.

    With kind='fixed' and per_head, each odd head takes another sub-block of c summary keys, beginning with the last one
    and starting over after l // c heads. If a head has only the fixed A2, the tokens before its first key see nothing
    and read 0.

    The bidirectional form, which is not in the paper, sees ``|i - j| < l`` in place of i - j < l, and A2 in both
    directions. The state is a ring of l keys and values in layers that have only A1, otherwise a KV cache. Time is
    $N^{1.5} D$ if l is about $\sqrt N$.

    Source: Child et al. 2019, sections 4.3 (the sets) and 5.1 (their integration). The l keys of strided A1 follow the
    authors' code; the paper's formula has one more.

    Raises:
        ValueError: For an unknown kind or integration, or a ``summary`` with kind='strided'.
    """

    name, paper, cost = "sparse_transformer", "1904.10509", "N^2 D / l"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"\text{strided:} \quad A_1 = \lbrace j : i - j < l \rbrace, \quad "
        r"A_2 = \lbrace j : (i - j) \bmod l = 0 \rbrace",
        r"\text{fixed:} \quad A_1 = \lbrace j : \lfloor j / l \rfloor = \lfloor i / l \rfloor \rbrace, \quad "
        r"A_2 = \lbrace j : j \bmod l \ge l - c \rbrace",
    )
    citation = (
        "Child, Rewon and Gray, Scott and Radford, Alec and Sutskever, Ilya",
        "Generating Long Sequences with Sparse Transformers",
        2019,
    )
    examples = (
        "sparse_transformer(block=7)",
        "sparse_transformer(kind='fixed', block=5, summary=2, integration='merged')",
    )
    states = lookback.STATES

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        kind: str = "strided",
        block: int = 128,
        summary: int = 8,
        integration: str = "per_head",
    ):
        super().__init__(dim, heads, causal=causal)
        known(kind, dict.fromkeys(("strided", "fixed")), "kind of sparse transformer")
        known(integration, dict.fromkeys(("interleaved", "merged", "per_head")), "integration")
        if kind == "strided" and summary != 8:
            raise ValueError("summary belongs to kind='fixed', not 'strided'")
        self.layer, self.kind, self.block, self.summary, self.integration = layer, kind, block, summary, integration
        near, far = steps(kind, block, summary)
        match integration:
            case "interleaved":
                sees = far if layer % 2 else near
            case "merged":
                sees = near | far
            case _:
                own = (steps(kind, block, summary, head // 2)[head % 2] for head in range(heads))
                sees = patterns.by_head(*own)
        self.see(sees & patterns.causal() if causal else sees)


def steps(kind: str, block: int, summary: int, part: int = 0) -> tuple[Pattern, Pattern]:
    """A1 and A2 without direction; ``part`` counts the sub-blocks of summary keys from the end of each block.

    >>> steps("fixed", 8, 3)
    (block(size=8), fixed(block=8, summary=3))
    """
    if kind == "strided":
        far = patterns.strided(block)
        return patterns.band(block - 1, block - 1), far
    far = patterns.fixed(block, summary)
    if part := part % (block // summary):
        far = patterns.fixed(block, (part + 1) * summary) - patterns.fixed(block, part * summary)
    return patterns.block(block), far
