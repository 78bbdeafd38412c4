"""Native sparse attention: a summary of all blocks, the best blocks in full, and a sliding window, mixed by gates."""

import torch
from torch import Tensor, nn

from .. import patterns
from ..ops import sparse
from ..ops.softmax import dense, scores
from ..ops.sparse import chosen
from .blockwise import Blockwise, Reading
from .cached import check_least

MEANS = 64  # means that the kernel reads together


class NSA(Blockwise):
    r"""Each query reads the means of all blocks, the tokens of the best blocks, and the last tokens, by three gates.

    Block $B_u$ holds the tokens $ub, \ldots, ub + b - 1$, and $\bar k_u$ and $\bar v_u$ are its means. The query heads
    that share a head of keys take the same blocks: the first, their own and the one before it, and those with the
    largest weights $\sum_h \bar p_{iu}$, k blocks in all. Among equal weights the first blocks win. The choice has no
    gradient; the means that decide it learn from the first branch.

    ``block``: b, tokens per block. ``top``: k, blocks per query, at least 3. ``window``: w, tokens of the window, the
    token itself included. ``kv_heads``: heads of keys and values, each shared by heads / kv_heads query heads (0: as
    many as heads). ``rotary``: base of rotary positions (0: none). ``rotary_layout``: halves or interleaved.

    The state is all keys and values, and one sum of both per block. In the paper a small network compresses overlapping
    blocks, and each branch has its own keys. Here blocks are disjoint, are averaged, and share the keys, as in
    flash-linear-attention.

    Source: Yuan et al. 2025, sections 3.2 and 3.3, eqs. 5, 7, 9 and 10.

    Raises:
        ValueError: For block < 1, top < 3, window < 1, ``kv_heads`` that do not divide heads, or rotary positions that
            do not fit the head dimension.
    """

    name, paper, cost = "nsa", "2502.11089", "N^2 D / b + N (k b + w) D"
    family = "content"
    equations = (
        r"o_i = g_i^1 \sum_u \bar p_{iu} \bar v_u + g_i^2 \sum_{j \in S_i} p_{ij} v_j + "
        r"g_i^3 \sum_{j \in L_i} p_{ij} v_j, \quad g_i = \sigma(W_g x_i)",
        r"\bar p_{iu} = \mathrm{softmax}_{u : ub + b - 1 \le i} \frac{q_i \cdot \bar k_u}{\sqrt D}, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in S_i \text{ or } L_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"S_i = \lbrace j \le i : \lfloor j / b \rfloor \in T_i \rbrace, \quad "
        r"T_i = \lbrace 0, u_i - 1, u_i \rbrace \cup \lbrace u : \sum_h \bar p_{iu} \text{ among the largest} \rbrace, "
        r"\quad u_i = \lfloor i / b \rfloor, \quad L_i = \lbrace j \le i : i - j < w \rbrace",
    )
    citation = (
        "Yuan, Jingyang and Gao, Huazuo and Dai, Damai and Luo, Junyu and others",
        "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
        2025,
    )
    examples = ("nsa(block=4, top=4, window=5)", "nsa(block=3, top=3, window=6, kv_heads=1, rotary=100.0)")
    summed = 2  # keys and values

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        block: int = 64,
        top: int = 16,
        window: int = 512,
        kv_heads: int = 0,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
    ):
        super().__init__(dim, heads, causal=causal)
        self.choose_by(block, top, least=3)
        check_least(window=window)
        self.create(kv_heads, rotary, rotary_layout)
        self.window, self.near = window, patterns.band(window - 1, right=0)
        self.gate = nn.Linear(dim, 3 * heads, bias=False)

    def _summed(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k, v], -1)

    def _fits(self, q: Tensor, sums: Tensor, at: Tensor) -> Tensor:
        """The weights of the means, summed over the heads that share a head of keys."""
        means = sums[..., : q.shape[-1]] / self.block
        fit = scores.products(q.unflatten(1, (self.groups, -1)), means[:, :, None])
        whole = (torch.arange(means.shape[2], device=q.device) + 1) * self.block - 1 <= at[:, None, None, :, None]
        return scores.weights(fit, whole).sum(2)

    def _always(self, number: Tensor, own: Tensor) -> Tensor:
        return (number == 0) | (number == own) | (number == own - 1)

    def _read(self, r: Reading) -> Tensor:
        # A query sees the means of all whole blocks before it. They are read in blocks of ``MEANS`` means.
        mean_keys, mean_values = (r.sums / self.block).to(r.q.dtype).split(r.k.shape[-1], -1)
        whole, count = (r.at + 1) // self.block - 1, -(-r.sums.shape[2] // MEANS)
        every = torch.arange(count, device=r.x.device).expand(*r.keys.shape[:2], r.x.shape[1], -1)
        branches = (
            chosen.attend(r.q, mean_keys, mean_values, whole, every, MEANS),
            chosen.attend(r.q, r.keys, r.values, r.at, r.blocks, self.block),
            self._near(r),
        )
        gates = self.gate(r.x).sigmoid().unflatten(-1, (self.heads, 3)).transpose(1, 2)[..., None]  # (B,H,N,3,1)
        first, second, third = (g * o for g, o in zip(gates.to(r.q.dtype).unbind(3), branches, strict=True))
        return first + second + third

    def _near(self, r: Reading) -> Tensor:
        """The sliding window."""
        if r.before is None:
            return sparse.attend(r.q, r.k, r.v, self.near)
        # The tokens of the window before the first new one, and the new ones; some may not exist.
        n, m = r.q.shape[2], r.keys.shape[2]
        place = r.before[:, None] + torch.arange(1 - self.window, n, device=r.q.device)
        there, index = (place >= 0) & (place < m), place.clamp(0, m - 1)[:, None, :, None]
        keys, values = (t.gather(2, index.expand(*t.shape[:2], -1, t.shape[-1])) for t in (r.keys, r.values))
        if n == 1:
            return dense.attend(r.q, keys, values, mask=there[:, None, None])
        if r.real is not None:
            there = there & torch.nn.functional.pad(r.real, (self.window - 1, 0), value=True)
        return sparse.attend(r.q, keys, values, self.near, mask=there)
