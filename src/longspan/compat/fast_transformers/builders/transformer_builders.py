"""Builders of encoders and decoders, for whole sequences and one token at a time."""

from typing import Any, ClassVar

from torch import nn

from ..attention.attention_layer import AttentionLayer
from ..recurrent.attention import RecurrentAttentionLayer, RecurrentCrossAttentionLayer
from ..recurrent.transformers import (
    RecurrentTransformerDecoder,
    RecurrentTransformerDecoderLayer,
    RecurrentTransformerEncoder,
    RecurrentTransformerEncoderLayer,
)
from ..transformers import TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer
from .attention_builders import (
    AttentionBuilder,
    BaseAttentionBuilder,
    RecurrentAttentionBuilder,
    RecurrentCrossAttentionBuilder,
)
from .base import BaseBuilder


class BaseTransformerBuilder(BaseBuilder):
    """Parameters of the model are attributes with defaults; any other name is offered to the attention builders.

    A name that both know, such as ``query_dimensions``, reaches both.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "n_layers": 4,
        "n_heads": 4,
        "query_dimensions": 64,
        "value_dimensions": 64,
        "feed_forward_dimensions": 1024,
        "model_dimensions": None,
        "dropout": 0.1,
        "activation": "relu",
        "final_normalization": True,
        "event_dispatcher": "",
    }
    builders: ClassVar[dict[str, type]] = {}

    def __init__(self):
        made = {name: cls() for name, cls in self.builders.items()}
        self.__dict__.update(_values=dict(self.defaults), _builders=made)

    def __getattr__(self, name: str) -> Any:
        # Also asked while a copy is being made, before there is a dictionary.
        if name in self.__dict__.get("_builders", {}):
            return self._builders[name]
        if name in self.__dict__.get("_values", {}):
            value = self._values[name]
            return self._derived(name) if value is None and self.defaults[name] is None else value
        raise AttributeError(f"the builder has no parameter {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name in self._builders:
            raise AttributeError(f"{name} is the attention's builder; set its parameters, not itself")
        if name in self._values:
            self._check(name, value)
            self._values[name] = bool(value) if name == "final_normalization" else value
        self._offer(name, value)

    def _offer(self, name: str, value: Any) -> None:
        """Hand a parameter to those attention builders that know it; AttributeError where nobody does."""
        takers = [b for b in self._builders.values() if b._registry.contains_parameter(name)]
        if not takers and name not in self._values:
            raise AttributeError(f"the builder has no parameter {name!r}")
        for builder in takers:
            setattr(builder, name, value)

    def _check(self, name: str, value: Any) -> None:
        if name == "activation" and value not in ("relu", "gelu"):
            raise ValueError(f"activation={value!r} is not one of relu, gelu")
        if name.endswith("attention_type"):
            builder: BaseAttentionBuilder = self._builders[name.removesuffix("_type")]
            if not builder.validate_attention_type(value):
                known = ", ".join(builder.available_attentions)
                raise ValueError(f"{name}={value!r} is not available; known: {known}")

    def _derived(self, name: str) -> Any:
        """The value of a parameter that is None."""
        return self.value_dimensions * self.n_heads

    def _rest(self) -> tuple:
        """What every layer takes behind its attentions."""
        return self.model_dimensions, self.feed_forward_dimensions, self.dropout, self.activation, self.event_dispatcher

    def _stack(self, cls: type, layers: list[nn.Module]) -> Any:
        norm = nn.LayerNorm(self.model_dimensions) if self.final_normalization else None
        return cls(layers, norm, self.event_dispatcher)

    def _attention(self, cls: type, role: str, sizes: tuple) -> nn.Module:
        builder: BaseAttentionBuilder = self._builders[role]
        heads, keys, values, width = sizes
        # The defaults count as well: the feature map must know the size of a head.
        builder.default(query_dimensions=keys, event_dispatcher=self.event_dispatcher)
        inner = builder.get(getattr(self, f"{role}_type"))
        return cls(inner, self.model_dimensions, heads, keys, values, width, self.event_dispatcher)

    def get(self) -> Any:
        """Build the model."""
        # Abstract: the builders of encoders and decoders define it.
        raise NotImplementedError(f"{type(self).__name__} must define get()")


class BaseTransformerEncoderBuilder(BaseTransformerBuilder):
    """``attention_type`` and ``attention``, the builder of the attention."""

    defaults: ClassVar[dict[str, Any]] = {**BaseTransformerBuilder.defaults, "attention_type": "full"}
    classes: ClassVar[tuple[type, ...]] = ()

    def get(self) -> Any:
        """Build the encoder. Raises as ``attention.get`` does."""
        stack, layer, attention = self.classes
        sizes = self.n_heads, self.query_dimensions, self.value_dimensions, None
        layers = [layer(self._attention(attention, "attention", sizes), *self._rest()) for _ in range(self.n_layers)]
        return self._stack(stack, layers)


class BaseTransformerDecoderBuilder(BaseTransformerBuilder):
    """``self_attention_type``, ``cross_attention_type``, and the builders ``self_attention`` and ``cross_attention``.

    The sizes of cross attention, ``cross_n_heads``, ``cross_query_dimensions`` and ``cross_value_dimensions``, are
    those of self attention unless they are set; ``cross_model_dimensions``, the width of the memory, is that of its
    heads' values together.
    """

    defaults: ClassVar[dict[str, Any]] = {
        **BaseTransformerBuilder.defaults,
        "self_attention_type": "full",
        "cross_attention_type": "full",
        "cross_n_heads": None,
        "cross_query_dimensions": None,
        "cross_value_dimensions": None,
        "cross_model_dimensions": None,
    }
    classes: ClassVar[tuple[type, ...]] = ()

    def _derived(self, name: str) -> Any:
        if name == "cross_model_dimensions":
            return self.cross_n_heads * self.cross_value_dimensions
        return getattr(self, name.removeprefix("cross_")) if name.startswith("cross_") else super()._derived(name)

    def _offer(self, name: str, value: Any) -> None:
        if name == "query_dimensions":
            # Cross attention has queries of its own size.
            self.self_attention.query_dimensions = value
            self.cross_attention.query_dimensions = self.cross_query_dimensions
        elif name == "cross_query_dimensions":
            self.cross_attention.query_dimensions = self.cross_query_dimensions
        else:
            super()._offer(name, value)

    def get(self) -> Any:
        """Build the decoder. Raises as the attention builders' ``get`` does."""
        stack, layer, own, cross = self.classes
        sizes = self.n_heads, self.query_dimensions, self.value_dimensions, None
        others = (
            self.cross_n_heads,
            self.cross_query_dimensions,
            self.cross_value_dimensions,
            self.cross_model_dimensions,
        )
        layers = [
            layer(
                self._attention(own, "self_attention", sizes),
                self._attention(cross, "cross_attention", others),
                *self._rest(),
            )
            for _ in range(self.n_layers)
        ]
        return self._stack(stack, layers)


