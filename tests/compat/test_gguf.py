"""GGUF files: what llama.cpp's converters write is read as the model that they converted, and written back."""

import struct

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import hybrids
import longspan
from longspan.compat import gguf
from longspan.compat.gguf import container, tokenizer
from longspan.compat.gguf.models import described
from longspan.compat.transformers import decoding
from longspan.data import tokenization
from longspan.ops.native.call import available
from longspan.ops.quantized.formats import FORMATS, Blocks, dequantize, quantize

pytestmark = pytest.mark.usefixtures("restored")
PAIR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
QWEN = {**PAIR, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "intermediate_size": 64}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
RWKV = {
    **{"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 64},
    **{"vocab_size": hybrids.VOCAB},
    **{"decay_low_rank_dim": 8, "gate_low_rank_dim": 16, "a_low_rank_dim": 8, "v_low_rank_dim": 4},
    **{"norm_eps": 1e-5, "norm_first": True, "fuse_norm": False},
}


def named(w, layer, names):
    """Tensors of a layer, renamed."""
    prefix = f"blk.{layer}."
    return {prefix + theirs: w[ours] for ours, theirs in names.items()}


def below(w, prefix):
    return {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}


def convert_mamba(w, c):
    found = {"token_embd.weight": w["backbone.embeddings.weight"], "output_norm.weight": w["backbone.norm_f.weight"]}
    if not c.tie_word_embeddings:
        found["output.weight"] = w["lm_head.weight"]
    for i in range(c.num_hidden_layers):
        m = below(w, f"backbone.layers.{i}.mixer.")
        found[f"blk.{i}.attn_norm.weight"] = w[f"backbone.layers.{i}.norm.weight"]
        names = {"in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight"}
        names |= {
            "conv1d.weight": "ssm_conv1d.weight",
            "conv1d.bias": "ssm_conv1d.bias",
            "A_log": "ssm_a",
            "D": "ssm_d",
        }
        if "dt_bias" in m:
            names |= {"dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight"}
            m["A_log"], m["D"] = m["A_log"][:, None], m["D"][:, None]
            m["norm.weight"] = m["norm.weight"].view(c.n_groups, -1)
        else:
            names |= {"x_proj.weight": "ssm_x.weight", "dt_proj.weight": "ssm_dt.weight", "dt_proj.bias": "ssm_dt.bias"}
        m["A_log"], m["conv1d.weight"] = -m["A_log"].exp(), m["conv1d.weight"].squeeze()
        found |= named(m, i, names)
    sizes = {"conv_kernel": c.conv_kernel, "state_size": c.state_size}
    if c.model_type == "mamba2":
        sizes |= {"inner_size": 2 * c.hidden_size, "time_step_rank": c.num_heads, "group_count": c.n_groups}
    else:
        sizes |= {"inner_size": c.intermediate_size, "time_step_rank": c.time_step_rank, "dt_b_c_rms": False}
    data = {f"ssm.{key}": value for key, value in sizes.items()}
    return found, data | {"attention.layer_norm_rms_epsilon": c.layer_norm_epsilon, "feed_forward_length": 0}


def tiled(t, dim, c, width):
    """Value heads grouped by key head -> tiled."""
    split = (c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads, width)
    return t.unflatten(dim, split).transpose(dim, dim + 1).flatten(dim, dim + 2)


def convert_qwen(w, c):
    w = {
        name: t + 1 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else t
        for name, t in w.items()
    }
    found = {"token_embd.weight": w["model.embed_tokens.weight"], "output_norm.weight": w["model.norm.weight"]}
    found["output.weight"] = w["lm_head.weight"]
    keys, wide = 2 * c.linear_num_key_heads * c.linear_key_head_dim, c.linear_value_head_dim
    for i in range(c.num_hidden_layers):
        m = below(w, f"model.layers.{i}.")
        names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
        if "self_attn.q_proj.weight" in m:
            names |= {f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"} | {"self_attn.o_proj": "attn_output"}
            names |= {f"self_attn.{one}_norm": f"attn_{one}_norm" for one in "qk"}
        else:
            names |= {
                "linear_attn.norm": "ssm_norm",
                "linear_attn.out_proj": "ssm_out",
                "linear_attn.conv1d": "ssm_conv1d",
            }
            a = below(m, "linear_attn.")
            m["linear_attn.conv1d.weight"] = conv = a["conv1d.weight"].squeeze()
            dt, decay = a["dt_bias"], -a["A_log"].exp()
            if "in_proj_qkv.weight" in a:
                parts = {"attn_qkv": a["in_proj_qkv.weight"], "attn_gate": tiled(a["in_proj_z.weight"], 0, c, wide)}
                parts |= {
                    "ssm_beta": tiled(a["in_proj_b.weight"], 0, c, 1),
                    "ssm_alpha": tiled(a["in_proj_a.weight"], 0, c, 1),
                }
                parts["attn_qkv"] = torch.cat([parts["attn_qkv"][:keys], tiled(parts["attn_qkv"][keys:], 0, c, wide)])
                m["linear_attn.conv1d.weight"] = torch.cat([conv[:keys], tiled(conv[keys:], 0, c, wide)])
                m["linear_attn.out_proj.weight"] = tiled(a["out_proj.weight"], 1, c, wide)
                dt, decay = tiled(dt, 0, c, 1), tiled(decay, 0, c, 1)
            else:
                each = c.linear_num_value_heads // c.linear_num_key_heads * wide
                sizes = [c.linear_key_head_dim, c.linear_key_head_dim, each, each]
                q, k, v, z = (
                    part.flatten(0, 1)
                    for part in a["in_proj_qkvz.weight"].unflatten(0, (c.linear_num_key_heads, -1)).split(sizes, 1)
                )
                parts = {"attn_qkv": torch.cat([q, k, v]), "attn_gate": z, "ssm_ba": a["in_proj_ba.weight"]}
            found |= {f"blk.{i}.{name}.weight": t for name, t in parts.items()}
            found |= {f"blk.{i}.ssm_dt.bias": dt, f"blk.{i}.ssm_a": decay}
        if "mlp.gate_proj.weight" in m:
            names |= {f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")}
        else:
            names |= {f"mlp.shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")}
            names |= {"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
            m["mlp.shared_expert_gate.weight"] = m["mlp.shared_expert_gate.weight"].squeeze()
            gate, up = m["mlp.experts.gate_up_proj"].chunk(2, 1)
            experts = {"gate": gate, "up": up, "down": m["mlp.experts.down_proj"]}
            found |= {f"blk.{i}.ffn_{one}_exps.weight": t.contiguous() for one, t in experts.items()}
        found |= named(m, i, {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()})
    rotated = c.head_dim // 4
    data = {
        **{"attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads},
        **{"attention.key_length": c.head_dim, "attention.value_length": c.head_dim},
        **{"attention.layer_norm_rms_epsilon": c.rms_norm_eps, "full_attention_interval": 2},
        **{"rope.freq_base": c.rope_parameters["rope_theta"], "rope.dimension_count": rotated},
        **{"ssm.conv_kernel": c.linear_conv_kernel_dim, "ssm.state_size": c.linear_key_head_dim},
        **{"ssm.group_count": c.linear_num_key_heads, "ssm.time_step_rank": c.linear_num_value_heads},
        **{"ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim},
    }
    if c.model_type != "qwen3_next":
        data["rope.dimension_sections"] = [11, 11, 10, 0]
    if c.model_type != "qwen3_5_moe_text":
        data["feed_forward_length"] = c.intermediate_size
    if c.model_type == "qwen3_5_text":
        return found, data
    experts = {"count": c.num_experts, "used_count": c.num_experts_per_tok}
    experts |= {"feed_forward_length": c.moe_intermediate_size}
    experts |= {"shared_feed_forward_length": c.shared_expert_intermediate_size}
    return found, data | {f"expert_{key}": value for key, value in experts.items()}


def adjacent(t, heads):
    """Rows for rotary embeddings of halves -> of adjacent rows."""
    return t.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def convert_granite(w, c):
    found = {"token_embd.weight": w["model.embed_tokens.weight"], "output_norm.weight": w["model.norm.weight"]}
    found["output.weight"] = w["lm_head.weight"]
    shared = "_shexp" if c.num_local_experts else ""
    for i, kind in enumerate(c.layer_types):
        m = below(w, f"model.layers.{i}.")
        names = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
        if kind == "full_attention":
            names |= {f"self_attn.{one}_proj.weight": f"attn_{one}.weight" for one in "qkv"}
            names |= {"self_attn.o_proj.weight": "attn_output.weight"}
            for one, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads)):
                m[f"self_attn.{one}_proj.weight"] = adjacent(m[f"self_attn.{one}_proj.weight"], heads)
        else:
            a = below(m, "mamba.")
            a["A_log"], a["D"] = -a["A_log"][:, None].exp(), a["D"][:, None]
            a["conv1d.weight"], a["norm.weight"] = (
                a["conv1d.weight"].squeeze(),
                a["norm.weight"].view(c.mamba_n_groups, -1),
            )
            inner = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "conv1d.bias": "ssm_conv1d.bias"}
            inner |= {"conv1d.weight": "ssm_conv1d.weight", "norm.weight": "ssm_norm.weight"}
            inner |= {f"{one}_proj.weight": f"ssm_{one}.weight" for one in ("in", "out")}
            found |= named(a, i, inner)
        gate, up = m["shared_mlp.input_linear.weight"].chunk(2)
        parts = {f"gate{shared}": gate, f"up{shared}": up, f"down{shared}": m["shared_mlp.output_linear.weight"]}
        if shared:
            gate, up = m["block_sparse_moe.experts.gate_up_proj"].chunk(2, 1)
            parts |= {"gate_exps": gate, "up_exps": up, "down_exps": m["block_sparse_moe.experts.down_proj"]}
            parts["gate_inp"] = m["block_sparse_moe.router.weight"]
        found |= named(m, i, names) | {f"blk.{i}.ffn_{one}.weight": t.contiguous() for one, t in parts.items()}
    heads = [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types]
    data = {
        **{"attention.head_count": c.num_attention_heads, "attention.head_count_kv": heads},
        **{"attention.layer_norm_rms_epsilon": c.rms_norm_eps, "feed_forward_length": c.intermediate_size},
        **{"attention.scale": c.attention_multiplier, "embedding_scale": c.embedding_multiplier},
        **{"residual_scale": c.residual_multiplier, "logit_scale": c.logits_scaling},
        **{"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok},
        **{"expert_shared_feed_forward_length": c.shared_intermediate_size},
        **{"ssm.conv_kernel": c.mamba_d_conv, "ssm.state_size": c.mamba_d_state, "ssm.group_count": c.mamba_n_groups},
        **{"ssm.inner_size": c.mamba_n_heads * c.mamba_d_head, "ssm.time_step_rank": c.mamba_n_heads},
        "rope.scaling.finetuned": c.position_embedding_type == "rope",
    }
    return found, data


def convert_lfm2(w, c):
    found = {
        "token_embd.weight": w["model.embed_tokens.weight"],
        "token_embd_norm.weight": w["model.embedding_norm.weight"],
    }
    for i, kind in enumerate(c.layer_types):
        m = below(w, f"model.layers.{i}.")
        names = {"operator_norm": "attn_norm", "ffn_norm": "ffn_norm"}
        names |= {"feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down"}
        if kind == "conv":
            names |= {f"conv.{one}": f"shortconv.{one}" for one in ("in_proj", "out_proj", "conv")}
            m["conv.conv.weight"] = m["conv.conv.weight"].squeeze(1)
        else:
            names |= {f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"} | {"self_attn.out_proj": "attn_output"}
            names |= {f"self_attn.{one}_layernorm": f"attn_{one}_norm" for one in "qk"}
        found |= named(m, i, {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()})
    heads = [0 if kind == "conv" else c.num_key_value_heads for kind in c.layer_types]
    data = {
        **{"attention.head_count": c.num_attention_heads, "attention.head_count_kv": heads},
        **{
            "attention.layer_norm_rms_epsilon": c.norm_eps,
            "feed_forward_length": len(w["model.layers.0.feed_forward.w1.weight"]),
        },
        **{"rope.freq_base": c.rope_parameters["rope_theta"], "shortconv.l_cache": c.conv_L_cache},
    }
    return found, data


def convert_rwkv7(w, c):
    found = {"token_embd.weight": w["model.embeddings.weight"], "output.weight": w["lm_head.weight"]}
    for end in ("weight", "bias"):
        found[f"output_norm.{end}"] = w[f"model.norm.{end}"]
        found[f"token_embd_norm.{end}"] = w[f"model.layers.0.pre_norm.{end}"]
    for i in range(c.num_hidden_layers):
        m = below(w, f"model.layers.{i}.")
        names = {
            "attn.k_k": "time_mix_k_k.weight",
            "attn.k_a": "time_mix_k_a.weight",
            "attn.r_k": "time_mix_r_k.weight",
        }
        m["attn.r_k"] = m["attn.r_k"].flatten()
        for ours, theirs in {"attn_norm": "attn_norm", "ffn_norm": "attn_norm_2", "attn.g_norm": "time_mix_ln"}.items():
            names |= {f"{ours}.{end}": f"{theirs}.{end}" for end in ("weight", "bias")}
        for ours, theirs in {"r": "receptance", "k": "key", "v": "value", "o": "output"}.items():
            names[f"attn.{ours}_proj.weight"] = f"time_mix_{theirs}.weight"
        names |= {"ffn.x_k": "channel_mix_lerp_k.weight", "ffn.key.weight": "channel_mix_key.weight"}
        names["ffn.value.weight"] = "channel_mix_value.weight"
        for one in "wavg":
            if one == "v" and not i:
                continue
            lora = f"attn.{one}_lora.lora"
            names |= {f"{lora}.0.weight": f"time_mix_{one}1.weight", f"{lora}.2.weight": f"time_mix_{one}2.weight"}
            names |= {} if one == "g" else {f"{lora}.2.bias": f"time_mix_{one}0.weight"}
        found |= named(m, i, names)
        found[f"blk.{i}.time_mix_lerp_fused.weight"] = torch.stack([m[f"attn.x_{one}"] for one in "rwkvag"])
    found |= {f"blk.0.time_mix_v{one}.weight": found[f"blk.0.time_mix_a{one}.weight"] for one in range(3)}
    ranks = {"decay": c.decay_low_rank_dim, "iclr": c.a_low_rank_dim, "value_residual_mix": c.v_low_rank_dim}
    ranks["gate"] = c.gate_low_rank_dim
    data = {f"attention.{name}_lora_rank": rank for name, rank in ranks.items()}
    data |= {"attention.layer_norm_epsilon": c.norm_eps, "wkv.head_size": c.head_dim}
    return found, data | {"feed_forward_length": c.intermediate_size}


CASES = {
    "mamba": ("mamba", {"intermediate_size": 64}, convert_mamba),
    "mamba2": ("mamba2", {"tie_word_embeddings": True}, convert_mamba),
    "qwen35": ("qwen3_5", QWEN, convert_qwen),
    "qwen35moe": ("qwen3_5_moe", QWEN | MOE, convert_qwen),
    "qwen3next": ("qwen3_next", QWEN | MOE, convert_qwen),
    "granitehybrid": ("granitemoehybrid", {"shared_intermediate_size": 32, "intermediate_size": 64}, convert_granite),
    "granitehybrid dense": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "residual_multiplier": 0.22, "logits_scaling": 8.0},
        convert_granite,
    ),
    "lfm2": ("lfm2", {"tie_word_embeddings": True, "block_multiple_of": 32}, convert_lfm2),
    "rwkv7": ("", RWKV, convert_rwkv7),
}


# Numbers that a format stores without loss, in whatever order.
EXACT = {"F32": (-1.1, 0.3, 0.7), "Q8_0": (-127, 0, 127), "Q4_0": (-8, 0, 4)}


def original(case, form="F32", seed=0):
    """A model of a case with weights that a format stores without loss."""
    kind, options, _ = CASES[case]
    if kind:
        hybrids.served(kind)
        made = hybrids.model(kind, **options)
    else:
        from longspan.compat.fla.models import supported

        family = supported()["rwkv7"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = family.model(family.config(**options)).eval()
            for p in made.parameters():
                p.data.add_(torch.randn_like(p) * 0.1)
    draw = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        if p.dim() > 1 and p.shape[-1] % 32 == 0:
            whole = torch.tensor(EXACT[form])[torch.randint(0, 3, p.shape, generator=draw)]
            p.data = whole * 2.0 ** -(int(max(map(abs, EXACT[form]))).bit_length() + p.shape[-1].bit_length() // 2)
    return made


def converted(case, made):
    """The tensors and the metadata of a case's file."""
    weights = {name: t.detach() for name, t in made.state_dict().items()}
    tensors, data = CASES[case][2](weights, made.config)
    name, c = case.split()[0], made.config
    data |= {"block_count": c.num_hidden_layers, "embedding_length": c.hidden_size, "context_length": 256}
    return name, tensors, {f"{name}.{key}": value for key, value in data.items()}


def formatted(tensors, form):
    """Tensors in blocks where the converters have them so."""
    found = {}
    for name, t in tensors.items():
        wide = (
            t.dim() > 1
            and t.shape[-1] % 32 == 0
            and not any(one in name for one in ("norm", "conv1d", "gate_inp", "lerp"))
        )
        found[name] = container.Content(
            tuple(t.shape), quantize(t.reshape(-1, t.shape[-1]), form) if wide and form != "F32" else t.contiguous()
        )
    return found


def write_by_gguf(path, name, data, tensors):
    """Write a file with the package gguf."""
    theirs = pytest.importorskip("gguf")
    writer = theirs.GGUFWriter(path, name)
    for key, value in data.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for tensor, (shape, t) in tensors.items():
        if isinstance(t, Blocks):
            kind, width = theirs.GGMLQuantizationType[t.format], t.data.shape[1]
            writer.add_tensor(tensor, t.data.view(*shape[:-1], width).numpy(), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, t.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path, case, made, form="F32", foreign=False):
    name, tensors, data = converted(case, made)
    tensors = formatted(tensors, form)
    if foreign:
        write_by_gguf(path, name, data, tensors)
    else:
        container.write(path, {"general.architecture": name} | data, tensors)


def logits(made):
    with torch.no_grad():
        return made(hybrids.tokens(2, 11)).logits


@torch.no_grad()
def stepped(made):
    """The logits of single tokens after a prompt."""
    cache = made(hybrids.tokens(2, 11), use_cache=True).cache
    return torch.cat([made(one, cache=cache).logits for one in hybrids.tokens(2, 3, seed=1).split(1, 1)], 1)


def same_by_engine(made):
    """Require that tokens are calls of the decode engine, and equal those of the layers."""
    if hybrids.version() < decoding.SINCE or not available("decode/step"):
        return
    assert isinstance(decoding.engine_of(made), decoding.Engine), decoding.engine_of(made)
    found = stepped(made)
    with longspan.backend("torch"):
        assert hybrids.far(found, stepped(made)) < 2e-4


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "gguf"])
@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_is_read(case, foreign, tmp_path):
    for form in ("F32", "Q8_0") if foreign else ("Q4_0",):
        made = original(case, form)
        write(tmp_path / "model.gguf", case, made, form, foreign)
        found = gguf.load(tmp_path / "model.gguf", activations="float32")
        assert hybrids.far(logits(found), logits(made)) < 2e-6, form
        same_by_engine(found)


@pytest.mark.parametrize("case", CASES)
def test_a_written_model_is_what_the_converter_writes(case, tmp_path):
    made = original(case)
    gguf.save(made, tmp_path / "ours.gguf")
    found = container.Container(tmp_path / "ours.gguf")
    name, tensors, data = converted(case, made)
    assert found.tensors.keys() == tensors.keys()
    for tensor, t in tensors.items():
        assert torch.equal(found.read(tensor), t), tensor
    for key, value in data.items():
        if key != f"{name}.context_length":
            assert np.allclose(found.metadata[key], value), key
    assert hybrids.far(logits(gguf.load(tmp_path / "ours.gguf")), logits(made)) < 1e-6
    _, config = described(found)
    assert config.to_dict().items() >= {"vocab_size": hybrids.VOCAB, "hidden_size": made.config.hidden_size}.items()


@pytest.mark.parametrize(("case", "form"), [("qwen35", "Q4_K"), ("qwen35", "Q6_K"), ("qwen3next", "Q5_0")])
def test_blocks_compute_what_their_numbers_do(case, form, tmp_path):
    """Also where blocks straddle heads that change places, and two formats in one parameter."""
    options = {"hidden_size": 256, "linear_num_value_heads": 8, "intermediate_size": 256}
    name, tensors, data = converted(case, hybrids.model(CASES[case][0], **CASES[case][1] | options))
    draw = torch.Generator().manual_seed(1)
    files = {"blocks": formatted(tensors, "F32"), "numbers": formatted(tensors, "F32")}
    for key, t in tensors.items():
        kind = "Q8_0" if "attn_gate" in key else form
        one = FORMATS[kind]
        if t.dim() != 2 or t.shape[-1] % 256:
            continue
        raw = torch.randint(0, 256, (len(t), t.shape[1] // one.block, one.size), dtype=torch.uint8, generator=draw)
        for at in {"Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
            raw[..., at : at + 2] = torch.tensor([1e-4 if "K" in kind else 1e-3]).half().view(torch.uint8)
        blocks = Blocks(raw.flatten(1), kind, t.shape[1])
        files["blocks"][key] = container.Content(tuple(t.shape), blocks)
        files["numbers"][key] = container.Content(tuple(t.shape), dequantize(blocks))
    found = {}
    for which, content in files.items():
        container.write(tmp_path / f"{which}.gguf", {"general.architecture": name} | data, content)
        model = gguf.load(tmp_path / f"{which}.gguf", activations="float32")
        found[which] = logits(model)
        if form != "Q5_0" or which == "numbers":  # the engine has no kernels for that
            same_by_engine(model)
    assert hybrids.far(found["blocks"], found["numbers"]) < 1e-5


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    made = original("qwen35")
    name, tensors, data = converted("qwen35", made)
    data |= {f"{name}.block_count": 3, f"{name}.nextn_predict_layers": 1}
    tensors |= {"blk.2.nextn.eh_proj.weight": torch.ones(32, 64), "blk.2.attn_norm.weight": torch.ones(32)}
    container.write(tmp_path / "model.gguf", {"general.architecture": name} | data, formatted(tensors, "F32"))
    found = gguf.load(tmp_path / "model.gguf")
    assert hybrids.far(logits(found), logits(made)) < 2e-6
    with pytest.raises(ValueError, match="copy the file"):
        found.save_pretrained(tmp_path / "saved")


def test_what_is_not_read_is_refused_by_name(tmp_path):
    path, bad = tmp_path / "model.gguf", tmp_path / "bad.gguf"
    gguf.save(original("mamba2"), path)
    good, file = path.read_bytes(), container.Container(path)
    data, tensors = (
        file.metadata,
        {key: container.Content(one.shape, file.read(key)) for key, one in file.tensors.items()},
    )
    name = "blk.0.ssm_in.weight"
    at = good.index(name.encode()) + len(name) + 4 + 16  # of its type, after the dimensions
    end = good.index(b"mamba2.ssm")

    def written(**entries):
        changed = {key.replace("__", "."): value for key, value in entries.items()}
        return b"".join(container.pieces(data | changed, tensors))

    def without(*names):
        kept = {key: one for key, one in tensors.items() if key not in names}
        return b"".join(container.pieces(data, kept | {f"{one}.x": tensors[one] for one in names[1:]}))

    for content, why in (
        (b"", "0 bytes"),
        (b"PK" + good[2:], "not a GGUF file"),
        (good[:4] + struct.pack(">I", 3) + good[8:], "big-endian"),
        (good[:4] + struct.pack("<I", 1) + good[8:], "version is 1"),
        (good[:8] + struct.pack("<Q", 1 << 60) + good[16:], "tensors do not fit"),
        (good[: len(good) // 2], "takes .* bytes|cut"),
        (good[:at] + struct.pack("<I", 20) + good[at + 4 :], "IQ4_NL"),
        (good[:at] + struct.pack("<I", 77) + good[at + 4 :], "the number 77"),
        (good[: at - 8] + struct.pack("<Q", 1 << 62) + good[at:], "takes"),
        (good[: at + 4] + struct.pack("<Q", 0) + good[at + 12 :], "overlap"),
        (good[:end] + b"\xff" + good[end + 1 :], "UTF-8"),
        (written(general__architecture="llama"), "llama.*supported are mamba"),
        (written(general__alignment=3), "alignment"),
        (written(mamba2__block_count=1 << 40), "block_count"),
        (written(mamba2__ssm__inner_size=65), "not a multiple"),
        (written(mamba2__rope__scaling__type="yarn"), "yarn"),
        (without(name), f"1 missing: {name}"),
        (without("token_embd.weight"), "no tensor token_embd"),
        (without("blk.1.ssm_d", "blk.0.ssm_d"), "1 unexpected: blk.0.ssm_d.x"),
        (written(mamba2__ssm__state_size=13), "another shape"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=why) as error:
            gguf.load(bad)
        assert str(bad) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="No such file"):
        gguf.load(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="llama cannot be written"):
        gguf.save(type("Model", (), {"config": type("Config", (), {"model_type": "llama"})})(), path)
    with pytest.raises(ValueError, match="equal distances"):
        gguf.save(hybrids.model("qwen3_5", **QWEN | {"layer_types": ["full_attention", "linear_attention"]}), path)


@pytest.mark.parametrize("pre", ["qwen35", "refact", "llama-bpe", "gpt-4o"])
def test_a_tokenizer_is_read_and_written(pre):
    letters = tokenization.byte_letters()
    data = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*letters, "<s>", "<t>", "th", "Ġth", "12", "'s"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["t h", "Ġ th", "1 2", "' s"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.add_bos_token": True,
    }
    content = tokenizer.read(data)
    made = tokenization.encoder(content, special=True)
    found = tokenization.encode(made, ["th th 12's<t>"], special=True)[0]
    digits = [letters["1"], letters["2"]] if pre in ("qwen35", "refact") else [260]
    assert found == [256, 258, 259, made.token_to_id("Ġ"), *digits, 261, 257]
    assert tokenizer.write(content, 262) == data
    for entry, value in (("model", "llama"), ("pre", "default"), ("tokens", ["a", "a"]), ("merges", ["a"])):
        with pytest.raises(ValueError, match=entry if entry != "tokens" else "different tokens"):
            tokenizer.read(data | {f"tokenizer.ggml.{entry}": value})
