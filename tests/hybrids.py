"""Tiny models of transformers with recurrent layers, of every type that ``longspan.compat.transformers`` serves."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

from longspan.compat.transformers import accelerate
from longspan.compat.transformers.models import MODELS

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
DELTA = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
SELECTIVE = {"state_size": 6, "num_hidden_layers": 2, "time_step_rank": 4}
SHORT = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
INKLING = {
    "num_hidden_layers": 2,
    "layer_types": ["hybrid", "hybrid_sliding"],
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 16,
    "d_rel": 4,
    "rel_extent": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
INKLING2 = {**INKLING, "unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 1}

# name: (class, what its configuration adds to COMMON)
KINDS = {
    "qwen3_next": ("Qwen3Next", {**DELTA, **EXPERTS}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybrid", {k: v for k, v in DELTA.items() if k != "head_dim"} | {"linear_num_key_heads": 4}),
    "kimi_linear": ("KimiLinear", {**LATENT, "linear_head_dim": 8, "linear_num_heads": 4}),
    "bailing_hybrid": (
        "BailingHybrid",
        {**LATENT, "head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": 2},
    ),
    "bamba": ("Bamba", {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 12,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 12,
            "chunk_size": 16,
            "num_key_value_heads": 4,
            "use_mem_rope": True,
            "hidden_size": 32,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "block_size": 16,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "mamba": ("Mamba", SELECTIVE),
    "falcon_mamba": ("FalconMamba", SELECTIVE),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 6,
            "mamba_dt_rank": 4,
        },
    ),
    "zamba": (
        "Zamba",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 6,
            "mamba_dt_rank": 4,
            "num_key_value_heads": 4,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "attention", "recurrent"],
            "attention_window_size": 64,
        },
    ),
    "rwkv": ("Rwkv", {"num_hidden_layers": 2}),
    "xlstm": (
        "xLSTM",
        {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "num_attention_heads": None},
    ),
    "lara_mini": ("LaraMini", {**DELTA, **EXPERTS}),
    "lfm2": ("Lfm2", SHORT),
    "lfm2_moe": (
        "Lfm2Moe",
        {**SHORT, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1},
    ),
    "lfm3": (
        "Lfm3",
        {**SHORT, "layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 16, "head_dim": 8},
    ),
    "inkling": ("Inkling", {**INKLING, "n_shared_experts": 1}),
    "inkling2": ("Inkling2", INKLING2),
    "inkling2_loop": (
        "Inkling2Loop",
        {
            **INKLING2,
            "num_hidden_layers": 3,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        },
    ),
}


def file(kind):
    """The modeling file of a type; skips where these transformers do not have it."""
    pytest.importorskip("transformers")
    try:
        return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except ImportError as error:
        pytest.skip(f"these transformers have no {kind}: {error}")


def of(*layers):
    """Types with one of these recurrent layers, by the names of ``Layer``."""
    return tuple(kind for kind in KINDS if MODELS[kind].layer.name in layers)


# Types whose recurrence older transformers have in one piece, so that they stay as they are.
WHOLE = of("Mamba-2")
# Types whose layers with a state are convolutions only.
CONVOLUTIONS = of("short convolutions")
# Types with Mamba-1. In training its original code takes time that grows with the square of the length.
MAMBA1 = of("Mamba-1")
# Types with a scan by channel.
SCANS = of("Mamba-1", "RG-LRU", "RWKV-4", "mLSTM")
# Types whose layers 5.15 does not tell where sequences begin.
UNTOLD = ("mamba2", "falcon_h1", "nemotron_h")


def version():
    """Of transformers: the first two numbers; skips without it."""
    return tuple(int(word) for word in pytest.importorskip("transformers").__version__.split(".")[:2])


def served(kind):
    """Skip if longspan leaves this type unchanged in the installed version of transformers."""
    if version() < MODELS[kind].since:
        pytest.skip(f"longspan supports it from transformers {MODELS[kind].since} on")
    if version() < (5, 15) and kind in WHOLE:
        pytest.skip("transformers before 5.15 has its recurrence in one piece")


def writes(kind):
    """Skip where these transformers' own ``generate`` ends in an error."""
    if version() < (5, 15) and kind in ("olmo_hybrid", "nemotron_h", "granitemoehybrid"):
        pytest.skip("generate of transformers before 5.15 fails for it")


def continues(kind, cuts):
    """Skip where these transformers' layers forget their state when several tokens follow a cache."""
    if version() < MODELS[kind].layer.continues and max(cuts[1:]) > 1:
        pytest.skip("these transformers read several tokens after a cache as a new sequence")


