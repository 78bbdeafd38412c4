"""The architectures of GGUF files that longspan reads and writes: a row for each tensor and each entry of metadata.

A row has both directions. The conversion of a tensor is that of llama.cpp: norms of Qwen are stored as w + 1, A_log as
A = -exp(A_log), convolutions without their dimension of size 1, and some rows in another order.

References:
    ggml-org/llama.cpp, conversion/*.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._utils.typecheck import format_value

REQUIRED: Any = object()
# Entries that are no single numbers.
_KINDS: Mapping[str, Any] = {
    "attention.head_count_kv": int | np.ndarray,
    "rope.dimension_sections": np.ndarray,
    "rope.scaling.type": str,
}
Order = Callable[[Any], Tensor]
Shape = tuple[int, ...]


class Value(NamedTuple):
    """How numbers are stored."""

    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]


class Row(NamedTuple):
    """A parameter of a model, and its tensors in a file."""

    ours: str
    """its name in transformers, with {} for the layer"""
    theirs: str
    """its tensor in a file, with {} for the layer; several are its rows one after the other, separated by spaces"""
    value: Value | None = None
    shape: Callable[[Shape, Any], Shape] = lambda shape, config: shape
    """its shape in a file, from that of the model"""
    rows: Order | None = None
    """config -> the place in the model of each row in a file"""
    columns: Order | None = None
    """config -> the place in the model of each column in a file"""
    parts: Callable[[Any], list[int]] | None = None
    """config -> rows of each of several tensors; None is equal parts"""
    slot: int | None = None
    """its place in the first dimension of a tensor that holds several parameters"""
    when: Callable[[Any], bool] = lambda config: True
    """whether the row applies, where one parameter has several"""


class Entry(NamedTuple):
    """An entry of metadata, and the field of a config that it becomes."""

    key: str
    """after the name of the architecture"""
    field: str = ""
    """"": the entry is only written"""
    read: Callable[[Any, "Entries"], Any] = lambda value, entries: value
    write: Callable[[Any], Any] | None = None
    """config -> the value; None is that of the field"""
    default: Any = REQUIRED
    """of an entry that a file may lack"""
    written: bool = True


class Entries:
    """The metadata of a file for a row of an architecture.

    Args:
        metadata: Of the file.
        architecture: Its name, which begins the keys.
        tensors: The names of all tensors.
    """

    def __init__(self, metadata: Mapping[str, Any], architecture: str, tensors: Mapping[str, Any]):
        self.metadata, self.architecture, self.tensors = metadata, architecture, tensors

    def __call__(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the value of an entry. Raises ValueError if it is missing and has no default."""
        found = self.metadata.get(f"{self.architecture}.{key}", default)
        if found is REQUIRED:
            raise ValueError(f"it has no entry {self.architecture}.{key}")
        if found is not default and not isinstance(found, _KINDS.get(key, int | float)):
            raise ValueError(f"{self.architecture}.{key} is of the wrong type: {format_value(found)}")
        # The shortest number that is this float32: 0.22 instead of 0.2199999988.
        return float(f"{found:.7g}") if isinstance(found, float) else found

    def divided(self, value: int, key: str) -> int:
        """Return ``value`` over the value of another entry. Raises ValueError unless it is whole."""
        by = self(key)
        if not isinstance(value, int) or not isinstance(by, int) or by < 1 or value % by:
            raise ValueError(f"{value} is not a multiple of {self.architecture}.{key}={by}")
        return value // by

    def layers(self, tensor: str, there: str, other: str, count: int) -> list[str]:
        """Return the type of each layer: ``there`` for those that have a tensor."""
        return [there if f"blk.{i}.{tensor}" in self.tensors else other for i in range(count)]

    @property
    def depth(self) -> int:
        """The number of layers, without those that predict further tokens."""
        count = self("block_count")
        if not isinstance(count, int) or not 1 <= count <= len(self.tensors):
            raise ValueError(f"block_count={count} must be between 1 and the number of tensors, {len(self.tensors)}")
        return count - self("nextn_predict_layers", 0)


