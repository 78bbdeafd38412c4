"""Longformer: sliding-window softmax attention with global tokens."""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import patterns
from ..ops import sparse
from ..ops.tensors import merge, positions, split, visible
from ..patterns import Pattern
from ..states import lookback, window
from ..states.window import Window, WindowView
from .base import Attention

AT_ONCE = 512  # new tokens of a call that attend to a state together


class LongformerState(NamedTuple):
    """The last keys and values, and those of the global tokens.

    The first H heads are for the queries of ordinary tokens, the other H for those of global tokens.
    """

    window: Window
    keys: Tensor  # (B,2H,G,D), slot j for position j
    values: Tensor  # (B,2H,G,D)


class Longformer(Attention[LongformerState]):
    r"""Each token sees a window and the first tokens, which are global and see all tokens.

    One softmax covers the window, the token itself and the global tokens; every key counts once. Global tokens attend
    to all keys, with separate query, key and value projections. A causal layer sees the keys $j \le i$ of these, so
    that global tokens see global tokens only.

    ``window``: w, the number of visible tokens on each side. ``globals``: G, the number of first tokens that are
    global. ``dilation``: the distance between neighboring keys of the window in every second head; the number of keys
    stays the same.

    The state is bounded: a ring of window * dilation + 1 keys and values, and those of the global tokens. ``record`` is
    not supported, since one matrix cannot describe two sets of values.

    Source: Beltagy et al. 2020, section 3.1; the paper chooses global tokens by task, here they are the first tokens.
    Raises ValueError for a window below 0, fewer than one global token, a dilation below 1 or without a second head.
    """

    name, paper, cost = "longformer", "2004.05150", "N (W + G) D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}",
        r"i \ge G: \quad P_i = \lbrace j \in \mathcal{A}_i : \lvert i - j \rvert \le w \text{ or } j < G \rbrace",
        r"i < G: \quad P_i = \mathcal{A}_i \text{, with } q, k, v \text{ from separate projections}",
    )
    citation = (
        "Beltagy, Iz and Peters, Matthew E. and Cohan, Arman",
        "Longformer: The Long-Document Transformer",
        2020,
    )
    examples = ("longformer(window=4, globals=3)", "longformer(window=2, globals=1, dilation=3)")
    states = (LongformerState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        window: int = 256,
        globals: int = 1,
        dilation: int = 1,
    ):
        super().__init__(dim, heads, causal=causal)
        if globals < 1:
            raise ValueError(f"globals={globals} must be at least 1; without global tokens, build local")
        if dilation > 1 and heads == 1:
            raise ValueError(
                f"dilation={dilation} applies to every second head and needs at least 2 heads, not heads=1"
            )
        self.window, self.globals, self.dilation = window, globals, dilation
        near = patterns.band(window, window)
        if dilation != 1:
            near = patterns.by_head(near, patterns.dilated(window, dilation))
        first, order = patterns.prefix(globals), patterns.causal() if causal else patterns.everywhere()
        self.near, self.key_pattern = near & order, (near | patterns.globals(globals)) & order
        # Rows of global and of ordinary tokens; each pattern is empty in the rows of the other, so that outputs add.
        ours = patterns.block(globals) & first
        self.globally: Pattern = ours & order if causal else ours | (patterns.globals(globals) - first)
        self.locally: Pattern = ((near | first) & order) - self.globally
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.query_global, self.key_global, self.value_global = (nn.Linear(dim, dim) for _ in range(3))

    def start(self, batch: int, capacity: int) -> LongformerState:
        size, like = self.dim // self.heads, self.weight_like
        keys = like.new_zeros(batch, 2 * self.heads, self.globals, size)
        near = cast(Window, lookback.empty(self.near, batch, self.heads, 0, size, like))
        return LongformerState(near, keys, keys.clone())

    def attend(
        self,
        x: Tensor,
        state: LongformerState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, LongformerState | None]:
        if state is None:
            return self.out(merge(self._whole(x, mask, segments)[0])), None
        plain = mask is None and segments is None and not torch.compiler.is_compiling()
        if plain and x.shape[1] > 1 and not bool(state.window.position.any()):
            return self._prompt(x, state)
        n = x.shape[1]
        if not n:
            return self.out(x), state
        outs: list[Tensor] = []
        together = n if segments is not None else AT_ONCE
        for start in range(0, n, together):
            own, packed = (t if t is None else t[:, start : start + together] for t in (mask, segments))
            o, state = self._go_on(x[:, start : start + together], state, own, packed, donate or start > 0)
            outs.append(o)
        return self.out(merge(torch.cat(outs, 2))), state

    def _local(self, x: Tensor) -> Iterator[Tensor]:
        return (split(part(x), self.heads) for part in (self.query, self.key, self.value))

    def _global(self, x: Tensor) -> Iterator[Tensor]:
        return (split(part(x), self.heads) for part in (self.query_global, self.key_global, self.value_global))

    def _whole(
        self, x: Tensor, mask: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The output of the heads for a whole sequence (B,H,N,D), and both pairs of keys and values."""
        q, k, v = self._local(x)
        o, _ = lookback.attend(q, k, v, None, self.locally, mask=mask, segments=segments)
        # Causal global tokens see global tokens only. With masks and segments their places depend on the data.
        few = self.causal and mask is None and segments is None
        query, key, value = self._global(x[:, : self.globals] if few else x)
        own, _ = lookback.attend(query, key, value, None, self.globally, mask=mask, segments=segments)
        return o + F.pad(own, (0, 0, 0, o.shape[2] - own.shape[2])), (k, v), (key, value)

    def _prompt(self, x: Tensor, state: LongformerState) -> tuple[Tensor, LongformerState]:
        """A whole sequence after an empty state."""
        o, (k, v), own = self._whole(x, None, None)
        n = min(self.globals, x.shape[1])
        new = (
            torch.cat([torch.cat([a[:, :, :n], b[:, :, :n]], 1).to(before.dtype), before[:, :, n:]], 2)
            for a, b, before in zip((k, v), own, (state.keys, state.values), strict=True)
        )
        return self.out(merge(o)), LongformerState(window.tail(state.window, k, v), *new)

    def _go_on(
        self, x: Tensor, state: LongformerState, mask: Tensor | None, segments: Tensor | None, donate: bool
    ) -> tuple[Tensor, LongformerState]:
        """Continue a state: the output of the heads (B,H,N,D), and the next state."""
        q, k, v = self._local(x)
        before, slots = state.window.position, state.window.keys.shape[2]
        place = torch.arange(self.globals, device=x.device)
        old = place < before[:, None]  # (B,G) global tokens of earlier calls
        goes_on = None if segments is None else segments == segments[:, :1]
        view, near = window.extend(state.window, k, v, mask=mask, segments=segments, donate=donate)
        # Global tokens that are still in the ring are read from the ring.
        gone = old & ~(place[:, None] == view.slots[:, None, :slots]).any(-1)
        seen = _columns(gone, goes_on, view.visible)
        o = _read(q, _with_globals(state, 0, view.keys, view.values), self.locally, view, seen)
        # After the global tokens their projections are not needed, except for gradients of zero.
        free = segments is None and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        # To know this waits for the device; a decode step on CUDA computes them instead.
        free = free and not (x.is_cuda and x.shape[1] == 1)
        if free and bool((before >= self.globals).all()):
            return o, LongformerState(near, state.keys, state.values)
        query, key, value = self._global(x)
        at, _ = positions(x, before, mask=mask, segments=segments)
        mine = WindowView(key, value, at, at, visible(x, causal=True, mask=mask, segments=segments)[:, 0])
        seen = _columns(old, goes_on, mine.visible.expand(len(x), -1, -1))
        o = o + _read(query, _with_globals(state, self.heads, key, value), self.globally, mine, seen)
        # Slot j takes the token at position j of the last segment.
        hit = at[:, None] == place[:, None]  # (B,G,N)
        hit = hit if mask is None else hit & mask[:, None]
        hit = hit if segments is None else hit & (segments == segments[:, -1:])[:, None]
        fresh, where = hit.any(-1)[:, None, :, None], hit.int().argmax(-1)[:, None, :, None]
        written = (
            torch.where(fresh, new.gather(2, where.expand(-1, new.shape[1], -1, new.shape[-1])).to(held.dtype), held)
            for new, held in ((torch.cat([k, key], 1), state.keys), (torch.cat([v, value], 1), state.values))
        )
        return o, LongformerState(near, *written)


def _with_globals(state: LongformerState, head: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend keys and values of the global tokens, in heads from ``head`` on, to the given ones (B,H,M,D)."""
    some = slice(head, head + keys.shape[1])
    pairs = ((state.keys[:, some], keys), (state.values[:, some], values))
    first, second = (torch.cat([held, new.to(held.dtype)], 2) for held, new in pairs)
    return first, second


def _columns(old: Tensor, goes_on: Tensor | None, new: Tensor) -> Tensor:
    """Concatenate masks: old (B,G), tokens of its segment (B,N), new (B,N,M) -> bool (B,N,G+M)."""
    first = old[:, None].expand(-1, new.shape[1], -1)
    return torch.cat([first if goes_on is None else first & goes_on[..., None], new], 2)


def _read(q: Tensor, pair: tuple[Tensor, Tensor], pattern: Pattern, view: WindowView, seen: Tensor) -> Tensor:
    """One softmax over the global tokens, at positions 0 ... G - 1, and the keys of a view."""
    place = torch.arange(pair[0].shape[2] - view.slots.shape[1], device=q.device)
    slots = torch.cat([place.expand(len(q), -1), view.slots], 1)
    allowed = sparse.allowed_at(pattern, view.at, slots, q.shape[1], 0) & seen[:, None]
    return sparse.by_rows(q.to(pair[0].dtype), *pair, allowed, view.at, slots, sparse.Logits(q.shape[-1] ** -0.5))
