"""Transformer encoders and decoders for one token at a time, with the parameters of ``transformers``."""

from typing import Any

from torch import Tensor

from ..masking import BaseMask, whole
from ..transformers import DecoderParts, EncoderParts, Layers
from .attention import check_state


class RecurrentTransformerEncoderLayer(EncoderParts):
    """``TransformerEncoderLayer`` under a causal mask, for one token."""

    def forward(self, x: Tensor, state: Any = None, memory: Any = None) -> tuple[Tensor, Any]:
        """Return (N,d_model) and the state for ``x`` (N,d_model); ``memory`` is an older name of ``state``."""
        y, state = self.attention(x, x, x, state=check_state(state, memory))
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.feed(x)), state


class RecurrentTransformerEncoder(Layers):
    """Encoder for one token at a time."""

    def forward(self, x: Tensor, state: list | None = None, memory: list | None = None) -> tuple[Tensor, list]:
        """Encode one token.

        Args:
            x: (N,d_model).
            state: a list with one state per layer; None at the beginning.
            memory: an older name of ``state``.

        Returns:
            (N,d_model), and a new list of states.

        Raises:
            ValueError: the list does not have one state per layer.
        """
        states = _states(self, check_state(state, memory))
        for i, layer in enumerate(self.layers):
            x, states[i] = layer(x, states[i])
            self.dispatch(x)
        return self.end(x), states


class RecurrentTransformerDecoderLayer(DecoderParts):
    """``TransformerDecoderLayer`` under a causal ``x_mask``, for one token."""

    def forward(
        self, x: Tensor, memory: Tensor, memory_length_mask: BaseMask | None = None, state: Any = None
    ) -> tuple[Tensor, list]:
        """Return (N,d_model) and [self, cross] attention states for ``x`` (N,d_model), ``memory`` (N,S,d_memory)."""
        if memory_length_mask is None:
            memory_length_mask = whole(len(x), memory.shape[1], x.device)
        before, cross = [None, None] if state is None else state
        y, before = self.self_attention(x, x, x, state=before)
        x = self.norm1(x + self.dropout(y))
        y, cross = self.cross_attention(x, memory, memory, memory_length_mask, state=cross)
        x = self.norm2(x + self.dropout(y))
        return self.norm3(x + self.feed(x)), [before, cross]


class RecurrentTransformerDecoder(Layers):
    """Decoder for one token at a time."""

    def forward(
        self, x: Tensor, memory: Tensor, memory_length_mask: BaseMask | None = None, state: list | None = None
    ) -> tuple[Tensor, list]:
        """Decode one token.

        Args:
            x: (N,d_model).
            memory: (N,S,d_memory), ignored with a state.
            memory_length_mask: (N,S); None keeps everything. Every call reads it.
            state: a list with one state per layer; None at the beginning.

        Returns:
            (N,d_model), and a new list of states.

        Raises:
            ValueError: the list does not have one state per layer.
        """
        states = _states(self, state)
        if memory_length_mask is None:
            memory_length_mask = whole(len(x), memory.shape[1], x.device)
        for i, layer in enumerate(self.layers):
            x, states[i] = layer(x, memory, memory_length_mask=memory_length_mask, state=states[i])
            self.dispatch(x)
        return self.end(x), states


def _states(model: Layers, state: list | None) -> list:
    """Return a copy of the list, so that the caller's does not change."""
    if state is None:
        return [None] * len(model.layers)
    if len(state) != len(model.layers):
        raise ValueError(f"the state of this model must be a list of {len(model.layers)} states, not {len(state)}")
    return list(state)
