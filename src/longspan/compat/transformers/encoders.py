"""Encoders of transformers as encoders of longspan, with the same outputs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._utils.optional_deps import need
from ..._utils.typecheck import format_value
from ...models.config import EncoderConfig
from ...models.encoder import Encoder
from .dense import ACTIVATIONS, TOKENIZER, load_decoder, tokens_of
from .dense import TYPES as DECODERS

TYPES = ("bert", "roberta", "xlm-roberta")
# Modules of a folder of sentence-transformers: the model, its pooling, and what `Encoder.embed` does by default.
MODULES = ("Transformer", "Pooling", "Normalize")
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

    Types: ``bert``, which includes MiniLM, ``roberta`` and ``xlm-roberta``. Weights are copied. Texts have one part, so
    the vector of token type 0 is added to the positions. The pooler of BERT and heads are left out.

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
    wanted = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
    for name, value in wanted.items():
        if (found := getattr(config, name, value)) != value:
            raise ValueError(f"an encoder of longspan has no {name}={found!r}; only {name}={value!r} can be converted")
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"an encoder of longspan has no activation {config.hidden_act!r}; known: {', '.join(ACTIVATIONS)}"
        )
    if tokenizer:
        tokens_of(tokenizer, config.vocab_size)
    given = dict(_weights(model.base_model, kind))
    made = Encoder(
        EncoderConfig(
            dim=config.hidden_size,
            depth=config.num_hidden_layers,
            heads=config.num_attention_heads,
            attention="softmax",
            feedforward=config.intermediate_size,
            activation=ACTIVATIONS[config.hidden_act],
            norm=f"layer(eps={float(config.layer_norm_eps)!r})",
            prenorm=False,
            vocab=config.vocab_size,
            pool=pool,
            positions="learned",
            length=len(given["embedding.table.weight"]),
            embedding_norm=True,
        )
    )
    made.to(given["embedding.table.weight"].dtype).load_state_dict(given)
    made.tokenizer = tokenizer
    return made.eval()


@torch.no_grad()
def _weights(model: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    first = model.embeddings
    yield "embedding.tokens.weight", first.word_embeddings.weight
    # Positions of RoBERTa begin after the number of the padding token.
    begin = 0 if kind == "bert" else model.config.pad_token_id + 1
    yield "embedding.table.weight", first.position_embeddings.weight[begin:] + first.token_type_embeddings.weight[0]
    yield from ((f"embedding_norm.{name}", p) for name, p in first.LayerNorm.named_parameters())
    for i, layer in enumerate(model.encoder.layer):
        for ours, theirs in PARTS.items():
            for name, p in layer.get_submodule(theirs).named_parameters():
                yield f"stack.blocks.{i}.{ours}.{name}", p


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
