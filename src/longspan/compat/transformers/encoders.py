"""Encoders of transformers as encoders of longspan, with the same outputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..._utils import spec
from ..._utils.optional_deps import need
from ..._utils.typecheck import format_value
from ...models.config import EncoderConfig
from ...models.encoder import Encoder
from .dense import ACTIVATIONS, TOKENIZER, Named, filled, load_decoder, named, refuse_others, rotary_base, tokens_of
from .dense import TYPES as DECODERS

# Modules of a folder of sentence-transformers: the model, its pooling, and what `Encoder.embed` does by default.
MODULES = ("Transformer", "Pooling", "Normalize")
GATED = {"gelu": "geglu", "silu": "swiglu"}
POOLINGS = {"pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean"}
PARTS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "feedforward.expand": "intermediate.dense",
    "feedforward.contract": "output.dense",
    "norm2": "output.LayerNorm",
}


def to_encoder(model: Any, tokenizer: str = "", *, pool: str = "mean") -> Encoder:
    """Convert an encoder of transformers into one of longspan, whose outputs are equal up to rounding.

    Types: ``bert``, which includes MiniLM, ``roberta``, ``xlm-roberta`` and ``modernbert``. Weights are copied; biases
    that a model lacks become zeros. Texts have one part, so the vector of token type 0 is added to the positions. The
    pooler of BERT and heads are left out. The local layers of ModernBERT become ``local``, and the others ``softmax``,
    each with its rotary positions.

    Args:
        model: The model, with or without a head.
        tokenizer: The content of its ``tokenizer.json``, which the encoder keeps.
        pool: Pooling of the encoder: ``none``, ``mean`` or ``first``.

    Returns:
        The encoder, in evaluation mode, in the dtype of the model.

    Raises:
        ValueError: The model has another type, options that an encoder does not have, or fewer embeddings than its
            tokenizer has tokens.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from longspan.compat.transformers import to_encoder
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = BertModel(BertConfig(vocab_size=9, **sizes)).eval()
        >>> tokens = torch.tensor([[1, 4, 2]])
        >>> torch.allclose(to_encoder(model, pool="none")(tokens), model(tokens).last_hidden_state, atol=1e-5)
        True
    """
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in TYPES:
        raise ValueError(f"models of the type {format_value(kind)} cannot be encoders; known: {', '.join(TYPES)}")
    describe, weights = TYPES[kind]
    fields = describe(config)
    if tokenizer:
        tokens_of(tokenizer, config.vocab_size)
    given = dict(weights(model.base_model))
    made = Encoder(
        EncoderConfig(
            dim=config.hidden_size,
            depth=config.num_hidden_layers,
            heads=config.num_attention_heads,
            feedforward=config.intermediate_size,
            vocab=config.vocab_size,
            pool=pool,
            embedding_norm=True,
            **fields,
        )
    )
    return filled(made.to(given["embedding.tokens.weight"].dtype), given, tokenizer)


def _bert(config: Any) -> dict[str, Any]:
    """The fields of an encoder for BERT and RoBERTa."""
    refuse_others("an encoder", config, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    pad = 0 if config.model_type == "bert" else config.pad_token_id + 1
    return {
        "attention": "softmax",
        "activation": _known(config.hidden_act, ACTIVATIONS),
        "norm": f"layer(eps={float(config.layer_norm_eps)!r})",
        "prenorm": False,
        "positions": "learned",
        "length": config.max_position_embeddings - pad,
    }


def _bert_weights(model: Any) -> Named:
    first = model.embeddings
    yield "embedding.tokens.weight", first.word_embeddings.weight
    # Positions of RoBERTa begin after the number of the padding token.
    begin = 0 if model.config.model_type == "bert" else model.config.pad_token_id + 1
    yield "embedding.table.weight", first.position_embeddings.weight[begin:] + first.token_type_embeddings.weight[0]
    yield from named("embedding_norm", first.LayerNorm)
    for i, layer in enumerate(model.encoder.layer):
        for ours, theirs in PARTS.items():
            yield from named(f"stack.blocks.{i}.{ours}", layer.get_submodule(theirs))


def _modernbert(config: Any) -> dict[str, Any]:
    """The fields of an encoder for ModernBERT."""
    bases = {kind: rotary_base("an encoder", rope) for kind, rope in config.rope_parameters.items() if rope}
    # A token sees as many others on each side as config.sliding_window, and itself.
    heads = {"full_attention": "softmax(", "sliding_attention": f"local(window={config.sliding_window + 1}, "}
    layers = [f"{heads[kind]}rotary={bases[kind]!r})" for kind in config.layer_types]
    return {
        "attention": spec.joined(layers),
        "activation": _known(config.hidden_activation, GATED),
        "norm": f"layer(eps={float(config.norm_eps)!r})",
        "prenorm": True,
        "positions": "none",
        "length": config.max_position_embeddings,
    }


def _modernbert_weights(model: Any) -> Named:
    yield "embedding.tokens.weight", model.embeddings.tok_embeddings.weight
    yield from named("embedding_norm", model.embeddings.norm)
    yield from named("stack.norm", model.final_norm)
    for i, layer in enumerate(model.layers):
        place = f"stack.blocks.{i}."
        for kind, joint in layer.attn.Wqkv.named_parameters():
            for name, part in zip(("query", "key", "value"), joint.chunk(3), strict=True):
                yield f"{place}attention.{name}.{kind}", part
        yield from named(f"{place}attention.out", layer.attn.Wo)
        yield from named(f"{place}feedforward.expand", layer.mlp.Wi)
        yield from named(f"{place}feedforward.contract", layer.mlp.Wo)
        yield from named(f"{place}norm1", layer.attn_norm)
        yield from named(f"{place}norm2", layer.mlp_norm)


def _known(activation: str, names: dict[str, str]) -> str:
    """The name of an activation in longspan. Raises ValueError."""
    if activation not in names:
        raise ValueError(f"an encoder of longspan has no activation {activation!r}; known: {', '.join(names)}")
    return names[activation]


# The fields of an encoder from the config, and its weights from the model without heads.
TYPES: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[Any], Named]]] = {
    "bert": (_bert, _bert_weights),
    "roberta": (_bert, _bert_weights),
    "xlm-roberta": (_bert, _bert_weights),
    "modernbert": (_modernbert, _modernbert_weights),
}


def load_encoder(source: str | Path) -> Encoder:
    """Load an encoder that transformers or sentence-transformers has written, with its ``tokenizer.json``.

    The pooling is that of sentence-transformers, by ``modules.json``, and the mean without that file.

    Args:
        source: The folder, of a type that ``to_encoder`` converts.

    Raises:
        ImportError: transformers is not installed.
        ValueError: As ``to_encoder`` does, and for a folder that cannot be loaded, has no tokenizer, or has modules
            that an encoder does not have.
    """
    need(f"the model in {source}", "transformers")
    from transformers import AutoModel

    from .loading import bounded, readable

    folder = Path(source)
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in TYPES:
        raise ValueError(
            f"{folder} has model_type {format_value(kind)}, which cannot be an encoder; known: {', '.join(TYPES)}"
        )
    if not (folder / TOKENIZER).is_file():
        raise ValueError(
            f"{folder} has no {TOKENIZER}; write it with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    pool = _pooling(folder)
    with readable(folder), bounded(folder):
        model = AutoModel.from_pretrained(folder)
    return to_encoder(model.eval(), (folder / TOKENIZER).read_text(encoding="utf-8"), pool=pool)


def load_any(source: str | Path) -> Any:
    """Load a folder as a decoder or an encoder, by its type; errors as in ``load_decoder`` and ``load_encoder``."""
    path = Path(source) / "config.json"
    kind = json.loads(path.read_text(encoding="utf-8")).get("model_type") if path.is_file() else None
    if kind in TYPES:
        return load_encoder(source)
    if kind is not None and kind not in (*DECODERS, "longspan"):
        raise ValueError(
            f"{source} has model_type {format_value(kind)}, which cannot be a decoder or an encoder; known: "
            f"{', '.join((*DECODERS, *TYPES))}"
        )
    return load_decoder(source)


def _pooling(folder: Path) -> str:
    """The pooling of a folder of sentence-transformers. Raises ValueError for one that an encoder does not have."""
    if not (folder / "modules.json").is_file():
        return "mean"
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    found = {one["type"].rpartition(".")[2]: folder / one["path"] for one in modules}
    if odd := [name for name in found if name not in MODULES]:
        raise ValueError(f"{folder} has the module {odd[0]}, which an encoder of longspan does not have")
    if "Pooling" not in found:
        raise ValueError(f"{folder} has no module Pooling in its modules.json")
    config = json.loads((found["Pooling"] / "config.json").read_text(encoding="utf-8"))
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{folder} has the pooling {', '.join(modes)}; only one of {', '.join(POOLINGS)} is supported")
    return POOLINGS[modes[0]]
