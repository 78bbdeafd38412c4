"""A model type of flash-linear-attention: its options, its layer, and its config and model classes."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from .causal_lm import FlaForCausalLM
from .config import FlaConfig


@dataclass(frozen=True)
class Family:
    """A model type of flash-linear-attention.

    Args:
        model_type: Its name in ``config.json``.
        title: The original's class names begin with it: ``GLA`` for ``GLAForCausalLM``.
        mixer: Builds the recurrent layer: ``mixer(config, layer)``, a ``mixer.Mixer``.
        options: Options of the family with their defaults, beyond ``COMMON`` or other than there.
        ignored: Further options without an effect on the result.
        check: Returns why a config is not supported, "" if it is.
        tied: Returns names of weights of a layer that are the same as others: {name: other}.
        body: The model without its head, a ``causal_lm.Body``; None is the common one.
        block: Builds a block: ``block(config, layer, mixer)``; None is norm, mixer, norm, gated feed-forward.
        migrate: Returns weights of an older format under today's names; None if there is none.
    """

    model_type: str
    title: str
    mixer: Callable[[Any, int], nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    check: Callable[[Any], str] = lambda config: ""
    tied: Callable[[Any], Mapping[str, str]] = lambda config: {}
    body: Callable[[Any], nn.Module] | None = None
    block: Callable[[Any, int, Callable[[Any, int], nn.Module]], nn.Module] | None = None
    migrate: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    of_transformers: ClassVar[bool] = False
    base: ClassVar[type] = FlaForCausalLM

    @functools.cached_property
    def config(self) -> type[FlaConfig]:
        """The config class."""
        # transformers replaces an inherited ``__init__`` by one that takes its own fields only.
        members = {"model_type": self.model_type, "family": self, "__init__": FlaConfig.__init__}
        return type(f"{self.title}Config", (FlaConfig,), members)

    @functools.cached_property
    def model(self) -> Any:
        """The model class, for transformers' Auto classes and ``from_pretrained``."""
        members = {"config_class": self.config, "__module__": FlaForCausalLM.__module__}
        return type(f"{self.title}ForCausalLM", (self.base,), members)

    def load(self, source: str | os.PathLike[str], config: Mapping[str, Any], **options: Any) -> Any:
        """Load a model of this family; ``config`` is the content of ``config.json``."""
        return self.model.from_pretrained(source, **options)
