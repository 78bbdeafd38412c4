"""The KV cache: the state of every mechanism that attends to single earlier tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..ops.prefix import join
from ..ops.tensors import positions, visible
from .counters import check_counts, counted, readable


class Visible(TypedDict, total=False):
    """Which tokens of a call see each other: mask, segments (B,N), and a bidirectional prefix (B,N)."""

    mask: Tensor | None
    segments: Tensor | None
    prefix: Tensor | None


class KeyValues(NamedTuple):
    """Keys and values of all tokens so far; slot j of a row holds its j-th real token, so slots are positions."""

    keys: Tensor  # (B,H,capacity,D)
    values: Tensor  # (B,H,capacity,E)
    length: Tensor  # (B,) int64, slots in use


class FixedKeyValues(KeyValues):
    """A cache whose number of slots never changes, so that a step with one token does not read ``length``.

    A query scores all slots, under a mask. A call beyond the last slot raises ValueError on the CPU. On a CUDA device,
    where reading the length would wait for the device, a step with one token fails with a device-side assertion.
    """

    __slots__ = ()


# Older versions of torch know only direct named tuples.
pytree.register_pytree_node(
    FixedKeyValues, lambda cache: (list(cache), None), lambda leaves, _: FixedKeyValues(*leaves)
)


class CachedContext(NamedTuple):
    """Keys and values of a context, for cross attention."""

    keys: Tensor  # (B,H,M,D)
    values: Tensor  # (B,H,M,E)
    mask: Tensor  # (B,M) bool, True on real tokens

    def view(self) -> "CacheView":
        return CacheView(self.keys, self.values, self.mask[:, None, None, :], False)


def of_context(k: Tensor, v: Tensor, mask: Tensor | None) -> CachedContext:
    """Cache a context: k (B,H,M,D), v (B,H,M,E), mask (B,M) bool, None if every token is real."""
    if mask is None:
        mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    return CachedContext(k, v, mask.clone())  # the caller may change its mask later


class CacheView(NamedTuple):
    """What the queries of one call may see: keys (B,H,M,D), values (B,H,M,E), mask bool (B,1,N,M) or None, causal."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    causal: bool

    def allowed(self, queries: int) -> Tensor:
        """Return the dense mask for ``queries`` queries: bool, broadcast to (B,1,N,M)."""
        if self.mask is not None:
            return self.mask
        allowed = torch.ones(1, 1, queries, self.keys.shape[2], dtype=torch.bool, device=self.keys.device)
        return allowed.tril() if self.causal else allowed


def empty(batch: int, heads: int, capacity: int, dim: int, like: Tensor) -> KeyValues:
    """Return a cache without tokens and with ``capacity`` slots, in the dtype and on the device of ``like``."""
    slots = like.new_zeros(batch, heads, capacity, dim)
    return KeyValues(slots, slots.clone(), torch.zeros(batch, dtype=torch.long, device=like.device))


def fixed(cache: KeyValues, capacity: int) -> FixedKeyValues:
    """Return a cache with exactly ``capacity`` slots, which share the memory of the given ones if it has as many.

    Raises:
        ValueError: For a capacity below the number of slots in use.
    """
    slots = cache.keys.shape[2]
    if slots == capacity:
        return FixedKeyValues(*cache)
    used = counted("length", cache.length, slots)[1]
    if used > capacity:
        raise ValueError(f"capacity={capacity} is too small for the {used} tokens of the cache")
    pad = (0, 0, 0, capacity - min(slots, capacity))
    keys, values = (torch.nn.functional.pad(t[:, :, :capacity], pad).contiguous() for t in (cache.keys, cache.values))
    return FixedKeyValues(keys, values, cache.length)


def within(
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
) -> CacheView:
    """Self-attention within a call: k (B,H,N,D), v (B,H,N,E), mask, segments (B,N), bidirectional prefix (B,N)."""
    if mask is None and segments is None and prefix is None:
        return CacheView(k, v, None, causal)
    allowed = visible(k.transpose(1, 2), causal=causal, mask=mask, segments=segments)
    return CacheView(k, v, allowed if prefix is None else join(allowed, prefix), False)


def continued(
    k: Tensor, v: Tensor, state: KeyValues | None, *, causal: bool, donate: bool = False, **given: Unpack[Visible]
) -> tuple[CacheView, KeyValues | None]:
    """Return what the queries of a call may see, and the next state: ``within`` without a state, else ``extend``."""
    if state is None:
        return within(k, v, causal=causal, **given), None
    return extend(state, k, v, donate=donate, **given)