def packs(kind):
    """Whether these transformers tell the layers of a type what they need to keep packed rows apart."""
    if MODELS[kind].since > (5, 15):
        return version() >= MODELS[kind].since
    return kind == "minimax" or version() >= (5, 16) or (version() == (5, 15) and kind not in UNTOLD)


def model(kind, seed=0, **more):
    """A model of this type with lively random weights, in evaluation."""
    module, (prefix, own) = file(kind), KINDS[kind]
    if version() < (5, 14) and kind == "nemotron_h":
        pytest.skip("transformers before 5.14 refuse a layer that is but an MLP")
    config = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    make = getattr(config, f"{prefix}TextConfig", None) or getattr(config, f"{prefix}Config")
    given = {k: v for k, v in {**COMMON, **own, **more}.items() if v is not None or k.endswith("token_id")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(module, f"{prefix}ForCausalLM")(make(**given))
        for name, p in made.named_parameters():
            # Initial values are often small or all alike, so that nothing would be seen of a mistake.
            if p.dim() > 1:
                # Mamba-1 multiplies what x_proj returns three times.
                wide = 4.0 if "x_proj" in name else 0.6
                p.data.normal_(0.0, wide / p.shape[-1] ** 0.5 if "embed" not in name else 1.0)
            elif "A_log" in name:
                p.data.uniform_(-1.0, 1.0)
            elif "dt_bias" in name or "dt_proj.bias" in name:
                p.data.uniform_(-2.0, 0.0)
            else:
                p.data.add_(torch.randn_like(p) * 0.1)
    return made.eval()


def accelerated(kind, **more):
    """The model of this type on our kernels; skips if longspan leaves the type unchanged here."""
    served(kind)
    made = model(kind, **more)
    accelerate(made)
    return made


def halved(made, dtype):
    """The model in a half precision, but for the weights that ``from_pretrained`` keeps in float32."""
    kept = [*(made._keep_in_fp32_modules or ()), *(made._keep_in_fp32_modules_strict or ())]
    for name, p in (*made.named_parameters(), *made.named_buffers()):
        if p.is_floating_point() and not any(word in name for word in kept):
            p.data = p.data.to(dtype)
    return made


def length(kind, half=False):
    """Tokens of a text for comparisons with the original code: short where that is slow."""
    if half and kind == "xlstm":
        return 60  # its chunks of 64 tokens end in an error in half precision
    return 80 if kind in SCANS else 139


def tokens(*shape, seed=0):
    """Random tokens, none of which is padding."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def far(a, b):
    """The largest difference over the largest number of b."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def gradients(made):
    """The gradients of a model's parameters by name."""
    return {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


def same_gradients(found, wanted, tolerance=1e-5):
    """Require equal gradients by name, up to ``tolerance`` of the largest number in all of them."""
    assert found.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        assert float((found[name] - grad).abs().max()) < tolerance * largest, name


def read_in_parts(made, parts):
    """Yield the output of each part of a text, given as arguments of the model, and keep the cache between them."""
    from transformers import DynamicCache

    gemma = made.config.model_type == "recurrent_gemma"  # its outputs have no cache
    cache = {"cache": DynamicCache(config=made.config)} if gemma else {}
    for part in parts:
        found = made(**part, use_cache=True, **cache)
        cache = cache if gemma else cache_of(found)
        yield found


def cache_of(found):
    """The cache among a model's outputs, as the argument of the next call."""
    name = next(name for name in ("cache", "past_key_values", "cache_params", "state") if name in found)
    return {name: found[name]}


def judge(kind, made):
    """Return the same model in float64 throughout, even where its file casts to float32; the reference of both."""
    if version() < (5, 16) and kind in WHOLE:
        pytest.skip("the files of transformers before 5.16 for this type cannot be had in float64")
    source = Path(file(kind).__file__).read_text(encoding="utf-8")
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    name = f"transformers.models.{kind}.modeling_{kind}_in_double"
    module = types.ModuleType(name)
    module.__package__, module.__file__ = f"transformers.models.{kind}", file(kind).__file__
    sys.modules[name] = module
    exec(compile(source, module.__file__, "exec"), vars(module))
    exact = getattr(module, type(made).__name__)(made.config).double().eval()
    exact.set_experts_implementation("eager")  # grouped products are not there in float64
    exact.load_state_dict(made.state_dict())
    return exact
