"""Attention inside buckets, for mechanisms: whole sequences sorted by bucket, and a ring of tokens for each bucket."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import buckets as ops
from ..ops.buckets import Rule, SortedLayout
from ..ops.buckets.places import ABSENT
from ..ops.rows import ragged

# Buckets of tokens in each round, from their queries: (B,H,N,D) -> (B,H,R,N) int64.
Hash = Callable[[Tensor], Tensor]


class Rings(NamedTuple):
    """The last S tokens of each of K buckets, in R rounds; slot r mod S of a bucket holds its token of rank r."""

    keys: Tensor  # (B,H,R,K,S,D)
    values: Tensor  # (B,H,R,K,S,E)
    places: Tensor  # (B,H,R,K,S,R) int64, rank * K + bucket of the token in every round
    counts: Tensor  # (B,H,R,K) int64, tokens in each bucket so far


class Reader(NamedTuple):
    """The options of the op: hash, numbers of buckets and rounds, visibility rule and scale."""

    hash: Hash
    buckets: int
    rounds: int
    rule: Rule
    scale: float

    @property
    def slots(self) -> int:
        """Tokens of its bucket that a token may see, itself included."""
        return (self.rule.lookback + 1) * self.rule.chunk or self.rule.window


class _Tokens(NamedTuple):
    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,H,N,D)
    v: Tensor  # (B,H,N,E)
    mask: Tensor | None  # (B,N)
    segments: Tensor | None  # (B,N)


def empty(reader: Reader, batch: int, heads: int, dim: int, like: Tensor) -> Rings:
    """Return rings without tokens, in the dtype and on the device of ``like``."""
    shape = batch, heads, reader.rounds, reader.buckets
    keys = like.new_zeros(*shape, reader.slots, dim)
    places = torch.zeros(*shape, reader.slots, reader.rounds, dtype=torch.long, device=like.device)
    return Rings(keys, keys.clone(), places, places.new_zeros(shape))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Rings | None,
    reader: Reader,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    record: dict[str, Any] | None = None,
    donate: bool = False,
) -> tuple[Tensor, Rings | None]:
    """Attend within buckets, for a whole sequence or after a state.

    Args:
        q: (B,H,N,D) queries.
        k: (B,H,N,D) keys.
        v: (B,H,N,E) values.
        state: The state before these tokens, or None for whole sequences.
        reader: Options of the op.
        mask: (B,N) bool, True on real tokens.
        segments: (B,N) int64, the sequence of each token in a packed row.
        record: Gets ``matrix`` and ``mask``: with a state, over its R K S slots and then the N tokens.
        donate: Allow the state to be overwritten.

    Returns:
        The output (B,H,N,E) and the next state, None without a state.
    """
    if not q.shape[0] * q.shape[2]:
        if record is not None:
            record.update(matrix=(none := q.new_zeros(*q.shape[:3], q.shape[2])), mask=none.bool())
        return torch.zeros_like(v), state
    if state is None:
        if record is not None:
            record_matrix(q, k, v, lambda q, k: _weights(q, k, reader), mask, segments, record)
        return _whole(q, k, v, reader, mask, segments), None
    run = _continued if segments is None else _packed
    return run(_Tokens(q, k, v, mask, segments), state, reader, record, donate)


def _whole(q: Tensor, k: Tensor, v: Tensor, reader: Reader, mask: Tensor | None, segments: Tensor | None) -> Tensor:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        groups = reader.hash(q)
        return ops.attend(q, k, v, groups, reader.buckets, reader.rule, mask=mask, scale=reader.scale)[0]

    # Masked tokens are sorted behind all buckets, which needs no sizes that depend on data. If chunks are cut from the
    # whole sequence, each row needs its own length.
    if segments is None and (mask is None or not reader.rule.whole):
        return run(q, k, v, mask)
    return ragged(q, k, v, run, mask, segments, exact=reader.rule.whole or not reader.rule.causal)


def record_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    mask: Tensor | None,
    segments: Tensor | None,
    record: dict[str, Any],
) -> None:
    """Write ``matrix`` and ``mask`` (B,H,N,N) into ``record``; ``weights(q, k)`` computes both without padding."""
    n = q.shape[2]
    # The matrix times the identity is the matrix, however its tokens are split into rows.
    each = torch.eye(n, dtype=q.dtype, device=q.device).expand(*v.shape[:2], n, n)
    for name, part in (("matrix", 0), ("mask", 1)):

        def run(q: Tensor, k: Tensor, v: Tensor, part: int = part) -> Tensor:
            return weights(q, k)[part].to(v.dtype) @ v

        apart = mask is not None or segments is not None
        record[name] = ragged(q, k, each, run, mask, segments, exact=True) if apart else weights(q, k)[part]
    record["mask"] = record["mask"] > 0


def _weights(q: Tensor, k: Tensor, reader: Reader) -> tuple[Tensor, Tensor]:
    places = ops.find(reader.hash(q), reader.buckets, reader.rule)
    p = ops.reference(q, k[:, :, None], k[:, :, None], places, reader.rule, reader.scale)[1]
    return p.sum(2), ops.multiplicity(reader.hash(q), reader.buckets, reader.rule)[0]


def _continued(
    tokens: _Tokens, state: Rings, reader: Reader, record: dict[str, Any] | None, donate: bool
) -> tuple[Tensor, Rings]:
    q, k, v, mask, _ = tokens
    k, v, q = k.to(state.keys.dtype), v.to(state.values.dtype), q.to(state.keys.dtype)  # they differ under autocast
    groups, n = reader.hash(q), q.shape[2]
    if n == 1 and mask is None and record is None:
        return _step(q, k, v, groups[..., 0], state, reader, donate)
    if record is None and n > 1 and not torch.compiler.is_compiling() and not bool(state.counts.any()):
        o, places = _whole(q, k, v, reader, mask, None), None
    else:
        keys, values, places = _joined(k, v, groups, state, reader, mask)
        o = ops.read(q, keys, values, places, reader.rule, reader.scale)[0]
        if record is not None:
            _record(record, q, keys, places, reader)
    return o, _extended(k, v, groups, state, reader, mask, donate)


def _record(record: dict[str, Any], q: Tensor, keys: Tensor, places: SortedLayout, reader: Reader) -> None:
    n, old = q.shape[2], keys.shape[3] - q.shape[2]
    p = ops.reference(q, keys, keys, places, reader.rule, reader.scale)[1]  # (B,H,R,N,old+N)
    matrix = torch.cat([p[..., :old].transpose(2, 3).flatten(3), p[..., old:].sum(2)], -1)
    seen = ops.first(ops.pairs(places, reader.rule, n), places, reader.rule, n)
    shown = torch.cat([seen[..., :old].transpose(2, 3).flatten(3), seen[..., old:].any(2)], -1)
    if reader.rule.alone:
        own = torch.eye(n, dtype=torch.bool, device=q.device) & ~shown.any(-1, keepdim=True)
        exists = (places.code[:, :, 0, 0, old:] != ABSENT)[..., None, :]
        shown = torch.cat([shown[..., :-n], shown[..., -n:] | (own & exists)], -1)
    record.update(matrix=matrix * shown, mask=shown)


def _ranks(groups: Tensor, state: Rings, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of new tokens (beyond all buckets if masked), their ranks and their order, (B,H,R,n) each."""
    buckets = state.counts.shape[-1]
    if mask is not None:
        groups = groups.masked_fill(~mask[:, None, None], buckets)
    order, rank = ops.ranked(groups)
    before = state.counts.gather(-1, groups.clamp(max=buckets - 1))
    return groups, rank + before, order


