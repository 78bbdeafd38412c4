"""The two types whose softmax layers have an indexer, and which are part of larger models: their text models."""

import importlib

import pytest
import torch

from hybrids import COMMON, DELTA, EXPERTS, far, file, gradients, same_gradients, tokens
from longspan.compat import transformers as on_cpu

pytest.importorskip("transformers")

from longspan.compat.transformers.cache import NAME

LAYERS = ["linear_attention", "indexed_attention", "linear_attention", "linear_attention"]
INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 0}
LATENT |= {"index_topk": 64, "index_kpool": 4, "index_head_dim": 8, "index_n_heads": 2, "num_key_value_heads": 4}
QWEN = {**DELTA, **EXPERTS, **INDEXED, "hc_lowrank": 8, "hc_count": 2, "indexer_compress_ratio": 4}
GLM = {**LATENT, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2}
GLM |= {"mlp_layer_types": ["dense"] * 4, "linear_head_dim": 8, "linear_num_heads": 4}
DEPTH = {"num_hidden_layers": 4, "layer_types": LAYERS}
BARE = {"qwen4_exp": ("Qwen4Exp", QWEN | DEPTH), "glm5_next": ("Glm5Next", GLM | DEPTH)}


@pytest.fixture(params=BARE)
def made(request):
    """A tiny text model; nothing stays replaced."""
    kind, (prefix, own) = request.param, BARE[request.param]
    module = file(kind)
    config = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    given = COMMON | own
    if kind == "qwen4_exp":
        del given["intermediate_size"]
    torch.manual_seed(0)
    model = getattr(module, f"{prefix}TextModel")(getattr(config, f"{prefix}TextConfig")(**given)).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0.0, 0.6 / p.shape[-1] ** 0.5)
    yield kind, model
    on_cpu.restore()


def test_sequences_and_steps_are_those_of_the_original_code(made):
    kind, model = made
    x, found = tokens(2, 70), []
    for ours in (False, True):
        if ours:
            on_cpu.accelerate(model)
        with torch.no_grad():
            whole = model(x, use_cache=False).last_hidden_state
            cache = model(x[:, :20], use_cache=True)[NAME]
            found.append((whole, model(x[:, 20:21], use_cache=True, **{NAME: cache}).last_hidden_state))
    for theirs, other in zip(*found, strict=True):
        assert far(other, theirs) < 1e-4
    assert all(what.startswith("native (") for by in on_cpu.status().functions[kind].values() for what in by)
    assert all(on_cpu.status().functions[kind].values())


@pytest.mark.parametrize("cuts", [[11, 12], [9, 1, 13]], ids=str)
def test_a_text_in_parts_and_its_gradients_are_those_of_the_whole(made, cuts):
    _, model = made
    on_cpu.accelerate(model)
    x, found = tokens(2, 23), []
    for parts in ([x], x.split(cuts, 1)):
        cache, out = {}, []
        for part in parts:
            one = model(part, use_cache=len(parts) > 1, **cache)
            cache = {NAME: one[NAME]} if len(parts) > 1 else {}
            out.append(one.last_hidden_state)
        model.zero_grad()
        torch.cat(out, 1).sin().sum().backward()
        found.append((torch.cat(out, 1).detach(), gradients(model)))
    (wanted, right), (got, ours) = found
    assert far(got, wanted) < 1e-5
    same_gradients(ours, right, 1e-4)


def test_packed_rows_are_refused(made):
    _, model = made
    on_cpu.accelerate(model)
    at = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with pytest.raises(ValueError, match="packed rows: .*indexer"):
        model(tokens(1, 7), position_ids=at)
    with pytest.raises(ValueError, match="packed rows: .*indexer"):
        model(tokens(1, 7), position_ids=at.expand(4, 1, -1))
