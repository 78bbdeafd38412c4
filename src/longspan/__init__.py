"""longspan: efficient transformers behind one call, ``y, state = attention(x, state)``."""

from .attention import Attention, build, clone, detach, examples, load_state, names, nbytes, save_state, select
from .ops import backend
from .ops.linear import linear_attention

__all__ = [
    "Attention", "backend", "build", "clone", "detach", "examples", "linear_attention", "load_state", "names",
    "nbytes", "save_state", "select",
]  # fmt: skip
