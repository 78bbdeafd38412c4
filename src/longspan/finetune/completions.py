"""Texts, pairs and chats as packed rows, with a loss on completions: the data of a fine-tuning."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._utils import atomic_io
from .._utils.cache_dirs import expanded
from .._utils.spec import known
from .._utils.typecheck import format_value
from ..data import text
from ..data.dataset import check_indices, sha256
from ..data.pairs import Column, column

KIND = "tuning"  # what comes before the path in the name of such data
IGNORED = -100  # target of a position without a loss
OPEN = 64  # rows with room that packing looks at
SHAPES = '"prompt" and "completion", "messages" (and "tools"), or "text"'
_LINES, _TEXTS, _PACKED = ".jsonl", (".txt", ".md"), (".gz", ".xz")

Part = tuple[str, bool]  # a text, and whether it has a loss


class Batch(NamedTuple):
    """Rows of packed sequences. The padding at the end of a row has another segment and no loss."""

    inputs: Tensor  # (B,N) int64
    targets: Tensor  # (B,N) int64, the token after each input; -100 where there is no loss
    segments: Tensor  # (B,N) int64, the sequence of each token
    share: Tensor  # () float32, one over the positions with a loss of one of the step's micro-batches, on average


class Piece(NamedTuple):
    """A sequence, or a part of one that is longer than a row."""

    inputs: list[int]
    targets: list[int]


class Columns(NamedTuple):
    """The rows of a split."""

    inputs: Column
    targets: Column
    segments: Column
    counted: Tensor  # (rows,) int64, the positions with a loss


@dataclass(frozen=True, eq=False)
class Completions:
    """Packed rows of sequences, in the splits train and validation."""

    name: str
    """``tuning:`` and the path"""
    vocab: int
    """levels of a token"""
    length: int
    """most tokens of a row"""
    checksum: str
    """sha256 (hex) of all rows"""
    splits: Mapping[str, Columns] = field(repr=False)
    """per split: its rows"""
    documents: int
    """number of texts, pairs and chats"""
    cut: int
    """of these, those that are longer than a row"""

    unit = "token"

    def count(self, split: str) -> int:
        """Rows in ``split``. Raises ValueError for a split that does not exist."""
        return len(self.splits[known(split, self.splits, "split")].counted)

    def mean(self, split: str) -> float:
        """Mean number of tokens of a row."""
        return int(self.splits[split].inputs.ends[-1]) / max(1, self.count(split))

    def take(self, split: str, indices: Tensor) -> Batch:
        """The rows numbered ``indices`` (B,) int64, as long as the longest of them; ``share`` is that of these alone.

        Raises ValueError for an unknown split and for indices that are not int64 (B,) in 0 ... count-1.
        """
        rows = self.splits[known(split, self.splits, "split")]
        check_indices(indices, len(rows.counted), split)
        (inputs, mask), (targets, _), (segments, _) = (one.padded(indices) for one in rows[:3])
        share = 1.0 / rows.counted[indices].sum().float()
        return Batch(inputs, targets.masked_fill(~mask, IGNORED), segments.masked_fill(~mask, self.length), share)


def load(
    source: str, codec: Any, *, vocab: int, start: int | None, length: int, held: float, every: bool, packed: bool
) -> Completions:
    """Read the texts, pairs and chats of a file or folder.

    A file that ends in ``.jsonl`` has an object on each line: ``{"prompt": ..., "completion": ...}``,
    ``{"messages": [...]}``, which the chat template renders, or ``{"text": ...}``. Any other file is one text, and so
    are the ``.txt`` and ``.md`` files of a folder, at any depth. Files may be packed as .gz or .xz.

    A turn of the assistant is what the template writes after the prompt of that turn. If the template writes earlier
    turns in another way in the middle of a chat, as without their reasoning, the chat becomes several sequences.

    Args:
        source: The file or folder.
        codec: Text to tokens, with ``encode``, ``encode_more``, ``ends`` and, for messages, ``template``.
        vocab: Levels of a token.
        start: The token before the first one of a sequence; None if sequences begin with their first token.
        length: Most tokens of a row. A longer sequence is cut into rows.
        held: Share of the sequences for validation, chosen by their sha256; 0: validation has those of training.
        every: Whether prompts have a loss too.
        packed: Whether a row may have several sequences.

    Raises:
        ValueError: For a file that is missing or unreadable, an invalid line (with its number), and too few sequences.
    """
    pieces: list[Piece] = []
    documents = cut = 0
    for where, parts, bare in _documents(expanded(source), codec, every):
        try:
            size, found = _pieces(parts, codec, start, length, bare)
        except ValueError as error:
            raise ValueError(f"{where} cannot be encoded: {error}") from error
        if not found:
            raise ValueError(f"{where} has no token with a loss: its text or completion is empty")
        documents, cut = documents + 1, cut + (size > length)
        pieces += found
    order = sorted(range(len(pieces)), key=lambda i: hashlib.sha256(repr(pieces[i]).encode()).digest())
    chosen = {*order[: max(1, round(held * len(pieces)))]} if held else set()
    if not pieces or len(chosen) == len(pieces):
        what = "no sequence" if not pieces else f"{len(pieces)} sequence, and validation needs one too"
        raise ValueError(f"{source} has {what}; add more, or pass --validation 0 to evaluate on those of training")
    parts = {"train": [one for i, one in enumerate(pieces) if i not in chosen]}
    parts["validation"] = [pieces[i] for i in sorted(chosen)] or parts["train"]
    splits = {split: _columns(_packed(some, length if packed else 0)) for split, some in parts.items()}
    arrays = (t.numpy().view(np.uint8) for rows in splits.values() for one in rows[:3] for t in one)
    return Completions(f"{KIND}:{source}", vocab, length, sha256(arrays), splits, documents, cut)


def _pieces(parts: list[Part], codec: Any, start: int | None, length: int, bare: bool) -> tuple[int, list[Piece]]:
    """The size of the sequence of some texts, and its pieces of up to ``length``, without those that have no loss.

    ``bare``: whether it gets what the tokenizer adds at the beginning, and a last token that ends it.
    """
    tokens, losses = [], []
    for i, (words, loss) in enumerate(parts):
        found = list(codec.encode(words) if bare and not i else codec.encode_more(words))
        found += codec.ends[:1] if bare and i == len(parts) - 1 else ()
        tokens += found
        losses += [loss] * len(found)
    if start is not None:
        tokens, losses = [start, *tokens], [False, *losses]
    targets = [token if loss else IGNORED for token, loss in zip(tokens[1:], losses[1:], strict=True)]
    places = range(0, len(targets), length)
    cut = [Piece(tokens[i : min(i + length, len(targets))], targets[i : i + length]) for i in places]
    return len(targets), [piece for piece in cut if any(token != IGNORED for token in piece.targets)]


def _packed(pieces: list[Piece], length: int) -> list[list[Piece]]:
    """Rows of pieces with up to ``length`` tokens together: each piece goes to the first open row with room."""
    rows: list[list[Piece]] = []
    room: dict[int, int] = {}
    for piece in pieces:
        size = len(piece.inputs)
        row = next((row for row, left in room.items() if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room[row] = length
            if len(room) > OPEN:
                del room[next(iter(room))]
        rows[row].append(piece)
        room[row] -= size
    return rows


def _columns(rows: list[list[Piece]]) -> Columns:
    inputs = column(list(itertools.chain.from_iterable(one.inputs for one in row)) for row in rows)
    targets = [list(itertools.chain.from_iterable(one.targets for one in row)) for row in rows]
    numbers = column(np.repeat(np.arange(len(row)), [len(one.inputs) for one in row]) for row in rows)
    return Columns(inputs, column(targets), numbers, torch.tensor([sum(t != IGNORED for t in one) for one in targets]))


def _documents(path: Path, codec: Any, every: bool) -> Iterator[tuple[str, list[Part], bool]]:
    """Each sequence -> where it is, its texts, and whether these are bare: not rendered by a template."""
    if not path.exists():
        raise ValueError(f"no data at {path.absolute()}: the file or folder does not exist")
    files = [path]
    if path.is_dir():
        files = [one for one in sorted(path.rglob("*")) if _ending(one) in (_LINES, *_TEXTS) and one.is_file()]
        if not files:
            raise ValueError(f"the folder {path} has no {', '.join((_LINES, *_TEXTS))} file")
    for file in files:
        content = atomic_io.without_mark(text.unpacked(file))
        atomic_io.refuse_nul(content, file)
        try:
            words = content.decode()
        except UnicodeDecodeError as error:
            number = content.count(b"\n", 0, error.start) + 1
            raise ValueError(f"line {number} of {file} is not UTF-8: byte {content[error.start]:#04x}") from error
        if _ending(file) != _LINES:
            yield str(file), [(words, True)], True
            continue
        for number, line in enumerate(words.split("\n"), 1):
            if line.strip():
                where = f"line {number} of {file}"
                yield from ((where, parts, bare) for parts, bare in _sequences(line, where, codec, every))


def _ending(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in _PACKED else path).suffix


def _sequences(line: str, where: str, codec: Any, every: bool) -> Iterator[tuple[list[Part], bool]]:
    """The sequences of a line: its texts, and whether they are bare. Raises ValueError."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {' '.join(str(error).split())}") from error
    keys = set(found) if isinstance(found, dict) else None
    if keys in ({"messages"}, {"messages", "tools"}):
        for parts in _turns(found, where, getattr(codec, "template", None), every):
            yield parts, False
        return
    if keys not in ({"prompt", "completion"}, {"text"}):
        came = format_value(found) if keys is None else ", ".join(map(format_value, found)) or "no keys"
        raise ValueError(f"{where} must be an object with {SHAPES}, not {came}")
    for name, words in found.items():
        if not isinstance(words, str):
            raise ValueError(f"{where}: its {name} must be a text, not {format_value(words)}")
    yield [(found["text"], True)] if "text" in found else [(found["prompt"], every), (found["completion"], True)], True


