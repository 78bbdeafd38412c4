"""The base of causal mechanisms that keep the keys and values of all tokens, and number them from the first."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import rows
from ..ops.operands import followed
from ..states.kv_cache import CacheView, KeyValues
from .base import S
from .grouped import Grouped

Run = Callable[[Tensor, Any, Tensor | None, bool], tuple[Tensor, Any]]


class Cached(Grouped[S]):
    """A subclass calls ``create`` in ``__init__``, and defines ``_run`` for rows that begin with their real tokens."""

    directions = ("causal",)

    @property
    def positional(self) -> bool:
        return True

    def attend(
        self,
        x: Tensor,
        state: S | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, S | None]:
        return self.by_sequences(self._run, x, state, mask, segments, donate)

    def by_sequences(
        self,
        run: Run,
        x: Tensor,
        state: Any,
        mask: Tensor | None,
        segments: Tensor | None,
        donate: bool,
        *,
        exact: bool = False,
    ) -> tuple[Tensor, Any]:
        """Call ``run`` for rows that begin with their real tokens; ``exact``: without padding that is not masked."""

        def clean(x: Tensor, state: Any, real: Tensor | None) -> tuple[Tensor, Any]:
            x = x if real is None else x.masked_fill(~real[..., None], 0.0)
            if not x.numel() or (real is not None and not followed() and not bool(real.any())):
                return self.out(x), state
            return run(x, state, real, donate and segments is None)

        return rows.map_sequences(clean, x, state, mask, segments, causal=not exact, width=self.dim)

    def _run(self, x: Tensor, state: Any, real: Tensor | None, donate: bool) -> tuple[Tensor, Any]:
        """x (B,N,dim), of which ``real`` (B,N) marks the first tokens of each row, or all if it is None."""
        raise NotImplementedError(f"{type(self).__name__} defines no _run")


def check_least(least: int = 1, **options: int) -> None:
    """Raise ValueError for an option below ``least``."""
    for option, value in options.items():
        if value < least:
            raise ValueError(f"{option}={value} must be at least {least}")


def places(view: CacheView, past: KeyValues, start: Tensor, n: int, real: Tensor | None) -> Tensor | None:
    """Return the positions (B,n) of the queries of a call, or None where they are the last tokens of the cache.

    Args:
        view: What the queries see, from ``kv_cache.extend``.
        past: The cache after the call.
        start: (B,) int64, the tokens before the call.
        n: The number of queries.
        real: (B,n) bool, the real tokens, or None.
    """
    last = view.mask is None
    if not last and real is None and not torch.compiler.is_compiling():
        last = bool((past.length == view.keys.shape[2]).all())
    return None if last else start[:, None] + torch.arange(n, device=start.device)