def held(state: Rings) -> Tensor:
    """Return the rank of the token in each slot, (B,H,R,K,S); negative for an empty slot."""
    slots = state.keys.shape[4]
    newest = state.counts[..., None] - 1
    return newest - (newest - torch.arange(slots, device=newest.device)) % max(slots, 1)


def _joined(
    k: Tensor, v: Tensor, groups: Tensor, state: Rings, reader: Reader, mask: Tensor | None
) -> tuple[Tensor, Tensor, SortedLayout]:
    """Old tokens of the slots, then new ones, for each round: keys, values (B,H,R,K S + n,.), and their places."""
    rule, buckets, rounds, n = reader.rule, reader.buckets, reader.rounds, k.shape[2]
    own, rank, _ = _ranks(groups, state, mask)
    keys, values = (
        torch.cat([old.flatten(3, 4), new[:, :, None].expand(-1, -1, rounds, -1, -1)], 3)
        for old, new in ((state.keys, k), (state.values, v))
    )
    slot = held(state)  # (B,H,R,K,S)
    # Sorted by bucket and then rank; ranks count from the oldest that a ring can hold.
    oldest = state.counts - reader.slots
    span = reader.slots + n
    bucket = torch.arange(buckets, device=k.device)[:, None]
    at = torch.where(slot >= 0, bucket * span + slot - oldest[..., None], buckets * span).flatten(3)
    new = own * span + rank - oldest.gather(-1, own.clamp(max=buckets - 1))
    order = torch.cat([at, new], -1).argsort(dim=-1, stable=True)
    # Old tokens by source and by round, (B,H,P,R,K S); new ones, which are the same in every source.
    old = state.places.flatten(3, 4).transpose(-1, -2)
    places = torch.cat([old, (rank * buckets + own)[:, :, None].expand(-1, -1, rounds, -1, -1)], -1)
    absent = torch.cat(
        [
            (slot < 0).flatten(3)[:, :, :, None].expand_as(old),
            (own == buckets)[:, :, None].expand(-1, -1, rounds, -1, -1),
        ],
        -1,
    )
    which = places % buckets
    chunks = torch.zeros_like(which)
    if rule.chunk:
        base = state.counts // rule.chunk - rule.lookback  # (B,H,R,K), the oldest chunks that new tokens see
        base = base[:, :, None].expand(-1, -1, rounds, -1, -1).gather(-1, which)
        chunks = places // buckets // rule.chunk - base
        absent = absent | (chunks < 0)
    code = ops.coded(which, chunks, buckets, rule, n).masked_fill(absent, ABSENT)
    return keys, values, SortedLayout(order, code.int(), None)


