"""GGUF files, the format of llama.cpp: hybrid and recurrent models read into transformers, and written from them.

    from longspan.compat import gguf

    model = gguf.load("model.gguf")                 # as longspan.load("model.gguf")
    tokenizer = gguf.load_tokenizer("model.gguf")   # of transformers, with the chat template
    gguf.save(model, "tuned.gguf", weights="q8_0")

transformers is an optional extra of longspan.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from . import tokenizer
from .container import Container
from .models import WEIGHTS, load, save

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["WEIGHTS", "is_file", "load", "load_tokenizer", "read_tokenizer", "read_words", "save"]


def is_file(source: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a GGUF file, by its name."""
    return Path(source).suffix.lower() == ".gguf"


def read_tokenizer(path: str | os.PathLike[str]) -> str:
    """Return the tokenizer of a GGUF file as the content of a ``tokenizer.json``.

    Raises:
        ImportError: The library ``tokenizers`` is not installed.
        ValueError: The file is damaged, or its tokenizer is not supported.
    """
    container = Container(path)
    try:
        return tokenizer.read(container.metadata)
    except ValueError as error:
        raise container.damaged(str(error)) from error


def read_words(path: str | os.PathLike[str]) -> list[bytes] | None:
    """Return the bytes of each token of a GGUF file with the tokenizer of RWKV, or None for other tokenizers.

    Raises:
        ValueError: The file is damaged.
    """
    container = Container(path)
    if container.metadata.get("tokenizer.ggml.model") != tokenizer.WORLD:
        return None
    try:
        return tokenizer.read_words(container.metadata)
    except ValueError as error:
        raise container.damaged(str(error)) from error


def load_tokenizer(path: str | os.PathLike[str]) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a GGUF file, with its chat template.

    Args:
        path: The file.

    Raises:
        ImportError: transformers is not installed.
        ValueError: The file is damaged, or its tokenizer is not supported.
    """
    from ..._utils.optional_deps import need

    need(f"the tokenizer in {path}", "transformers", "tokenizers")
    from transformers import PreTrainedTokenizerFast

    from ...data.tokenization import parsed

    metadata, made = Container(path).metadata, parsed(read_tokenizer(path))
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        **{name: made.id_to_token(number) for name, number in special.items() if number is not None},
    )
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        found.chat_template = template
    return found
