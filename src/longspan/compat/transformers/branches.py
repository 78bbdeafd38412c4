"""What the layers of transformers compute for one token, as branches of the decode engine, by model type."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ...generation import native_mixers
from ...generation.native_mixers import Heads, Row
from ...modules.quantized import QuantizedEmbedding, QuantizedLinear
from ...ops.native import decode
from ...ops.native.call import FORMATS, LARGEST, TYPES
from ..gguf.blocks import Experts, Reordered
from . import lazy_logits


class Sums(NamedTuple):
    """The state of a recurrent layer in a cache: recent inputs of its convolution, and its sums."""

    layer: int
    recent: tuple[int, int]
    """channels, and inputs of each"""
    sums: tuple[int, ...] | None = None
    """heads, keys and values, or channels and states; None for a convolution alone"""
    values_first: bool = False
    """whether the cache has them (B,H,E,D), where the engine reads (B,H,D,E)"""


class Keys(NamedTuple):
    """The state of a layer of softmax attention in a cache: its keys and values."""

    layer: int
    groups: int
    size: int


class Shifted(NamedTuple):
    """The state of a branch of RWKV-7: its last input, and its sums."""

    layer: int
    channels: int
    sums: tuple[int, int, int] | None = None
    """heads, keys and values; None for a feed-forward"""


class Unserved(ValueError):
    """Why the engine cannot compute a model."""


class Plan:
    """The branches of a model, with what each reads of a cache."""

    def __init__(self, dtype: torch.dtype):
        self.weights = decode.Weights(dtype, packs=False)
        self.rows: list[Row] = []
        self.branches: list[decode.Branch] = []
        self.states: list[Sums | Keys | Shifted | None] = []
        self.tokens: Any = None
        self.token_factor = self.head_factor = 1.0
        self.begin, self.norm = decode.Norm(), decode.Norm()
        self.kept = 0  # numbers of a row that branches leave to later ones
        self.head = decode.Linear()

    def row(self) -> Row:
        """Return a row for the stages of a branch."""
        self.rows.append(Row(self.weights))
        return self.rows[-1]

    def add(self, branch: decode.Branch, state: Sums | Keys | Shifted | None = None) -> None:
        """Add a branch."""
        self.branches.append(branch)
        self.states.append(state)

    def ends(self, tokens: Any, norm: Any, head: Any, token_factor: float = 1.0, head_factor: float = 1.0) -> None:
        """Set the embeddings, the last norm and the output layer."""
        self.tokens, self.norm, self.head = tokens, self.normed(norm), native_mixers.linear_map(self.weights, head)
        self.token_factor, self.head_factor = token_factor, head_factor

    def normed(self, norm: Any) -> decode.Norm:
        """Return a layer norm, or one of the root mean square. The weight of some is the difference to 1."""
        bias = None
        if isinstance(norm, nn.LayerNorm):
            bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        return self.weights.norm(scales(norm), bias, epsilon(norm))


def scales(norm: Any) -> Tensor:
    """Return the factors of a norm's channels."""
    return norm.weight.detach().float() + (1.0 if type(norm).__name__ in ZERO_CENTERED else 0.0)


