"""Mixture of block attention: each query reads its own block and the earlier blocks with the best mean keys."""

from torch import Tensor

from ..ops.softmax import scores
from ..ops.sparse import chosen
from .blockwise import Blockwise, Reading


class MoBA(Blockwise):
    r"""Softmax over the tokens of the own block, and of the earlier blocks whose mean keys fit the query best.

    Block $B_u$ holds the tokens $ub, \ldots, ub + b - 1$. Each head of each query takes its own block up to itself, and
    the k - 1 whole blocks before it with the largest products. Among equal products the first blocks win. The choice
    has no gradient: keys learn from the queries that read them.

    ``block``: b, tokens per block. ``top``: k, blocks per query, its own included. ``kv_heads``: heads of keys and
    values, each shared by heads / kv_heads query heads (0: as many as heads). ``rotary``: base of rotary positions (0:
    none). ``rotary_layout``: halves or interleaved.

    The state is all keys and values, and one sum of keys per block. Blocks count the tokens of a sequence, so that the
    parts of a packed row choose among their own blocks.

    Source: Lu et al. 2025, section 2.2, eqs. 2 to 6.

    Raises:
        ValueError: For block < 1, top < 1, ``kv_heads`` that do not divide heads, or rotary positions that do not fit
            the head dimension.
    """

    name, paper, cost = "moba", "2502.13189", "N^2 D / b + N k b D"
    family = "content"
    equations = (
        r"o_i = \sum_{j \in S_i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \in S_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"S_i = \lbrace j \le i : \lfloor j / b \rfloor \in T_i \rbrace",
        r"T_i = \lbrace u_i \rbrace \cup "
        r"\lbrace u < u_i : q_i \cdot \bar k_u \text{ is among the } k - 1 \text{ largest} \rbrace",
        r"u_i = \lfloor i / b \rfloor, \quad \bar k_u = \frac{1}{b} \sum_{j \in B_u} k_j",
    )
    citation = (
        "Lu, Enzhe and Jiang, Zhejun and Liu, Jingyuan and Du, Yulun and others",
        "MoBA: Mixture of Block Attention for Long-Context LLMs",
        2025,
    )
    examples = ("moba(block=4, top=3)", "moba(block=5, top=2, kv_heads=1, rotary=100.0)")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        block: int = 256,
        top: int = 4,
        kv_heads: int = 0,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
    ):
        super().__init__(dim, heads, causal=causal)
        self.choose_by(block, top)
        self.create(kv_heads, rotary, rotary_layout)

    def _summed(self, k: Tensor, v: Tensor) -> Tensor:
        return k.detach()

    def _fits(self, q: Tensor, sums: Tensor, at: Tensor) -> Tensor:
        # Whole blocks have equally many keys, so sums are in the order of means.
        return scores.products(q.unflatten(1, (self.groups, -1)), sums[:, :, None]).flatten(1, 2)

    def _read(self, r: Reading) -> Tensor:
        return chosen.attend(r.q, r.keys, r.values, r.at, r.blocks, self.block)
