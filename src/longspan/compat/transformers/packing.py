"""Packed and padded rows: find where each sequence begins and which tokens are real, and pass it to every layer.

``DataCollatorWithFlattening`` packs sequences into one row and marks them by ``position_ids`` that restart, and on
request by ``seq_idx`` or ``cu_seq_lens_q``. Softmax layers of transformers read the positions, recurrent layers only
the other two. Here a model accepts any of them and passes ``seq_idx`` to all layers. A recurrent layer that does not
receive it raises an error.

Recurrent layers of transformers set padding to zeros, which still moves their states and the windows of convolutions.
Here they read the mask of the model's call, by ``real``, and skip padding.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rows(NamedTuple):
    """The rows that a model is reading."""

    ids: Tensor | None = None
    """(B,N) int64, the number of each token's sequence; None if rows are not packed"""
    real: Tensor | None = None
    """(B,N) bool, False on padding; None if there is none"""


_rows: ContextVar[Rows] = ContextVar("longspan_rows", default=Rows())  # noqa: B039 (a tuple of None)


def borders(kwargs: Mapping[str, Any], batch: int, n: int) -> Tensor | None:
    """Return the number of each token's sequence from the arguments of a layer.

    Args:
        kwargs: arguments of the layer: ``seq_idx`` (B,N), with equal numbers next to each other, or ``cu_seqlens`` or
            ``cu_seq_lens_q`` (S+1,), the offsets of the sequences of a single row.
        batch: number of rows.
        n: number of tokens.

    Returns:
        (B,N) int64, or None with one sequence per row.

    Raises:
        ValueError: the arguments do not fit the tokens, or a packed row comes without them.
    """
    ids = kwargs.get("seq_idx")
    if ids is not None:
        if tuple(ids.shape) != (batch, n):
            raise ValueError(f"seq_idx must be {(batch, n)}, one number per token, not {tuple(ids.shape)}")
        return _counted(ids[:, 1:] != ids[:, :-1]) if n else ids.long()
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if (starts := kwargs.get(name)) is not None:
            return _from_starts(name, starts, batch, n)
    if _rows.get().ids is not None:
        raise ValueError(
            "rows are packed, but this version of transformers does not pass the sequence boundaries to its recurrent "
            "layers, so sequences would leak; use transformers 5.15 or later, or rows of one sequence"
        )
    return None


def _counted(border: Tensor) -> Tensor:
    """Return the number of each token's sequence (B,N); ``border`` (B,N-1): whether tokens from 1 on begin one."""
    return F.pad(border.long().cumsum(-1), (1, 0))


def _from_starts(name: str, starts: Tensor, batch: int, n: int) -> Tensor:
    starts = starts.flatten().long()
    if batch != 1 or not len(starts) or starts[0] != 0 or starts[-1] != n or bool((starts.diff() < 0).any()):
        raise ValueError(
            f"{name}={starts.tolist()} must increase from 0 to {n}, the number of tokens, in a single row, not {batch}"
        )
    if not n:
        return torch.zeros(1, 0, dtype=torch.long)
    border = torch.zeros(1, n - 1, dtype=torch.bool)
    inner = starts[(starts > 0) & (starts < n)]
    border[0, inner - 1] = True
    return _counted(border)


def of_positions(positions: Tensor | None) -> Tensor | None:
    """Return the number of each token's sequence from positions (B,N) that restart; None with one sequence per row."""
    if positions is None or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    border = positions.diff() != 1
    return _counted(border) if bool(border.any()) else None


def positions_of(ids: Tensor) -> Tensor:
    """Return the position (B,N) of each token in its sequence, from the numbers of sequences (B,N)."""
    at = torch.arange(ids.shape[1]).expand_as(ids)
    first = torch.where(F.pad(ids.diff() != 0, (1, 0), value=True), at, 0).cummax(-1).values
    return at - first