def view(
    project: Callable[[Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    state: KeyValues | CachedContext | None,
    *,
    causal: bool,
    context: Tensor | None = None,
    context_mask: Tensor | None = None,
    record: dict[str, Any] | None = None,
    donate: bool = False,
    **given: Unpack[Visible],
) -> tuple[CacheView, KeyValues | CachedContext | None]:
    """Return what the queries of x may see, and the next state.

    Args:
        project: Maps x (B,N,dim) or the context (B,M,context_dim) to keys (B,H,M,D) and values (B,H,M,E).
        x: (B,N,dim) input.
        state: A cache to continue, a cached context to read, or None for x alone.
        record: Gets ``mask``.

    The other arguments are those of ``Attention.forward``.
    """
    if context is not None:
        state = of_context(*project(context), context_mask)
    if isinstance(state, CachedContext):
        found = state.view()
    else:
        found, state = continued(*project(x), state, causal=causal, donate=donate, **given)
    if record is not None:
        record["mask"] = found.allowed(x.shape[1])
    return found, state


def extend(
    cache: KeyValues,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
    donate: bool = False,
) -> tuple[CacheView, KeyValues]:
    """Add tokens to a cache for causal attention.

    Args:
        cache: The cache to continue.
        k: (B,H,N,D) keys of the new tokens.
        v: (B,H,N,E) values of the new tokens.
        mask: (B,N) bool, True on real tokens.
        segments: (B,N) int64, the sequence of each token in a packed row.
        prefix: (B,N) bool, new tokens that see each other; not together with ``segments``.
        donate: Write into free slots of the given cache, and double the slots if they run out. Otherwise the given
            cache stays intact, and the new one has exactly the slots that it needs.

    Returns:
        What the new tokens may see, and the cache with them.

    Raises:
        ValueError: For a cache with a negative length or a length beyond its slots, except while a compiler traces, and
            for packed sequences on a GPU; for tokens beyond the last slot of a cache of fixed capacity.
    """
    if isinstance(cache, FixedKeyValues):
        return _extend_fixed(cache, k, v, mask, segments, prefix, donate)
    k, v = k.to(cache.keys.dtype), v.to(cache.values.dtype)  # they differ under autocast
    if prefix is not None:
        view, added = extend(cache, k, v, mask=mask, donate=donate)
        # Slots are positions, so the prefix ends at a slot; its tokens see every slot up to there.
        end = (cache.length + prefix.sum(1))[:, None, None, None]
        slots = torch.arange(view.keys.shape[2], device=k.device)
        allowed = view.allowed(k.shape[2]) | (prefix[:, None, :, None] & (slots < end))
        return CacheView(view.keys, view.values, allowed, False), added
    if segments is not None:
        check_counts("length", cache.length, cache.keys.shape[2])
        return _extend_packed(cache, k, v, mask, segments)
    lengths = None if torch.compiler.is_compiling() else counted("length", cache.length, cache.keys.shape[2])
    if mask is None and lengths is not None and lengths[0] == lengths[1]:
        return _extend_even(cache, k, v, lengths[0], donate)
    at, length = positions(k.transpose(1, 2), cache.length, mask=mask)
    if donate and lengths is not None:
        added = _scatter_in_place(cache, k, v, at, mask, length)
    else:
        used = cache.keys.shape[2] if lengths is None else lengths[1]
        added = KeyValues(*_scatter(cache, k, v, mask, used), length)
    used = added.keys.shape[2] if lengths is None else int(length.max())
    slots = torch.arange(used, device=k.device)
    last = at if mask is None else at - (~mask).long()
    allowed = slots <= last[:, None, :, None]  # (B,1,N,used)
    return CacheView(added.keys[:, :, :used], added.values[:, :, :used], allowed, False), added


def _extend_fixed(
    cache: FixedKeyValues,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    prefix: Tensor | None,
    donate: bool,
) -> tuple[CacheView, FixedKeyValues]:
    batch, _, n, _ = k.shape
    capacity = cache.keys.shape[2]
    if n != 1 or mask is not None or segments is not None or prefix is not None:
        view, added = extend(KeyValues(*cache), k, v, mask=mask, segments=segments, prefix=prefix, donate=donate)
        return view, fixed(added, capacity)
    if readable(cache.length) and batch and counted("length", cache.length, capacity)[1] == capacity:
        raise ValueError(f"all {capacity} slots of the cache of fixed capacity are in use; fix a larger capacity")
    k, v = k.to(cache.keys.dtype), v.to(cache.values.dtype)  # they differ under autocast
    slot, rows = cache.length, torch.arange(batch, device=k.device)
    keys, values = (t if donate else t.clone() for t in (cache.keys, cache.values))
    keys[rows, :, slot], values[rows, :, slot] = k[:, :, 0], v[:, :, 0]
    allowed = torch.arange(capacity, device=k.device) <= slot[:, None]
    return CacheView(keys, values, allowed[:, None, None], False), FixedKeyValues(keys, values, slot + 1)


def _extend_even(cache: KeyValues, k: Tensor, v: Tensor, used: int, donate: bool) -> tuple[CacheView, KeyValues]:
    """All rows have equal lengths before and after: slots are slices, and only the causal mask is needed."""
    n, total = k.shape[2], used + k.shape[2]
    if donate:
        cache = with_room(cache, total)
        cache.keys[:, :, used:total] = k
        cache.values[:, :, used:total] = v
        added = KeyValues(cache.keys, cache.values, cache.length + n)
        keys, values = cache.keys[:, :, :total], cache.values[:, :, :total]
    else:
        keys, values = torch.cat([cache.keys[:, :, :used], k], 2), torch.cat([cache.values[:, :, :used], v], 2)
        added = KeyValues(keys, values, cache.length + n)
    if n == 1:
        return CacheView(keys, values, None, False), added
    if used == 0:
        return CacheView(keys, values, None, True), added
    allowed = torch.ones(n, total, dtype=torch.bool, device=k.device).tril(used)[None, None]
    return CacheView(keys, values, allowed, False), added


def with_room(cache: KeyValues, slots: int) -> KeyValues:
    """Return the cache if it has at least ``slots`` slots, else a copy with twice its slots or ``slots``."""
    capacity = cache.keys.shape[2]
    if slots <= capacity:
        return cache
    more = max(slots, 2 * capacity) - capacity
    pad = (0, 0, 0, more)
    return KeyValues(torch.nn.functional.pad(cache.keys, pad), torch.nn.functional.pad(cache.values, pad), cache.length)


def _scatter_in_place(
    cache: KeyValues, k: Tensor, v: Tensor, at: Tensor, mask: Tensor | None, length: Tensor
) -> KeyValues:
    cache = with_room(cache, int(length.max()))
    real = torch.ones_like(at, dtype=torch.bool) if mask is None else mask
    rows, tokens = real.nonzero(as_tuple=True)
    slots = at[rows, tokens]
    cache.keys[rows, :, slots] = k[rows, :, tokens]
    cache.values[rows, :, slots] = v[rows, :, tokens]
    return KeyValues(cache.keys, cache.values, length)


def _scatter(cache: KeyValues, k: Tensor, v: Tensor, mask: Tensor | None, used: int) -> tuple[Tensor, Tensor]:
    """New slots: the first ``used`` old ones, then all new tokens, real ones first in their order."""
    batch, heads, n, _ = k.shape
    order = torch.arange(n, device=k.device).expand(batch, n)
    if mask is not None:
        order = torch.argsort(~mask, dim=1, stable=True)
    slots = cache.length[:, None] + torch.arange(n, device=k.device)
    out = []
    for old, new in ((cache.keys, k), (cache.values, v)):
        shape = (batch, heads, n, new.shape[-1])
        sorted_new = new.gather(2, order[:, None, :, None].expand(shape))
        padded = torch.cat([old[:, :, :used], torch.zeros_like(new)], 2)
        out.append(padded.scatter(2, slots[:, None, :, None].expand(shape), sorted_new))
    return out[0], out[1]


def _extend_packed(
    cache: KeyValues, k: Tensor, v: Tensor, mask: Tensor | None, segments: Tensor
) -> tuple[CacheView, KeyValues]:
    """Continue the cache with the first segment; the tokens of the last one become the new cache."""
    real = torch.ones_like(segments, dtype=torch.bool) if mask is None else mask
    new = within(k, v, causal=True, mask=mask, segments=segments)
    slots = torch.arange(cache.keys.shape[2], device=k.device)
    first = segments == segments[:, :1]
    old = (slots < cache.length[:, None])[:, None, None, :] & first[:, None, :, None]
    assert new.mask is not None
    allowed = torch.cat([old.expand(-1, 1, k.shape[2], -1), new.mask.expand(len(k), -1, -1, -1)], -1)
    view = CacheView(torch.cat([cache.keys, k], 2), torch.cat([cache.values, v], 2), allowed, False)
    last = segments == segments[:, -1:]
    kept = KeyValues(cache.keys, cache.values, torch.where(first[:, -1], cache.length, 0))
    ending = real & last
    added = _scatter(kept, k, v, ending, cache.keys.shape[2])
    return view, KeyValues(*added, kept.length + ending.sum(1))
