"""Builders of encoders and decoders, for whole sequences and for one token at a time."""

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
    """Base class of model builders: parameters are attributes with defaults.

    Attention builders receive every other name, and names that both have, such as ``query_dimensions``.
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
        # copy reads attributes before it sets the dictionary.
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
            raise AttributeError(f"{name} is the builder of the attention; set its parameters instead of replacing it")
        if name in self._values:
            self._check(name, value)
            self._values[name] = bool(value) if name == "final_normalization" else value
        self._offer(name, value)

    def _offer(self, name: str, value: Any) -> None:
        """Set a parameter of the attention builders that have it; raise AttributeError if none has."""
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
        """Return the value of a parameter that is None."""
        return self.value_dimensions * self.n_heads

    def _rest(self) -> tuple:
        """Return the arguments of a layer after its attentions."""
        return self.model_dimensions, self.feed_forward_dimensions, self.dropout, self.activation, self.event_dispatcher

    def _stack(self, cls: type, layers: list[nn.Module]) -> Any:
        norm = nn.LayerNorm(self.model_dimensions) if self.final_normalization else None
        return cls(layers, norm, self.event_dispatcher)

    def _attention(self, cls: type, role: str, sizes: tuple) -> nn.Module:
        builder: BaseAttentionBuilder = self._builders[role]
        heads, keys, values, width = sizes
        # Defaults are passed too: the feature map needs the size of a head.
        builder.default(query_dimensions=keys, event_dispatcher=self.event_dispatcher)
        inner = builder.get(getattr(self, f"{role}_type"))
        return cls(inner, self.model_dimensions, heads, keys, values, width, self.event_dispatcher)

    def get(self) -> Any:
        """Build the model."""
        # The builders of encoders and decoders define it.
        raise NotImplementedError(f"{type(self).__name__} must define get()")


class BaseTransformerEncoderBuilder(BaseTransformerBuilder):
    """Base class of encoder builders, with ``attention_type`` and the attention builder ``attention``."""

    defaults: ClassVar[dict[str, Any]] = {**BaseTransformerBuilder.defaults, "attention_type": "full"}
    classes: ClassVar[tuple[type, ...]] = ()

    def get(self) -> Any:
        """Build the encoder. Raises as ``attention.get`` does."""
        stack, layer, attention = self.classes
        sizes = self.n_heads, self.query_dimensions, self.value_dimensions, None
        layers = [layer(self._attention(attention, "attention", sizes), *self._rest()) for _ in range(self.n_layers)]
        return self._stack(stack, layers)


class BaseTransformerDecoderBuilder(BaseTransformerBuilder):
    """Base class of decoder builders, with the attention builders ``self_attention`` and ``cross_attention``.

    ``self_attention_type`` and ``cross_attention_type`` select the attentions. The sizes of cross attention
    (``cross_n_heads``, ``cross_query_dimensions``, ``cross_value_dimensions``) default to those of self attention.
    ``cross_model_dimensions``, the width of the memory, defaults to the width of all its heads' values.
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
            # Cross attention may have another query size.
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
    """Build a ``TransformerEncoder``."""

    builders: ClassVar[dict[str, type]] = {"attention": AttentionBuilder}
    classes = (TransformerEncoder, TransformerEncoderLayer, AttentionLayer)


class RecurrentEncoderBuilder(BaseTransformerEncoderBuilder):
    """Build a ``RecurrentTransformerEncoder``."""

    builders: ClassVar[dict[str, type]] = {"attention": RecurrentAttentionBuilder}
    classes = (RecurrentTransformerEncoder, RecurrentTransformerEncoderLayer, RecurrentAttentionLayer)


class TransformerDecoderBuilder(BaseTransformerDecoderBuilder):
    """Build a ``TransformerDecoder``."""

    builders: ClassVar[dict[str, type]] = {"self_attention": AttentionBuilder, "cross_attention": AttentionBuilder}
    classes = (TransformerDecoder, TransformerDecoderLayer, AttentionLayer, AttentionLayer)


class RecurrentDecoderBuilder(BaseTransformerDecoderBuilder):
    """Build a ``RecurrentTransformerDecoder``."""

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