class TransformerEncoderBuilder(BaseTransformerEncoderBuilder):
    """Builds a ``TransformerEncoder``."""

    builders: ClassVar[dict[str, type]] = {"attention": AttentionBuilder}
    classes = (TransformerEncoder, TransformerEncoderLayer, AttentionLayer)


class RecurrentEncoderBuilder(BaseTransformerEncoderBuilder):
    """Builds a ``RecurrentTransformerEncoder``."""

    builders: ClassVar[dict[str, type]] = {"attention": RecurrentAttentionBuilder}
    classes = (RecurrentTransformerEncoder, RecurrentTransformerEncoderLayer, RecurrentAttentionLayer)


class TransformerDecoderBuilder(BaseTransformerDecoderBuilder):
    """Builds a ``TransformerDecoder``."""

    builders: ClassVar[dict[str, type]] = {"self_attention": AttentionBuilder, "cross_attention": AttentionBuilder}
    classes = (TransformerDecoder, TransformerDecoderLayer, AttentionLayer, AttentionLayer)


class RecurrentDecoderBuilder(BaseTransformerDecoderBuilder):
    """Builds a ``RecurrentTransformerDecoder``."""

    builders: ClassVar[dict[str, type]] = {
        "self_attention": RecurrentAttentionBuilder,
        "cross_attention": RecurrentCrossAttentionBuilder,
    }
    classes = (
        RecurrentTransformerDecoder,
        RecurrentTransformerDecoderLayer,
        RecurrentAttentionLayer,
        RecurrentCrossAttentionLayer,
    )
