"""Documents from files of text, lines of JSON, Parquet, and folders of Hugging Face ``datasets``, piece by piece."""

import contextlib
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from .._utils import atomic_io
from .._utils.cache_dirs import expanded
from .._utils.optional_deps import need

TEXT, LINES, PARQUET = (".txt", ".md"), (".jsonl", ".ndjson"), (".parquet",)
PACKED = (".gz", ".xz")
LONGEST = 2**22  # characters of a piece
ROWS = 1000  # rows of a Parquet file that are read at once


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    begins: bool
    """whether it begins a document"""
    ends: bool
    """whether it ends one"""


class Source(NamedTuple):
    """A file, or a folder of Hugging Face ``datasets``."""

    path: Path
    kind: str
    """text, jsonl, parquet or datasets"""
    size: int
    """bytes on disk"""


def sources(names: list[str]) -> list[Source]:
    """Find the inputs: files, files in folders (by path), and folders that ``datasets.save_to_disk`` wrote.

    Raises ValueError for a name that does not exist, a file of an unknown kind, and a folder without any file.
    """
    found: list[Source] = []
    for name in names:
        path = expanded(name)
        if not path.exists():
            raise ValueError(f"no input at {path.absolute()}: there is no such file or folder")
        if not path.is_dir():
            found.append(_file(path))
        elif any((path / one).exists() for one in ("dataset_info.json", "dataset_dict.json")):
            found.append(Source(path, "datasets", sum(one.stat().st_size for one in path.rglob("*.arrow"))))
        else:
            inside = [one for one in sorted(path.rglob("*")) if one.is_file() and _kind(one)]
            if not inside:
                known = ", ".join(f"*{end}" for end in (*TEXT, *LINES, *PARQUET))
                raise ValueError(f"no input in the folder {path}: looked for {known}, also packed as .gz and .xz")
            found += map(_file, inside)
    return found


def pieces(source: Source, field: str = "text", separator: str = "") -> Iterator[Piece]:
    """Read one input. Empty documents are left out; longer ones than ``LONGEST`` come in several pieces.

    Args:
        source: the input.
        field: field of lines of JSON, or column of a table, that has the text.
        separator: text that separates the documents of a text file, such as "<|endoftext|>"; "": each file is one
            document.

    Raises:
        ValueError: for a file that cannot be read, is not UTF-8 or not of its kind, and a row without the field.
        ImportError: if ``pyarrow`` or ``datasets`` is needed and missing.
    """
    if source.kind == "text":
        yield from _texts(source.path, separator)
        return
    rows = {"jsonl": _lines, "parquet": _parquet, "datasets": _datasets}[source.kind](source.path, field)
    for where, text in rows:
        if not isinstance(text, str):
            raise ValueError(
                f"{source.path}, {where}: the field {field!r} is not a text, but {type(text).__name__}; name the field "
                "that has the text with --field"
            )
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{source.path}, {where}: the field {field!r} has half of a surrogate pair, {text[error.start]!r}, "
                    "which no text has"
                ) from error
        yield from _cut(text)


def _file(path: Path) -> Source:
    kind = _kind(path)
    if not kind:
        known = ", ".join((*TEXT, *LINES, *PARQUET))
        raise ValueError(
            f"{path} is of an unknown kind; its name must end in {known}, or in one of these and .gz or .xz"
        )
    return Source(path, kind, path.stat().st_size)


def _kind(path: Path) -> str:
    name = path.name.lower()
    for end in PACKED:
        name = name.removesuffix(end)
    kinds = {"text": TEXT, "jsonl": LINES, "parquet": PARQUET}
    return next((kind for kind, ends in kinds.items() if name.endswith(ends)), "")


def _cut(text: str) -> Iterator[Piece]:
    """A document in pieces, cut where a line begins with something else than white space, if there is such a place.

    Tokenizers split there anyway, except those that mark the beginning of a text.
    """
    begin = 0
    while len(text) - begin > LONGEST:
        end = _border(text, begin + LONGEST)
        yield Piece(text[begin:end], begin == 0, False)
        begin = end
    if len(text) > begin:
        yield Piece(text[begin:], begin == 0, True)


def _border(text: str, end: int) -> int:
    """The last place up to ``end`` where a line begins with something else than white space, or ``end``."""
    place = end
    while (place := text.rfind("\n", max(0, end - LONGEST // 2), place)) >= 0:
        if place + 1 < len(text) and not text[place + 1].isspace():
            return place + 1
    return end


def _texts(path: Path, separator: str) -> Iterator[Piece]:
    with _opened(path) as file:
        rest, begins = "", True
        while block := _decoded(path, file, LONGEST):
            rest += block
            if separator:
                *whole, rest = rest.split(separator)
                for text in whole:
                    if text:
                        yield Piece(text, begins, True)
                    elif not begins:
                        # The document ended with the piece before it.
                        yield Piece("", False, True)
                    begins = True
            while len(rest) > 2 * LONGEST:
                end = _border(rest, LONGEST)
                yield Piece(rest[:end], begins, False)
                rest, begins = rest[end:], False
        if rest or not begins:
            yield Piece(rest, begins, True)


def _lines(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        number = 0
        while line := _decoded(path, file, None):
            number += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict) or field not in row:
                names = (
                    f"its fields are {', '.join(map(str, row))[:200]}" if isinstance(row, dict) else "it is no object"
                )
                raise ValueError(f"{path}, line {number} has no field {field!r}: {names}; pass --field")
            yield f"line {number}", row[field]


def _parquet(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    need("Parquet files", "pyarrow")
    import pyarrow  # pyright: ignore[reportMissingImports] (optional)
    from pyarrow import parquet  # pyright: ignore[reportMissingImports] (optional)

    try:
        with atomic_io.reading(path):
            file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{path} has no column {field!r}: its columns are {names}; pass --field")
        number = 0
        for batch in file.iter_batches(ROWS, columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield f"row {number}", value
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file that pyarrow reads: {' '.join(str(error).split())}") from error


def _datasets(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    need("folders of Hugging Face datasets", "datasets")
    import datasets  # pyright: ignore[reportMissingImports] (optional)

    found, number = datasets.load_from_disk(str(path)), 0
    # A DatasetDict holds its parts by name.
    for part in found.values() if isinstance(found, dict) else (found,):
        if field not in part.column_names:
            names = ", ".join(part.column_names)
            raise ValueError(f"{path} has no column {field!r}: its columns are {names}; pass --field")
        for row in part.select_columns([field]):
            number += 1
            yield f"row {number}", cast(dict, row)[field]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower())
    with contextlib.ExitStack() as stack:
        with atomic_io.reading(path):
            file: Any = stack.enter_context(atomic_io.open_regular(path))
        if opener:
            file = stack.enter_context(opener(file))
        # Line ends stay as they are, and a byte order mark is no part of the text.
        yield stack.enter_context(io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n"))


def _decoded(path: Path, file: IO[str], size: int | None) -> str:
    """The next ``size`` characters, or the next line for None. Raises ValueError, which names the file."""
    try:
        found = file.readline() if size is None else file.read(size)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is truncated or corrupt: {error}") from error
    if "\0" in found:
        raise ValueError(f"{path} has a NUL, which no text has; convert UTF-16 to UTF-8")
    return found
