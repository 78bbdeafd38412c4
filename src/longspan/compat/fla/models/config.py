"""Configs of flash-linear-attention: the options of each family, and which of them longspan supports."""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

# Options of all families with their defaults in flash-linear-attention.
COMMON = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "elementwise_affine": True,
    "attn": None,
    "use_cache": True,
    "initializer_range": 0.02,
    "vocab_size": 32000,
}
# Options that choose a kernel or a loss of flash-linear-attention, without another result.
WITHOUT_EFFECT = (
    "attn_mode",
    "fuse_norm",
    "fuse_swiglu",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "use_l2warp",
    "max_position_embeddings",
)


class FlaConfig(PreTrainedConfig):
    """Config of a model of flash-linear-attention, with the original's option names.

    Args:
        values: Options of the family, and fields of ``PreTrainedConfig``.

    Raises:
        ValueError: An option is unknown or not supported.
    """

    family: ClassVar[Any]  # the ``family.Family``
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]  # pyright: ignore[reportIncompatibleVariableOverride] (a list in transformers too)

    def __init__(self, **values: Any):
        options = COMMON | dict(self.family.options)
        ignored = (*WITHOUT_EFFECT, *self.family.ignored)
        rest: dict[str, Any] = {
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        }
        unknown = []
        for name, value in values.items():
            if name in rest:
                rest[name] = value
            elif name in options:
                options[name] = value
            elif name in ignored:
                setattr(self, name, value)
            elif name == "attnres_block_size":
                if value is not None:
                    raise ValueError(
                        f"attnres_block_size={value} (residual attention) is not supported; it must be null"
                    )
            elif (
                name.startswith("_")
                or name == "quantization_config"  # for transformers, which gives the model quantized layers
                or hasattr(PreTrainedConfig, name)
                or name in generic_fields()
            ):
                rest[name] = value
            else:
                unknown.append(name)
        if unknown:
            raise ValueError(
                f"a config of {self.model_type} has options that longspan does not know: "
                f"{', '.join(f'{name}={values[name]!r}' for name in unknown)}; known are {', '.join(options)}"
            )
        if reason := wrong_value(options, COMMON | dict(self.family.options)):
            raise ValueError(f"this {self.model_type} model is not supported: {reason}")
        for name, value in options.items():
            setattr(self, name, value)
        PreTrainedConfig.__init__(self, **rest)
        for name, value in rest.items():
            if not hasattr(self, name):  # transformers drops special tokens that are None
                setattr(self, name, value)
        if reason := _common_check(self) or self.family.check(self):
            raise ValueError(f"this {self.model_type} model is not supported: {reason}")

    def attention_of(self, layer: int) -> Mapping[str, Any] | None:
        """Return the options of the softmax attention of a layer in a hybrid model; None for a recurrent layer."""
        given = self.attn
        for one in given if isinstance(given, list | tuple) else [given] if given else []:
            if layer in one["layers"]:
                # The original has no norm of queries and keys here, whatever qk_norm is.
                return {name: value for name, value in one.items() if name != "qk_norm"}
        return None


def wrong_value(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return which value of an option is not of its default's kind, or ""; null is of any kind."""
    for name, default in defaults.items():
        value = values[name]
        if value is None or default is None:
            continue
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        match default:
            case bool():
                wanted, fits = "true or false", isinstance(value, bool)
            case int():
                # Ratios may be fractions.
                wanted, fits = "a positive number", numeric and 0 < value < 1 << 63
                if "ratio" not in name and not name.startswith("expand"):
                    wanted, fits = "a positive whole number", fits and isinstance(value, int)
            case float():
                wanted, fits = "a number", numeric and math.isfinite(value)
            case str():
                wanted, fits = "a text", isinstance(value, str | int)
            case _:
                continue
        if not fits:
            return f"{name}={value!r} must be {wanted}"
    return ""


def _common_check(config: Any) -> str:
    act = config.family.options.get("hidden_act", COMMON["hidden_act"])
    given, wanted = ("swish" if one == "silu" else one for one in (config.hidden_act, act))
    if given != wanted:
        return f"hidden_act={config.hidden_act!r} must be {act!r}"
    attn = config.attn
    for one in attn if isinstance(attn, list | tuple) else [attn] if attn else []:
        known = {"layers", "num_heads", "num_kv_heads", "qkv_bias", "qk_norm", "window_size", "rope_theta"}
        if not isinstance(one, dict) or not {"layers", "num_heads"} <= one.keys():
            return f"attn={one!r} must have 'layers' and 'num_heads'"
        if odd := sorted(one.keys() - known):
            return f"attn has options that longspan does not know: {', '.join(odd)}"
    return ""


@functools.cache
def generic_fields() -> frozenset[str]:
    """Names of the fields that every config of transformers has, of this version or an earlier one."""
    earlier = (
        "torch_dtype",
        "auto_map",
        "transformers_version",
        "use_bfloat16",
        "is_encoder_decoder",
        "tokenizer_class",
    )
    return frozenset((*PreTrainedConfig().to_dict(), *vars(PreTrainedConfig()), *earlier))
