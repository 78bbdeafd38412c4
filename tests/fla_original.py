"""Functions and models of flash-linear-attention on inputs drawn from seeds, to compare longspan's with them.

As a program it runs the original's kernels on the CPU, in Triton's interpreter, and writes their results:

    PYTHONPATH=<its source> TRITON_INTERPRET=1 python tests/fla_original.py FILE.npz [channels of keys, of values]

``tests/compat/fla_original.npz`` was written this way with flash-linear-attention 0.6.0 and Triton 3.9, with 6 and 4
channels. The interpreter of Triton 3.6 needs numpy before 2.4 for it.
"""

import importlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

B, T, H, HV = 1, 9, 2, 4
BLOCK, TOP = 2, 4  # tokens per block, and blocks per query
SIZES = 6, 4  # channels of keys and of values
RECORDED = json.loads((Path(__file__).parent / "compat" / "fla_names.json").read_text(encoding="utf-8"))
SMALL, SHARED = {"num_heads": 2, "head_dim": 8}, {"num_heads": 4, "num_kv_heads": 2}
WIDE = SHARED | {"qkv_bias": True, "qk_norm": True}
PRECONDITIONED = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6, "allow_neg_eigval": True, "squash_x": 1.2}
LATENT = {"num_heads": 4, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "qk_head_dim": None}
RANKS = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 7}
LOG_LINEAR = {"intermediate_size": None, "num_hidden_layers": 2}
# Options of small models: the tests try all laws on each. (model type, options)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "abc": ("abc", {"num_heads": 2, "num_slots": 8}),
    "abc-conv": ("abc", {"num_heads": 4, "num_slots": 4, "use_short_conv": True, "use_rope": False, "expand_v": 2.0}),
    "bitnet": ("bitnet", SHARED | {"window_size": 5}),
    "comba": ("comba", SMALL),
    "comba-shared": ("comba", SMALL | {"num_v_heads": 4, "use_output_gate": False}),
    "comba-plain": ("comba", SMALL | {"use_short_conv": False}),
    "delta_net": ("delta_net", {"num_heads": 2}),
    "delta_net-sum": (
        "delta_net",
        {"num_heads": 2, "qk_norm": "sum", "qk_activation": "elu", "use_gate": True, "allow_neg_eigval": True},
    ),
    "delta_net-bare": ("delta_net", {"num_heads": 2, "use_short_conv": False, "use_beta": False}),
    "deltaformer": ("deltaformer", {"num_heads": 2, "use_cache": True}),
    "deltaformer-wide": ("deltaformer", {"num_heads": 4, "qkv_bias": True, "qk_norm": True, "use_cache": True}),
    "forgetting": ("forgetting_transformer", {"num_heads": 2}),
    "forgetting-shared": ("forgetting_transformer", WIDE | {"use_output_gate": True}),
    "gated_deltanet": ("gated_deltanet", SMALL),
    "gated_deltanet-shared": (
        "gated_deltanet",
        SMALL | {"num_v_heads": 4, "expand_v": 1.0, "allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    ),
    "gated_deltanet-hybrid": (
        "gated_deltanet",
        SMALL | {"use_gate": False, "attn": {"layers": [0, 2], "num_heads": 4, "qkv_bias": True}},
    ),
    "gated_deltaproduct": ("gated_deltaproduct", SMALL | {"num_householder": 3, "use_forget_gate": True}),
    "gated_deltaproduct-plain": (
        "gated_deltaproduct",
        SMALL | {"num_householder": 2, "allow_neg_eigval": True, "use_output_gate": False},
    ),
    "gla": ("gla", {"num_heads": 2}),
    "gla-shared": ("gla", SHARED | {"use_short_conv": True, "clamp_min": -0.05, "feature_map": "relu"}),
    "gla-hybrid": ("gla", {"num_heads": 2, "attn": SHARED | {"layers": [1], "window_size": 5}}),
    "gsa": ("gsa", {"num_heads": 2, "num_slots": 5}),
    "gsa-shared": ("gsa", SHARED | {"num_slots": None, "use_short_conv": True, "feature_map": "t2r"}),
    "gsa-relu": ("gsa", {"num_heads": 2, "num_slots": 3, "feature_map": "relu", "gate_logit_normalizer": 2}),
    "hgrn": ("hgrn", {}),
    "hgrn-free": (
        "hgrn",
        {"use_lower_bound": False, "expand_ratio": 2, "use_short_conv": True, "elementwise_affine": False},
    ),
    "hgrn-conv": ("hgrn", {"use_short_conv": True, "conv_size": 3, "tie_word_embeddings": True}),
    "hgrn2": ("hgrn2", {"expand_ratio": 16}),
    "hgrn2-free": ("hgrn2", {"expand_ratio": None, "num_heads": 4, "use_lower_bound": False, "use_short_conv": True}),
    "kda": ("kda", SMALL),
    "kda-bounded": ("kda", SMALL | {"num_v_heads": 4, "expand_v": 1.5, "safe_gate": True, "lower_bound": -2.0}),
    "lightnet": ("lightnet", {"expand_ratio": 16}),
    "lightnet-conv": ("lightnet", {"expand_ratio": 8, "num_heads": 2, "use_short_conv": True}),
    "linear_attn": ("linear_attn", {"num_heads": 2}),
    "linear_attn-hedgehog": ("linear_attn", {"num_heads": 2, "feature_map": "hedgehog", "norm_feature_map": True}),
    "linear_attn-t2r": ("linear_attn", SHARED | {"feature_map": "t2r", "tie_feature_map_qk": True, "norm_q": True}),
    "linear_attn-tied": (
        "linear_attn",
        {"num_heads": 2, "feature_map": "hedgehog", "tie_feature_map_qk": True, "tie_word_embeddings": True},
    ),
    "linear_attn-dpfp": ("linear_attn", {"num_heads": 2, "feature_map": "dpfp", "norm_k": True}),
    "linear_attn-elu": ("linear_attn", {"num_heads": 2, "feature_map": "elu", "norm_feature_map": True}),
    "log_linear": ("log_linear_mamba2", LOG_LINEAR | {"head_dim": 8, "state_size": 6}),
    "log_linear-groups": (
        "log_linear_mamba2",
        {"head_dim": 16, "state_size": 4, "n_groups": 2, "use_bias": True, "use_conv_bias": False, "norm_eps": 1e-2}
        | LOG_LINEAR,
    ),
    "log_linear-tied": (
        "log_linear_mamba2",
        {"head_dim": 32, "state_size": 5, "expand": 1, "tie_word_embeddings": True, "conv_kernel": 3} | LOG_LINEAR,
    ),
    "mamba3": ("mamba3", LOG_LINEAR | {"head_dim": 16, "state_size": 8}),
    "mamba3-groups": (
        "mamba3",
        {"head_dim": 16, "state_size": 6, "n_groups": 2, "use_bias": True, "A_floor": 0.4, "norm_eps": 1e-2}
        | LOG_LINEAR,
    ),
    "mamba3-normed": (
        "mamba3",
        {"head_dim": 8, "state_size": 5, "expand": 1, "rope_fraction": 1.0, "is_outproj_norm": True} | LOG_LINEAR,
    ),
    "mesa_net": ("mesa_net", SMALL),
    "mesa_net-gated": ("mesa_net", {"num_heads": 4, "head_dim": 6, "use_output_gate": True, "lambda_lower_bound": 0.5}),
    "mla": ("mla", LATENT | {"v_head_dim": 8, "q_lora_rank": 12}),
    "mla-window": ("mla", LATENT | {"v_head_dim": 10, "q_lora_rank": None, "window_size": 5}),
    "moba": ("moba", {"num_heads": 2, "moba_chunk_size": 4, "moba_topk": 3}),
    "moba-shared": ("moba", WIDE | {"moba_chunk_size": 5, "moba_topk": 2, "use_output_gate": True}),
    "nsa": ("nsa", SHARED | {"head_dim": 8, "block_size": 3, "block_counts": 4, "window_size": 5}),
    "nsa-wide": (
        "nsa",
        SHARED | {"head_dim": 12, "qkv_bias": True, "block_size": 4, "block_counts": 3, "window_size": 2},
    ),
    "path": ("path_attn", {"num_heads": 2}),
    "path-shared": ("path_attn", SHARED | {"use_low_rank_w": False, "use_w_shortconv": False}),
    "precond_gated_deltanet": ("precond_gated_deltanet", SMALL),
    "precond_gated_deltanet-shared": (
        "precond_gated_deltanet",
        PRECONDITIONED | {"use_gate": False, "use_short_conv": False},
    ),
    "precond_kda": ("precond_kda", SMALL),
    "precond_kda-shared": ("precond_kda", PRECONDITIONED | {"expand_v": 2.0, "safe_gate": True, "lower_bound": -5.0}),
    "raven": ("raven", {"num_heads": 2, "num_slots": 6, "topk": 2}),
    "raven-shared": (
        "raven",
        SHARED
        | {"num_slots": 6, "topk": 3, "decay_type": "GLA", "use_rope": True, "router_type": "mlp"}
        | {"router_score": "softmax", "use_output_gate": True, "expand_v": 2.0},
    ),
    "retnet": ("retnet", {"num_heads": 2}),
    "retnet-shared": ("retnet", SHARED | {"use_output_gate": False, "feature_map": "relu"}),
    "rwkv6": ("rwkv6", {"num_heads": 2}),
    "rwkv6-wide": (
        "rwkv6",
        {"num_heads": 4, "expand_k": 1.0, "expand_v": 0.5, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5}
        | {"norm_first": False, "norm_bias": False},
    ),
    "rwkv6-hybrid": ("rwkv6", {"num_heads": 2, "attn": {"layers": [1], "num_heads": 4, "window_size": 5}}),
    "rwkv7": ("rwkv7", {"head_dim": 16}),
    "rwkv7-wide": (
        "rwkv7",
        {"head_dim": None, "num_heads": 4, "value_dim": [64, 64, 64], "fuse_norm": False, "norm_first": False} | RANKS,
    ),
    "stick_breaking": ("stickbreaking_attn", {"num_heads": 2, "use_cache": True}),
    "stick_breaking-shared": ("stickbreaking_attn", WIDE | {"attend_current": True, "use_cache": True}),
    "transformer": ("transformer", {"num_heads": 2}),
    "transformer-shared": ("transformer", WIDE | {"window_size": 5}),
}
SIZE = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 48, "vocab_size": 12}
# Model types whose layers do not run in the interpreter: some require CUDA or flash-attn, or have a scan or shapes that
# it does not support. mamba and mamba2 are transformers' own classes here.
NOT_RUN = (
    "abc",
    "bitnet",
    "deltaformer",
    "lightnet",
    "log_linear_mamba2",
    "mamba3",
    "mesa_net",
    "moba",
    "stickbreaking_attn",
)


