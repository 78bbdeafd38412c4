"""Small models of transformers and of flash-linear-attention that pools serve, and what they draw alone."""

import pytest
import torch

pytest.importorskip("transformers")

import hybrids
from fla_laws import build
from longspan.compat import transformers as on_cpu

FLA = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 8},
    "rwkv7": {"head_dim": 16},
    "gla": {"num_heads": 2},
    "retnet": {"num_heads": 2},
    "hybrid": {"num_heads": 2, "head_dim": 8, "attn": {"layers": [1], "num_heads": 4, "window_size": 5}},
    "rwkv-hybrid": {"num_heads": 2, "attn": {"layers": [1], "num_heads": 4}},
    "comba": {"num_heads": 2, "head_dim": 8},
    "delta_net": {"num_heads": 2},
    "gated_deltaproduct": {"num_heads": 2, "head_dim": 8, "num_householder": 2},
    "hgrn": {},
    "hgrn2": {"expand_ratio": 16, "num_heads": 2},
    "kda": {"num_heads": 2, "head_dim": 8},
    "lightnet": {"num_heads": 2},
    "linear_attn": {"num_heads": 2},
    "log_linear_mamba2": {"intermediate_size": None, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "rwkv6": {"num_heads": 2},
}
TYPES = {"hybrid": "gated_deltanet", "rwkv-hybrid": "rwkv6"}


def in_pools(kind):
    """Skip where pools do not serve models of transformers of this type."""
    hybrids.served(kind)
    if hybrids.version() < (5, 24):
        pytest.skip("pools map caches from transformers 5.24 on")


def hybrid(kind, **more):
    """A model of transformers of this type, accelerated; skips where pools do not serve it."""
    in_pools(kind)
    made = hybrids.model(kind, **more)
    on_cpu.accelerate(made)
    return made


def fla(name):
    """A model of flash-linear-attention: one of ``FLA``."""
    return build(TYPES.get(name, name), **FLA[name])


def generated(model, prompt, n):
    """The n tokens that ``generate`` of transformers draws after a prompt."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    return model.generate(ids, max_new_tokens=n, **options)[0, len(prompt) :].tolist()