def pass_rows(original: Callable, refused: str, reads_padding: str = "", numbers_anew: bool = False) -> Callable:
    """Wrap a model's ``forward`` so that all of its layers know the boundaries of packed rows, and the padding.

    Args:
        original: the ``forward`` method.
        refused: why the model does not support packed rows, or "".
        reads_padding: why the model does not support padding between tokens, or "".
        numbers_anew: whether the model numbers the tokens after a cache from 0 unless it receives ``position_ids``.
    """
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or len(args) > len(names):  # pyright: ignore[reportPrivateImportUsage] (documented by torch)
            return original(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        tokens = next((t for t in map(given.get, ("input_ids", "inputs_embeds")) if t is not None), None)
        if tokens is None or not tokens.is_cpu:
            return original(self, *args, **kwargs)
        batch, n = tokens.shape[:2]
        own, mask = padding(given, batch, n)
        if mask is not None:
            refuse_between(self.config, mask, n, reads_padding)
        if "position_ids" in names and given.get("position_ids") is None:
            given |= _placed(given, n, mask, numbers_anew)
        ids = found(given, batch, n) if n > 1 else None
        if ids is not None and refused:
            raise ValueError(
                f"{type(self).__name__} does not support packed rows: {refused}; pass one sequence per row"
            )
        outer = _rows.get()
        if ids is None and own is None and outer.real is None:
            return original(self, **given)
        rows = Rows(outer.ids if ids is None else ids, own)
        with _reading(rows), _remembered(self, rows):
            return original(self, **(given if ids is None else _completed(given, ids, names)))

    return forward


def padding(given: Mapping[str, Any], batch: int, n: int) -> tuple[Tensor | None, Tensor | None]:
    """Return which tokens are real, from a model's arguments.

    Returns:
        The mask (B,N) of the model's tokens, and that of all tokens so far (B,M), both bool; None if all are real, or
        if only the first is known.

    Raises:
        ValueError: the mask does not fit the tokens.
    """
    whole = given.get("attention_mask")
    masks = whole.values() if isinstance(whole, Mapping) else [whole]  # by kind of layer, as of generate
    mask = next((one for one in masks if isinstance(one, Tensor) and one.dim() == 2), None)
    if mask is None:
        # That of a model around this one, whose tokens they are.
        outer = _rows.get().real
        return outer if outer is not None and tuple(outer.shape) == (batch, n) else None, None
    last, mask = mask_of_last(mask, batch, n), mask.bool()
    return last, None if bool(mask.all()) or not isinstance(whole, Tensor) else mask


def mask_of_last(mask: Tensor | None, batch: int, n: int) -> Tensor | None:
    """Return the part of an attention mask for the last n tokens, bool (B,n); None if all are real.

    Raises:
        ValueError: the mask does not fit the tokens.
    """
    if mask is None:
        return None
    if mask.dim() != 2 or len(mask) != batch or mask.shape[1] < n:
        raise ValueError(
            f"attention_mask must be (B, N) = {(batch, n)}, or longer by the tokens of the cache, with 1 on real "
            f"tokens, not {tuple(mask.shape)}"
        )
    mask = mask[:, mask.shape[1] - n :].bool()
    return None if bool(mask.all()) else mask


def real(batch: int, n: int, *, earlier: bool = False) -> Tensor | None:
    """Return which of a layer's n tokens are real (B,N); None if all are.

    Args:
        batch: number of rows.
        n: number of tokens.
        earlier: the tokens begin with some of earlier calls, which count as real.

    Raises:
        ValueError: a layer has other rows than the model.
    """
    mask = _rows.get().real
    if mask is None:
        return None
    more = n - mask.shape[1]
    if len(mask) != batch or more < 0 or (more and not earlier):
        raise ValueError(f"a layer has {(batch, n)} tokens, but the padded rows of its model are {tuple(mask.shape)}")
    return F.pad(mask, (more, 0), value=True)


def refuse_between(config: Any, mask: Tensor, n: int, why: str) -> None:
    """Raise ValueError for padding between tokens that a model cannot skip.

    Args:
        config: the model's.
        mask: (B,M) bool, the real ones of all tokens so far.
        n: number of tokens that the model reads now, the last ones.
        why: why the model never can, or ""; in a sliding window, padding takes the places of real tokens.
    """
    after = mask.flip(1).cumsum(1).flip(1) > 0
    between = ~mask & (mask.cumsum(1) > 0) & after
    names = ("sliding_window", "sliding_window_size", "attention_window_size")
    text = config.get_text_config()
    window = next((size for name in names if isinstance(size := getattr(text, name, None), int)), None)
    if not why and window is not None and mask.shape[1] > window:
        between = between[:, max(mask.shape[1] - n - window, 0) :]
        why = f"in its sliding window of {window} tokens, padding takes the places of real tokens"
    if why and bool(between.any()):
        raise ValueError(
            f"a model of type {config.model_type} does not support padding between tokens: {why}; "
            "pad prompts on the left"
        )


def with_sequences(original: Callable) -> Callable:
    """Wrap a layer's ``forward`` whose caller does not pass it the boundaries of packed rows."""
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        # First, so that a compiler sees only the original.
        if torch.compiler.is_compiling() or kwargs.get("seq_idx") is not None:
            return original(self, *args, **kwargs)
        x = args[0] if args else kwargs[names[0]]
        ids = sequences(*x.shape[:2])
        return original(self, *args, **(kwargs if ids is None else {**kwargs, "seq_idx": ids.int()}))

    return forward


def sequences(batch: int, n: int) -> Tensor | None:
    """Return the number (B,N) of each token's sequence in the rows that a model is reading; None if not packed.

    Raises:
        ValueError: a layer has other rows than the model.
    """
    ids = _rows.get().ids
    if ids is not None and tuple(ids.shape) != (batch, n):
        raise ValueError(f"a layer has {(batch, n)} tokens, but the packed rows of its model are {tuple(ids.shape)}")
    return ids


@contextlib.contextmanager
def _reading(rows: Rows) -> Iterator[None]:
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


@contextlib.contextmanager
def _remembered(model: nn.Module, rows: Rows) -> Iterator[None]:
    """Make checkpointed layers know the rows when the backward pass computes them again, after the call."""
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    kept = [(m, m.__dict__.get("_gradient_checkpointing_func")) for m in layers]

    def checkpoint(run: Callable) -> Callable:
        def checkpointed(layer: Callable, *args, **kwargs):
            def again(*given):
                with _reading(rows):
                    return layer(*given)

            return run(again, *args, **kwargs)

        return checkpointed

    try:
        for layer, run in kept:
            if run is not None:
                layer._gradient_checkpointing_func = checkpoint(run)  # pyright: ignore[reportArgumentType] (a function)
        yield
    finally:
        for layer, run in kept:
            if run is not None:
                layer._gradient_checkpointing_func = run  # pyright: ignore[reportArgumentType] (a function)


def found(given: Mapping[str, Any], batch: int, n: int) -> Tensor | None:
    """Return the number (B,N) of each token's sequence from a model's arguments; None if rows are not packed.

    Raises:
        ValueError: the arguments contradict each other.
    """
    outside, positions = _rows.get().ids, given.get("position_ids")
    if positions is not None and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # text positions; time, height and width follow
    if outside is not None and tuple(outside.shape) != (batch, n):
        outside = None
    with _reading(Rows()):
        ids = borders(given, batch, n)
    if positions is not None and positions.dim() == 2 and positions.shape[0] == 1:
        positions = positions.expand(batch, -1)
    mask, cache = given.get("attention_mask"), cache_of(given)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        mask = None
    padded = mask is not None and not bool(mask.all())
    by_position = None
    if cache is None and positions is not None and positions.shape[-1] == n:
        by_position = of_positions(positions)
    if by_position is not None and mask is not None and padded and ids is None:
        # Positions of padding are arbitrary, so only a boundary between two real tokens counts.
        real = mask[:, -n:].bool()
        inner = (by_position.diff() != 0) & real[:, 1:] & real[:, :-1]
        by_position = by_position if bool(inner.any()) else None
    if ids is None:
        ids = outside if by_position is None else by_position
    elif by_position is not None and not torch.equal(ids, by_position):
        raise ValueError(
            "position_ids and seq_idx or cu_seq_lens_q disagree on where sequences begin; pass one of them"
        )
    elif by_position is None and positions is not None and positions.dim() == 2 and bool((ids != ids[:, :1]).any()):
        raise ValueError(
            "position_ids do not restart where seq_idx or cu_seq_lens_q begin a sequence; leave position_ids out"
        )
    if ids is None or not bool((ids != ids[:, :1]).any()):
        return None
    if padded:
        raise ValueError("packed rows do not support padding; leave attention_mask out, or pass one sequence per row")
    if cache is not None:
        raise ValueError("packed rows do not support a cache, which has one state per row; leave the cache out")
    return ids


def cache_of(given: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model or layer, or None."""
    return next(
        (c for c in map(given.get, ("cache", "past_key_values", "cache_params", "state")) if c is not None), None
    )


def _placed(given: Mapping[str, Any], n: int, mask: Tensor | None, numbers_anew: bool) -> dict[str, Tensor]:
    """Return ``position_ids`` of the last n tokens, where the model would count padding or forget a cache."""
    if mask is not None:
        # As ``generate`` numbers them.
        return {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)[:, mask.shape[1] - n :]}
    cache = cache_of(given)
    return (
        {"position_ids": torch.arange(n)[None] + cache.get_seq_length()} if numbers_anew and cache is not None else {}
    )


def _completed(given: Mapping[str, Any], ids: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    """Add the arguments that the layers need."""
    if given.get("use_cache"):
        raise ValueError("packed rows need use_cache=False: a cache has one state per row, not per sequence")
    more: dict[str, Any] = {"seq_idx": ids.int(), "use_cache": False}
    if "position_ids" in names and given.get("position_ids") is None:
        more["position_ids"] = positions_of(ids)
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        # Softmax layers read positions only without a mask, and this mask hides nothing.
        more["attention_mask"] = None
    return {**given, **more}


def masked(original: Callable) -> Callable:
    """Wrap ``create_causal_mask`` and similar functions, for models that do not pass them ``position_ids``."""

    @functools.wraps(original)
    def create(*args, **kwargs):
        # First, so that a compiler sees only the original.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if (ids := _rows.get().ids) is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions_of(ids)
        return original(*args, **kwargs)

    return create