class Function(NamedTuple):
    """A function of the original."""

    module: str  # below fla.ops
    name: str
    tensors: str  # its tensors; ``argument=operand`` where the names differ
    options: Mapping[str, Any] = MappingProxyType({})
    differentiable: bool = True
    through_state: bool = True  # whether gradients of the last state reach the operands


RULES = "q k=unit v beta initial_state=state"
FUNCTIONS = {
    "linear_attn": Function("linear_attn", "fused_recurrent_linear_attn", "q k v initial_state=state"),
    "linear_attn-normalized": Function(
        "linear_attn", "fused_recurrent_linear_attn", "q=weights k=keys v", {"normalize": True}
    ),
    "retention": Function("retention", "fused_recurrent_retention", "q k v initial_state=state"),
    "lightning": Function(
        "lightning_attn",
        "fused_recurrent_lightning_attn",
        "q k v initial_state=state",
        {"layer_idx": 1, "num_layers": 3},
    ),
    "simple_gla": Function("simple_gla", "fused_recurrent_simple_gla", "q k v g initial_state=state", {"scale": 0.7}),
    "gla": Function("gla", "fused_recurrent_gla", "q k v gk initial_state=state"),
    "hgrn": Function("hgrn", "fused_recurrent_hgrn", "x g=gates initial_state=last"),
    "rwkv6": Function(
        "rwkv6", "fused_recurrent_rwkv6", "r=q k v w=gk u initial_state=state", {"scale": 1.0}, through_state=False
    ),
    "delta_rule": Function("delta_rule", "fused_recurrent_delta_rule", RULES),
    "delta_rule-normalized": Function(
        "delta_rule", "fused_recurrent_delta_rule", "q k v beta", {"use_qk_l2norm_in_kernel": True}
    ),
    "gated_delta_rule": Function(
        "gated_delta_rule", "fused_recurrent_gated_delta_rule", f"{RULES} g", differentiable=False
    ),
    "gated_delta_rule-shared": Function(
        "gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        "q k v=v4 beta=beta4 g=g4 gk=gk4 initial_state=state4",
        {"use_qk_l2norm_in_kernel": True},
        False,
    ),
    "kda": Function("kda", "fused_recurrent_kda", "q k=unit v beta g=gk initial_state=state", {}, False),
    "comba": Function("comba", "fused_recurrent_comba", f"{RULES} p g", {}, False),
    "iplr": Function("generalized_delta_rule", "fused_recurrent_iplr_delta_rule", "q k v a=p b initial_state=state"),
    "dplr": Function(
        "generalized_delta_rule", "fused_recurrent_dplr_delta_rule", "q k v a=p b gk initial_state=state", {}, False
    ),
    "rwkv7": Function(
        "rwkv7", "fused_mul_recurrent_rwkv7", "r=q w=gk k v kk=unit a=rates initial_state=state", {}, False
    ),
}


