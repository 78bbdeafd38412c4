"""Softmax transformers of transformers as decoders of longspan, with the same logits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._utils.optional_deps import need
from ..._utils.typecheck import format_value
from ...data import tokenization
from ...models.config import DecoderConfig
from ...models.decoder import Decoder
from ...models.encoder import Encoder

Built = TypeVar("Built", bound=Decoder | Encoder)
Named = Iterator[tuple[str, Tensor]]
TOKENIZER = "tokenizer.json"


def to_decoder(model: Any, tokenizer: str = "") -> Decoder:
    """Convert a causal language model of transformers into a decoder, whose logits are equal up to rounding.

    Types: ``llama``, ``qwen3`` and ``gpt2``. A decoder's sequences begin with its start token, which gets the embedding
    of the model's ``bos_token_id``, or of its end of a text if it has none: the outputs for ``start, a, b`` are the
    logits for ``bos, a, b``. Weights are copied; biases that a model lacks become zeros.

    Args:
        model: The model.
        tokenizer: The content of its ``tokenizer.json``, which the decoder keeps. Embeddings of numbers beyond the
            tokenizer's are left out.

    Returns:
        The decoder, in evaluation mode, in the dtype of the model.

    Raises:
        ValueError: The model has another type, options that a decoder does not have, or fewer embeddings than its
            tokenizer has tokens.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from longspan.compat.transformers import to_decoder
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, bos_token_id=1, **sizes)).eval()
        >>> tokens = torch.tensor([[1, 4, 2]])
        >>> torch.allclose(to_decoder(model)(tokens)[0], model(tokens).logits, atol=1e-5)
        True
    """
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in TYPES:
        raise ValueError(f"models of the type {format_value(kind)} cannot be decoders; known: {', '.join(TYPES)}")
    describe, weights = TYPES[kind]
    fields = describe(config)
    vocab = config.vocab_size
    if tokenizer:
        vocab = tokens_of(tokenizer, vocab)
    given = dict(weights(model))
    tied = config.tie_word_embeddings
    table = given["embedding.tokens.weight"]
    given["embedding.tokens.weight"] = torch.cat([table[:vocab], table[_first(model)][None]])
    if not tied:
        given["head.weight"] = model.get_output_embeddings().weight[:vocab]
    made = Decoder(DecoderConfig(vocab=vocab, tied=tied, **fields)).to(table.dtype)
    return filled(made, given, tokenizer)


@torch.no_grad()
def filled(made: Built, given: dict[str, Tensor], tokenizer: str) -> Built:
    """Copy weights into a model, with zeros for biases that are not given; set its tokenizer and evaluation mode."""
    for name, tensor in made.state_dict().items():
        tensor.copy_(given.pop(name)) if name in given or not name.endswith(".bias") else tensor.zero_()
    assert not given, f"weights without a place: {', '.join(given)}"
    made.tokenizer = tokenizer
    return made.eval()


def tokens_of(tokenizer: str, embeddings: int) -> int:
    """Return the number of tokens of a tokenizer's file content.

    Raises:
        ValueError: The model has fewer embeddings.
    """
    known = tokenization.vocab_of(tokenization.parsed(tokenizer))
    if known > embeddings:
        raise ValueError(f"the tokenizer has {known} tokens, but the model has only {embeddings} embeddings")
    return known


def load_decoder(source: str | Path) -> Decoder:
    """Load a folder that transformers has written as a decoder, with its ``tokenizer.json``.

    Args:
        source: The folder: of a type that ``to_decoder`` converts, or of ``LongspanForCausalLM``.

    Raises:
        ImportError: transformers is not installed.
        ValueError: As ``to_decoder`` does, and for a folder that cannot be loaded or has no tokenizer.
    """
    need(f"the model in {source}", "transformers")
    from transformers import AutoModelForCausalLM

    from .loading import bounded, readable

    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a folder with the config.json of a model of transformers")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "longspan":
        from .causal_lm import LongspanForCausalLM

        decoder = LongspanForCausalLM.from_pretrained(folder).eval().decoder
        path = folder / TOKENIZER
        decoder.tokenizer = path.read_text(encoding="utf-8") if path.is_file() else ""
        return decoder
    if config["model_type"] not in TYPES:
        kind = format_value(config["model_type"])
        raise ValueError(f"{folder} has model_type {kind}, which cannot be a decoder; known: {', '.join(TYPES)}")
    if not (folder / TOKENIZER).is_file():
        raise ValueError(
            f"{folder} has no {TOKENIZER}; write it with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    with readable(folder), bounded(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
    return to_decoder(model.eval(), (folder / TOKENIZER).read_text(encoding="utf-8"))


def _first(model: Any) -> int:
    """The token that begins a text: the model's first one, or that which ends texts."""
    for config in (model.config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id"):
            found = getattr(config, name, None)
            found = found[0] if isinstance(found, list) and found else found
            if isinstance(found, int):
                return found
    raise ValueError("the model's config has neither bos_token_id nor eos_token_id, one of which begins a text")


def refuse_others(model: str, config: Any, **usual: Any) -> None:
    """Raise ValueError for an option that a model of longspan, such as ``a decoder``, does not have."""
    for name, value in usual.items():
        if (found := getattr(config, name, value)) != value:
            raise ValueError(f"{model} of longspan has no {name}={found!r}; only {name}={value!r} can be converted")


def rotary_base(model: str, rope: dict[str, Any]) -> float:
    """The base of rotary positions. Raises ValueError for other types than the default."""
    if (kind := rope.get("rope_type", "default")) != "default":
        raise ValueError(
            f"{model} of longspan has no rotary positions of the type {kind!r}; only 'default' can be converted"
        )
    return float(rope.get("rope_theta", 10000.0))


ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def _llama(config: Any) -> dict[str, Any]:
    """The fields of a decoder for Llama and Qwen3."""
    base = rotary_base("a decoder", config.rope_parameters or {})
    refuse_others("a decoder", config, hidden_act="silu")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError("a decoder of longspan has no sliding windows with norms; layer_types has sliding_attention")
    heads, dim = config.num_attention_heads, config.hidden_size
    size = config.head_dim or dim // heads
    options: dict[str, Any] = {}
    if config.num_key_value_heads != heads:
        options["kv_heads"] = config.num_key_value_heads
    if size * heads != dim:
        options["head_dim"] = size
    if config.model_type == "qwen3":
        options["qk_norm"] = float(config.rms_norm_eps)
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return {
        "dim": dim,
        "depth": config.num_hidden_layers,
        "heads": heads,
        "attention": f"softmax({words})" if words else "softmax",
        "feedforward": config.intermediate_size,
        "activation": "swiglu",
        "norm": f"rms(eps={float(config.rms_norm_eps)!r})",
        "positions": f"rotary(base={base!r})",
        "length": config.max_position_embeddings,
    }


def _llama_weights(model: Any) -> Named:
    inner = model.model
    yield "embedding.tokens.weight", inner.embed_tokens.weight
    yield "stack.norm.weight", inner.norm.weight
    for i, layer in enumerate(inner.layers):
        place, own = f"stack.blocks.{i}.", layer.self_attn
        projections = {"query": own.q_proj, "key": own.k_proj, "value": own.v_proj, "out": own.o_proj}
        for name, linear in projections.items():
            yield from named(f"{place}attention.{name}", linear)
        for name in ("query", "key") if hasattr(own, "q_norm") else ():
            yield f"{place}attention.{name}_norm.weight", getattr(own, f"{name[0]}_norm").weight
        yield f"{place}norm1.weight", layer.input_layernorm.weight
        yield f"{place}norm2.weight", layer.post_attention_layernorm.weight
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        yield f"{place}feedforward.expand.weight", torch.cat([gate.weight, up.weight])
        if gate.bias is not None:
            yield f"{place}feedforward.expand.bias", torch.cat([gate.bias, up.bias])
        yield from named(f"{place}feedforward.contract", layer.mlp.down_proj)


def _gpt2(config: Any) -> dict[str, Any]:
    """The fields of a decoder for GPT-2."""
    refuse_others(
        "a decoder", config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    if config.activation_function not in ACTIVATIONS:
        found = config.activation_function
        raise ValueError(f"a decoder of longspan has no activation {found!r}; known: {', '.join(ACTIVATIONS)}")
    return {
        "dim": config.n_embd,
        "depth": config.n_layer,
        "heads": config.n_head,
        "attention": "softmax",
        "feedforward": config.n_inner or 4 * config.n_embd,
        "activation": ACTIVATIONS[config.activation_function],
        "norm": f"layer(eps={float(config.layer_norm_epsilon)!r})",
        "positions": "learned",
        "length": config.n_positions,
    }


def _gpt2_weights(model: Any) -> Named:
    inner = model.transformer
    yield "embedding.tokens.weight", inner.wte.weight
    yield "embedding.table.weight", inner.wpe.weight
    yield from named("stack.norm", inner.ln_f)
    for i, layer in enumerate(inner.h):
        place, joint = f"stack.blocks.{i}.", layer.attn.c_attn
        # Its maps are stored as (inputs, outputs).
        weights, biases = joint.weight.mT.chunk(3), joint.bias.chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            yield f"{place}attention.{name}.weight", weight
            yield f"{place}attention.{name}.bias", bias
        maps = {
            "attention.out": layer.attn.c_proj,
            "feedforward.expand": layer.mlp.c_fc,
            "feedforward.contract": layer.mlp.c_proj,
        }
        for name, one in maps.items():
            yield f"{place}{name}.weight", one.weight.mT
            yield f"{place}{name}.bias", one.bias
        yield from named(f"{place}norm1", layer.ln_1)
        yield from named(f"{place}norm2", layer.ln_2)


def named(name: str, module: nn.Module) -> Named:
    """The parameters of a module below a name."""
    yield from ((f"{name}.{part}", value) for part, value in module.named_parameters())


TYPES: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[Any], Named]]] = {
    "llama": (_llama, _llama_weights),
    "qwen3": (_llama, _llama_weights),
    "gpt2": (_gpt2, _gpt2_weights),
}
