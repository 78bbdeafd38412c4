"""Softmax attention to one's own block and to a block that a learned, soft sorting puts beside it."""

import torch
from torch import nn

from ..ops import rows
from ..ops.compress import sinkhorn as op
from ..ops.tensors import merge, split, upcast_half, visible
from ..states import kv_cache, sorted_blocks
from ..states.sorted_blocks import SortedBlocks
from .base import Attention


class Sinkhorn(Attention):
    r"""Each token reads its own block, and beside it one of all other blocks that a learned sorting has put there.

    Blocks $B_u$ have b tokens, the last what is left. A small network scores how much block u wants block v, by means
    of their tokens; Sinkhorn's normalization makes shares Z of the scores, in the limit a permutation; $k^\prime_{ul}$
    is place l of all blocks, mixed by $Z_u$. Own and sorted keys share one softmax. Of the last block, places that it
    lacks weigh what the other blocks' shares are.

    Causal: block u asks by the mean of the tokens up to its first one and mixes whole blocks v < u alone, and the sum
    of a column is over the rows up to u; block 0 reads itself alone. The only balanced such Z is the shift by one
    block, and iterations lead towards it: what other blocks get falls like 1 / ``iterations``, so take few, or 0 for a
    plain softmax over blocks. The state has every token, without bound, and a step costs O(N D).

    ``block``: b. ``iterations``: of rows and columns; rows once more at the end. ``temperature``: $\tau$. ``noise``:
    how much Gumbel noise g scores get while training, 0: none; there is none in evaluation. ``cut``: SortCut; every
    token reads the first so many sorted blocks, and no own one; bidirectional only. 0: not.

    The paper sums tokens where this takes means, so that scores do not grow with the length, and scores by a layer with
    one output per block, which fixes the length; these are products. It adds the two products of queries with
    keys where this has the keys side by side, which alone makes an identical sorting local attention.

    Source: Tay et al. 2020, sections 3.1 (sorting), 3.3 (causal), 3.4 (SortCut). Raises ValueError for block < 1,
    iterations < 0, temperature <= 0, noise < 0, cut < 0, and a cut that is causal.
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
    states = (SortedBlocks,)

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
            raise ValueError(f"block={block} is a number of tokens; it must be at least 1")
        for option, value in (("iterations", iterations), ("noise", noise), ("cut", cut)):
            if value < 0:
                raise ValueError(f"{option}={value} must not be negative; 0 for none")
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} divides scores; it must be positive")
        self.block, self.iterations, self.temperature = block, iterations, temperature
        self.noise, self.cut = noise, cut
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.ask = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.offer = nn.Linear(dim, dim)

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch, capacity):
        return sorted_blocks.empty(
            batch, self.heads, capacity, self.dim // self.heads, self.iterations, self.weight_like
        )

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        donate = donate and segments is None
        if record is not None:
            # What the heads read is linear in the values: of unit vectors, one per column, it is the matrix.
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

    def _allowed(self, x, state, mask, segments):
        """Which columns a token may weigh: all real tokens, or all so far; bool (B|1,1,N,M)."""
        allowed = visible(x, causal=self.causal, mask=mask, segments=segments)
        if state is None:
            return allowed
        slots = torch.arange(state.past.keys.shape[2], device=x.device)
        old = (slots < state.past.length[:, None])[:, None, None].expand(-1, 1, x.shape[1], -1)
        if segments is not None:
            old = old & (segments == segments[:, :1])[:, None, :, None]
        return torch.cat([old, allowed.expand(len(x), -1, -1, -1)], -1)

    def _read(self, x, v, state, mask, segments, donate):
        """x (B,N,dim), v (B,N,H*E) -> what the heads read, (B,N,H*E) in float32 at least, and the state."""

        def run(both, state, real):
            x, v = both.split([self.dim, both.shape[-1] - self.dim], -1)
            q, k, v = (split(part, self.heads) for part in (self.query(x), self.key(x), v))
            with torch.autocast(x.device.type, enabled=False):
                read = self._past if self.causal else self._whole
                o, after = read(x, q, k, v, state, real, donate)
            return merge(o), after

        if not x.numel():
            return upcast_half(v), state
        return rows.split_packed(run, torch.cat([x, v.to(x.dtype)], -1), state, mask, segments)

    def _whole(self, x, q, k, v, state, real, donate):
        """Both directions: x (B,N,dim), q, k (B,H,N,D), v (B,H,N,E), of which the ``real`` (B,N) ones come first."""
        n = x.shape[1]
        block = min(self.block, n)
        count = torch.full_like(x[:, 0, 0], n, dtype=torch.long) if real is None else real.sum(1)
        sums = op.blocks(upcast_half(x)[:, None], block)[:, 0].sum(2)  # (B,U,dim)
        size = count[:, None] - block * torch.arange(sums.shape[1], device=x.device)
        means = sums / size.clamp(1, block)[..., None]
        allowed = ((size > 0)[:, :, None] & (size > 0)[:, None])[:, None]
        sort = op.balance(self._scores(means, self._part(self.offer, means)), self.iterations, allowed)
        return op.attend(q, k, v, sort, block, total=count, cut=self.cut), state

    def _past(self, x, q, k, v, state, real, donate):
        """Causal: the same after what the state has, and the state after it."""
        block, start, before = self.block, None, state
        if state is None:
            before = self.start(x.shape[0], 0)
        else:
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
        return o, state and sorted_blocks.after(state, past, call, offers, sums, x, block)

    def _scores(self, asks, offers):
        """Means (B,U,dim) that ask, offers (B,H,V,D) -> (B,H,U,V) over the temperature, with noise while training."""
        scores = self._part(self.ask, asks) @ offers.mT * offers.shape[-1] ** -0.5
        if self.training and self.noise:
            scores = scores + self.noise * op.gumbel(scores)
        return scores / self.temperature

    def _part(self, network, means):
        """Heads (B,H,U,D) of a network's outputs for means (B,U,dim), float32 at least."""
        return split(upcast_half(network(means.to(self.weight_like.dtype))), self.heads)
