"""Native sparse attention: a summary of all blocks, the best blocks in full, and a sliding window, mixed by gates."""

import torch
from torch import Tensor, nn

from .. import patterns
from ..modules.rotary import check_rotary, rotate
from ..ops import sparse
from ..ops.softmax import dense, scores
from ..ops.sparse import chosen, picked
from ..ops.tensors import merge, positions
from ..states import block_sums, kv_cache
from ..states.block_sums import BlockCache
from .cached import Cached

SCORES = 2**22  # weights of means in memory at a time
MEANS = 64  # means that the kernel reads together


class NSA(Cached[BlockCache]):
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
    states = (BlockCache,)

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
        for option, value, least in (("block", block, 1), ("top", top, 3), ("window", window, 1)):
            if value < least:
                raise ValueError(f"{option}={value} must be at least {least}")
        self.project(kv_heads)
        check_rotary(rotary, rotary_layout, dim // heads)
        self.block, self.top, self.window = block, top, window
        self.rotary, self.rotary_layout = rotary, rotary_layout
        self.near = patterns.band(window - 1, right=0)
        self.gate = nn.Linear(dim, 3 * heads, bias=False)

    def start(self, batch: int, capacity: int) -> BlockCache:
        size = self.dim // self.heads
        return block_sums.empty(batch, self.groups, capacity, size, self.weight_like, width=2 * size)

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
        q = q.to(keys.dtype)
        sums = block_sums.add(sums, torch.cat([k, v], -1), at, self.block, -(-keys.shape[2] // self.block))
        mean_keys, mean_values = (sums / self.block).split(k.shape[-1], -1)
        # A query sees the means of all whole blocks before it. They are read in blocks of ``MEANS`` means.
        whole = (at + 1) // self.block - 1
        every = torch.arange(-(-sums.shape[2] // MEANS), device=x.device).expand(*keys.shape[:2], x.shape[1], -1)
        summary = chosen.attend(q, mean_keys.to(q.dtype), mean_values.to(q.dtype), whole, every, MEANS)
        with torch.no_grad():
            blocks = self._choose(q, at, mean_keys)
        best = chosen.attend(q, keys, values, at, blocks, self.block)
        near = self._near(q, k, v, keys, values, state, real)
        gates = self.gate(x).sigmoid().unflatten(-1, (self.heads, 3)).transpose(1, 2)[..., None]  # (B,H,N,3,1)
        first, second, third = gates.to(best.dtype).unbind(3)
        o = first * summary + second * best + third * near
        return self.out(merge(o)), past and block_sums.after(past, sums, self.block)

    def _weights(self, q: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        """The weights of the means (B,H,N,blocks) for queries (B,H,N,D) at the positions (B,N)."""
        fit = scores.products(q.unflatten(1, (self.groups, -1)), keys[:, :, None]).flatten(1, 2)
        whole = (torch.arange(keys.shape[2], device=q.device) + 1) * self.block - 1 <= at[:, None, :, None]
        return scores.weights(fit, whole)

    def _choose(self, q: Tensor, at: Tensor, keys: Tensor) -> Tensor:
        """The blocks that the heads of each head of keys share, (B,G,N,S), -1 for none."""
        number, found = torch.arange(keys.shape[2], device=q.device), []
        step = max(1, SCORES // (q.shape[0] * self.heads * len(number)))
        for some, place in zip(q.split(step, 2), at.split(step, 1), strict=True):
            fit = self._weights(some, place, keys).unflatten(1, (self.groups, -1)).sum(2)
            own = (place // self.block)[:, None, :, None]
            always = (number == 0) | (number == own) | (number == own - 1)
            # Weights of a group add up to less than these; blocks without a weight come last.
            fit = fit.masked_fill(always, torch.inf).masked_fill(number > own, -torch.inf)
            found.append(picked.largest(fit, self.top))
        return torch.cat(found, 2)

    def _near(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        state: BlockCache | None,
        real: Tensor | None,
    ) -> Tensor:
        """The sliding window: new tokens (B,G,N,D), all tokens (B,G,M,D)."""
        if state is None:
            return sparse.attend(q, k, v, self.near)
        # The tokens of the window before the first new one, and the new ones; some may not exist.
        n = q.shape[2]
        place = state.past.length[:, None] + torch.arange(1 - self.window, n, device=q.device)
        there = (place >= 0) & (place < keys.shape[2])
        index = place.clamp(0, keys.shape[2] - 1)[:, None, :, None]
        own_keys, own_values = (t.gather(2, index.expand(*t.shape[:2], -1, t.shape[-1])) for t in (keys, values))
        if n == 1:
            return dense.attend(q, own_keys, own_values, mask=there[:, None, None])
        if real is not None:
            there = there & torch.nn.functional.pad(real, (self.window - 1, 0), value=True)
        return sparse.attend(q, own_keys, own_values, self.near, mask=there)
