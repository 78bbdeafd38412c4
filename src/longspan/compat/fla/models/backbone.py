"""Models of flash-linear-attention whose body has Mamba's names: ``backbone`` and ``norm_f``."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .causal_lm import Body, FlaForCausalLM
from .family import Family
from .mixer import Call, Mixer


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

    base = BackboneForCausalLM

    def load(self, source: str | os.PathLike[str], config: Mapping[str, Any], **options: Any) -> Any:
        """Load a model of this family; ``config`` is the content of ``config.json``."""
        # The name of early checkpoints.
        options.setdefault("key_mapping", {r"^backbone\.embedding\.": "backbone.embeddings."})
        return self.model.from_pretrained(source, **options)


# Options of both model types, with their defaults.
OPTIONS = {
    "num_hidden_layers": 48,
    "norm_eps": 1e-5,
    "hidden_act": "silu",
    "state_size": 128,
    "head_dim": 64,
    "expand": 2,
    "n_groups": 1,
    "use_bias": False,
}
# The number of heads follows from other options; the rest initializes weights or chooses a kernel.
IGNORED = (
    "num_heads",
    "dt_min",
    "dt_max",
    "dt_init_floor",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "chunk_size",
)


class MixerBlock(GradientCheckpointingLayer):
    """A block whose state is that of its mixer."""

    mixer: Mixer

    def start(self, batch: int) -> Any:
        """Return the state of ``batch`` rows before the first token."""
        return self.mixer.start(batch)


def odd_heads(config: Any) -> str:
    """Return why the heads of a config do not fit its width or its groups; empty if they do."""
    width = int(config.expand * config.hidden_size)
    count = width // config.head_dim
    if width % config.head_dim or getattr(config, "num_heads", count) != count:
        return f"expand * hidden_size = {width} must be num_heads * head_dim, with head_dim={config.head_dim}"
    if config.n_groups < 1 or count % config.n_groups:
        return f"n_groups={config.n_groups} must divide {count} heads"
    return ""


def other_option(config: Any) -> str:
    """Return why a config is not supported that sets an option which these model types do not have."""
    # The original builds its feed-forwards and norms with these alone.
    for name, value in (("hidden_ratio", 4), ("intermediate_size", None), ("elementwise_affine", True)):
        if (given := getattr(config, name)) != value:
            return f"{name}={given!r} is not an option of this model type; it must be {value!r}"
    return ""