@dataclass(frozen=True)
class Architecture:
    """A model type.

    Args:
        kind: Its type in transformers, or of a model of flash-linear-attention.
        entries: Its metadata.
        rows: Its tensors.
        constants: Fields of the config that every file has.
        check: Returns why a config is not served or written, or "".
        copies: Tensors that a file has although nothing reads them, and those that they repeat.
    """

    kind: str
    entries: tuple[Entry, ...]
    rows: tuple[Row, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], str] = lambda config: ""
    copies: Mapping[str, str] = field(default_factory=dict)


# Values.
_PLUS_ONE = Value(lambda t: t + 1, lambda t: t - 1)
_DECAY = Value(lambda t: -t.exp(), lambda t: (-t).log())


# Shapes in a file.
def _channels(shape: Shape, config: Any) -> Shape:
    return shape[0], shape[-1]  # (C,1,k) of a convolution


def _column(shape: Shape, config: Any) -> Shape:
    return (*shape, 1)


def _flat(shape: Shape, config: Any) -> Shape:
    return (math.prod(shape),)


# Orders of rows.
def _halves(heads: str, width: Callable[[Any], int]) -> Order:
    """Rotary embeddings of adjacent rows in a file, of rows half a head apart in the model."""

    def order(config: Any) -> Tensor:
        count = getattr(config, heads)
        return torch.arange(count * width(config)).view(count, 2, -1).transpose(1, 2).flatten()

    return order


