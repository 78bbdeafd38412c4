"""Softmax attention over slots that each compress R neighboring tokens."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops import rows
from ..ops.compress import blocks, pool
from ..ops.softmax import dense
from ..ops.tensors import merge, positions, split
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention

POOLS = {"conv": "a learned convolution", "mean": "the mean"}


class MemoryCompressedState(NamedTuple):
    """All slots, and the last R - 1 tokens, some of which are not in a slot yet."""

    slots: KeyValues
    keys: Tensor  # (B,H,R-1,D)
    values: Tensor  # (B,H,R-1,D)
    position: Tensor  # (B,) int64, tokens so far


class MemoryCompressed(Attention[MemoryCompressedState]):
    r"""Softmax attention over slots, each of which compresses the keys and values of R neighboring tokens.

    Slot s holds the tokens $s R, \ldots, s R + R - 1$. A causal query sees a slot once the slot's last token is not
    ahead of it. The first R - 1 tokens therefore see no slot, and their heads read 0 or only the null slot.
    Bidirectional queries see all slots, and the last slot may hold fewer tokens. Positions count real tokens.

    ``stride``: R, the number of tokens per slot. ``pool``: conv, a learned convolution with kernel and stride R, whose
    taps $A_r$ and $B_r$ are full matrices over the channels of all heads, without bias; mean, the mean of the slot's
    tokens, as with taps of $1/R$. ``null``: add one learned slot that every query sees.

    The state holds all slots and the last R - 1 tokens.

    Source: Liu et al. 2018, section 4.2.3, with kernel and stride 3. The paper convolves keys and values. A convolution
    over the full width is our reading; the paper does not describe how it treats the first tokens.

    Raises:
        ValueError: For stride < 1 or an unknown pool.
    """

    name, paper, cost = "memory_compressed", "1801.10198", "N^2 D / R"
    family = "compressed"
    equations = (
        r"o_i = \sum_{s \in C_i} p_{is} \tilde v_s, \quad "
        r"p_{is} = \mathrm{softmax}_{s \in C_i} \frac{q_i \cdot \tilde k_s}{\sqrt D}",
        r"\tilde k_s = \sum_{r < R} A_r k_{s R + r}, \quad \tilde v_s = \sum_{r < R} B_r v_{s R + r}",
        r"\text{causal:} \quad C_i = \lbrace s : s R + R - 1 \le i \rbrace",
    )
    citation = (
        "Liu, Peter J. and Saleh, Mohammad and Pot, Etienne and Goodrich, Ben and Sepassi, Ryan and Kaiser, Lukasz and "
        "Shazeer, Noam",
        "Generating Wikipedia by Summarizing Long Sequences",
        2018,
    )
    examples = ("memory_compressed(stride=3)", "memory_compressed(stride=4, pool='mean', null=True)")
    states = (MemoryCompressedState,)
    no_decay = ("null_key", "null_value")

    def __init__(
        self, dim: int, heads: int, *, causal: bool = True, stride: int = 3, pool: str = "conv", null: bool = False
    ):
        super().__init__(dim, heads, causal=causal)
        if stride < 1:
            raise ValueError(f"stride={stride} is the number of tokens per slot and must be at least 1")
        self.stride, self.pool, self.null = stride, known(pool, POOLS, "pool"), null
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if pool == "conv":
            self.compress_key, self.compress_value = (nn.Linear(stride * dim, dim, bias=False) for _ in range(2))
        if null:
            self.null_key, self.null_value = (nn.Parameter(torch.randn(heads, dim // heads)) for _ in range(2))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> MemoryCompressedState:
        size, like = self.dim // self.heads, self.weight_like
        pending = like.new_zeros(batch, self.heads, self.stride - 1, size)
        position = torch.zeros(batch, dtype=torch.long, device=like.device)
        slots = kv_cache.empty(batch, self.heads, capacity // self.stride, size, like)
        return MemoryCompressedState(slots, pending, pending.clone(), position)

    def attend(
        self,
        x: Tensor,
        state: MemoryCompressedState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, MemoryCompressedState | None]:
        def run(
            x: Tensor, state: MemoryCompressedState | None, real: Tensor | None
        ) -> tuple[Tensor, MemoryCompressedState | None]:
            return self._run(x, state, real, donate and segments is None)

        return rows.map_sequences(run, x, state, mask, segments, causal=self.causal, width=self.dim)

    def _run(
        self, x: Tensor, state: MemoryCompressedState | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, MemoryCompressedState | None]:
        """x (B,N,dim), real tokens first in each row."""
        if not x.numel():
            return self.out(x), state
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        if state is None:
            return self.out(merge(self._whole(q, k, v, real))), None
        lengths = torch.full_like(state.position, x.shape[1]) if real is None else real.sum(1)
        new, pending, whole = [], [], None
        for tokens, held, taps in ((k, state.keys, "compress_key"), (v, state.values, "compress_value")):
            found, whole, last = pool.fresh(held, tokens, state.position, lengths, self.stride, self.stride)
            new.append(self._compress(found, None, taps))
            pending.append(last)
        # A prompt without a mask reads its own slots by blocks. The check waits for the device, so one token skips it.
        traced = torch.compiler.is_compiling()
        first = x.shape[1] > 1 and real is None and not traced and not bool(state.position.any())
        slots = kv_cache.extend(state.slots, new[0], new[1], mask=whole, donate=donate)[1]
        after = MemoryCompressedState(slots, pending[0], pending[1], state.position + lengths)
        if first:
            q, ready = q.to(new[0].dtype), pool.number(x.shape[1], self.stride, self.stride, whole=True)
            return self.out(merge(self._read(q, *(t[:, :, :ready] for t in new)))), after
        at, _ = positions(x, state.position)
        keys, values = self._with_null(slots.keys, slots.values)
        places = torch.arange(slots.keys.shape[2], device=x.device)[None]

        def allowed(start: int, stop: int) -> Tensor:
            seen = pool.visible(at[:, start:stop], places, self.stride, self.stride, causal=True)[:, None]
            return nn.functional.pad(seen, (int(self.null), 0), value=True)

        return self.out(merge(blocks.each(_masked, q.to(keys.dtype), keys, values, allowed))), after

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """The output of whole sequences (B,H,N,D); ``real`` (B,N) marks real tokens."""
        lengths = None if real is None or self.causal else real.sum(1)
        k, there = pool.windows(k, self.stride, self.stride, whole=self.causal, lengths=lengths)
        v, _ = pool.windows(v, self.stride, self.stride, whole=self.causal, lengths=lengths)
        k, v = self._compress(k, there, "compress_key"), self._compress(v, there, "compress_value")
        if lengths is None or there is None:
            return self._read(q, k, v)
        k, v = self._with_null(k, v)
        seen = nn.functional.pad(there.any(-1), (int(self.null), 0), value=True)[:, None, None]
        return dense.attend(q, k, v, mask=seen.expand(-1, -1, q.shape[2], -1))

    def _read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = self._with_null(k, v)
        return pool.attend(q, *slots, kernel=self.stride, stride=self.stride, causal=self.causal, null=self.null)

    def _with_null(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.null:
            return k, v
        first = (part[:, None].to(k.dtype).expand(len(k), -1, 1, -1) for part in (self.null_key, self.null_value))
        null_k, null_v = first
        return torch.cat([null_k, k], 2), torch.cat([null_v, v], 2)

    def _compress(self, tokens: Tensor, there: Tensor | None, taps: str) -> Tensor:
        """tokens (B,H,slots,R,D) -> (B,H,slots,D)."""
        if self.pool == "mean":
            return pool.mean(tokens, there)
        wide = tokens.permute(0, 2, 3, 1, 4).flatten(2)  # (B,slots,R dim)
        return split(getattr(self, taps)(wide), self.heads)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return dense.attend(q, k, v, mask=mask)
