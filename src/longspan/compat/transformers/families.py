"""Tables of the supported model types, and of the replacements of their functions."""

from collections.abc import Callable
from typing import NamedTuple

from . import convolution, delta, lightning, mamba2


class Ours(NamedTuple):
    """Replacement of a function, and why it may leave a call to the original."""

    run: Callable
    why_not: Callable[..., str] | None = None
    counts: bool = True
    """Whether ``status()`` counts its calls: True for functions with kernels."""


DELTA = Ours(delta.gated_delta_rule)

# By the name in a modeling file. All files of a family have the same function under this name.
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": DELTA,
    "torch_recurrent_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": DELTA,
    "recurrent_kimi_delta_attention": DELTA,
    "mamba2_chunk_scan": Ours(mamba2.scan),
    "mamba2_selective_state_update": Ours(mamba2.step, mamba2.per_head),
    "mamba2_split_conv1d_scan_combined": Ours(mamba2.fused, counts=False),
    "causal_conv1d_fn": Ours(convolution.convolve),
    "causal_conv1d_update": Ours(convolution.update),
}
# By the attribute in which a layer keeps its function, in transformers before 5.15.
ATTRIBUTES = {"chunk_gated_delta_rule": DELTA, "recurrent_gated_delta_rule": DELTA}
# By the names of a layer's class and method.
METHODS = {("MiniMaxLightningAttention", "forward"): Ours(lightning.forward)}

GATED_DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid")
KIMI_DELTA_ATTENTION = ("kimi_linear", "bailing_hybrid", "glm5_next")
MAMBA2 = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "zamba2", "falcon_h1")
LIGHTNING = ("minimax",)
TYPES = (*GATED_DELTA_NET, *KIMI_DELTA_ATTENTION, *MAMBA2, *LIGHTNING)

# Model types that number the tokens after a cache from 0 unless they receive position_ids.
UNPLACED = ("bamba",)
# By the names of a cache's class and method: wrappers that fix the original.
CACHES = {
    ("MiniMaxCache", "get_seq_length"): lightning.from_layer_with_keys,
    ("MiniMaxCache", "get_mask_sizes"): lightning.from_layer_with_keys,
    ("MiniMaxCache", "reorder_cache"): lightning.with_states,
}

# Model types with recurrent layers for which longspan has no kernel.
_SELECTIVE = "Mamba-1's selective scan has a decay per channel and state, for which longspan has no kernel"
UNSERVED = {
    "mamba": _SELECTIVE,
    "falcon_mamba": _SELECTIVE,
    "jamba": _SELECTIVE,
    "zamba": _SELECTIVE,
    "rwkv": "longspan has no kernel for RWKV-4's normalized exponential average",
    "xlstm": "longspan has no kernel for the cells of xLSTM",
    "recurrent_gemma": "longspan has no kernel for the gated linear recurrence of RG-LRU",
}

# Model types whose other layers look across the sequences of a packed row.
LEAKING = {
    "qwen4_exp": "its layers with an indexer and its n-gram embeddings may look across sequences",
    "glm5_next": "its layers with an indexer look at all tokens of a row",
}
