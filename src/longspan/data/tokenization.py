"""Tokenizers of text, and the writing of token folders with them."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._utils import atomic_io
from .._utils.optional_deps import need
from .._utils.typecheck import format_value
from . import token_shards
from .documents import Piece, Source, pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"  # what a tokenizer trained here has for the end of a document
TOKENIZER_CONFIG = "tokenizer_config.json"
BATCH = 256  # pieces that are encoded at once, in parallel
LETTERS = 2**24  # their largest number of characters


def parsed(text: str, where: str | Path = "the tokenizer") -> "Tokenizer":
    """Make a tokenizer from the content of its file. Raises ValueError for what the library cannot read."""
    need("tokens of a tokenizer", "tokenizers")
    from tokenizers import Tokenizer

    try:
        with _plain_errors():
            return Tokenizer.from_str(text)
    # The library raises plain exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{where} is not a tokenizer in the format of the library tokenizers: {reason}") from error


def encoder(text: str, where: str | Path = "the tokenizer", *, special: bool = False) -> "Tokenizer":
    """Make a tokenizer that encodes whole texts, whatever its file says of batches of a model.

    Args:
        text: the content of its file.
        where: the file, for messages.
        special: whether the name of a special token in a text, such as ``<|endoftext|>``, becomes that token; otherwise
            it is text.

    Raises:
        ValueError: for what the library cannot read.
    """
    made = parsed(text, where)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = not special
    return made


def encode(tokenizer: "Tokenizer", texts: list[str], *, special: bool = False) -> list[list[int]]:
    """Encode texts.

    Args:
        tokenizer: an ``encoder``.
        texts: the texts.
        special: whether to add the special tokens of the tokenizer, such as a first ``<s>``.

    Raises:
        ValueError: for a text that has half of a surrogate pair (UnicodeEncodeError), for one with a character for
            which the tokenizer has no token, and for one at which the tokenizer fails, such as a regular expression
            that backtracks too often.
    """
    for text in texts:
        if not text.isascii():
            text.encode()
    with _plain_errors():
        try:
            return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=special)]
        # The library raises plain exceptions.
        except Exception as error:
            odd = "".join(letter for letter in sorted(set("".join(texts))) if not _knows(tokenizer, letter))
            raise ValueError(f"the tokenizer has no token for {format_value(odd)}" if odd else str(error)) from error


def _knows(tokenizer: "Tokenizer", letter: str) -> bool:
    try:
        return bool(tokenizer.encode(letter))
    # As above.
    except Exception:
        return False


def frame(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer adds before and after a text: two lists of numbers, such as [CLS] and [SEP].

    Raises ValueError for a tokenizer that adds them elsewhere.
    """
    (bare,), (whole,) = encode(tokenizer, ["a"]), encode(tokenizer, ["a"], special=True)
    for begin in range(len(whole) - len(bare) + 1):
        if bare and whole[begin : begin + len(bare)] == bare:
            return whole[:begin], whole[begin + len(bare) :]
    raise ValueError("the tokenizer does not add its special tokens before and after a text")


def framed(text: str, texts: list[str], length: int) -> list[list[int]]:
    """Encode texts with the special tokens of a tokenizer, and cut their ends to ``length`` tokens (0: none is cut).

    ``text``: the content of its file. Raises ValueError as ``encode`` and ``frame`` do, and for a text without tokens.
    """
    made = encoder(text)
    before, after = frame(made)
    most = max(1, length - len(before) - len(after)) if length else None
    found = [[*before, *one[:most], *after] for one in encode(made, texts)]
    if not all(found):
        raise ValueError(f"the tokenizer finds no tokens in {texts[found.index([])]!r}")
    return found


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn a panic of the library, which does not derive from Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer failed: {' '.join(str(error).split())[:200]}") from error


def vocab_of(tokenizer: "Tokenizer") -> int:
    """Number of levels of a tokenizer's tokens: its highest one and 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of(tokenizer: "Tokenizer", end: str) -> int | None:
    """The token ``end`` by number; None for "". Raises ValueError for one that the tokenizer lacks."""
    if not end:
        return None
    number = tokenizer.token_to_id(end)
    if number is None:
        special = [one.content for one in tokenizer.get_added_tokens_decoder().values()]
        raise ValueError(f"the tokenizer has no token {end!r}; its special tokens are {', '.join(special) or 'none'}")
    return number


def byte_letters() -> dict[str, int]:
    """Return the character of each byte in byte-level tokens: printable bytes themselves, others from 256 on.

    References:
        Radford et al. 2019, GPT-2, byte-level BPE.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte if byte in printed else 256 + others.index(byte)): byte for byte in range(256)}


