"""Tables of the supported model types, and of the replacements of their functions."""

from collections.abc import Callable
from typing import NamedTuple

from . import convolution, delta, lightning, mamba, mamba2, mlstm, packing, rglru, rwkv


class Ours(NamedTuple):
    """Replacement of a function, and why it may leave a call to the original."""

    run: Callable
    why_not: Callable[..., str] | None = None
    counts: bool = True
    """Whether ``status()`` counts its calls: True for functions with kernels."""
    part: str = ""
    """What it computes, for ``status()``."""


DELTA = Ours(delta.gated_delta_rule, part="the gated delta rule")
KIMI = Ours(delta.gated_delta_rule, part="Kimi's delta rule")

# By the name in a modeling file. All files of a family have the same function under this name.
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": DELTA,
    "torch_recurrent_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": KIMI,
    "recurrent_kimi_delta_attention": KIMI,
    "mamba2_chunk_scan": Ours(mamba2.scan, part="Mamba-2's scan"),
    "mamba2_selective_state_update": Ours(mamba2.step, mamba2.per_head, part="Mamba-2's scan"),
    "mamba2_split_conv1d_scan_combined": Ours(mamba2.fused, counts=False),
    "mamba_selective_scan": Ours(mamba.scan, part="Mamba-1's selective scan"),
    "mamba_selective_state_update": Ours(mamba.step, part="Mamba-1's selective scan"),
    "mamba_inner_fn": Ours(mamba.fused, counts=False),
    "causal_conv1d_fn": Ours(convolution.convolve, part="short convolutions"),
    "causal_conv1d_update": Ours(convolution.update, part="short convolutions"),
}
# By the attribute in which a layer keeps its function, in transformers before 5.15.
ATTRIBUTES = {"chunk_gated_delta_rule": DELTA, "recurrent_gated_delta_rule": DELTA}
# By the names of a layer's class and method.
METHODS = {
    ("MiniMaxLightningAttention", "forward"): Ours(lightning.forward, part="lightning attention"),
    ("RecurrentGemmaRecurrentBlock", "forward"): Ours(rglru.block, part="short convolutions, with states in the cache"),
    ("RecurrentGemmaRglru", "forward"): Ours(rglru.recurrence, part="the recurrence RG-LRU"),
    ("RwkvSelfAttention", "forward"): Ours(rwkv.attention, part="RWKV-4's exponential average"),
    ("RwkvFeedForward", "forward"): Ours(rwkv.feed_forward, counts=False),
    ("xLSTMBackend", "forward"): Ours(mlstm.forward, part="the memory of mLSTM"),
}

GATED_DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini")
KIMI_DELTA_ATTENTION = ("kimi_linear", "bailing_hybrid", "glm5_next")
MAMBA2 = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "zamba2", "falcon_h1")
MAMBA1 = ("mamba", "falcon_mamba", "jamba", "zamba")
LIGHTNING = ("minimax",)
OTHERS = ("recurrent_gemma", "rwkv", "xlstm")
CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm3", "inkling", "inkling2", "inkling2_loop")
TYPES = (*GATED_DELTA_NET, *KIMI_DELTA_ATTENTION, *MAMBA2, *MAMBA1, *LIGHTNING, *OTHERS, *CONVOLUTIONS)

# Model types that are replaced from transformers 5.24 on, the first version with which longspan tests them.
RECENT = ("lara_mini", *MAMBA1, *OTHERS, *CONVOLUTIONS)
# Models around a text model of one of these types. transformers builds the text model from its own file.
WRAPPERS = {
    "jev": "qwen3_5",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "minicpm_ocr": "qwen3_5",
    "minicpmv4_6": "qwen3_5",
    "minicpmv4_7": "qwen3_5",
    "nemotron3_5_transcribe": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
}

# Model types that number the tokens after a cache from 0 unless they receive position_ids.
UNPLACED = ("bamba",)
# By the names of a cache's class and method: wrappers that fix the original.
CACHES = {
    ("MiniMaxCache", "get_seq_length"): lightning.from_layer_with_keys,
    ("MiniMaxCache", "get_mask_sizes"): lightning.from_layer_with_keys,
    ("MiniMaxCache", "reorder_cache"): lightning.with_states,
}

# By the names of a layer's class and method: wrappers that give the original what its caller does not, and what they
# change, for ``status()``.
_CONTINUED = "several tokens after a cache, which the original code reads as a new sequence"
LAYERS = {
    ("InklingShortConvolution", "forward"): (packing.told, ""),
    ("MambaMixer", "forward"): (mamba.with_state, _CONTINUED),
    ("FalconMambaMixer", "forward"): (mamba.with_state, _CONTINUED),
    ("JambaMambaMixer", "forward"): (mamba.with_state, _CONTINUED),
    ("ZambaMambaMixer", "forward"): (mamba.with_state, _CONTINUED),
    ("RecurrentGemmaModel", "__call__"): (rglru.numbered, ""),
    ("RwkvForCausalLM", "_reorder_cache"): (rwkv.reordered, "beam search with states"),
    ("xLSTMForCausalLM", "_reorder_cache"): (mlstm.reordered, "beam search with states"),
}

# Model types with recurrent layers for which longspan has no kernel.
UNSERVED = {
    "zaya": "its convolutions mix the channels of a head, for which longspan has no kernel",
    "deepseek_v4": "its state is a compressed cache of keys and values, without a recurrence",
}
# Layers with a state, of supported types, that run as they are.
_DYNAMIC = "its taps depend on the token, for which longspan has no kernel"
UNSERVED_LAYERS = {
    "inkling2": {"Inkling2DynamicShortConvolution": _DYNAMIC},
    "inkling2_loop": {"Inkling2LoopDynamicShortConvolution": _DYNAMIC},
    "qwen4_exp": {
        "Qwen4ExpTextPLELayer": "its convolution has dilation, for which longspan has no kernel",
        "Qwen4ExpTextNGramEmbedding": "its state is the last token ids, without arithmetic",
    },
    "lfm3_vl": {"Lfm3VlVisionShortConv": "it is a convolution in two dimensions, without a state"},
}

# Model types whose other layers look across the sequences of a packed row.
LEAKING = {
    "qwen4_exp": "its layers with an indexer and its n-gram embeddings may look across sequences",
    "glm5_next": "its layers with an indexer look at all tokens of a row",
}

# Model types whose other layers read the places of tokens in a row, so that padding between tokens changes the result.
_DISTANCES = "its attention measures distances by places in the row"
UNPADDED = {
    "inkling": _DISTANCES,
    "inkling2": _DISTANCES,
    "inkling2_loop": _DISTANCES,
    "qwen4_exp": "its n-gram embeddings and its layers with an indexer may read padding",
    "glm5_next": "its layers with an indexer may read padding",
}