class Naive(NamedTuple):
    """A definition of the original in plain PyTorch: ``call(module, **tensors)`` returns its output."""

    module: str  # below fla.ops
    tensors: str
    call: Callable[..., Tensor]
    differentiable: bool = True
    through_state: bool = True


def naive_abc(module: Any, **tensors: Tensor) -> Tensor:
    """Its layout is (B,H,T,channels)."""
    given = {name: t.transpose(1, 2) for name, t in tensors.items()}
    return module.naive_recurrent_abc(**given)[0].transpose(1, 2)


def naive_path(module: Any, q: Tensor, beta: Tensor, **tensors: Tensor) -> Tensor:
    """Without forget gates."""
    scale = q.shape[-1] ** -0.5
    return module.naive_path_attn(q, beta=2 * beta, g=torch.zeros_like(beta), scale=scale, chunk_size=4, **tensors)


def means(x: Tensor) -> Tensor:
    """The means of whole blocks: x (B,T,H,D) -> (B,blocks,H,D)."""
    return x[:, : len(x[0]) // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).mean(2)


def nsa_choice(module: Any, q: Tensor, k: Tensor) -> Tensor:
    """The blocks of each query, (B,T,H,TOP) in ascending order, -1 for none."""
    # The last block is not whole, so that its mean does not matter.
    own = torch.nn.functional.pad(means(k), (0, 0, 0, 0, 0, k.shape[1] % BLOCK))
    blocks = module.naive_nsa_topk(q, own, TOP, BLOCK, q.shape[-1] ** -0.5)
    none = own.shape[1]
    return blocks.masked_fill(blocks < 0, none).sort(-1).values.float()


def nsa_best(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The branch that reads the best blocks."""
    blocks = nsa_choice(module, q.detach(), k.detach()).long()
    return module.naive_nsa_selection(q, k, v, blocks.masked_fill(blocks * BLOCK >= k.shape[1], -1), BLOCK)


NAIVE = {
    "forgetting": Naive("forgetting_attn.naive", "q k v g", lambda m, **t: m.naive_forgetting_attn(**t)),
    "path": Naive("path_attn.naive", "q k v w=unit beta", naive_path),
    "stick_breaking": Naive("stickbreaking_attn.naive", "q k v", lambda m, **t: m.naive_stickbreaking_attn(**t)[0]),
    "stick_breaking-current": Naive(
        "stickbreaking_attn.naive", "q k v", lambda m, **t: m.naive_stickbreaking_attn(**t, attend_current=True)[0]
    ),
    "gsa": Naive("gsa.naive", "q k v s=weights g=gk", lambda m, **t: m.naive_recurrent_gsa(**t)[0]),
    "abc": Naive("abc.naive", "q k v s=b", naive_abc),
    "mesa": Naive(
        "mesa_net.naive",
        "q k=unit v=b g beta lamb=u",
        lambda m, lamb, **t: m.naive_mesa_net_exact(lamb=0.25 + lamb.square(), **t)[0],
    ),
    "preconditioned": Naive(
        "precond_gated_delta_rule.naive",
        "q k v g g_atk=fade beta beta_atk",
        lambda m, **t: m.naive_recurrent_precond_gated_delta_rule(**t)[0],
    ),
    "dsa": Naive(
        "dsa.naive", "q k v a b=x w=beta", lambda m, a, b, w, **t: m.naive_dsa(**t, q_idx=a, k_idx=b, w_idx=w, topk=TOP)
    ),
    "nsa-summary": Naive(
        "nsa.naive",
        "q k v",
        lambda m, q, k, v: m.naive_nsa_compression(q, means(k), means(v), BLOCK, q.shape[-1] ** -0.5)[0],
    ),
    "nsa-choice": Naive("nsa.naive", "q k", nsa_choice, differentiable=False),
    "nsa-best": Naive("nsa.naive", "q k v", nsa_best),
}


def drawn(name: str, *shape: int) -> Tensor:
    """Normally distributed numbers that depend on the name only, the same in every version of numpy."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)).float()


def operands(keys: int, values: int) -> dict[str, Tensor]:
    """The tensors of ``FUNCTIONS`` by name, in the original's layout (B,T,H,channels)."""
    found = {name: drawn(name, B, T, H, keys) for name in ("q", "k", "p", "b", "weights", "keys", "rates")}
    found |= {name: found[name].exp() for name in ("weights", "keys")}
    found |= {name: 0.3 * found[name] for name in ("p", "b")}
    found["rates"] = found["rates"].sigmoid()
    found["unit"] = torch.nn.functional.normalize(found["k"], dim=-1)
    for heads, suffix in ((H, ""), (HV, "4")):
        found |= {
            f"v{suffix}": drawn(f"v{suffix}", B, T, heads, values),
            f"g{suffix}": -drawn(f"g{suffix}", B, T, heads).exp(),
            f"gk{suffix}": -drawn(f"gk{suffix}", B, T, heads, keys).exp(),
            f"beta{suffix}": drawn(f"beta{suffix}", B, T, heads).sigmoid(),
            f"state{suffix}": drawn(f"state{suffix}", B, heads, keys, values),
        }
    found |= {"u": drawn("u", H, keys), "x": drawn("x", B, T, keys), "last": drawn("last", B, keys)}
    found["gates"] = -drawn("gates", B, T, keys).exp()
    found |= {"a": drawn("a", B, T, H, keys), "fade": -drawn("fade", B, T, H).exp()}
    found["beta_atk"] = drawn("beta_atk", B, T, H).sigmoid()
    return found


def arguments(case: Function | Naive, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a function by the names of its arguments, each one a leaf."""
    pairs = (pair.partition("=") for pair in case.tensors.split())
    return {name: given[other or name].clone().requires_grad_(case.differentiable) for name, _, other in pairs}


def results(case: Function | Naive, out: Tensor, end: Any, leaves: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Outputs, last states, and the gradients of a sum of sines of them."""
    ends = end if isinstance(end, tuple) else (end,)
    yield "out", out
    yield from ((f"state{i}", one) for i, one in enumerate(ends))
    needed = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if needed:
        read = (out, *ends) if case.through_state else (out,)
        total = sum(one.sin().sum() for one in read)
        grads = torch.autograd.grad(total, list(needed.values()), allow_unused=True, materialize_grads=True)
        yield from ((f"grad_{name}", grad) for name, grad in zip(needed, grads, strict=True))


def model_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Type and options of the models whose logits are stored, by name: CASES, and those recorded of nsa."""
    found = {key: (name, SIZE | options) for key, (name, options) in CASES.items() if name not in (*NOT_RUN, "nsa")}
    for i, one in enumerate(RECORDED["nsa"]["models"]):
        found[f"nsa-{i}"] = "nsa", one["options"] | {"vocab_size": 12, "num_hidden_layers": 2}
    return found


def ids(name: str) -> Tensor:
    """Tokens (1,N) for a model; those of nsa are more blocks than it reads."""
    return torch.arange(44 if name == "nsa" else 8)[None] * 5 % 12


def fill(model: Any) -> Any:
    """Give every parameter of a model numbers that depend on its name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of norms near 1, so that no layer vanishes.
            scale, mean = 0.3 if parameter.dim() > 1 else 0.25, 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(scale * drawn(name, *parameter.shape) + mean)
    return model.eval()


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """What ``flash_attn_func`` of the package flash-attn computes on GPUs: q, k, v (B,T,H,channels)."""
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    if window_size[0] >= 0:
        seen = seen.triu(-window_size[0])
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,bjhd->bihd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)


def main(path: str, keys: int, values: int) -> None:
    """Run the original and write its results."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from triton.runtime.autotuner import Autotuner

    # Without a device nothing can be timed, so that each kernel runs with the first of its configs.
    whole = Autotuner.__init__
    Autotuner.__init__ = lambda self, fn, names, configs, *more, **options: whole(
        self, fn, names, configs[:1], *more, **options
    )
    importlib.import_module("fla.models")
    for module in ("ops.nsa.parallel", "layers.attn", "layers.mla"):
        importlib.import_module(f"fla.{module}").flash_attn_func = flash  # pyright: ignore[reportAttributeAccessIssue]
    found = {}
    given = operands(keys, values)
    for name, case in FUNCTIONS.items():
        function = getattr(importlib.import_module(f"fla.ops.{case.module}"), case.name)
        leaves = arguments(case, given)
        out, end = function(**leaves, **case.options, output_final_state=True)
        found |= {f"{name}/{part}": value for part, value in results(case, out, end, leaves)}
    for name, case in NAIVE.items():
        leaves = arguments(case, given)
        out = case.call(importlib.import_module(f"fla.ops.{case.module}"), **leaves)
        found |= {f"naive-{name}/{part}": value for part, value in results(case, out, (), leaves)}
    for key, (name, options) in model_cases().items():
        model = fill(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)))
        with torch.no_grad():
            found[f"model-{key}/logits"] = model(ids(name), use_cache=False).logits
    np.savez_compressed(path, **{name: value.detach().numpy() for name, value in found.items()})


if __name__ == "__main__":
    main(sys.argv[1], *(map(int, sys.argv[2:]) if len(sys.argv) > 2 else SIZES))