def train_bpe(
    inputs: list[Source],
    vocab: int,
    *,
    field: str = "text",
    separator: str = "",
    letters: int = 10**9,
    track: Callable[[Iterable[Piece]], Iterable[Piece]] = iter,
) -> str:
    """Train a byte-level BPE tokenizer, which encodes any text without loss.

    Args:
        inputs: what to train on.
        vocab: number of tokens: 256 bytes, the end of a document, and merges; fewer if the text has fewer pairs.
        field: as in ``documents.pieces``.
        separator: as in ``documents.pieces``.
        letters: characters after which training reads no more.
        track: wraps the loop over the pieces.

    Returns:
        The content of the tokenizer's file.

    Raises:
        ValueError: for vocab < 257, and for inputs that cannot be read or have no text.
        ImportError: without ``tokenizers``.

    References:
        Sennrich et al. 2016, 1508.07909, section 3.2. Radford et al. 2019, GPT-2 (bytes).
    """
    need("training of a tokenizer", "tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 257:
        raise ValueError(f"a vocabulary of {vocab} is too small: 256 bytes and {END} are 257 tokens")
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for piece in track(_every(inputs, field, separator)):
            yield piece.text
            read += len(piece.text)
            if read >= letters:
                return

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue] (missing in the stubs)
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] (missing in the stubs)
    options: dict[str, Any] = {"vocab_size": vocab, "special_tokens": [END], "show_progress": False}
    trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(texts(), trainer)
    if not read:
        raise ValueError("the inputs have no text to train a tokenizer on")
    return made.to_str()


def write(
    folder: Path,
    inputs: list[Source],
    tokenizer: str,
    *,
    end: str = "",
    field: str = "text",
    separator: str = "",
    special: bool = False,
    shard: int = token_shards.SHARD,
    options: dict[str, Any] | None = None,
    report: Callable[[Source, dict[str, Any]], None] = lambda source, index: None,
) -> dict[str, Any]:
    """Encode all documents of the inputs into a token folder, or continue one that is incomplete.

    The result depends on the arguments alone: a run that was stopped and continued writes the same files.

    Args:
        folder: the token folder, locked by ``token_shards.new_or_continued``.
        inputs: files, in their order.
        tokenizer: content of the tokenizer's file.
        end: a token of the tokenizer to append to each document; "": none.
        field: as in ``documents.pieces``.
        separator: as in ``documents.pieces``.
        special: as in ``encoder``.
        shard: tokens per shard.
        options: further plain values for the index; a folder that is continued must have the same.
        report: called with each input and the index so far, before each batch.

    Returns:
        The complete index.

    Raises:
        ValueError: for inputs that cannot be read or have no tokens, an unknown ``end``, and a folder of other tokens.
        ImportError: without ``tokenizers``.
        OSError: if a file cannot be written.
    """
    made = encoder(tokenizer, special=special)
    last = end_of(made, end)
    source = (
        {
            "inputs": [[str(one.path.absolute()), one.size] for one in inputs],
            "field": field,
            "separator": separator,
            "end": end,
        }
        | ({"special": True} if special else {})
        | (options or {})
    )
    writer = token_shards.Writer(folder, vocab_of(made), tokenizer.encode(), source, shard)
    if writer.complete:
        return writer.index
    closing = [] if last is None else [last]
    taken, done = 0, writer.pieces
    for one in inputs:
        for batch in _batches(pieces(one, field, separator)):
            report(one, writer.index)
            fresh = batch[max(0, done - taken) :]
            taken += len(batch)
            try:
                encoded = encode(made, [piece.text for piece in fresh])
            except ValueError as error:
                raise ValueError(f"{one.path} cannot be encoded: {error}") from error
            for piece, found in zip(fresh, encoded, strict=True):
                tokens = np.array([*found, *closing] if piece.ends else found, np.int64)
                writer.add(tokens, begins=piece.begins)
    if not writer.index["tokens"] + writer.count:
        raise ValueError(f"the inputs have no text: {', '.join(str(one.path) for one in inputs)[:200]}")
    return writer.finish()


def write_files(folder: Path, content: str) -> None:
    """Write a tokenizer's file, and the one by which ``AutoTokenizer`` of transformers reads it, into a new folder.

    The token ``<|endoftext|>`` ends documents if the tokenizer has it. As in GPT-2, no padding token is defined.

    Raises OSError.
    """
    added = [one["content"] for one in json.loads(content).get("added_tokens") or []]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if END in added:
        config["eos_token"] = END
    (folder / token_shards.TOKENIZER).write_text(content, encoding="utf-8")
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _every(inputs: list[Source], field: str, separator: str) -> Iterator[Piece]:
    return itertools.chain.from_iterable(pieces(one, field, separator) for one in inputs)


def _batches(found: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if len(batch) == BATCH or size >= LETTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def load_tokenizer(path: Path) -> str:
    """The content of a tokenizer's file, or of ``tokenizer.json`` in a folder. Raises ValueError for a wrong one."""
    path = path / token_shards.TOKENIZER if path.is_dir() else path
    text = atomic_io.read_text(path)
    parsed(text, path)
    return text
