"""The model types of transformers that longspan supports, one row each, and the replacements of their functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from . import convolution, delta, indexer, lightning, mamba, mamba2, mlstm, packing, rglru, rwkv
from .record import OLDEST


class Ours(NamedTuple):
    """Replacement of a function, and why it may leave a call to the original."""

    run: Callable
    why_not: Callable[..., str] | None = None
    counts: bool = True
    """Whether ``status()`` counts its calls: True for functions with kernels."""
    part: str = ""
    """What it computes, for ``status()``."""


class Wrapper(NamedTuple):
    """A wrapper that fixes the original, or gives it what its caller does not."""

    wrap: Callable[..., Callable]
    part: str = ""
    """What it changes, for ``status()``."""


@dataclass(frozen=True)
class Layer:
    """A kind of recurrent layer.

    Args:
        name: Its name in the docs.
        about: What it computes, for the docs.
        functions: Replacements by name in a modeling file: ``function``, or ``Class.method``. Files with this kind of
            layer have the same functions under these names, and replacements that a file lacks are skipped.
        continues: The first version of transformers whose layers read several tokens after a cache as its continuation.
        skips: The first version in which its states skip padding.
    """

    name: str
    about: str
    functions: Mapping[str, Ours]
    continues: tuple[int, int] = OLDEST
    skips: tuple[int, int] = (5, 15)


@dataclass(frozen=True)
class Model:
    """A model type of transformers.

    Args:
        layer: Its recurrent layer.
        since: The first version of transformers with which longspan tests it.
        wrappers: Wrappers of methods by ``Class.method``.
        around: Model types around a text model of this type, which transformers builds from this type's file.
        unserved: Classes of layers with a state that run as they are, with the reason.
        leaks: Why other layers look across the sequences of a packed row, or "".
        reads_padding: Why other layers read the places of tokens in a row, so that padding between tokens changes the
            result, or "".
        numbers_anew: Whether it numbers the tokens after a cache from 0 unless it receives ``position_ids``.
        no_drafts: Why its cache cannot undo drafted tokens, or "".
    """

    layer: Layer
    since: tuple[int, int] = OLDEST
    wrappers: Mapping[str, Wrapper] = field(default_factory=dict)
    around: tuple[str, ...] = ()
    unserved: Mapping[str, str] = field(default_factory=dict)
    leaks: str = ""
    reads_padding: str = ""
    numbers_anew: bool = False
    no_drafts: str = ""


def _no_kernel(*args, **kwargs) -> None:
    """Return None, so that callers run the layer's functions one by one. It replaces fused kernels.

    The originals return None too, but raise an error for packed rows.
    """


_DELTA = Ours(delta.gated_delta_rule, part="the gated delta rule")
_KIMI = Ours(delta.gated_delta_rule, part="Kimi's delta rule")
_CONVOLUTION = {
    "causal_conv1d_fn": Ours(convolution.convolve, part="short convolutions"),
    "causal_conv1d_update": Ours(convolution.update, part="short convolutions"),
}
# By the attribute in which a layer keeps its function, in transformers before 5.15.
ATTRIBUTES = {"chunk_gated_delta_rule": _DELTA, "recurrent_gated_delta_rule": _DELTA}

GATED_DELTA_NET = Layer(
    "gated DeltaNet",
    "the delta rule with a decay per head",
    {"torch_chunk_gated_delta_rule": _DELTA, "torch_recurrent_gated_delta_rule": _DELTA, **_CONVOLUTION},
    continues=(5, 7),
)
KIMI_DELTA_ATTENTION = Layer(
    "Kimi Delta Attention",
    "the delta rule with a decay per channel",
    {"chunk_kimi_delta_attention": _KIMI, "recurrent_kimi_delta_attention": _KIMI, **_CONVOLUTION},
)
MAMBA2 = Layer(
    "Mamba-2",
    "linear attention with a decay per head",
    {
        "mamba2_chunk_scan": Ours(mamba2.scan, part="Mamba-2's scan"),
        "mamba2_selective_state_update": Ours(mamba2.step, mamba2.per_head, part="Mamba-2's scan"),
        "mamba2_split_conv1d_scan_combined": Ours(_no_kernel, counts=False),
        **_CONVOLUTION,
    },
)
MAMBA1 = Layer(
    "Mamba-1",
    "the selective scan",
    {
        "mamba_selective_scan": Ours(mamba.scan, part="Mamba-1's selective scan"),
        "mamba_selective_state_update": Ours(mamba.step, part="Mamba-1's selective scan"),
        "mamba_inner_fn": Ours(_no_kernel, counts=False),
        **_CONVOLUTION,
    },
)
LIGHTNING = Layer(
    "lightning attention",
    "linear attention with a fixed decay per head",
    {"MiniMaxLightningAttention.forward": Ours(lightning.forward, part="lightning attention")},
    skips=OLDEST,
)
RG_LRU = Layer(
    "RG-LRU",
    "a gated linear recurrence by channel",
    {
        "RecurrentGemmaRecurrentBlock.forward": Ours(rglru.block, part="short convolutions, with states in the cache"),
        "RecurrentGemmaRglru.forward": Ours(rglru.recurrence, part="the recurrence RG-LRU"),
    },
)
RWKV4 = Layer(
    "RWKV-4",
    "an exponential average by channel",
    {
        "RwkvSelfAttention.forward": Ours(rwkv.attention, part="RWKV-4's exponential average"),
        "RwkvFeedForward.forward": Ours(rwkv.feed_forward, counts=False),
    },
)
MLSTM = Layer(
    "mLSTM",
    "a matrix memory with exponential gates",
    {"xLSTMBackend.forward": Ours(mlstm.forward, part="the memory of mLSTM")},
)
CONVOLUTIONS = Layer(
    "short convolutions",
    "a causal convolution of a few tokens; the dynamic ones of Inkling 2 run as they are",
    _CONVOLUTION,
)

_CONTINUED = Wrapper(mamba.with_state, "several tokens after a cache, which the original code reads as a new sequence")
_DISTANCES = "its attention measures distances by places in the row"
_UNTRIED = "longspan does not test it with drafts"
_OWN_CACHE = "its cache is its own, which cannot undo tokens"
_DYNAMIC = "its taps depend on the token, for which longspan has no kernel"

MODELS = {
    "qwen3_next": Model(GATED_DELTA_NET),
    "qwen3_5": Model(GATED_DELTA_NET, around=("jev", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7")),
    "qwen3_5_moe": Model(GATED_DELTA_NET),
    "qwen4_exp": Model(
        GATED_DELTA_NET,
        unserved={
            "Qwen4ExpTextPLELayer": "its convolution has dilation, for which longspan has no kernel",
            "Qwen4ExpTextNGramEmbedding": "its state is the last token ids, without arithmetic",
        },
        leaks="its layers with an indexer and its n-gram embeddings may look across sequences",
        reads_padding="its n-gram embeddings and its layers with an indexer may read padding",
        no_drafts=_UNTRIED,
    ),
    "olmo_hybrid": Model(GATED_DELTA_NET),
    "lara_mini": Model(GATED_DELTA_NET, since=(5, 24)),
    "kimi_linear": Model(KIMI_DELTA_ATTENTION),
    "bailing_hybrid": Model(KIMI_DELTA_ATTENTION),
    "glm5_next": Model(
        KIMI_DELTA_ATTENTION,
        leaks="its layers with an indexer look at all tokens of a row",
        reads_padding="its layers with an indexer may read padding",
        no_drafts=_UNTRIED,
    ),
    "mamba2": Model(MAMBA2),
    "nemotron_h": Model(MAMBA2, around=("nemotron3_5_transcribe", "nemotron_h_omni")),
    "bamba": Model(MAMBA2, numbers_anew=True),
    "granitemoehybrid": Model(MAMBA2),
    "zamba2": Model(MAMBA2),
    "falcon_h1": Model(MAMBA2),
    "mamba": Model(MAMBA1, (5, 24), {"MambaMixer.forward": _CONTINUED}),
    "falcon_mamba": Model(MAMBA1, (5, 24), {"FalconMambaMixer.forward": _CONTINUED}),
    "jamba": Model(MAMBA1, (5, 24), {"JambaMambaMixer.forward": _CONTINUED}),
    "zamba": Model(
        MAMBA1,
        (5, 24),
        {"ZambaMambaMixer.forward": _CONTINUED},
        no_drafts="each of its layers has several scans, one for each head",
    ),
    "minimax": Model(
        LIGHTNING,
        wrappers={
            "MiniMaxCache.get_seq_length": Wrapper(lightning.from_layer_with_keys),
            "MiniMaxCache.get_mask_sizes": Wrapper(lightning.from_layer_with_keys),
            "MiniMaxCache.reorder_cache": Wrapper(lightning.with_states),
        },
        no_drafts=_OWN_CACHE,
    ),
    "recurrent_gemma": Model(
        RG_LRU,
        (5, 24),
        {"RecurrentGemmaModel.__call__": Wrapper(rglru.numbered)},
        no_drafts="its outputs do not return the cache",
    ),
    "rwkv": Model(
        RWKV4,
        (5, 24),
        {"RwkvForCausalLM._reorder_cache": Wrapper(rwkv.reordered, "beam search with states")},
        no_drafts=_OWN_CACHE,
    ),
    "xlstm": Model(
        MLSTM,
        (5, 24),
        {"xLSTMForCausalLM._reorder_cache": Wrapper(mlstm.reordered, "beam search with states")},
        no_drafts=_OWN_CACHE,
    ),
    "lfm2": Model(CONVOLUTIONS, (5, 24), around=("lfm2_vl",)),
    "lfm2_moe": Model(CONVOLUTIONS, (5, 24)),
    "lfm3": Model(CONVOLUTIONS, (5, 24), around=("lfm3_vl",)),
    "inkling": Model(
        CONVOLUTIONS,
        (5, 24),
        {"InklingShortConvolution.forward": Wrapper(packing.with_sequences)},
        reads_padding=_DISTANCES,
    ),
    "inkling2": Model(
        CONVOLUTIONS, (5, 24), unserved={"Inkling2DynamicShortConvolution": _DYNAMIC}, reads_padding=_DISTANCES
    ),
    "inkling2_loop": Model(
        CONVOLUTIONS, (5, 24), unserved={"Inkling2LoopDynamicShortConvolution": _DYNAMIC}, reads_padding=_DISTANCES
    ),
}
_INDEXER = {"why_not": indexer.why_not, "part": "the choice of an indexer"}
INDEXERS = {
    "deepseek_v32": {"DeepseekV32Indexer.forward": Ours(indexer.halves, **_INDEXER)},
    "glm_moe_dsa": {"GlmMoeDsaIndexer.forward": Ours(indexer.interleaved, **_INDEXER)},
}
"""Functions of model types without recurrent layers that choose the tokens of softmax layers."""
# Model types with recurrent layers for which longspan has no kernel.
UNSERVED = {
    "zaya": "its convolutions mix the channels of a head, for which longspan has no kernel",
    "deepseek_v4": "its state is a compressed cache of keys and values, without a recurrence",
}
UNSERVED_LAYERS = {
    f"{kind}.{layer}": why for kind, model in MODELS.items() for layer, why in model.unserved.items()
} | {"lfm3_vl.Lfm3VlVisionShortConv": "it is a convolution in two dimensions, without a state"}
"""Layers with a state that run as they are, with the reason, by ``type.Class``."""
WRAPPERS = {outer: kind for kind, model in MODELS.items() for outer in model.around}
"""The type of the text model by the type of the model around it."""