def _tiled(config: Any, width: int) -> Tensor:
    """Value heads: those of a key head are adjacent in the model, and one key head apart in a file."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return torch.arange(values * width).view(keys, values // keys, width).transpose(0, 1).flatten()


def _tiled_values(config: Any) -> Tensor:
    return _tiled(config, config.linear_value_head_dim)


def _tiled_heads(config: Any) -> Tensor:
    return _tiled(config, 1)


def _tiled_after_keys(config: Any) -> Tensor:
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([torch.arange(keys), keys + _tiled_values(config)])


def _untangled(config: Any) -> Tensor:
    """The model has query, key, values, gates of each key head; a file has all queries, keys, values, gates."""
    count, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // count * config.linear_value_head_dim
    parts = torch.arange(count * (2 * width + 2 * values)).view(count, -1).split([width, width, values, values], 1)
    return torch.cat([part.flatten() for part in parts])


def _queries_and_gates(config: Any) -> list[int]:
    gates = config.linear_num_value_heads * config.linear_value_head_dim
    return [2 * config.linear_num_key_heads * config.linear_key_head_dim + gates, gates]


# Tensors.
def _ends(embedding: str, norm: str, value: Value | None = None, output_norm: str = "output_norm") -> tuple[Row, ...]:
    return (
        Row(embedding, "token_embd.weight"),
        Row(norm, f"{output_norm}.weight", value),
        Row("lm_head.weight", "output.weight"),
    )


def _layer(ours: str, pairs: Mapping[str, str], **more: Any) -> tuple[Row, ...]:
    """Rows of a layer, by their names after those of the layer."""
    return tuple(
        Row(f"{ours}.{name}", " ".join(f"blk.{{}}.{one}" for one in tensor.split()), **more)
        for name, tensor in pairs.items()
    )


def _attention(ours: str, out: str, norms: str = "", value: Value | None = None) -> tuple[Row, ...]:
    linear = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", out: "attn_output"}
    named = {f"{name}.weight": f"{tensor}.weight" for name, tensor in linear.items()}
    normed = {f"{one}_{norms}.weight": f"attn_{one}_norm.weight" for one in "qk"} if norms else {}
    return _layer(ours, named) + _layer(ours, normed, value=value)


def _mamba2(ours: str, groups: str) -> tuple[Row, ...]:
    def grouped(shape: Shape, config: Any) -> Shape:
        count = getattr(config, groups)
        return count, shape[0] // count

    return (
        *_layer(ours, {"in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight"}),
        *_layer(ours, {"dt_bias": "ssm_dt.bias", "conv1d.bias": "ssm_conv1d.bias"}),
        *_layer(ours, {"conv1d.weight": "ssm_conv1d.weight"}, shape=_channels),
        *_layer(ours, {"A_log": "ssm_a"}, value=_DECAY, shape=_column),
        *_layer(ours, {"D": "ssm_d"}, shape=_column),
        *_layer(ours, {"norm.weight": "ssm_norm.weight"}, shape=grouped),
    )


def _gated(
    ours: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", end: str = ""
) -> tuple[Row, ...]:
    """A gated feed-forward."""
    names = {gate: "gate", up: "up", down: "down"}
    return _layer(ours, {f"{name}.weight": f"ffn_{one}{end}.weight" for name, one in names.items()})


_EXPERTS = {"gate_up_proj": "ffn_gate_exps.weight ffn_up_exps.weight", "down_proj": "ffn_down_exps.weight"}
_QWEN = "model.layers.{}"


def _qwen() -> tuple[Row, ...]:
    """What Qwen3.5 and Qwen3-Next share."""
    norms = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
    }
    return (
        *_ends("model.embed_tokens.weight", "model.norm.weight", _PLUS_ONE),
        *_layer(_QWEN, norms, value=_PLUS_ONE),
        *_attention(f"{_QWEN}.self_attn", "o_proj", "norm", _PLUS_ONE),
        *_layer(f"{_QWEN}.linear_attn", {"norm.weight": "ssm_norm.weight"}),
    )


def _tiled_delta_net() -> tuple[Row, ...]:
    """The gated delta rule of Qwen3.5."""
    ours = f"{_QWEN}.linear_attn"
    heads = {"in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight", "dt_bias": "ssm_dt.bias"}
    return (
        *_layer(ours, {"in_proj_qkv.weight": "attn_qkv.weight"}, rows=_tiled_after_keys),
        *_layer(ours, {"in_proj_z.weight": "attn_gate.weight"}, rows=_tiled_values),
        *_layer(ours, heads, rows=_tiled_heads),
        *_layer(ours, {"A_log": "ssm_a"}, value=_DECAY, rows=_tiled_heads),
        *_layer(ours, {"conv1d.weight": "ssm_conv1d.weight"}, shape=_channels, rows=_tiled_after_keys),
        *_layer(ours, {"out_proj.weight": "ssm_out.weight"}, columns=_tiled_values),
    )


def _qwen_experts() -> tuple[Row, ...]:
    return (
        *_layer(f"{_QWEN}.mlp.experts", _EXPERTS),
        *_layer(f"{_QWEN}.mlp", {"gate.weight": "ffn_gate_inp.weight"}),
        *_layer(f"{_QWEN}.mlp", {"shared_expert_gate.weight": "ffn_gate_inp_shexp.weight"}, shape=_flat),
        *_gated(f"{_QWEN}.mlp.shared_expert", end="_shexp"),
    )


# Metadata.
_SIZES = (
    Entry("embedding_length", "hidden_size"),
    Entry("block_count", "num_hidden_layers", lambda value, e: e.depth),
)
_UNUSED = (Entry("feed_forward_length", write=lambda c: 0), Entry("attention.head_count", write=lambda c: 0))
_LONG = Entry("context_length", write=lambda c: 1 << 20)
_CONTEXT = Entry("context_length", "max_position_embeddings")
_HEADS = Entry("attention.head_count", "num_attention_heads")
_WIDTH = Entry("feed_forward_length", "intermediate_size")
_EPSILON = "attention.layer_norm_rms_epsilon"


def _theta(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def _key_value_heads(kind: str) -> tuple[Entry, ...]:
    """The number of heads of keys in each layer, 0 in recurrent ones."""
    return (
        Entry(
            "attention.head_count_kv",
            "num_key_value_heads",
            lambda value, e: max(int(one) for one in _listed(value)),
            lambda c: [c.num_key_value_heads if one == "full_attention" else 0 for one in c.layer_types],
        ),
        Entry(
            "attention.head_count_kv",
            "layer_types",
            lambda value, e: ["full_attention" if int(one) else kind for one in _listed(value, e.depth)],
            written=False,
        ),
    )


def _listed(value: Any, count: int = 0) -> Any:
    if not hasattr(value, "__len__") or len(value) < max(1, count):
        raise ValueError(f"attention.head_count_kv must have a number for each of {count} layers")
    return value[:count] if count else value


def _ssm(prefix: str, heads: str, width: str, expand: str) -> tuple[Entry, ...]:
    """The sizes of Mamba-2."""
    return (
        Entry("ssm.conv_kernel", f"{prefix}conv_kernel" if not prefix else f"{prefix}d_conv"),
        Entry("ssm.state_size", f"{prefix}state_size" if not prefix else f"{prefix}d_state"),
        Entry("ssm.group_count", f"{prefix}n_groups"),
        Entry("ssm.time_step_rank", heads),
        Entry(
            "ssm.inner_size",
            width,
            lambda value, e: e.divided(value, "ssm.time_step_rank"),
            lambda c: getattr(c, heads) * getattr(c, width),
        ),
        Entry("ssm.inner_size", expand, lambda value, e: e.divided(value, "embedding_length"), written=False),
    )


def _interval(config: Any) -> int:
    """How many layers there are for each one with attention."""
    full = [i for i, one in enumerate(config.layer_types) if one == "full_attention"]
    return full[0] + 1 if full else config.num_hidden_layers + 1


def _qwen_check(config: Any) -> str:
    every = _interval(config)
    regular = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config.num_hidden_layers)]
    if list(config.layer_types) != regular:
        return "its layers with attention are not at equal distances, which the format requires"
    return _rope_check(config)


def _rope_check(config: Any) -> str:
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    return "" if kind == "default" else f"rope scaling of the type {kind} is not supported"


def _qwen_rope(value: Any, entries: Entries) -> dict[str, Any]:
    share = entries("rope.dimension_count") / entries("attention.key_length")
    if not 0 < share <= 1:
        raise ValueError(f"rope.dimension_count must be at most attention.key_length, not {share:g} times of it")
    found = {"rope_type": "default", "rope_theta": float(value), "partial_rotary_factor": share}
    sections = entries("rope.dimension_sections", None)
    if sections is None:
        return found
    return found | {"mrope_section": [int(one) for one in sections if one], "mrope_interleaved": True}


def _rotated(config: Any) -> int:
    return int(config.head_dim * config.rope_parameters["partial_rotary_factor"])


def _sections(config: Any) -> list[int]:
    # The default of transformers.
    found = list(config.rope_parameters.get("mrope_section") or [11, 11, 10])
    return found + [0] * (4 - len(found))


_QWEN_ENTRIES = (
    *_SIZES,
    _CONTEXT,
    _HEADS,
    Entry("attention.head_count_kv", "num_key_value_heads"),
    Entry("attention.key_length", "head_dim"),
    Entry("attention.value_length", write=lambda c: c.head_dim),
    Entry(_EPSILON, "rms_norm_eps"),
    Entry("rope.freq_base", "rope_parameters", _qwen_rope, _theta, 10000.0),
    Entry("rope.dimension_count", write=_rotated),
    Entry("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Entry("ssm.state_size", "linear_key_head_dim"),
    Entry("ssm.group_count", "linear_num_key_heads"),
    Entry("ssm.time_step_rank", "linear_num_value_heads"),
    Entry(
        "ssm.inner_size",
        "linear_value_head_dim",
        lambda value, e: e.divided(value, "ssm.time_step_rank"),
        lambda c: c.linear_num_value_heads * c.linear_value_head_dim,
    ),
    Entry(
        "full_attention_interval",
        "layer_types",
        lambda value, e: e.layers("attn_q.weight", "full_attention", "linear_attention", e.depth),
        _interval,
        default=4,
    ),
)
_QWEN_EXPERTS = (
    Entry("expert_count", "num_experts"),
    Entry("expert_used_count", "num_experts_per_tok"),
    Entry("expert_feed_forward_length", "moe_intermediate_size"),
    Entry("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
_SECTIONS = Entry("rope.dimension_sections", write=_sections)


def _sparse(config: Any) -> bool:
    return bool(config.num_local_experts)


def _dense(config: Any) -> bool:
    return not config.num_local_experts


def _granite_scale(value: Any, entries: Entries) -> float:
    if value:
        return value
    return entries.divided(entries("embedding_length"), "attention.head_count") ** -0.5


def _granite_rope(value: Any, entries: Entries) -> str | None:
    if value and entries("rope.dimension_count", None) is not None:
        raise ValueError("rotary embeddings of a part of a head, as in Bamba, are not supported")
    return "rope" if value else None


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _lfm_width(config: Any) -> int:
    """The channels of the feed-forward, which transformers computes from the config."""
    if not config.block_auto_adjust_ff_dim:
        return config.intermediate_size
    width = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
    return -(-width // config.block_multiple_of) * config.block_multiple_of


def _rwkv_check(config: Any) -> str:
    if config.head_dim != 64 or config.norm_eps != 1e-5:
        return f"head_dim={config.head_dim} and norm_eps={config.norm_eps} must be 64 and 1e-05, as in all its files"
    return "" if config.norm_first else "norm_first must be true"


def _lora(name: str) -> dict[str, str]:
    own = f"attn.{name}_lora.lora"
    found = {f"{own}.0.weight": f"time_mix_{name}1.weight", f"{own}.2.weight": f"time_mix_{name}2.weight"}
    return found if name == "g" else found | {f"{own}.2.bias": f"time_mix_{name}0.weight"}


def _norms(pairs: Mapping[str, str]) -> dict[str, str]:
    return {f"{ours}.{end}": f"{theirs}.{end}" for ours, theirs in pairs.items() for end in ("weight", "bias")}


_MAMBA = "backbone.layers.{}.mixer"
_GRANITE = "model.layers.{}"
_LFM = "model.layers.{}"
_RWKV = "model.layers.{}"

ARCHITECTURES = {
    "mamba": Architecture(
        "mamba",
        (
            *_SIZES,
            *_UNUSED,
            _LONG,
            Entry("ssm.conv_kernel", "conv_kernel"),
            Entry("ssm.inner_size", "intermediate_size"),
            Entry("ssm.state_size", "state_size"),
            Entry("ssm.time_step_rank", "time_step_rank"),
            Entry(_EPSILON, "layer_norm_epsilon"),
            Entry("ssm.dt_b_c_rms", write=lambda c: False),
        ),
        (
            *_ends("backbone.embeddings.weight", "backbone.norm_f.weight"),
            *_layer("backbone.layers.{}", {"norm.weight": "attn_norm.weight"}),
            *_layer(
                _MAMBA,
                {
                    "in_proj.weight": "ssm_in.weight",
                    "x_proj.weight": "ssm_x.weight",
                    "dt_proj.weight": "ssm_dt.weight",
                    "dt_proj.bias": "ssm_dt.bias",
                    "conv1d.bias": "ssm_conv1d.bias",
                    "D": "ssm_d",
                    "out_proj.weight": "ssm_out.weight",
                },
            ),
            *_layer(_MAMBA, {"conv1d.weight": "ssm_conv1d.weight"}, shape=_channels),
            *_layer(_MAMBA, {"A_log": "ssm_a"}, value=_DECAY),
        ),
    ),
    "mamba2": Architecture(
        "mamba2",
        (*_SIZES, *_UNUSED, _LONG, *_ssm("", "num_heads", "head_dim", "expand"), Entry(_EPSILON, "layer_norm_epsilon")),
        (
            *_ends("backbone.embeddings.weight", "backbone.norm_f.weight"),
            *_layer("backbone.layers.{}", {"norm.weight": "attn_norm.weight"}),
            *_mamba2(_MAMBA, "n_groups"),
        ),
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        (*_QWEN_ENTRIES, _WIDTH, _SECTIONS),
        (*_qwen(), *_tiled_delta_net(), *_gated(f"{_QWEN}.mlp")),
        check=_qwen_check,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        (*_QWEN_ENTRIES, *_QWEN_EXPERTS, _SECTIONS),
        (*_qwen(), *_tiled_delta_net(), *_qwen_experts()),
        check=_qwen_check,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        (*_QWEN_ENTRIES, _WIDTH, *_QWEN_EXPERTS),
        (
            *_qwen(),
            *_qwen_experts(),
            *_layer(
                f"{_QWEN}.linear_attn",
                {"in_proj_qkvz.weight": "attn_qkv.weight attn_gate.weight"},
                rows=_untangled,
                parts=_queries_and_gates,
            ),
            *_layer(
                f"{_QWEN}.linear_attn",
                {"in_proj_ba.weight": "ssm_ba.weight", "out_proj.weight": "ssm_out.weight", "dt_bias": "ssm_dt.bias"},
            ),
            *_layer(f"{_QWEN}.linear_attn", {"A_log": "ssm_a"}, value=_DECAY),
            *_layer(f"{_QWEN}.linear_attn", {"conv1d.weight": "ssm_conv1d.weight"}, shape=_channels),
        ),
        check=_qwen_check,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        (
            *_SIZES,
            _CONTEXT,
            _HEADS,
            _WIDTH,
            *_key_value_heads("linear_attention"),
            *_ssm("mamba_", "mamba_n_heads", "mamba_d_head", "mamba_expand"),
            Entry(_EPSILON, "rms_norm_eps"),
            Entry("expert_count", "num_local_experts", default=0),
            Entry("expert_used_count", "num_experts_per_tok", default=0),
            Entry(
                "expert_shared_feed_forward_length",
                "shared_intermediate_size",
                lambda value, e: value or e("feed_forward_length"),
                default=0,
            ),
            Entry("attention.scale", "attention_multiplier", _granite_scale, default=0.0),
            Entry("embedding_scale", "embedding_multiplier", default=1.0),
            Entry("residual_scale", "residual_multiplier", default=1.0),
            Entry("logit_scale", "logits_scaling", default=1.0),
            Entry("rope.freq_base", "rope_parameters", lambda value, e: {"rope_theta": float(value)}, _theta, 10000.0),
            Entry(
                "rope.scaling.finetuned",
                "position_embedding_type",
                _granite_rope,
                lambda c: c.position_embedding_type == "rope",
                default=False,
            ),
        ),
        (
            *_ends("model.embed_tokens.weight", "model.norm.weight"),
            *_layer(
                _GRANITE,
                {
                    "input_layernorm.weight": "attn_norm.weight",
                    "post_attention_layernorm.weight": "ffn_norm.weight",
                    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
                },
            ),
            *_mamba2(f"{_GRANITE}.mamba", "mamba_n_groups"),
            *_layer(
                f"{_GRANITE}.self_attn",
                {"q_proj.weight": "attn_q.weight"},
                rows=_halves("num_attention_heads", _head_dim),
            ),
            *_layer(
                f"{_GRANITE}.self_attn",
                {"k_proj.weight": "attn_k.weight"},
                rows=_halves("num_key_value_heads", _head_dim),
            ),
            *_layer(f"{_GRANITE}.self_attn", {"v_proj.weight": "attn_v.weight", "o_proj.weight": "attn_output.weight"}),
            *_layer(f"{_GRANITE}.block_sparse_moe.experts", _EXPERTS),
            *(
                row
                for end, when in (("", _dense), ("_shexp", _sparse))
                for row in _layer(
                    f"{_GRANITE}.shared_mlp",
                    {
                        "input_linear.weight": f"ffn_gate{end}.weight ffn_up{end}.weight",
                        "output_linear.weight": f"ffn_down{end}.weight",
                    },
                    when=when,
                )
            ),
        ),
        check=_rope_check,
    ),
    "lfm2": Architecture(
        "lfm2",
        (
            *_SIZES,
            _CONTEXT,
            _HEADS,
            _WIDTH._replace(write=_lfm_width),
            *_key_value_heads("conv"),
            Entry(_EPSILON, "norm_eps"),
            Entry("rope.freq_base", "rope_parameters", lambda value, e: {"rope_theta": float(value)}, _theta, 10000.0),
            Entry("shortconv.l_cache", "conv_L_cache"),
            Entry("vocab_size", write=lambda c: c.vocab_size),
        ),
        (
            *_ends("model.embed_tokens.weight", "model.embedding_norm.weight", output_norm="token_embd_norm"),
            *_layer(
                _LFM,
                {
                    "operator_norm.weight": "attn_norm.weight",
                    "ffn_norm.weight": "ffn_norm.weight",
                    "conv.in_proj.weight": "shortconv.in_proj.weight",
                    "conv.out_proj.weight": "shortconv.out_proj.weight",
                },
            ),
            *_layer(_LFM, {"conv.conv.weight": "shortconv.conv.weight"}, shape=_channels),
            *_attention(f"{_LFM}.self_attn", "out_proj", "layernorm"),
            *_gated(f"{_LFM}.feed_forward", "w1", "w3", "w2"),
        ),
        {"block_auto_adjust_ff_dim": False, "conv_bias": False},
        check=_rope_check,
    ),
    "rwkv7": Architecture(
        "rwkv7",
        (
            *_SIZES,
            _LONG,
            Entry("attention.head_count", write=lambda c: 0),
            Entry("feed_forward_length", "intermediate_size"),
            Entry("attention.layer_norm_epsilon", "norm_eps"),
            Entry("wkv.head_size", "head_dim"),
            Entry("attention.decay_lora_rank", "decay_low_rank_dim"),
            Entry("attention.iclr_lora_rank", "a_low_rank_dim"),
            Entry("attention.value_residual_mix_lora_rank", "v_low_rank_dim"),
            Entry("attention.gate_lora_rank", "gate_low_rank_dim"),
        ),
        (
            *_ends("model.embeddings.weight", "model.norm.weight"),
            Row("model.norm.bias", "output_norm.bias"),
            *(Row(f"model.layers.0.pre_norm.{end}", f"token_embd_norm.{end}") for end in ("weight", "bias")),
            *_layer(_RWKV, _norms({"attn_norm": "attn_norm", "ffn_norm": "attn_norm_2", "attn.g_norm": "time_mix_ln"})),
            *_layer(
                _RWKV,
                {
                    "attn.r_proj.weight": "time_mix_receptance.weight",
                    "attn.k_proj.weight": "time_mix_key.weight",
                    "attn.v_proj.weight": "time_mix_value.weight",
                    "attn.o_proj.weight": "time_mix_output.weight",
                    "attn.k_k": "time_mix_k_k.weight",
                    "attn.k_a": "time_mix_k_a.weight",
                    "ffn.x_k": "channel_mix_lerp_k.weight",
                    "ffn.key.weight": "channel_mix_key.weight",
                    "ffn.value.weight": "channel_mix_value.weight",
                },
            ),
            *(row for name in "wavg" for row in _layer(_RWKV, _lora(name))),
            *(
                row
                for slot, name in enumerate("rwkvag")
                for row in _layer(_RWKV, {f"attn.x_{name}": "time_mix_lerp_fused.weight"}, slot=slot)
            ),
            *_layer(_RWKV, {"attn.r_k": "time_mix_r_k.weight"}, shape=_flat),
        ),
        {"norm_first": True, "fuse_norm": False},
        check=_rwkv_check,
        # The first layer has no values to mix with, but files have these tensors.
        copies={f"blk.0.time_mix_v{i}.weight": f"blk.0.time_mix_a{i}.weight" for i in range(3)},
    ),
}
