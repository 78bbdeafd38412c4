"""Models in GGUF files, and in folders of transformers: of longspan, of flash-linear-attention, and hybrids."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._utils.optional_deps import need
from .._utils.typecheck import format_value
from ..compat import gguf
from ..compat.servable import why_not_type
from ..data import tokenization
from ..models import pretrained
from .chat import Template
from .text import Bytes, Words
from .tokenized import Tokenized

TOKENIZER = "tokenizer.json"


def is_foreign(source: str) -> bool:
    """Return whether a source is a GGUF file, or a folder with a ``config.json`` that names a type of transformers.

    The name of a pretrained model is that model, whatever folder there is.
    """
    if pretrained.is_pretrained_name(source):
        return False
    return gguf.is_file(source) or "model_type" in _config(Path(source))


def load(source: str, stop: str = "") -> tuple[Any, Tokenized | Bytes | None]:
    """Load a model in evaluation mode, and its text.

    Args:
        source: A GGUF file, or a folder that ``save_pretrained`` has written, of ``LongspanForCausalLM``, of a model
            of flash-linear-attention, or of a hybrid of transformers, which is accelerated.
        stop: A token of the tokenizer that ends a stream; "" for those that the file or the folder's configs name.

    Returns:
        The model, and its codec: None for a decoder of ours that has no text.

    Raises:
        ImportError: transformers or tokenizers is not installed.
        ValueError: The model type is not served, the folder has no tokenizer.json, or the model cannot be loaded.
    """
    need(f"the model in {source}", "transformers")
    if gguf.is_file(source):
        return _of_gguf(source, stop)
    folder = Path(source)
    config = _config(folder)
    if config["model_type"] == "longspan":
        return _of_longspan(folder, stop)
    build = _builder(source, config["model_type"])
    content = _tokenizer(folder)
    if not content:
        raise ValueError(
            f"{source} has no {TOKENIZER}; write it with transformers: "
            f"AutoTokenizer.from_pretrained({source!r}).save_pretrained({source!r})"
        )
    model = build()
    found = ends(content, stop, _numbers(model.generation_config, config))
    return model.eval(), Tokenized(content, ends=found, special=True, template=Template.of_folder(folder))


def _of_gguf(source: str, stop: str) -> tuple[Any, Tokenized | Words]:
    words = gguf.read_words(source)
    content = gguf.read_tokenizer(source) if words is None else ""
    model = gguf.load(source)
    named = _numbers(model.config)
    if words is None:
        template = Template.of(gguf.load_tokenizer(source))
        return model, Tokenized(content, ends=ends(content, stop, named), special=True, template=template)
    if stop and stop.encode() not in words:
        raise ValueError(f"the tokenizer has no token {stop!r}")
    words += [b""] * (model.config.vocab_size - len(words))
    return model, Words(words, (words.index(stop.encode()),) if stop else tuple(named))


def load_model(source: str) -> tuple[Any, dict[str, str]]:
    """Load a model of another library in evaluation mode, and the texts of its tokenizer.

    Args:
        source: As in ``load``, but of other libraries.

    Returns:
        The model, and the content of its ``tokenizer.json`` and its chat template where there are these.

    Raises:
        ImportError: transformers is not installed.
        ValueError: The model type is not served, or the model cannot be loaded.
    """
    need(f"the model in {source}", "transformers")
    folder, config = Path(source), _config(Path(source))
    texts = {}
    if content := _tokenizer(folder):
        texts["tokenizer"], template = content, Template.of_folder(folder)
        if template is not None and isinstance(text := template.tokenizer.chat_template, str):
            texts["template"] = text
    return _builder(source, config.get("model_type"))().eval(), texts


def _builder(source: str, kind: Any) -> Callable[[], Any]:
    """Return what loads a model of another library. Raises ValueError for a type that is not served."""
    from ..compat.fla import models as fla
    from ..compat.fla.models.unserved import UNSERVED

    if not isinstance(kind, str):
        raise ValueError(f"{source} has model_type {format_value(kind)}, which must be a text")
    if kind in fla.supported():
        return lambda: fla.load(source)
    if kind in UNSERVED:
        raise ValueError(f"{source} has model_type {format_value(kind)}, {UNSERVED[kind]}; it is not served")
    if reason := why_not_type(kind.removesuffix("_text")):
        raise ValueError(f"{source} has model_type {format_value(kind)}, which is not served: {reason}")
    return lambda: _hybrid(source)


def _hybrid(source: str) -> Any:
    from transformers import AutoModelForCausalLM

    from ..compat.transformers import accelerate
    from ..compat.transformers.loading import bounded, readable

    with readable(source), bounded(Path(source)):
        model = AutoModelForCausalLM.from_pretrained(source)
    accelerate(model)
    return model


def ends(tokenizer: str, stop: str, named: Iterable[int] = ()) -> list[int]:
    """Return the tokens that end a stream.

    Args:
        tokenizer: The content of a ``tokenizer.json``.
        stop: A token of it; "" for ``named``, or ``<|endoftext|>`` if there are none.
        named: Numbers of tokens.

    Raises:
        ValueError: The tokenizer has no token ``stop``.
    """
    made = tokenization.parsed(tokenizer)
    if stop:
        end = tokenization.end_of(made, stop)
        assert end is not None
        return [end]
    end = made.token_to_id(tokenization.END)
    return list(named) or ([] if end is None else [end])


def _of_longspan(folder: Path, stop: str) -> tuple[Any, Tokenized | Bytes | None]:
    from ..compat.transformers import LongspanForCausalLM

    model = LongspanForCausalLM.from_pretrained(folder).eval()
    vocab = model.config.vocab_size
    if content := _tokenizer(folder):
        found = [end for end in ends(content, stop) if end < vocab]
        # The tokens of a template are special ones, which a text may name.
        template = Template.of_folder(folder)
        return model, Tokenized(content, ends=found, special=template is not None, template=template)
    if stop:
        raise ValueError(f"--stop {stop!r} requires a model with a tokenizer; {folder} has no {TOKENIZER}")
    data = (model.config.run or {}).get("data", "").partition(":")[0]
    return model, Bytes() if data == "text" and vocab == Bytes.vocab else None


def _numbers(*configs: Any) -> list[int]:
    """Return the ``eos_token_id`` of the first config that has one: a number or several."""
    for config in configs:
        found = config.get("eos_token_id") if isinstance(config, dict) else getattr(config, "eos_token_id", None)
        if found is not None:
            return list(found) if isinstance(found, list | tuple) else [found]
    return []


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokenizer(folder: Path) -> str:
    path = folder / TOKENIZER
    return path.read_text(encoding="utf-8") if path.is_file() else ""
