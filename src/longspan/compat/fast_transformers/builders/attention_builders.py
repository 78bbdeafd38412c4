"""Builders of attentions from the registries."""

from typing import Any

from torch import nn

# The import registers the attentions.
from .. import attention as _whole  # noqa: F401
from ..absent import Absent
from ..attention_registry import (
    AttentionRegistry,
    RecurrentAttentionRegistry,
    RecurrentCrossAttentionRegistry,
    Registry,
)
from ..recurrent import attention as _stepwise  # noqa: F401
from .base import BaseBuilder


class BaseAttentionBuilder(BaseBuilder):
    """Build attentions of one registry; the builder has the parameters of all of them."""

    def __init__(self, registry: Registry):
        self.__dict__.update(_registry=registry, _parameters={})

    @property
    def available_attentions(self) -> list[str]:
        """Names of the attentions that ``get`` builds."""
        return self._registry.keys

    def validate_attention_type(self, attention_type: str) -> bool:
        """Return whether every attention in ``attention_type`` is known."""
        return all(name in self._registry for level in attention_type.split(":") for name in level.split(","))

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._registry.contains_parameter(name):
            raise AttributeError(f"{name!r} is not a parameter of any attention")
        self._parameters[name] = self._registry.validate_parameter(name, value)

    def __getattr__(self, name: str) -> Any:
        # copy reads attributes before it sets the dictionary.
        parameters = self.__dict__.get("_parameters", {})
        if name not in parameters:
            raise AttributeError(f"parameter {name!r} has not been set")
        return parameters[name]

    def __repr__(self) -> str:
        inside = "".join(f"    {name}={value!r},\n" for name, value in self._parameters.items())
        return f"{type(self).__name__}.from_kwargs(\n{inside})"

    def default(self, **values: Any) -> None:
        """Set parameters that an attention has and that have not been set."""
        for name, value in values.items():
            if self._registry.contains_parameter(name) and name not in self._parameters:
                setattr(self, name, value)

    def get(self, attention_type: str) -> nn.Module:
        """Build an attention.

        Args:
            attention_type: a name, or ``outer:inner``. Inner attentions, separated by commas, are arguments of the
                outer one.

        Raises:
            ValueError: a name is unknown, a parameter is missing or invalid, or there is more than one outermost
                attention.
            NotImplementedError: the attention is not carried over.
        """
        built: list[nn.Module] = []
        for level in reversed(attention_type.split(":")):
            built = [self._build(name, built) for name in level.split(",")]
        if len(built) != 1:
            raise ValueError(
                f"attention_type={attention_type!r} has {len(built)} outermost attentions; it must have one"
            )
        return built[0]

    def _build(self, name: str, inner: list[nn.Module]) -> nn.Module:
        if name not in self._registry:
            raise ValueError(f"Unknown attention type {name!r}; known: {', '.join(self.available_attentions)}")
        cls, names = self._registry[name]
        if issubclass(cls, Absent):
            return cls()
        validate = self._registry.validate_parameter
        return cls(*inner, **{name: validate(name, self._parameters.get(name)) for name in names})


class AttentionBuilder(BaseAttentionBuilder):
    """Build attentions over whole sequences."""

    def __init__(self):
        super().__init__(AttentionRegistry)


class RecurrentAttentionBuilder(BaseAttentionBuilder):
    """Build attentions for one token at a time."""

    def __init__(self):
        super().__init__(RecurrentAttentionRegistry)


class RecurrentCrossAttentionBuilder(BaseAttentionBuilder):
    """Build attentions of one token over another sequence."""

    def __init__(self):
        super().__init__(RecurrentCrossAttentionRegistry)
