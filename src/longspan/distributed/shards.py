r"""The state before each shard, by the cheapest exact exchange.

A state of sums obeys S' = A S + B over a shard. The ranks gather their A and B, never tokens, and each folds those
before it:

$$
S_0 = S, \quad S_{r+1} = A_r S_r + B_r
$$

A window or a short convolution needs the last tokens before the shard, softmax all of them. Any other state is handed
from rank to rank.

References:
    Sun et al. 2024 (2502.07563), section 3: one all-gather whose size does not depend on the length.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.base import Attention
from ..ops import shards as hook
from ..ops.gated.decays import LOWEST
from ..ops.gated.operands import Recurrence
from ..ops.linear import stabilized
from ..ops.linear.operands import LinearOperands
from ..ops.operands import zero_masked
from ..ops.tensors import unit, upcast_half
from ..patterns import Pattern
from . import wavefront
from .collectives import from_before, gather
from .layout import Layout

Recur = Callable[..., tuple[Tensor, Tensor]]


class ShardsOf:
    """The shards of one call of a model; see ``ops.shards.Shards``."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def contexts(self) -> hook.Contexts:
        return contextlib.nullcontext(), hook.use_shards(self)

    def attend(
        self, attention: Attention, run: Callable[[Tensor, Any], tuple[Any, ...]], x: Tensor, state: Any
    ) -> tuple[Any, ...]:
        # Mechanisms that see other tokens through the ops below alone.
        if attention.parallel_by == "sums" or (attention.parallel_by == "tokens" and state is None):
            return run(x, state)
        with hook.use_shards(None):
            return wavefront.attend(attention, run, x, state, self.layout)

    def position(self, start: Tensor | None, x: Tensor) -> Tensor:
        at = self.layout.position(0 if start is None else start)
        return at if isinstance(at, Tensor) else torch.full((x.shape[0],), at, device=x.device)

    def recur(self, run: Callable[[Recurrence], tuple[Tensor, Tensor]], r: Recurrence) -> tuple[Tensor, Tensor]:
        _refuse(cu_seqlens=r.cu_seqlens)
        wide, state, width = r.state.dtype, r.state, r.v.shape[-1]
        if r.beta is None:
            own, decay = _sums(r.k, r.v, r.log_decay, r.normalize, self.layout.ending)
            return _alone(run, r._replace(state=self._fold(state, own, decay)))
        # Columns of zeros whose state begins with the identity: they end with A, and their outputs read A.
        size = r.k.shape[-1]
        eye = torch.eye(size, dtype=wide, device=state.device).expand(*state.shape[:2], size, size)
        values = torch.cat([r.v, r.v.new_zeros(*r.v.shape[:3], size)], -1)
        o, found = _alone(run, r._replace(v=values, state=torch.cat([torch.zeros_like(state), eye], -1)))
        own, decay = found[..., :width], found[..., width:]
        before = self._fold(state, own, decay)
        if r.v.dtype != wide:
            # Half precision would round what the queries read of A.
            return _alone(run, r._replace(state=before))
        with torch.autocast(state.device.type, enabled=False):
            return o[..., :width] + o[..., width:] @ before, decay @ before + own

    def _fold(self, state: Tensor, own: Tensor, decay: Tensor | None) -> Tensor:
        """Return the state (B,H,D,E) before this shard, from B (B,H,D,E) and A (B,H,1|D,1|D) of each; None for A = 1.

        A of one column multiplies rows of the state.
        """
        if decay is not None:
            decay = decay.expand(*own.shape[:3], -1)
        every = gather(own if decay is None else torch.cat([own, decay], -1), self.layout.group)
        # Zeros of the gathered tensor, so that the first rank enters the backward pass of the collective too.
        state, width = state + every[:0, ..., : own.shape[-1]].sum(0), own.shape[-1]
        with torch.autocast(own.device.type, enabled=False):
            for r in range(self.layout.rank):
                before, a = self.layout.kept(state, r), every[r, ..., width:]
                state = (before if decay is None else a * before if a.shape[-1] == 1 else a @ before) + every[
                    r, ..., :width
                ]
        return self.layout.joined(state)

    def linear(
        self, run: Callable[[LinearOperands], tuple[Tensor, Tensor]], r: LinearOperands
    ) -> tuple[Tensor, Tensor]:
        _refuse(bidirectional=not r.causal or None)
        # One query is enough to ask for the sums.
        bare = r._replace(q=r.q[:, :, :1], state=None, mask=self.layout.ending, segments=None, causal=False)
        _, own = _alone(run, bare)
        state = torch.zeros_like(own) if r.state is None else r.state
        return _alone(run, r._replace(state=self._fold(state, own, None)))

    def stabilized(
        self,
        run: Callable[..., tuple[Tensor, stabilized.Sums]],
        q: Any,
        k: Any,
        v: Tensor,
        *,
        causal: bool,
        state: stabilized.Sums | None,
        **options: Any,
    ) -> tuple[Tensor, stabilized.Sums]:
        _refuse(bidirectional=not causal or None)
        with torch.autocast(v.device.type, enabled=False):
            own, peak = stabilized.total(k, v, self.layout.ending)
            packed = torch.cat([own.flatten(2), peak[..., None]], -1)  # (B,H,F(E+1)+1)
            every = gather(packed, self.layout.group)
            if state is None:
                state = stabilized.Sums(torch.zeros_like(own), torch.full_like(peak, -torch.inf))
            sums, top = state
            assert top is not None
            sums = sums + every[:0, ..., :-1].sum(0).view_as(own)
            for r in range(self.layout.rank):
                sums, top = self.layout.kept(sums, r), self.layout.kept(top, r, -torch.inf)
                added, other = every[r, ..., :-1].view_as(own), every[r, ..., -1].detach()
                highest = torch.maximum(top, other)
                sums = stabilized.rescaled(sums, top, highest) + stabilized.rescaled(added, other, highest)
                top = highest
            before = stabilized.Sums(self.layout.joined(sums), self.layout.joined(top, -torch.inf))
        return _alone(run, q, k, v, causal=True, state=before, **options)

    def convolve(
        self,
        run: Recur,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        *,
        cu_seqlens: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        _refuse(cu_seqlens=cu_seqlens)
        wide = upcast_half(x[:0]).dtype
        if state is None:
            state = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2], dtype=wide)
        return _alone(run, x, weight, bias, self._past(x.to(state.dtype), state), **options)

    def _past(self, x: Tensor, start: Tensor) -> Tensor:
        """Return the last tokens before this shard: x (B,N,...), start (B,rows,...) those before the row."""
        rows = start.shape[1]
        hops = self.layout.hops(rows)
        if not hops:
            return start
        tails = from_before(self.layout.tail(x, rows), hops, self.layout.group)
        first = self.layout.rank - len(tails)
        past = start + tails[:0].sum(0)
        for r in range(first, self.layout.rank):
            past = self.layout.shifted(self.layout.kept(past, r), r) + tails[r - first]
        return self.layout.joined(past)

    def band(
        self,
        run: Callable[..., tuple[Tensor, Any]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pattern: Pattern,
        mask: Tensor | None,
        segments: Tensor | None,
    ) -> Tensor:
        rows, layout = pattern.lookback or 0, self.layout
        both = torch.cat([k, v], -1).transpose(1, 2)  # (B,N,G,D+E)
        past = self._past(both, both.new_zeros(len(both), rows, *both.shape[2:]))
        count = layout.position(0)
        valid = None
        if isinstance(count, Tensor):
            valid = torch.arange(rows, device=q.device) >= rows - count[:, None]  # (B,rows)
            seen = layout.mask if mask is None else mask
            mask = torch.cat([valid, seen], 1)
            if segments is not None:
                segments = torch.cat([segments[:, :1].expand(-1, rows), segments], 1)
        else:
            rows = min(rows, count)
            past = past[:, past.shape[1] - rows :]
        # Keys and values of the tokens before, whose own outputs are dropped: a band depends on distances alone.
        keys, values = torch.cat([past, both], 1).transpose(1, 2).split([k.shape[-1], v.shape[-1]], -1)
        queries = F.pad(q, (0, 0, rows, 0))
        with hook.use_shards(None):
            o, _ = run(queries, keys, values, None, pattern, mask=mask, segments=segments)
        return o[:, :, rows:]

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        layout, n = self.layout, k.shape[2]
        longest, rank = max(layout.lengths), layout.rank
        every = gather(F.pad(torch.cat([k, v], -1), (0, 0, 0, longest - n)), layout.group)
        parts = [every[r, :, :, : layout.lengths[r]] for r in range(rank)]
        both = torch.cat([*parts, torch.cat([k, v], -1)], 2) + every[:0].sum()
        keys, values = both.split([k.shape[-1], v.shape[-1]], -1)
        if layout.plain and not rank:
            return keys, values, None, True
        allowed = torch.ones(n, both.shape[2], dtype=torch.bool, device=k.device).tril(layout.begin)[None, None]
        if layout.plain:
            return keys, values, allowed, False
        ids, real = layout.tokens()
        seen = (ids[:, None, None] == layout.ids[:, None, :, None]) & real[:, None, None]
        return keys, values, allowed & seen, False


def _alone(run: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    with hook.use_shards(None):
        return run(*operands, **options)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            what = "bidirectional attention" if name == "bidirectional" else f"{name}="
            raise ValueError(f"{what} has no exact form under sequence parallelism")


def _sums(
    k: Tensor, v: Tensor, log_decay: Tensor | None, normalize: bool, own: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return B (B,H,D,E) and A (B,H,1|D,1) of one shard without the delta rule; own (B,N) are its tokens, or None."""
    with torch.autocast(v.device.type, enabled=False):
        wide = upcast_half(v[:0]).dtype
        keys, values, g = zero_masked(own, k.to(wide), v.to(wide), log_decay)
        assert keys is not None
        assert values is not None
        keys = (unit(keys) if normalize else keys).repeat_interleave(v.shape[1] // k.shape[1], 1)
        if g is None:
            return keys.mT @ values, None
        g = g.to(wide).clamp(min=LOWEST)
        # Sums of the decays after each token, not differences of sums, which would cancel.
        later = F.pad(g.flip(2).cumsum(2).flip(2), (0,) * (2 * g.dim() - 6) + (0, 1))[:, :, 1:].exp()
        total = g.sum(2).exp()
        if g.dim() == 4:
            return (keys * later).mT @ values, total[..., None]
        return keys.mT @ (values * later[..., None]), total[..., None, None]
