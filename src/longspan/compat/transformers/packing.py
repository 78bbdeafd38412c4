"""Rows of several sequences: where each begins, from what a collator gives, and no layer that does not know of it.

``DataCollatorWithFlattening`` lays sequences one after the other into one row and says so by ``position_ids`` that
start again, and, if asked for, by ``seq_idx`` or ``cu_seq_lens_q``. Softmax layers of transformers read the positions,
recurrent ones only the others. Here every model finds out by any of them and hands all layers ``seq_idx``, and the
recurrent ones refuse to run where that does not arrive.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The sequences of the row that a model is at work on, None where rows are not packed.
_expected: ContextVar[Tensor | None] = ContextVar("longspan_packed_rows", default=None)


def borders(kwargs: Mapping[str, Any], batch: int, n: int) -> Tensor | None:
    """The number (B,N) of each token's sequence in its row, int64, from what a layer was given; None: one per row.

    By ``seq_idx`` (B,N), equal numbers side by side, or ``cu_seqlens`` or ``cu_seq_lens_q`` (S+1,), where each sequence
    of a single row begins, and the end.

    Raises ValueError where these do not fit the layer's tokens, or where the row is packed and nothing says how.
    """
    ids = kwargs.get("seq_idx")
    if ids is not None:
        if tuple(ids.shape) != (batch, n):
            raise ValueError(f"seq_idx {tuple(ids.shape)} must have a number for each token: {(batch, n)}")
        return _counted(ids[:, 1:] != ids[:, :-1]) if n else ids.long()
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if (starts := kwargs.get(name)) is not None:
            return _from_starts(name, starts, batch, n)
    if _expected.get() is not None:
        raise ValueError(
            "rows are packed, but this version of the model does not tell its recurrent layers where sequences begin, "
            "which would leak from one into the next; use a later transformers (5.15 at least), or rows of one sequence"
        )
    return None


def _counted(border: Tensor) -> Tensor:
    """(B,N-1) whether each token but the first begins a sequence -> the number of each token's, (B,N)."""
    return F.pad(border.long().cumsum(-1), (1, 0))


def _from_starts(name: str, starts: Tensor, batch: int, n: int) -> Tensor:
    starts = starts.flatten().long()
    if batch != 1 or not len(starts) or starts[0] != 0 or starts[-1] != n or bool((starts.diff() < 0).any()):
        raise ValueError(f"{name}={starts.tolist()} must rise from 0 to the {n} tokens of a single row, not of {batch}")
    if not n:
        return torch.zeros(1, 0, dtype=torch.long)
    border = torch.zeros(1, n - 1, dtype=torch.bool)
    inner = starts[(starts > 0) & (starts < n)]
    border[0, inner - 1] = True
    return _counted(border)


def of_positions(positions: Tensor | None) -> Tensor | None:
    """positions (B,N), which go up by one inside a sequence -> the number of each token's; None: one per row."""
    if positions is None or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    border = positions.diff() != 1
    return _counted(border) if bool(border.any()) else None


def positions_of(ids: Tensor) -> Tensor:
    """Numbers of sequences (B,N) -> the position (B,N) of each token in its own."""
    at = torch.arange(ids.shape[1]).expand_as(ids)
    first = torch.where(F.pad(ids.diff() != 0, (1, 0), value=True), at, 0).cummax(-1).values
    return at - first