def _extended(
    k: Tensor, v: Tensor, groups: Tensor, state: Rings, reader: Reader, mask: Tensor | None, donate: bool
) -> Rings:
    """The state after these tokens: each slot keeps the token of the largest rank that belongs into it."""
    own, rank, order = _ranks(groups, state, mask)
    buckets, n = reader.buckets, k.shape[2]
    edges = torch.arange(buckets + 1, device=k.device).expand(*own.shape[:3], -1).contiguous()
    starts = torch.searchsorted(own.gather(-1, order), edges)  # (B,H,R,K+1)
    counts = state.counts + starts.diff(dim=-1)
    wanted = held(state._replace(counts=counts))
    later = wanted - state.counts[..., None]  # how many of this call's tokens come before it in its bucket
    fresh = (later >= 0) & (wanted >= 0)
    token = order.gather(-1, (starts[..., :-1, None] + later).clamp(0, n - 1).flatten(3))  # (B,H,R,K S)
    places = (rank * buckets + own.clamp(max=buckets - 1)).transpose(2, 3)  # (B,H,n,R)

    def written(new: Tensor, before: Tensor) -> Tensor:
        taken = new.gather(2, token.flatten(2)[..., None].expand(-1, -1, -1, new.shape[-1])).view(before.shape)
        return torch.where(fresh[..., None], taken, before)

    after = Rings(written(k, state.keys), written(v, state.values), written(places, state.places), counts)
    if not donate or torch.compiler.is_compiling():
        return after
    return Rings._make(old.copy_(new) for old, new in zip(state, after, strict=True))


