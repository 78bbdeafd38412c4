"""The hook for sequence parallelism: which processes hold the other tokens of a row, for the ops that look back.

``longspan.distributed`` sets the shards while a model runs. Without them, an op reads one global and goes on.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Protocol

from torch import Tensor

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


class Shards(Protocol):
    """What attentions and ops call if each row of tokens is spread over processes."""

    def attend(self, attention: Any, run: Callable[[Tensor, Any], tuple[Any, ...]], x: Tensor, state: Any) -> Any:
        """Return ``run(x, state)``, the ``attend`` of an attention, as one process with whole rows would."""
        ...

    def recur(self, run: Callable[[Any], tuple[Tensor, Tensor]], r: Any) -> tuple[Tensor, Tensor]:
        """Return ``run(r)``, which serves checked operands of ``gated``, after the state before this shard."""
        ...

    def linear(self, run: Callable[[Any], tuple[Tensor, Tensor]], r: Any) -> tuple[Tensor, Tensor]:
        """Return ``run(r)``, which serves checked operands of ``linear``, after the sums before this shard."""
        ...

    def stabilized(self, run: Callable[..., tuple[Tensor, Any]], *args: Any, **kwargs: Any) -> Any:
        """Return ``run``, which is ``stabilized.attend``, after the sums before this shard."""
        ...

    def convolve(self, run: Callable[[Any], tuple[Tensor, Tensor]], r: Any) -> tuple[Tensor, Tensor]:
        """Return ``run(r)``, which serves checked operands of ``convolution``, after the inputs before this shard."""
        ...

    def band(self, run: Callable[..., tuple[Tensor, Any]], *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of ``run``, which is ``lookback.attend`` under a causal band."""
        ...

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Return the keys and values up to this shard's end, and a mask of them or whether they are causal."""
        ...

    def position(self, start: Tensor | None, x: Tensor) -> Tensor:
        """Return the position (B,) of the first token of x (B,N,...); ``start`` (B,) is that of the row."""
        ...

    def contexts(self) -> Contexts:
        """Return contexts for a block and for its recomputation, as ``checkpoint(context_fn=...)`` needs them."""
        ...


# A plain global, as in ``backends``.
_shards: Shards | None = None


def active_shards() -> Shards | None:
    """Return the shards that the running model is split into; None outside of sequence parallelism."""
    return _shards


def set_shards(shards: Shards | None) -> Shards | None:
    """Set the shards, and return those before."""
    global _shards
    old, _shards = _shards, shards
    return old


@contextlib.contextmanager
def use_shards(shards: Shards | None) -> Generator[None, None, None]:
    """Set the shards inside a ``with`` block."""
    old = set_shards(shards)
    try:
        yield
    finally:
        set_shards(old)
