"""Hugging Face transformers: run its models on longspan's CPU kernels, and use longspan's decoders as its models.

    import longspan.compat.transformers as on_cpu

    on_cpu.accelerate()                 # recurrent layers, before or after a model is loaded; restore() undoes it
    on_cpu.register()                   # attn_implementation="longspan": windows, chunks and padding of softmax layers
    print(on_cpu.status())              # what was replaced, the backends of its calls, and what was left unchanged
    on_cpu.LongspanForCausalLM          # a longspan decoder with transformers' generate, Trainer and save_pretrained
    on_cpu.byte_tokenizer()             # the tokenizer of longspan's models of bytes
    on_cpu.to_decoder(model)            # a Llama, Qwen3 or GPT-2 as a longspan decoder
    on_cpu.to_encoder(model)            # a BERT, MiniLM or RoBERTa as a longspan encoder
    on_cpu.LongspanEncoder              # a longspan encoder in a folder that sentence-transformers loads

transformers (5.5 to 5.24) is an optional extra of longspan. It is imported on first use of one of these.
"""

from importlib import import_module
from typing import Any

from ..._utils.optional_deps import need
from .replace import accelerate, restore
from .report import Status, status
from .softmax import register

_WHERE = {
    "LongspanCache": "cache",
    "LongspanConfig": "config",
    "LongspanEncoder": "sentences",
    "LongspanEncoderConfig": "sentences",
    "LongspanForCausalLM": "causal_lm",
    "byte_tokenizer": "byte_tokens",
    "load_any": "encoders",
    "load_decoder": "dense",
    "load_encoder": "encoders",
    "to_decoder": "dense",
    "to_encoder": "encoders",
}

# Some names are loaded on first use.
# pyright: reportUnsupportedDunderAll=false
__all__ = [
    "LongspanCache",
    "LongspanConfig",
    "LongspanEncoder",
    "LongspanEncoderConfig",
    "LongspanForCausalLM",
    "Status",
    "accelerate",
    "byte_tokenizer",
    "load_decoder",
    "load_encoder",
    "register",
    "restore",
    "status",
    "to_decoder",
    "to_encoder",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need("longspan's models in transformers", "transformers")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
