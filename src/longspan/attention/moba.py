"""Mixture of block attention: each query reads its own block and the earlier blocks with the best mean keys."""

import torch
from torch import Tensor

from ..modules.rotary import check_rotary, rotate
from ..ops.softmax import scores
from ..ops.sparse import chosen, picked
from ..ops.tensors import merge, positions
from ..states import block_sums, kv_cache
from ..states.block_sums import BlockCache
from .cached import Cached

SCORES = 2**22  # scores of blocks in memory at a time


class MoBA(Cached[BlockCache]):
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
    states = (BlockCache,)

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
        for option, value in (("block", block), ("top", top)):
            if value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
        self.project(kv_heads)
        check_rotary(rotary, rotary_layout, dim // heads)
        self.block, self.top = block, top
        self.rotary, self.rotary_layout = rotary, rotary_layout

    def start(self, batch: int, capacity: int) -> BlockCache:
        return block_sums.empty(batch, self.groups, capacity, self.dim // self.heads, self.weight_like)

    def _run(
        self, x: Tensor, state: BlockCache | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, BlockCache | None]:
        q, k, v = self.heads_of(x, real)
        at, _ = positions(x, state and state.past.length)
        if self.rotary:
            turn = at, self.rotary, self.rotary_layout
            q, k = rotate(q, *turn), rotate(k, *turn)
        keys, values, past, sums = k, v, None, None
        if state is not None:
            view, past = kv_cache.extend(state.past, k, v, mask=real, donate=donate)
            keys, values, sums = view.keys, view.values, state.sums.keys
        with torch.no_grad():
            sums = block_sums.add(sums, k, at, self.block, -(-keys.shape[2] // self.block))
            blocks = self._choose(q, sums, at)
        o = chosen.attend(q.to(keys.dtype), keys, values, at, blocks, self.block)
        return self.out(merge(o)), past and block_sums.after(past, sums, self.block)

    def _choose(self, q: Tensor, sums: Tensor, at: Tensor) -> Tensor:
        """The blocks of each query (B,H,N,S), -1 for none; q (B,H,N,D), sums (B,G,blocks,D), at (B,N)."""
        own = (at // self.block)[:, None, :, None].expand(-1, q.shape[1], -1, -1)
        number, found = torch.arange(sums.shape[2], device=q.device), []
        if self.top == 1 or len(number) == 1:
            return own
        step = max(1, SCORES // (q.shape[0] * q.shape[1] * len(number)))
        for some, home in zip(q.split(step, 2), own.split(step, 2), strict=True):
            # Whole blocks have equally many keys, so sums are in the order of means.
            fit = scores.products(some.unflatten(1, (self.groups, -1)), sums[:, :, None]).flatten(1, 2)
            found.append(picked.largest(fit.masked_fill(number >= home, -torch.inf), self.top - 1))
        return torch.cat([own, torch.cat(found, 2)], -1)
