"""States of prompts that were read before, so that a prompt with the same beginning starts there."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import states


@dataclass
class Snapshot:
    """The state after a number of tokens, and the outputs of the last one."""

    state: Any
    outputs: Tensor
    nbytes: int


class Beginning:
    """The first tokens of a prompt as their number and their digest, which grows with each piece.

    Args:
        tokens: The tokens so far.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self._length, self._digest = 0, hashlib.sha256()
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the next tokens."""
        self._length += len(tokens)
        self._digest.update(array("q", tokens).tobytes())

    @property
    def key(self) -> tuple[int, bytes]:
        """The number of tokens and their sha256."""
        return self._length, self._digest.digest()


class PrefixCache:
    """Keeps states by the exact tokens that led to them, and forgets the least recently used.

    A recurrent state cannot be cut back to fewer tokens, so it serves only prompts that begin with all of its tokens.
    Tokens are compared by their digest, since a long prompt has more memory than its state.

    Args:
        limit: Bytes of all states together; 0 keeps none.
    """

    def __init__(self, limit: int):
        if limit < 0:
            raise ValueError(f"limit={limit} must be a number of bytes >= 0")
        self.limit = limit
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self._kept: OrderedDict[tuple[int, bytes], Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Sequence[int]) -> tuple[int, Any, Tensor] | None:
        """Return the longest known beginning of a prompt.

        Args:
            tokens: The prompt.

        Returns:
            The number of tokens read, a copy of the state (one row) and of the outputs (1,size) after them; None if no
            beginning is known.
        """
        beginning, read, best = Beginning(), 0, None
        for length in sorted({length for length, _ in self._kept if length <= len(tokens)}):
            beginning.extend(tokens[read:length])
            read = length
            if (key := beginning.key) in self._kept:
                best = key
        if best is None:
            self.misses += 1
            return None
        self._kept.move_to_end(best)
        self.hits += 1
        found = self._kept[best]
        return best[0], states.clone(found.state), found.outputs.clone()

    def keep(self, tokens: Sequence[int] | Beginning, state: Any, outputs: Tensor) -> None:
        """Keep a copy of the state (one row) and the outputs (1,size) after ``tokens``.

        A long prompt that is read in pieces passes a ``Beginning``, so that no token is hashed twice.
        """
        size = states.nbytes(state) + outputs.nbytes
        if size > self.limit:
            return
        key = (tokens if isinstance(tokens, Beginning) else Beginning(tokens)).key
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        with torch.no_grad():
            self._kept[key] = Snapshot(states.clone(state), outputs.clone(), size)
        self.nbytes += size
        while self.nbytes > self.limit:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= gone.nbytes

    def clear(self) -> None:
        """Forget all states."""
        self._kept.clear()
        self.nbytes = 0
