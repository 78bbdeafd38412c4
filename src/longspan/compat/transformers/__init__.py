"""longspan's decoders in the world of Hugging Face transformers, which is imported when one of these is asked for."""

from importlib import import_module
from typing import Any

from ...extras import need

_WHERE = {"LongspanCache": "cache", "LongspanConfig": "config", "LongspanForCausalLM": "causal_lm"}

__all__ = ["LongspanCache", "LongspanConfig", "LongspanForCausalLM"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need("longspan's models in transformers", "transformers")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
