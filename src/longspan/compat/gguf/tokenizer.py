"""Tokenizers of GGUF files as those of the library ``tokenizers``, and back.

References:
    ggml-org/llama.cpp, src/llama-vocab.cpp: the expressions that split a text, by ``tokenizer.ggml.pre``.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..._utils.optional_deps import need
from ..._utils.typecheck import format_value
from ...data import tokenization

MODEL = "gpt2"  # byte-level BPE
WORLD = "rwkv"  # of RWKV
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2 olmo mpt phi-2 jais trillion granite-docling": (_WORDS,),
    "refact starcoder command-r smollm codeshell exaone minerva-7b": (r"\p{N}", _WORDS),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe": (_LLAMA3,),
    "qwen2 stablelm2 deepseek-r1-qwen hunyuan megrez": (_LLAMA3.replace("{1,3}", ""),),
    "qwen35": (_QWEN35,),
    "gpt-4o llama4": (_GPT4O,),
}
SPLITS = {name: found for names, found in _SPLITS.items() for name in names.split()}
# These begin with a first token unless a file says otherwise.
_BEGUN = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2".split()


def read(metadata: Mapping[str, Any]) -> str:
    """Return the tokenizer of a file as the content of a ``tokenizer.json``.

    Raises:
        ImportError: The library ``tokenizers`` is not installed.
        ValueError: The file has no tokenizer, one of another kind, or a damaged one.
    """
    need("the tokenizer of a GGUF file", "tokenizers")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != MODEL:
        raise ValueError(f"its tokenizer.ggml.model is {format_value(kind)}; supported is {MODEL}")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ValueError(f"its tokenizer.ggml.pre is {format_value(pre)}; supported are {', '.join(SPLITS)}")
    tokens, merges = (_texts(metadata, key) for key in ("tokens", "merges"))
    types = metadata.get("tokenizer.ggml.token_type", ())
    if len(set(tokens)) != len(tokens) or not hasattr(types, "__len__") or len(types) not in (0, len(tokens)):
        raise ValueError(f"its tokenizer must have {len(tokens):,} different tokens and as many types")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    if odd := next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None):
        raise ValueError(f"its tokenizer.ggml.merges has {format_value(odd)}, which must be two tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    try:
        made: Any = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _BEGUN))
    # The library raises plain exceptions, as for a merge whose tokens are unknown.
    except Exception as error:
        raise ValueError(f"its tokenizer is damaged: {' '.join(str(error).split())[:200]}") from error
    splits: list[Any] = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[pre]]
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    for number, kind in enumerate(types):
        if kind in (_CONTROL, _USER):
            one = AddedToken(tokens[number], special=kind == _CONTROL, normalized=False)
            (made.add_special_tokens if kind == _CONTROL else made.add_tokens)([one])
    first = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", pre in _BEGUN) and isinstance(first, int) and first < len(tokens):
        name = tokens[first]
        made.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", "$B:1"], special_tokens=[(name, first)]
        )
    return made.to_str()


def read_words(metadata: Mapping[str, Any]) -> list[bytes]:
    """Return the bytes of each token of RWKV's World vocabulary, none of tokens without text.

    Raises:
        ValueError: The tokenizer is damaged.
    """
    tokens, types = _texts(metadata, "tokens"), metadata.get("tokenizer.ggml.token_type", ())
    if not hasattr(types, "__len__") or len(types) != len(tokens):
        raise ValueError(f"its tokenizer must have {len(tokens):,} types")
    try:
        # Some bytes are written as escapes of Python.
        words = [token.encode("ascii").decode("unicode_escape").encode("latin-1") for token in tokens]
    except UnicodeError as error:
        raise ValueError(f"its tokenizer is damaged: {error}") from error
    return [word if kind == _NORMAL else b"" for word, kind in zip(words, types, strict=True)]


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list):
        raise ValueError(f"it has no texts tokenizer.ggml.{key}")
    return found


def write(content: str, vocab: int, template: str = "") -> dict[str, Any]:
    """Return the entries of metadata for a tokenizer.

    Args:
        content: The content of a ``tokenizer.json``.
        vocab: Rows of the model's embedding.
        template: The chat template, or "".

    Raises:
        ValueError: The tokenizer is not byte-level BPE, splits texts in a way that the format has no name for, or has
            more tokens than the model.
    """
    made, found = tokenization.parsed(content), json.loads(content)
    if found["model"].get("type") != "BPE" or found["model"].get("byte_fallback"):
        raise ValueError(
            f"a tokenizer of the type {found['model'].get('type')} cannot be written as GGUF, only byte-level BPE"
        )
    splits = tuple(_expressions(found.get("pre_tokenizer") or {}))
    pre = next((name for name, one in SPLITS.items() if one == splits), None)
    if pre is None:
        raise ValueError(
            f"the tokenizer splits texts by {format_value(splits)}, which GGUF files have no name for here"
        )
    words = {number: word for word, number in made.get_vocab(with_added_tokens=True).items()}
    if max(words, default=-1) >= vocab:
        raise ValueError(f"the tokenizer has the token {max(words)}, but the model has {vocab} tokens")
    kinds = {one["id"]: _CONTROL if one["special"] else _USER for one in found.get("added_tokens") or []}
    entries: dict[str, Any] = {
        "tokenizer.ggml.model": MODEL,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [words.get(number, f"[PAD{number}]") for number in range(vocab)],
        "tokenizer.ggml.token_type": [
            kinds.get(number, _NORMAL if number in words else _UNUSED) for number in range(vocab)
        ],
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in found["model"]["merges"]],
    }
    first = made.encode("", add_special_tokens=True).ids
    entries["tokenizer.ggml.add_bos_token"] = len(first) == 1
    if len(first) == 1:
        entries["tokenizer.ggml.bos_token_id"] = first[0]
    return entries | ({"tokenizer.chat_template": template} if template else {})


def _expressions(pre: Mapping[str, Any]) -> list[str]:
    """Return the expressions by which a pre-tokenizer splits texts."""
    match pre.get("type"):
        case "Sequence":
            return [found for one in pre["pretokenizers"] for found in _expressions(one)]
        case "Split":
            return [pre["pattern"].get("Regex", str(pre["pattern"]))]
        case "ByteLevel":
            return [_WORDS] if pre.get("use_regex", True) else []
        case "Digits" if pre.get("individual_digits"):
            return [r"\p{N}"]
        case kind:
            return [str(kind)]