def _turns(found: dict[str, Any], where: str, template: Any, every: bool) -> Iterator[list[Part]]:
    """The sequences of a chat. Raises ValueError."""
    from ..serving.requests import RequestError

    if template is None:
        raise ValueError(f"{where} has messages, which need a chat template, and the model has none")
    messages = found["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str | None)
        for one in messages
    ):
        raise ValueError(f"{where}: its messages must be a list of objects, each with a role and a content")
    answers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    if not answers:
        raise ValueError(f"{where} has no message of the assistant to learn from")
    options = {"tools": found["tools"]} if found.get("tools") else {}

    def render(count: int, prompts: bool = False) -> str:
        try:
            return template.render(messages[:count], add_generation_prompt=prompts, **options)
        except RequestError as error:
            raise ValueError(f"{where}: {error.message}") from error

    if every:
        yield [(render(len(messages)), True)]
        return
    parts: list[Part] = []
    so_far = ""
    for i in answers:
        whole = render(i + 1)
        prompt = _beginning(render(i, prompts=True), whole)
        if not prompt.startswith(so_far):
            yield parts
            parts, so_far = [], ""
        parts += [(prompt[len(so_far) :], False), (whole[len(prompt) :], True)]
        so_far = whole
    yield parts


def _beginning(one: str, other: str) -> str:
    """The longest text with which both begin."""
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]
