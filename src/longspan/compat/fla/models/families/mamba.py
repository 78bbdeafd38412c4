"""Mamba and Mamba-2 (2312.00752, 2405.21060): transformers' own classes, whose weights have the same names and shapes.

``load`` calls ``longspan.compat.transformers.accelerate``, so that recurrent layers run on longspan's kernels.
"""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers

from ....transformers import accelerate
from ....transformers.loading import StrictLoading
from ..config import WITHOUT_EFFECT, generic_fields, wrong_value

# Options of both types with their defaults in flash-linear-attention.
_SHARED = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "norm_eps": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "dt_min": 0.001,
    "dt_max": 0.1,
    "dt_init_floor": 1e-4,
    "use_cache": True,
}
_RENAMED = {
    "norm_eps": "layer_norm_epsilon",
    "dt_rank": "time_step_rank",
    "dt_scale": "time_step_scale",
    "dt_init_scheme": "time_step_init_scheme",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init_floor": "time_step_floor",
    "dt_limit": "time_step_limit",
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}


@dataclass(frozen=True)
class TransformersFamily:
    """A model type of flash-linear-attention that is also one of transformers.

    Args:
        model_type: Its name in ``config.json``.
        title: transformers' class names begin with it.
        options: Options with their defaults in flash-linear-attention.
        fixed: Options of which transformers' class has one value only: {name: value}.
        derived: Options that follow from others: {name: function of all options}.
        ignored: Options without an effect on the result.
    """

    model_type: str
    title: str
    options: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    of_transformers: ClassVar[bool] = True

    def config(self, **values: Any) -> Any:
        """Return transformers' config for the options of flash-linear-attention.

        Raises:
            ValueError: An option is unknown or not supported.
        """
        known = self.options
        ignored = (*WITHOUT_EFFECT, *self.ignored, "model_type", "transformers_version")
        options, rest, unknown = dict(known), dict(_TOKENS), list[str]()
        for name, value in values.items():
            if name in known:
                options[name] = value
            elif name in self.fixed:
                if value != self.fixed[name]:
                    raise ValueError(
                        f"this {self.model_type} model is not supported: {name}={value!r} must be {self.fixed[name]!r}"
                    )
            elif name in _TOKENS or name in generic_fields():
                rest[name] = value
            elif name not in ignored and name not in self.derived:
                unknown.append(f"{name}={value!r}")
        if unknown:
            raise ValueError(
                f"a config of {self.model_type} has options that longspan does not know: {', '.join(unknown)}; "
                f"known are {', '.join(known)}"
            )
        if reason := wrong_value(options, known):
            raise ValueError(f"this {self.model_type} model is not supported: {reason}")
        if options["hidden_act"] not in ("silu", "swish"):
            raise ValueError(
                f"this {self.model_type} model is not supported: hidden_act={options['hidden_act']!r} must be 'silu'"
            )
        derived = {name: rule(options) for name, rule in self.derived.items()}
        for name, value in derived.items():
            if values.get(name, value) != value:
                raise ValueError(
                    f"this {self.model_type} model is not supported: {name}={values[name]!r} must be {value}, which "
                    f"follows from the other options"
                )
        given = {_RENAMED.get(name, name): value for name, value in options.items()}
        return getattr(transformers, f"{self.title}Config")(**given, **derived, **rest)

    @functools.cached_property
    def model(self) -> Any:
        """transformers' model class, whose ``from_pretrained`` requires every weight, and no other."""
        native = getattr(transformers, f"{self.title}ForCausalLM")
        return type(native.__name__, (StrictLoading, native), {"__module__": native.__module__})

    def load(self, source: str | os.PathLike[str], config: Mapping[str, Any], **options: Any) -> Any:
        """Load a model and accelerate it; ``config`` is the content of ``config.json``, in either library's names.

        Raises:
            ValueError: An option is not supported, or weights are missing, unexpected or of another shape.
        """
        # transformers' save_pretrained writes its own names.
        own = "layer_norm_epsilon" in config
        native = getattr(transformers, f"{self.title}Config").from_dict(dict(config)) if own else self.config(**config)
        # It belongs to initialization, but transformers divides loaded weights too.
        native.rescale_prenorm_residual = False
        options["config"] = native
        # The name of early checkpoints.
        options.setdefault("key_mapping", {r"^backbone\.embedding\.": "backbone.embeddings."})
        found = self.model.from_pretrained(source, **options)
        model = found[0] if isinstance(found, tuple) else found
        mixer = model.backbone.layers[0].mixer
        if getattr(model.config, "n_groups", 1) > 1 and not hasattr(mixer.norm, "group_size"):
            raise ValueError(
                f"n_groups={model.config.n_groups} needs a transformers whose Mamba2 normalizes groups apart; "
                f"version {transformers.__version__} does not"
            )
        accelerate(model)
        return found


FAMILIES = (
    TransformersFamily(
        "mamba",
        "Mamba",
        options=_SHARED
        | {
            "state_size": 16,
            "residual_in_fp32": False,
            "dt_rank": "auto",
            "dt_scale": 1.0,
            "dt_init_scheme": "random",
            "rescale_prenorm_residual": False,
        },
        derived={"intermediate_size": lambda o: int(o["expand"] * o["hidden_size"])},
    ),
    TransformersFamily(
        "mamba2",
        "Mamba2",
        options=_SHARED
        | {
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "residual_in_fp32": True,
            "dt_limit": [0.0, float("inf")],
            "rescale_prenorm_residual": True,
            "chunk_size": 256,
        },
        fixed={"D_has_hdim": False, "norm_before_gate": False, "rmsnorm": True},
        derived={"num_heads": lambda o: int(o["expand"] * o["hidden_size"] / o["head_dim"])},
        ignored=("conv_init", "A_init_range"),
    ),
)