def epsilon(norm: Any) -> float:
    """Return what a norm adds to the mean of squares."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def activation(function: Any) -> str:
    """Return the name of an activation in the engine. Raises Unserved for others."""
    name = ACTIVATIONS.get(type(function).__name__)
    if name is None:
        raise Unserved(f"the activation {type(function).__name__} is not one of the engine")
    return name


def _convolve(row: Row, conv: nn.Conv1d, at: int, *, linear: bool = False) -> tuple[int, int]:
    """The short convolution of a layer, in place -> its channels and its taps."""
    channels, taps = conv.in_channels, conv.kernel_size[0]
    if conv.groups != channels or conv.out_channels != channels or conv.dilation != (1,) or conv.stride != (1,):
        raise Unserved("a convolution is not one by channel")
    weights = row.weights.taps(conv.weight.squeeze(1), conv.bias)
    row.add(decode.Convolve(weights, at, channels, taps, taps, True, linear))
    return channels, taps


def _project(row: Row, *maps: Any) -> list[int]:
    """Project the input of the branch -> the places of the results, which are adjacent unless a map reorders them."""
    parts: list[list[Any]] = [list(m.maps) if isinstance(m, Reordered) else [m] for m in maps]
    places, found = iter(row.project(*itertools.chain(*parts))), []
    for m, own in zip(maps, parts, strict=True):
        at, *_ = itertools.islice(places, len(own))
        if isinstance(m, Reordered) and m.inputs is not None:
            raise Unserved("the inputs of a layer are in another order")
        if isinstance(m, Reordered) and m.outputs is not None:
            row.wait()
            at = row.arrange(at, m.outputs)
        found.append(at)
    return found


def _ended(row: Row, out: Any, mixed: int, norm: decode.Norm, factor: float = 1.0) -> decode.Branch:
    """Return the branch that ends with a linear map of a part."""
    if isinstance(out, Reordered):
        if out.inputs is not None:
            mixed = row.arrange(mixed, out.inputs)
            row.wait()
        (out,) = out.maps
    return row.branch(out, mixed, norm, factor=factor)


def _together(groups: int, *sizes: int) -> Tensor:
    """Return the order in which the first parts of all groups come before all second parts, and so on."""
    parts = torch.arange(groups * sum(sizes), device="cpu").view(groups, -1).split(sizes, 1)
    return torch.cat([part.flatten() for part in parts])


def _gated_delta_net(plan: Plan, m: Any, norm: Any) -> None:
    heads, groups, keys, values = m.num_v_heads, m.num_k_heads, m.head_k_dim, m.head_v_dim
    _check_size(keys, values)
    if m.activation not in ("silu", "swish"):
        raise Unserved(f"a convolution is followed by {m.activation}")
    row = plan.row()
    if hasattr(m, "in_proj_qkvz"):
        # What belongs to one head of keys is adjacent.
        each, places = heads // groups, _project(row, m.in_proj_qkvz, m.in_proj_ba)
        row.wait()
        qkv = row.arrange(places[0], _together(groups, keys, keys, each * values, each * values))
        beta = row.arrange(places[1], _together(groups, each, each))
        gate, decay = qkv + 2 * groups * keys + heads * values, beta + heads
    else:
        qkv, gate, beta, decay = _project(row, m.in_proj_qkv, m.in_proj_z, m.in_proj_b, m.in_proj_a)
    row.wait()
    recent = _convolve(row, m.conv1d, qkv)
    row.curve("sigmoid", beta, heads)
    row.curve("softplus", decay, heads, bias=m.dt_bias, factor=-m.A_log.detach().float().exp())
    row.wait()
    key, value = qkv + groups * keys, qkv + 2 * groups * keys
    sizes = Heads(heads, groups, (keys, values))
    row.recur(qkv, key, value, to=value, heads=sizes, decay="head", log_decay=decay, beta=beta, normalize=True)
    weight, silu = plan.weights.numbers(m.norm.weight), decode.GATES["silu"]
    row.add(decode.HeadNorm(weight, value, heads, values, values, 0, gate, silu, False, False, epsilon(m.norm)))
    row.wait()
    state = Sums(m.layer_idx, recent, (heads, keys, values))
    plan.add(_ended(row, m.out_proj, value, plan.normed(norm)), state)


def _mamba2(plan: Plan, m: Any, norm: Any, factor: float = 1.0) -> None:
    width, groups, states, heads, size = m.intermediate_size, m.n_groups, m.ssm_state_size, m.num_heads, m.head_dim
    _check_size(states, size)
    if activation(m.act) != "silu":
        raise Unserved(f"a convolution is followed by {type(m.act).__name__}")
    row = plan.row()
    (gate,) = _project(row, m.in_proj)  # gate, values, keys, queries, steps
    value, key, query, step = (
        gate + width + n for n in (0, width, width + groups * states, width + 2 * groups * states)
    )
    decay, scaled = row.part(heads), row.part(width)
    row.wait()
    recent = _convolve(row, m.conv1d, value)
    row.curve("softplus", step, heads, bias=m.dt_bias)
    row.curve("identity", step, heads, factor=-m.A_log.detach().float().exp(), to=decay)
    row.wait()
    row.scale(value, width, by=step, size=size, to=scaled)
    row.wait()
    sizes = Heads(heads, groups, (states, size))
    row.recur(query, key, scaled, to=scaled, heads=sizes, decay="head", log_decay=decay, scale=1.0)
    row.wait()
    row.scale(value, width, by=m.D.detach(), size=size, add=scaled, to=scaled)
    row.wait()
    group = m.norm.group_size
    weight, silu, gate_first = plan.weights.numbers(m.norm.weight), decode.GATES["silu"], True
    counts = width // group, group, group, group
    row.add(decode.HeadNorm(weight, scaled, *counts, gate, silu, gate_first, False, epsilon(m.norm)))
    row.wait()
    branch = _ended(row, m.out_proj, scaled, plan.normed(norm), factor)
    plan.add(branch, Sums(m.layer_idx, recent, (heads, states, size), values_first=True))


def _mamba(plan: Plan, m: Any, norm: Any) -> None:
    width, states, rank, row = m.intermediate_size, m.ssm_state_size, m.time_step_rank, plan.row()
    if activation(m.act) != "silu":
        raise Unserved(f"a convolution is followed by {type(m.act).__name__}")
    (x,) = _project(row, m.in_proj)  # inputs, gate
    row.wait()
    recent = _convolve(row, m.conv1d, x)
    row.wait()
    (low,) = row.project(m.x_proj, start=x)  # steps, keys, queries
    row.wait()
    (step,) = row.project(m.dt_proj, start=low, activation="softplus")
    row.wait()
    rates, skip, read = -m.A_log.detach().float().exp(), m.D.detach(), row.part(width)
    places = x, step, low + rank, low + rank + states, x + width, read
    row.add(decode.Select(plan.weights.numbers(rates), plan.weights.numbers(skip), *places, width, states))
    row.wait()
    plan.add(_ended(row, m.out_proj, read, plan.normed(norm)), Sums(m.layer_idx, recent, (width, states)))


def _short_convolution(plan: Plan, m: Any, norm: Any) -> None:
    width, row = m.conv.in_channels, plan.row()
    (before,) = _project(row, m.in_proj)
    after, x = before + width, before + 2 * width
    row.wait()
    row.gate("identity", before, x, width)
    row.wait()
    recent = _convolve(row, m.conv, x, linear=True)
    row.wait()
    row.gate("identity", after, x, width)
    row.wait()
    plan.add(_ended(row, m.out_proj, x, plan.normed(norm)), Sums(m.layer_idx, recent))


class Attention(NamedTuple):
    """What layers of softmax attention add to queries, keys and values."""

    out: Any
    """the output layer"""
    norms: tuple[Any, Any] | None = None
    """norms of the heads of queries and of keys"""
    gated: bool = False
    """whether each head of queries is followed by a gate of the outputs"""
    rotary: Any = None
    """the module with the angles, or None"""


def _attention(plan: Plan, m: Any, norm: Any, parts: Attention, factor: float = 1.0) -> None:
    size, row = m.head_dim, plan.row()
    _check_size(size)
    apart = 2 * size if parts.gated else size
    heads, groups = m.q_proj.out_features // apart, m.k_proj.out_features // size
    query, key, value = _project(row, m.q_proj, m.k_proj, m.v_proj)
    row.wait()
    places = (query, heads, apart), (key, groups, size)
    if parts.norms is not None:
        for one, (at, count, between) in zip(parts.norms, places, strict=True):
            weight, identity = plan.weights.numbers(scales(one)), decode.GATES["identity"]
            row.add(decode.HeadNorm(weight, at, count, size, between, 0, -1, identity, False, False, epsilon(one)))
        row.wait()
    if parts.rotary is not None:
        rates = _rates(parts.rotary)
        for at, count, between in places:
            row.add(decode.Turn(plan.weights.numbers(rates), at, count, 2 * len(rates), between))
        row.wait()
    out = row.part(heads * size)
    row.add(decode.SoftmaxAttention(None, query, apart, key, value, out, heads, groups, size, m.scaling))
    if parts.gated:
        row.wait()
        row.add(decode.Gate(query + size, apart, out, heads, size, decode.GATES["sigmoid"]))
    row.wait()
    branch = _ended(row, parts.out, out, plan.normed(norm), factor)
    plan.add(branch, Keys(m.layer_idx, groups, size))


def _rates(rotary: Any) -> Tensor:
    """Return the angles per position. Raises Unserved if they depend on the length."""
    if rotary.rope_type not in STATIC or rotary.attention_scaling != 1:
        raise Unserved(f"rotary positions of the type {rotary.rope_type}")
    return rotary.inv_freq


def _network(plan: Plan, norm: Any, maps: tuple[Any, ...], act: Any, factor: float = 1.0) -> None:
    """A gated feed-forward network; ``maps``: gates and values, together or apart, and the output."""
    *inner, out = maps
    row, width = plan.row(), out.in_features
    gate = _project(row, *inner)[0]
    row.wait()
    row.gate(activation(act), gate, gate + width, width)
    row.wait()
    plan.add(_ended(row, out, gate + width, plan.normed(norm), factor))


class Mixture(NamedTuple):
    """A feed-forward network of experts, of which each token uses some, and one that all tokens use."""

    router: Any
    experts: Any
    shared: tuple[Any, ...]
    """as the maps of ``_network``"""
    act: Any
    gate: Any = None
    """the map to the factor of the shared one before its sigmoid; None is 1"""


def _mixture(plan: Plan, norm: Any, m: Mixture, factor: float = 1.0) -> None:
    row, router = plan.row(), m.router.weight
    count, width = router.shape
    if m.router.top_k > count:
        raise Unserved(f"a token uses {m.router.top_k} of {count} experts")
    logits, by = row.part(count), -1 if m.gate is None else _project(row, m.gate)[0]
    identity = decode.GATES["identity"]
    row.add(decode.Project(plan.weights.linear([_typed(plan, router)], [None]), -1, logits, identity))
    row.wait()
    (*inner, out), to = m.shared, row.part(width)
    inner: list[Any] = [part for one in inner for part in (one.maps if isinstance(one, Reordered) else [one])]
    maps = [*_experts(plan, m.experts, count), [native_mixers.linear_map(plan.weights, one) for one in (*inner, out)]]
    experts = row.array(decode.Expert, [_expert(*one) for one in maps])
    # Weights of all experts are divided by their sum unless the router has an option and it is off.
    normalize = getattr(m.router, "norm_topk_prob", True)
    act = decode.ACTIVATIONS[activation(m.act)]
    row.add(decode.Experts(experts, logits, to, count, m.router.top_k, normalize, act, True, by))
    row.wait()
    plan.add(row.branch(None, to, plan.normed(norm), factor=factor))


def _typed(plan: Plan, weight: Tensor) -> Tensor:
    if weight.dtype != plan.weights.dtype:
        raise Unserved(f"a weight is {weight.dtype}, and the output layer {plan.weights.dtype}")
    return weight


def _experts(plan: Plan, m: Any, count: int) -> Iterator[list[decode.Linear]]:
    """Yield the maps of each expert."""
    if isinstance(m, Experts):
        for e in range(count):
            yield [
                plan.weights.quantized(one[:3], (one.format, m.gate.activations), None, one.inputs, one.outputs)
                for one in m.weights(e)
            ]
        return
    for e in range(count):
        yield [plan.weights.linear([_typed(plan, t)[e]], [None]) for t in (m.gate_up_proj, m.down_proj)]


def _expert(*maps: decode.Linear) -> decode.Expert:
    gate, *values, out = maps
    (value,) = values or [decode.Linear()]
    if values and (gate.format, gate.activations) != (value.format, value.activations):
        raise Unserved("the gates of experts have other blocks than the values")
    return decode.Expert(gate, value, out)


def _check_size(*sizes: int) -> None:
    if max(sizes) > LARGEST:
        raise Unserved(f"heads of more than {LARGEST} channels")


def _qwen(model: Any, plan: Plan) -> None:
    body = model.model
    for layer in body.layers:
        if layer.block_type == "linear_attention":
            _gated_delta_net(plan, layer.linear_attn, layer.input_layernorm)
        else:
            m = layer.self_attn
            parts = Attention(m.o_proj, (m.q_norm, m.k_norm), gated=True, rotary=body.rotary_emb)
            _attention(plan, m, layer.input_layernorm, parts)
        m, norm = layer.mlp, layer.post_attention_layernorm
        if hasattr(m, "experts"):
            one = m.shared_expert
            shared = one.gate_proj, one.up_proj, one.down_proj
            _mixture(plan, norm, Mixture(m.gate, m.experts, shared, one.act_fn, m.shared_expert_gate))
        else:
            _network(plan, norm, (m.gate_proj, m.up_proj, m.down_proj), m.act_fn)
    plan.ends(body.embed_tokens, body.norm, model.lm_head)


def _mamba_model(model: Any, plan: Plan) -> None:
    body = model.backbone
    for layer in body.layers:
        _mamba(plan, layer.mixer, layer.norm)
    plan.ends(body.embeddings, body.norm_f, model.lm_head)


def _mamba2_model(model: Any, plan: Plan) -> None:
    body = model.backbone
    for layer in body.layers:
        _mamba2(plan, layer.mixer, layer.norm)
    plan.ends(body.embeddings, body.norm_f, model.lm_head)


def _granite(model: Any, plan: Plan) -> None:
    body = model.model
    for layer in body.layers:
        factor = layer.residual_multiplier
        if layer.mamba is not None:
            _mamba2(plan, layer.mamba, layer.input_layernorm, factor)
        else:
            m = layer.self_attn
            _attention(plan, m, layer.input_layernorm, Attention(m.o_proj, rotary=body.rotary_emb), factor)
        m, norm = layer.shared_mlp, layer.post_attention_layernorm
        shared = m.input_linear, m.output_linear
        if layer.has_experts:
            moe = layer.block_sparse_moe
            _mixture(plan, norm, Mixture(moe.router, moe.experts, shared, m.activation), factor)
        else:
            _network(plan, norm, shared, m.activation, factor)
    scaling = model.config.logits_scaling
    plan.ends(body.embed_tokens, body.norm, model.lm_head, body.embedding_multiplier, 1 / scaling)


def _lfm2(model: Any, plan: Plan) -> None:
    body = model.model
    for layer in body.layers:
        if layer.is_attention_layer:
            m = layer.self_attn
            parts = Attention(m.out_proj, (m.q_layernorm, m.k_layernorm), rotary=body.rotary_emb)
            _attention(plan, m, layer.operator_norm, parts)
        else:
            _short_convolution(plan, layer.conv, layer.operator_norm)
        m = layer.feed_forward
        _network(plan, layer.ffn_norm, (m.w1, m.w3, m.w2), nn.SiLU())
    plan.ends(body.embed_tokens, body.embedding_norm, model.lm_head)


def _rwkv7(model: Any, plan: Plan) -> None:
    body = model.model
    for number, layer in enumerate(body.layers):
        if layer.pre_norm is not None:
            plan.begin = plan.normed(layer.pre_norm)
        _rwkv7_mixer(plan, layer.attn, layer.attn_norm, number)
        m, channels, row = layer.ffn, layer.ffn.key.in_features, plan.row()
        mixed = row.part(channels)
        row.add(decode.Mix(plan.weights.numbers(m.x_k), mixed, 1))
        row.wait()
        (inner,) = row.project(m.key, start=mixed, activation="squared_relu")
        row.wait()
        plan.add(row.branch(m.value, inner, plan.normed(layer.ffn_norm)), Shifted(number, channels))
    plan.ends(body.embeddings, body.norm, model.lm_head)


def _rwkv7_mixer(plan: Plan, m: Any, norm: Any, number: int) -> None:
    heads, (keys, values), channels, row = m.heads, m.sizes, m.r_proj.in_features, plan.row()
    _check_size(keys, values)
    letters, width, numbers = "rwkvag", heads * values, plan.weights.numbers
    mixed = row.part(len(letters) * channels)
    row.add(decode.Mix(numbers(torch.cat([getattr(m, f"x_{one}").flatten() for one in letters])), mixed, len(letters)))
    row.wait()
    at = {one: mixed + i * channels for i, one in enumerate(letters)}
    query, key, value = (row.project(getattr(m, f"{one}_proj"), start=at[one])[0] for one in "rkv")
    loras = {"w": (m.w_lora, "tanh", "sigmoid"), "a": (m.a_lora, "identity", "sigmoid")}
    loras["g"] = m.g_lora, "sigmoid", "identity"
    if m.v_lora is not None:
        loras["v"] = m.v_lora, "identity", "sigmoid"
    low = {one: row.project(pair.lora[0], start=at[one], activation=act)[0] for one, (pair, act, _) in loras.items()}
    row.wait()
    high = {one: row.project(pair.lora[2], start=low[one], activation=act)[0] for one, (pair, _, act) in loras.items()}
    row.wait()
    row.curve("identity", high["w"], heads * keys, factor=torch.tensor([m.slowest]))
    row.add(decode.Blend(value, high.get("v", -1), width))
    plan.kept = width
    row.wait()
    out = row.part(width)
    bias = torch.zeros_like(m.g_norm.weight) if m.g_norm.bias is None else m.g_norm.bias
    constants = (numbers(t.flatten()) for t in (m.k_k, m.k_a, m.r_k, m.g_norm.weight, bias))
    places = query, key, value, high["w"], high["a"], high["g"], out
    row.add(decode.Rwkv(*constants, *places, heads, keys, values, m.least, m.g_norm.eps))
    row.wait()
    plan.add(row.branch(m.o_proj, out, plan.normed(norm)), Shifted(number, channels, (heads, keys, values)))


class Served(NamedTuple):
    """A model type that the engine computes."""

    build: Callable[[Any, Plan], None]
    """adds its branches to a plan"""
    classes: tuple[str, ...]
    """the classes of its modules, besides ``...ForCausalLM``"""
    output: str = "CausalLMOutputWithPast"
    """the class of its outputs"""
    wide: bool = False
    """whether logits are float32 in any dtype"""
    files: tuple[str, ...] = ()
    """the modules of transformers that define its classes; (): those named after the type"""


def _named(prefix: str, names: str, *others: str) -> tuple[str, ...]:
    return (*(prefix + name for name in names.split()), *others)


SERVED = {
    "qwen3_5": Served(
        _qwen,
        _named(
            "Qwen3_5", "TextModel RMSNorm DecoderLayer TextRotaryEmbedding GatedDeltaNet RMSNormGated Attention MLP"
        ),
    ),
    "qwen3_5_moe": Served(
        _qwen,
        _named(
            "Qwen3_5Moe",
            "TextModel RMSNorm DecoderLayer TextRotaryEmbedding GatedDeltaNet RMSNormGated Attention MLP "
            "SparseMoeBlock TopKRouter Experts",
        ),
        "MoeCausalLMOutputWithPast",
    ),
    "qwen3_next": Served(
        _qwen,
        _named(
            "Qwen3Next",
            "Model RMSNorm DecoderLayer RotaryEmbedding GatedDeltaNet RMSNormGated Attention MLP "
            "SparseMoeBlock TopKRouter Experts",
        ),
        "MoeCausalLMOutputWithPast",
    ),
    "mamba": Served(_mamba_model, _named("Mamba", "Model RMSNorm Block Mixer"), "MambaCausalLMOutput", True),
    "mamba2": Served(
        _mamba2_model, _named("Mamba2", "Model RMSNorm Block Mixer", "MambaRMSNormGated"), "Mamba2CausalLMOutput", True
    ),
    "granitemoehybrid": Served(
        _granite,
        _named(
            "GraniteMoeHybrid",
            "Model RMSNorm DecoderLayer RotaryEmbedding Attention MambaLayer RMSNormGated MLP MoE TopKRouter Experts",
        ),
        "MoeCausalLMOutputWithPast",
    ),
    "rwkv7": Served(
        _rwkv7,
        ("Rwkv7Body", "Rwkv7Block", "Rwkv7", "LoRA", "FeedForward"),
        files=("longspan.compat.fla.models.rwkv", "longspan.compat.fla.models.families.rwkv7"),
    ),
    "lfm2": Served(_lfm2, _named("Lfm2", "Model RMSNorm DecoderLayer RotaryEmbedding Attention ShortConv MLP")),
}
"""by the model type in transformers"""
ZERO_CENTERED = {"Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm"}
"""norms whose weight is the difference to 1"""
STATIC = ("default", "linear", "llama3")
"""types of rotary positions whose angles do not depend on the length"""
ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "ReLUSquaredActivation": "squared_relu",
}
_MAPS = (nn.Linear, QuantizedLinear, nn.Embedding, QuantizedEmbedding)
_PLAIN = (*_MAPS, nn.Conv1d, nn.ModuleList, nn.LayerNorm, nn.GroupNorm)
_SIMPLE = (nn.Sequential, nn.Tanh, nn.Identity, nn.Sigmoid, Reordered, Experts)


def plan(model: Any, kind: str) -> Plan:
    """Return the branches of a causal language model of a type in ``SERVED``.

    Raises:
        Unserved: The engine cannot compute it.
    """
    served = SERVED[kind]
    files = [sys.modules[name] for name in served.files or (type(model).__module__,)]
    named = (getattr(file, name, None) for file in files for name in served.classes)
    known = {type(model), *_PLAIN, *_SIMPLE, *named}
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise Unserved("there are hooks for all modules")
    if type(model.lm_head) not in _MAPS:
        raise Unserved(f"lm_head is a {type(model.lm_head).__name__}")
    dtype = model.lm_head.weight.dtype
    if dtype not in TYPES:
        raise Unserved(f"its weights are {dtype}, not float32 or bfloat16")
    for name, module in model.named_modules():
        own = module.__dict__.get("forward")
        replaced = own is not None and getattr(own, "__func__", None) is not lazy_logits.forward
        if replaced or module._forward_hooks or module._forward_pre_hooks:
            raise Unserved(f"{name or 'it'} has hooks or a replaced forward")
        if type(module) not in known and type(module).__name__ not in ACTIVATIONS:
            raise Unserved(f"{name} is a {type(module).__name__}")
        if isinstance(module, QuantizedLinear) and module.format not in FORMATS:
            raise Unserved(f"{name} has weights in the format {module.format}")
        if isinstance(module, _MAPS) and module.weight.dtype != dtype:
            raise Unserved(f"{name} is {module.weight.dtype}, and the output layer {dtype}")
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if type(t) not in (Tensor, nn.Parameter) or not t.is_cpu or t.is_inference() or not t.is_contiguous():
            raise Unserved(f"{name} is not a plain tensor on the CPU")
    made = Plan(dtype)
    served.build(model, made)
    return made