def told(original: Callable, refused: str, unplaced: bool = False) -> Callable:
    """A model's ``forward`` that hands on what it finds out of packed rows; ``refused``: why it cannot, or "".

    ``unplaced``: the model numbers the tokens after a cache from 0 on unless it is given ``position_ids``.
    """
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or len(args) > len(names):  # pyright: ignore[reportPrivateImportUsage]
            return original(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        tokens = next((t for t in map(given.get, ("input_ids", "inputs_embeds")) if t is not None), None)
        if tokens is None or not tokens.is_cpu:
            return original(self, *args, **kwargs)
        if unplaced and "position_ids" in names:
            given |= _placed(given, tokens)
        ids = found(given, *tokens.shape[:2]) if tokens.shape[1] > 1 else None
        if ids is None:
            return original(self, **given)
        if refused:
            raise ValueError(f"{type(self).__name__} cannot take packed rows: {refused}")
        token = _expected.set(ids)
        try:
            return original(self, **_completed(given, ids, names))
        finally:
            _expected.reset(token)

    return forward


def found(given: Mapping[str, Any], batch: int, n: int) -> Tensor | None:
    """The number (B,N) of each token's sequence, from the arguments of a model; None where rows are not packed.

    Raises ValueError where they contradict each other.
    """
    outside, positions = _expected.get(), given.get("position_ids")
    if positions is not None and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # of text, before those of time, height and width
    if outside is not None and tuple(outside.shape) != (batch, n):
        outside = None
    token = _expected.set(None)
    try:
        ids = borders(given, batch, n)
    finally:
        _expected.reset(token)
    if positions is not None and positions.dim() == 2 and positions.shape[0] == 1:
        positions = positions.expand(batch, -1)
    mask, cache = given.get("attention_mask"), _cache(given)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        mask = None
    padded = mask is not None and not bool(mask.all())
    by_position = None
    if cache is None and positions is not None and positions.shape[-1] == n:
        by_position = of_positions(positions)
    if by_position is not None and mask is not None and padded and ids is None:
        # Padding has positions of its own; only a border between two real tokens is one.
        real = mask[:, -n:].bool()
        inner = (by_position.diff() != 0) & real[:, 1:] & real[:, :-1]
        by_position = by_position if bool(inner.any()) else None
    if ids is None:
        ids = outside if by_position is None else by_position
    elif by_position is not None and not torch.equal(ids, by_position):
        raise ValueError("position_ids start again at other tokens than those where seq_idx or cu_seq_lens_q change")
    elif by_position is None and positions is not None and positions.dim() == 2 and bool((ids != ids[:, :1]).any()):
        raise ValueError("position_ids do not start again where seq_idx or cu_seq_lens_q begin a sequence")
    if ids is None or not bool((ids != ids[:, :1]).any()):
        return None
    if padded:
        raise ValueError("packed rows take no padding: leave attention_mask out, or give each row one sequence")
    if cache is not None:
        raise ValueError("a cache has one state for each row; a packed row, of several sequences, must go without")
    return ids


def _cache(given: Mapping[str, Any]) -> Any:
    return next((c for c in map(given.get, ("cache", "past_key_values", "cache_params")) if c is not None), None)


def _placed(given: Mapping[str, Any], tokens: Tensor) -> dict[str, Tensor]:
    """``position_ids`` (1,N) of tokens (B,N,...) that go on with a cache, where a model is given none."""
    cache = _cache(given)
    if cache is None or given.get("position_ids") is not None:
        return {}
    return {"position_ids": torch.arange(tokens.shape[1])[None] + cache.get_seq_length()}


def _completed(given: Mapping[str, Any], ids: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a model with what its layers need."""
    if given.get("use_cache"):
        raise ValueError("packed rows need use_cache=False: a cache has one state for each row, not for each sequence")
    more: dict[str, Any] = {"seq_idx": ids.int(), "use_cache": False}
    if "position_ids" in names and given.get("position_ids") is None:
        more["position_ids"] = positions_of(ids)
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        # Softmax layers read positions only where there is none; this one hides nothing.
        more["attention_mask"] = None
    return {**given, **more}


def masked(original: Callable) -> Callable:
    """``create_causal_mask`` and its like for models that forget to hand it the positions of packed rows."""

    @functools.wraps(original)
    def create(*args, **kwargs):
        # First, so that a compiler sees nothing but the original.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if (ids := _expected.get()) is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions_of(ids)
        return original(*args, **kwargs)

    return create
