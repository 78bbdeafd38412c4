"""Transformer encoders and decoders over whole sequences, normalized after each part."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .events import EventDispatcher, IntermediateOutput
from .masking import BaseMask, FullMask, whole


class Layer(nn.Module):
    """Base class of layers: a feed-forward network, two norms, and dropout.

    Args:
        d_model: width of the model.
        d_ff: inner width of the feed-forward network; None means 4 d_model.
        dropout: probability of dropout.
        activation: name of a function of ``torch.nn.functional``.
        event_dispatcher: a dispatcher, or its name.
        attentions: attention modules, stored under their names.

    Raises:
        ValueError: ``activation`` is not a function of ``torch.nn.functional``.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None,
        dropout: float,
        activation: str,
        event_dispatcher: str | EventDispatcher,
        **attentions: nn.Module,
    ):
        super().__init__()
        # First, as in the original: an optimizer's checkpoint numbers the parameters in this order.
        for name, attention in attentions.items():
            setattr(self, name, attention)
        d_ff = d_ff or 4 * d_model
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        function = F.__dict__.get(activation)
        if not callable(function):
            raise ValueError(f"activation={activation!r} is not a function of torch.nn.functional; use relu or gelu")
        self.activation = function
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def feed(self, x: Tensor) -> Tensor:
        """Apply the feed-forward network: (..., d_model) -> (..., d_model)."""
        hidden = self.dropout(self.activation(self.linear1(x)))
        return self.dropout(self.linear2(hidden))


class EncoderParts(Layer):
    """Parameters of an encoder layer."""

    attention: nn.Module

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(d_model, d_ff, dropout, activation, event_dispatcher, attention=attention)


class DecoderParts(Layer):
    """Parameters of a decoder layer."""

    self_attention: nn.Module
    cross_attention: nn.Module

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ):
        both = {"self_attention": self_attention, "cross_attention": cross_attention}
        super().__init__(d_model, d_ff, dropout, activation, event_dispatcher, **both)
        self.norm3 = nn.LayerNorm(d_model)


class Layers(nn.Module):
    """Base class of encoders and decoders: a list of layers, and ``norm_layer`` (or None) after the last."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm_layer: nn.Module | None = None,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm_layer
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def dispatch(self, x: Tensor) -> None:
        """Dispatch an IntermediateOutput."""
        if self.event_dispatcher.listening:
            self.event_dispatcher.dispatch(IntermediateOutput(self, x))

    def end(self, x: Tensor) -> Tensor:
        """Apply the final norm, if there is one."""
        return x if self.norm is None else self.norm(x)


class TransformerEncoderLayer(EncoderParts):
    """Encoder layer: x = norm1(x + attention(x)), y = norm2(x + feed(x))."""

    def forward(self, x: Tensor, attn_mask: BaseMask | None = None, length_mask: BaseMask | None = None) -> Tensor:
        """Return (N,L,d_model) for ``x`` of that shape; masks are (L,L) and (N,L), None keeps everything."""
        attn_mask, length_mask = _everything(x, x, attn_mask), _all_tokens(x, length_mask)
        y = self.attention(x, x, x, attn_mask=attn_mask, query_lengths=length_mask, key_lengths=length_mask)
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.feed(x))


class TransformerEncoder(Layers):
    """Encoder. It is causal with ``attn_mask=TriangularCausalMask(L)``."""

    def forward(self, x: Tensor, attn_mask: BaseMask | None = None, length_mask: BaseMask | None = None) -> Tensor:
        """Encode sequences.

        Args:
            x: (N,L,d_model).
            attn_mask: (L,L); None keeps everything.
            length_mask: (N,L); None keeps everything.

        Returns:
            (N,L,d_model).
        """
        attn_mask, length_mask = _everything(x, x, attn_mask), _all_tokens(x, length_mask)
        for layer in self.layers:
            x = layer(x, attn_mask=attn_mask, length_mask=length_mask)
            self.dispatch(x)
        return self.end(x)


class TransformerDecoderLayer(DecoderParts):
    """Decoder layer: x = norm1(x + self_attention(x)), norm2(x + cross_attention(x, memory)), norm3(x + feed(x))."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        x_mask: BaseMask | None = None,
        x_length_mask: BaseMask | None = None,
        memory_mask: BaseMask | None = None,
        memory_length_mask: BaseMask | None = None,
    ) -> Tensor:
        """Decode ``x`` with a memory.

        Args:
            x: (N,L,d_model).
            memory: (N,S,d_memory).
            x_mask: (L,L); None keeps everything, as for all masks.
            x_length_mask: (N,L).
            memory_mask: (L,S).
            memory_length_mask: (N,S).

        Returns:
            (N,L,d_model).
        """
        x_mask, x_lengths = _everything(x, x, x_mask), _all_tokens(x, x_length_mask)
        memory_mask, lengths = _everything(x, memory, memory_mask), _all_tokens(memory, memory_length_mask)
        y = self.self_attention(x, x, x, attn_mask=x_mask, query_lengths=x_lengths, key_lengths=x_lengths)
        x = self.norm1(x + self.dropout(y))
        y = self.cross_attention(x, memory, memory, attn_mask=memory_mask, query_lengths=x_lengths, key_lengths=lengths)
        x = self.norm2(x + self.dropout(y))
        return self.norm3(x + self.feed(x))


class TransformerDecoder(Layers):
    """Decoder whose layers all read the same memory."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        x_mask: BaseMask | None = None,
        x_length_mask: BaseMask | None = None,
        memory_mask: BaseMask | None = None,
        memory_length_mask: BaseMask | None = None,
    ) -> Tensor:
        """Decode ``x`` with a memory; arguments as in ``TransformerDecoderLayer``."""
        masks = {
            "x_mask": _everything(x, x, x_mask),
            "x_length_mask": _all_tokens(x, x_length_mask),
            "memory_mask": _everything(x, memory, memory_mask),
            "memory_length_mask": _all_tokens(memory, memory_length_mask),
        }
        for layer in self.layers:
            x = layer(x, memory, **masks)
            self.dispatch(x)
        return self.end(x)


def _everything(x: Tensor, memory: Tensor, mask: BaseMask | None) -> BaseMask:
    return FullMask(x.shape[1], memory.shape[1], device=x.device) if mask is None else mask


def _all_tokens(x: Tensor, mask: BaseMask | None) -> BaseMask:
    return whole(len(x), x.shape[1], x.device) if mask is None else mask
