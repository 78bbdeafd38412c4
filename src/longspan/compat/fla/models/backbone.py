"""Models of flash-linear-attention whose body has Mamba's names: ``backbone`` and ``norm_f``."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .causal_lm import Body, FlaForCausalLM
from .family import Family
from .mixer import Call


class Backbone(Body):
    """Embedding, blocks and final norm, by the names of Mamba."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.norm_f = self.norm
        del self.norm
        # The original embeds padding like any token.
        self.embeddings.padding_idx = None

    def forward(self, x: Tensor, states: list[Any] | None, call: Call) -> tuple[Tensor, list[Any]]:
        after = []
        for i, layer in enumerate(self.layers):
            x, state = layer(x, None if states is None else states[i], call)
            after.append(state)
        return self.norm_f(x), after


class BackboneForCausalLM(FlaForCausalLM):
    """A model whose body is named ``backbone``; ``model`` reads it too."""

    base_model_prefix = "backbone"
    _no_split_modules = ["LogLinearBlock", "Mamba3Block"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("backbone" if name == "model" else name, value)

    @property
    def model(self) -> nn.Module:
        """The model without its head."""
        return self.get_submodule("backbone")


@dataclass(frozen=True)
class BackboneFamily(Family):
    """A family whose body is named ``backbone``."""

    @functools.cached_property
    def model(self) -> Any:
        """The model class, for transformers' Auto classes and ``from_pretrained``."""
        members = {"config_class": self.config, "__module__": FlaForCausalLM.__module__}
        return type(f"{self.title}ForCausalLM", (BackboneForCausalLM,), members)

    def load(self, source: str | os.PathLike[str], config: Mapping[str, Any], **options: Any) -> Any:
        """Load a model of this family; ``config`` is the content of ``config.json``."""
        # The name of early checkpoints.
        options.setdefault("key_mapping", {r"^backbone\.embedding\.": "backbone.embeddings."})
        return self.model.from_pretrained(source, **options)


def other_option(config: Any) -> str:
    """Return why a config is not supported that sets an option which these model types do not have."""
    # The original builds its feed-forwards and norms with these alone.
    for name, value in (("hidden_ratio", 4), ("intermediate_size", None), ("elementwise_affine", True)):
        if (given := getattr(config, name)) != value:
            return f"{name}={given!r} is not an option of this model type; it must be {value!r}"
    return ""