def _step(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, state: Rings, reader: Reader, donate: bool
) -> tuple[Tensor, Rings]:
    """One token for every row, groups (B,H,R): it attends to the ring of its bucket in each round."""
    rule, buckets, slots = reader.rule, reader.buckets, reader.slots
    rank = state.counts.gather(-1, groups[..., None])  # (B,H,R,1)

    def ring(x: Tensor) -> Tensor:
        index = groups.view(*groups.shape, *(1,) * (x.dim() - 3)).expand(*groups.shape, 1, *x.shape[4:])
        return x.gather(3, index).squeeze(3)

    keys, values, places, slot = (ring(x) for x in (state.keys, state.values, state.places, held(state)))
    which, others = places % buckets, places // buckets  # (B,H,R,S,R)
    seen = slot >= 0  # (B,H,R,S)
    if rule.chunk:
        shown = which == groups[:, :, None, None]
        shown &= others // rule.chunk >= (rank[..., 0] // rule.chunk)[:, :, None, None] - rule.lookback
        # If several rounds show a token, only the first one counts.
        earlier = shown.long().cumsum(-1) - shown.long()
        rounds = torch.arange(reader.rounds, device=q.device)[:, None]
        here = (torch.arange(reader.rounds, device=q.device) == rounds)[:, None]  # (R,1,R)
        seen = seen & ((shown & here).any(-1)) & ~((earlier > 0) & here).any(-1)
    if rule.window:
        seen = seen & (rank - slot < rule.window)
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values, seen = keys.flatten(2, 3), values.flatten(2, 3), seen.flatten(2)
    logits = torch.cat([(q @ keys.mT), (q * k).sum(-1, keepdim=True)], -1).to(wide)[:, :, 0] * reader.scale
    own = ~seen.any(-1, keepdim=True) if rule.alone else torch.ones_like(seen[..., :1])
    p = logits.masked_fill(~torch.cat([seen, own], -1), -torch.inf).softmax(-1).to(v.dtype)[:, :, None]
    o = p @ torch.cat([values, v], 2)
    return o, _written(k, v, groups, rank, state, slots, donate)


def _written(k: Tensor, v: Tensor, groups: Tensor, rank: Tensor, state: Rings, slots: int, donate: bool) -> Rings:
    """The state after one token of every row, groups (B,H,R) and ranks (B,H,R,1)."""
    place = (rank[..., 0] * state.counts.shape[-1] + groups)[:, :, None]  # (B,H,1,R)
    bucket = torch.arange(state.counts.shape[-1], device=k.device) == groups[..., None]  # (B,H,R,K)
    if donate and not torch.compiler.is_compiling():
        at = torch.meshgrid(*(torch.arange(s, device=k.device) for s in groups.shape), indexing="ij")
        index = (*at, groups, rank[..., 0] % slots)
        for ring, new in ((state.keys, k), (state.values, v), (state.places, place)):
            ring[index] = new.expand(*groups.shape, -1)
        state.counts.add_(bucket)
        return state
    here = torch.arange(slots, device=k.device) == (rank % slots)  # (B,H,R,S)
    here = (bucket[..., None] & here[..., None, :])[..., None]  # (B,H,R,K,S,1)
    keys, values, places = (
        torch.where(here, new[:, :, :, None, None], ring)
        for ring, new in ((state.keys, k), (state.values, v), (state.places, place))
    )
    return Rings(keys, values, places, state.counts + bucket)


def _packed(
    tokens: _Tokens, state: Rings, reader: Reader, record: dict[str, Any] | None, donate: bool
) -> tuple[Tensor, Any]:
    """Continue the state with the first packed sequence, and keep the tokens of the last one."""
    q, k, v, mask, segments = tokens
    assert segments is not None
    n = q.shape[2]
    real = torch.ones_like(segments, dtype=torch.bool) if mask is None else mask
    first, last = segments == segments[:, :1], segments == segments[:, -1:]
    own, others = (None, None) if record is None else ({}, {})
    begun, after = _continued(tokens._replace(mask=real & first), state, reader, own, False)
    o = torch.where(
        first[:, None, :, None],
        begun,
        attend(q, k, v, None, reader, mask=mask, segments=segments, record=others)[0].to(begun.dtype),
    )
    k, v, groups = k.to(state.keys.dtype), v.to(state.values.dtype), reader.hash(q.to(state.keys.dtype))
    nothing = Rings._make(torch.zeros_like(x) for x in state)
    fresh = _extended(k, v, groups, nothing, reader, real & last, False)
    one = first[:, -1]
    both = zip(after, fresh, strict=True)
    after = Rings._make(torch.where(one.view(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in both)
    if record is not None and own is not None and others is not None:
        for name, past in own.items():
            new = torch.nn.functional.pad(others[name], (past.shape[-1] - n, 0))
            record[name] = torch.where(first[:, None, :, None], past, new.to(past.dtype))
    if donate and not torch.compiler.is_compiling():
        after = Rings._make(old.copy_(new) for old, new in zip(state, after, strict=True))
    return o, after
