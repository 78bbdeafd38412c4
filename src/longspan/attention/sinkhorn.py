"""Softmax attention to the own block and to a block selected by a learned, soft sorting."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import rows
from ..ops.compress import sinkhorn as op
from ..ops.tensors import merge, split, upcast_half, visible
from ..states import kv_cache, sorted_blocks
from ..states.sorted_blocks import SortedBlocks
from .base import Attention


class Sinkhorn(Attention[SortedBlocks]):
    r"""Each token reads its block, and a mixture of other blocks that a learned sorting assigns to it.

    Blocks $B_u$ have b tokens; the last block may have fewer. A small network scores each block v for block u, from the
    means of their tokens. Sinkhorn's normalization turns the scores into shares Z, in the limit a permutation.
    $k^\prime_{ul}$ is place l of all blocks, mixed by $Z_u$. Own and sorted keys share one softmax. A place that the
    last block lacks is a mean over the other blocks, weighted by their total share.

    In the causal form block u is scored by the mean of the tokens up to its first one. It mixes only whole blocks v <
    u, and the sum of a column is over the rows up to u. Block 0 reads only itself. The only balanced Z of this kind is
    the shift by one block, and iterations lead towards it: the shares of other blocks fall like 1 / ``iterations``. Use
    few iterations, or 0 for a plain softmax over blocks. The state has every token, so it grows without bound, and a
    step costs O(N D).

    ``block``: b, tokens per block. ``iterations``: normalizations of rows and columns; rows are normalized once more at
    the end. ``temperature``: $\tau$, which divides the scores. ``noise``: factor of the Gumbel noise g of the scores in
    training (0: none); evaluation has none. ``cut``: SortCut: every token reads only the first ``cut`` sorted blocks
    and not its own; bidirectional only (0: no cut).

    The paper sums tokens; here they are averaged, so that scores do not grow with the length. The paper scores by a
    layer with one output per block, which fixes the length; here scores are products. The paper adds the products of
    queries with both kinds of keys; here the keys share one softmax, so that an identity sorting gives local attention.

    Source: Tay et al. 2020, sections 3.1 (sorting), 3.3 (causal), 3.4 (SortCut).

    Raises:
        ValueError: For block < 1, iterations < 0, temperature <= 0, noise < 0, cut < 0, or a cut with ``causal``.
    """

    name, paper, cost = "sinkhorn", "2002.11296", "N^2 D / b + N b D"
    family = "content"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i \cap B_u} p_{ij} v_j + \sum_l p^\prime_{il} v^\prime_{ul}, \quad "
        r"u = \lfloor i / b \rfloor, \quad "
        r"[p_i; p^\prime_i] = \mathrm{softmax} \frac{[q_i \cdot k_j; \, q_i \cdot k^\prime_{ul}]}{\sqrt D}",
        r"k^\prime_{ul} = \sum_v Z_{uv} k_{vb+l}, \quad v^\prime_{ul} = \sum_v Z_{uv} v_{vb+l}, \quad "
        r"Z = \mathrm{Sinkhorn} \left( \frac{R + g}{\tau} \right)",
        r"R_{uv} = \frac{1}{\sqrt D} W_2 \mathrm{relu}(W_1 \bar x_u) \cdot W_3 \bar x_v",
    )
    citation = (
        "Tay, Yi and Bahri, Dara and Yang, Liu and Metzler, Donald and Juan, Da-Cheng",
        "Sparse Sinkhorn Attention",
        2020,
    )
    examples = ("sinkhorn(block=5, iterations=3)", "sinkhorn(block=3, iterations=0, temperature=0.3)")
    joinable, states = False, (SortedBlocks,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        block: int = 64,
        iterations: int = 5,
        temperature: float = 0.75,
        noise: float = 1.0,
        cut: int = 0,
    ):
        if cut > 0:
            self.directions = ("bidirectional",)
        super().__init__(dim, heads, causal=causal)
        if block < 1:
            raise ValueError(f"block={block} is the number of tokens per block and must be at least 1")
        for option, value in (("iterations", iterations), ("noise", noise), ("cut", cut)):
            if value < 0:
                raise ValueError(f"{option}={value} must be positive, or 0 for none")
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} divides the scores and must be positive")
        self.block, self.iterations, self.temperature = block, iterations, temperature
        self.noise, self.cut = noise, cut
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.ask = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.offer = nn.Linear(dim, dim)

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> SortedBlocks:
        return sorted_blocks.empty(
            batch, self.heads, capacity, self.dim // self.heads, self.iterations, self.weight_like
        )

    def attend(
        self,
        x: Tensor,
        state: SortedBlocks | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, SortedBlocks | None]:
        donate = donate and segments is None
        if record is not None:
            # The output is linear in the values, so the output for unit vectors, one per column, is the matrix.
            kept = 0 if state is None else state.past.keys.shape[2]
            units = torch.eye(kept + x.shape[1], dtype=x.dtype, device=x.device)
            before = state
            if state is not None:
                values = units[:kept].expand(len(x), self.heads, -1, -1)
                before = state._replace(past=state.past._replace(values=values))
            v = units[kept:].repeat(1, self.heads).expand(len(x), -1, -1)
            matrix = split(self._read(x, v, before, mask, segments, False)[0], self.heads)
            record.update(matrix=matrix, mask=self._allowed(x, state, mask, segments))
        o, state = self._read(x, self.value(x), state, mask, segments, donate)
        return self.out(o.to(x.dtype)), state

    def _allowed(self, x: Tensor, state: SortedBlocks | None, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        """The columns of the matrix: all real tokens, or all so far if causal; bool (B|1,1,N,M)."""
        allowed = visible(x, causal=self.causal, mask=mask, segments=segments)
        if state is None:
            return allowed
        slots = torch.arange(state.past.keys.shape[2], device=x.device)
        old = (slots < state.past.length[:, None])[:, None, None].expand(-1, 1, x.shape[1], -1)
        if segments is not None:
            old = old & (segments == segments[:, :1])[:, None, :, None]
        return torch.cat([old, allowed.expand(len(x), -1, -1, -1)], -1)

    def _read(
        self,
        x: Tensor,
        v: Tensor,
        state: SortedBlocks | None,
        mask: Tensor | None,
        segments: Tensor | None,
        donate: bool,
    ) -> tuple[Tensor, SortedBlocks | None]:
        """x (B,N,dim), v (B,N,H*E) -> output (B,N,H*E) in float32 or wider, and the state."""

        def run(both: Tensor, state: SortedBlocks | None, real: Tensor | None) -> tuple[Tensor, SortedBlocks | None]:
            x, v = both.split([self.dim, both.shape[-1] - self.dim], -1)
            q, k, v = (split(part, self.heads) for part in (self.query(x), self.key(x), v))
            with torch.autocast(x.device.type, enabled=False):
                read = self._past if self.causal else self._whole
                o, after = read(x, q, k, v, state, real, donate)
            return merge(o), after

        if not x.numel():
            return upcast_half(v), state
        return rows.split_packed(run, torch.cat([x, v.to(x.dtype)], -1), state, mask, segments)

    def _whole(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: SortedBlocks | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, SortedBlocks | None]:
        """Bidirectional: x (B,N,dim), q, k (B,H,N,D), v (B,H,N,E), real tokens first; ``real`` (B,N) marks them."""
        n = x.shape[1]
        block = min(self.block, n)
        count = torch.full_like(x[:, 0, 0], n, dtype=torch.long) if real is None else real.sum(1)
        sums = op.blocks(upcast_half(x)[:, None], block)[:, 0].sum(2)  # (B,U,dim)
        size = count[:, None] - block * torch.arange(sums.shape[1], device=x.device)
        means = sums / size.clamp(1, block)[..., None]
        allowed = ((size > 0)[:, :, None] & (size > 0)[:, None])[:, None]
        sort = op.balance(self._scores(means, self._part(self.offer, means)), self.iterations, allowed)
        return op.attend(q, k, v, sort, block, total=count, cut=self.cut), state

    def _past(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: SortedBlocks | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, SortedBlocks | None]:
        """Causal: the output after the tokens of the state, and the next state."""
        block, start, past = self.block, None, None
        before = self.start(x.shape[0], 0) if state is None else state
        if state is not None:
            start = state.past.length
            view, past = kv_cache.extend(state.past, k, v, mask=real, donate=donate)
            k, v = view.keys, view.values
        call = sorted_blocks.touch(before, x, block, op.spanned(x.shape[1], block, anywhere=state is not None))
        blocks = op.spanned(k.shape[2], block, anywhere=False)
        offers = sorted_blocks.offers_of(before, call, self._part(self.offer, call.sums / block), blocks)
        earlier = sorted_blocks.earlier(before, block, blocks, op.EMPTY)
        allowed = torch.arange(blocks, device=x.device) < call.numbers[:, None, :, None]
        sort, sums = op.balance_causal(self._scores(call.queries, offers), earlier, allowed)
        o = op.attend(q, k, v, sort, block, start=start, causal=True)
        return o, None if past is None else sorted_blocks.after(before, past, call, offers, sums, x, block)

    def _scores(self, means: Tensor, offers: Tensor) -> Tensor:
        """Scores over the temperature, with noise in training: means (B,U,dim), offers (B,H,V,D) -> (B,H,U,V)."""
        scores = self._part(self.ask, means) @ offers.mT * offers.shape[-1] ** -0.5
        if self.training and self.noise:
            scores = scores + self.noise * op.gumbel(scores)
        return scores / self.temperature

    def _part(self, network: nn.Module, means: Tensor) -> Tensor:
        """Outputs (B,H,U,D) of a network for means (B,U,dim), float32 or wider."""
        return split(upcast_half(network(means.to(self.weight_like.dtype))), self.heads)
