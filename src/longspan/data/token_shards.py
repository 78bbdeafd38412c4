"""Token folders: memory-mapped shards of tokens with an index, written by ``longspan tokenize``.

| in the folder | content |
|---|---|
| ``shard-00000.tokens`` | tokens of the documents one after the other, little-endian uint16 or uint32 |
| ``documents.bin`` | where documents begin among the tokens of all shards, little-endian int64 |
| ``tokenizer.json`` | the tokenizer, in the format of the library ``tokenizers`` |
| ``index.json`` | vocabulary, dtype, and of each file its size and sha256; written last |

Each file is written under another name and renamed when it is complete. Until all shards are there, ``index.json``
has ``complete: false`` and the place in the inputs where the next shard begins, from which a later run goes on.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .._utils import atomic_io, sealed_dir
from .._utils.locks import exclusive_lock

INDEX, TOKENIZER, DOCUMENTS, LOCK = "index.json", "tokenizer.json", "documents.bin", ".lock"
FORMAT = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SHARD = 2**26  # tokens per shard
_PIECE = 2**24  # bytes that are read at once to verify a file
T = TypeVar("T")
Track = Callable[[Iterable[T], int, str], Iterable[T]]


def dtype_of(vocab: int) -> str:
    """The narrowest dtype of a vocabulary.

    >>> dtype_of(65536), dtype_of(65537)
    ('uint16', 'uint32')
    """
    return "uint16" if vocab <= 2**16 else "uint32"


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a complete token folder.

    Raises ValueError for a folder without one, an index that is corrupt or of another format, and an incomplete one.
    """
    index = _index(folder)
    if index is None:
        raise ValueError(f"no tokens at {folder.absolute()}: it has no {INDEX}; write it with longspan tokenize")
    if not index["complete"]:
        raise ValueError(
            f"the tokens at {folder.absolute()} are incomplete: {len(index['shards'])} shards are finished; run the "
            "same longspan tokenize again, which continues"
        )
    return index


def verify(folder: Path, track: Track = lambda items, total, label: items) -> dict[str, Any]:
    """Read all files of a token folder and compare them with the index.

    Args:
        folder: a complete token folder.
        track: wraps the loop over the files, as ``progress.track`` does.

    Returns:
        The index.

    Raises:
        ValueError: for a file that is missing, changed or damaged, and for tokens outside the vocabulary.
    """
    index = read_index(folder)
    for entry in track(index["files"], len(index["files"]), "files"):
        path, digest, highest = folder / entry["name"], hashlib.sha256(), 0
        dtype = DTYPES[index["dtype"]] if path.suffix == ".tokens" else None
        with atomic_io.reading(path), atomic_io.open_regular(path) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                if dtype is not None and len(piece) % dtype.itemsize == 0:
                    highest = max(highest, int(np.frombuffer(piece, dtype).max()))
        _refuse_changed(path, digest.hexdigest(), entry["sha256"])
        if highest >= index["vocab"]:
            raise ValueError(f"{path} has token {highest}, outside the vocabulary of {index['vocab']}")
    return index


def read_tokenizer(folder: Path, index: dict[str, Any]) -> str:
    """The content of a folder's tokenizer. Raises ValueError for one that was changed."""
    path = folder / TOKENIZER
    text = atomic_io.read_text(path)
    _refuse_changed(path, hashlib.sha256(text.encode()).hexdigest(), index["tokenizer"])
    return text


def _refuse_changed(path: Path, digest: str, recorded: str) -> None:
    if digest != recorded:
        raise ValueError(
            f"{path} was changed or damaged since it was written: its sha256 is {digest}, and {INDEX} records "
            f"{recorded}; restore it from a copy, or write the folder again"
        )


class Writer:
    """Writes a token folder shard by shard; a shard ends after the first piece with which it has ``shard`` tokens.

    Pieces are counted, so that a later run with the same ``source`` skips those of finished shards. Call ``add`` for
    each piece from ``pieces`` on, then ``finish``.

    Args:
        folder: the folder, which exists and is locked by the caller.
        vocab: number of tokens of the vocabulary.
        tokenizer: content of the tokenizer's file.
        source: plain values that determine the pieces and their tokens; a folder with others is refused.
        shard: tokens per shard.

    Raises:
        ValueError: for a folder of other tokens.
        OSError: if a file cannot be written.
    """

    def __init__(self, folder: Path, vocab: int, tokenizer: bytes, source: dict[str, Any], shard: int = SHARD):
        self.folder, self.shard = folder, shard
        new = {
            "format": FORMAT,
            "complete": False,
            "vocab": vocab,
            "dtype": dtype_of(vocab),
            "tokens": 0,
            "documents": 0,
            "pieces": 0,
            "source": json.loads(json.dumps(source | {"shard": shard})),
            "tokenizer": hashlib.sha256(tokenizer).hexdigest(),
            "shards": [],
        }
        self.index = _index(folder) or new
        for name in ("source", "tokenizer"):
            if self.index[name] != new[name]:
                differs = _difference(self.index, new, name)
                raise ValueError(
                    f"{folder} holds other tokens (different: {differs}); choose another folder with --out"
                )
        self.dtype = DTYPES[self.index["dtype"]]
        atomic_io.write(folder / TOKENIZER, tokenizer)
        self._clear()

    @property
    def complete(self) -> bool:
        """Whether all shards are written."""
        return self.index["complete"]

    @property
    def pieces(self) -> int:
        """Number of pieces in finished shards."""
        return self.index["pieces"]

    def add(self, tokens: np.ndarray, *, begins: bool) -> None:
        """Append the tokens of one piece; ``begins``: it begins a document."""
        if begins:
            self.begins.append(self.index["tokens"] + self.count)
        self.parts.append(np.asarray(tokens, self.dtype))
        self.count += len(tokens)
        self.taken += 1
        if self.count >= self.shard:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Write the last shard, the documents and the complete index, and return it."""
        if self.count:
            self._flush()
        names = [f"{_name(i)}.documents" for i in range(len(self.index["shards"]))]
        starts = [np.frombuffer(atomic_io.read(self.folder / name), "<i8") for name in names]
        self.index["documents"] = sum(map(len, starts))
        content = np.concatenate([*starts, np.zeros(0, "<i8")]).tobytes()
        atomic_io.write(self.folder / DOCUMENTS, content)
        documents = {"name": DOCUMENTS, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        tokenizer = self.folder / TOKENIZER
        copy = {"name": TOKENIZER, "bytes": tokenizer.stat().st_size, "sha256": self.index["tokenizer"]}
        self._write_index({"complete": True, "files": [*self.index["shards"], documents, copy]})
        for name in names:
            (self.folder / name).unlink()
        return self.index

    def _flush(self) -> None:
        name = _name(len(self.index["shards"]))
        content = np.concatenate(self.parts).tobytes()
        atomic_io.write(self.folder / f"{name}.documents", np.asarray(self.begins, "<i8").tobytes())
        atomic_io.write(self.folder / f"{name}.tokens", content)
        entry = {"name": f"{name}.tokens", "bytes": len(content), "tokens": self.count}
        entry["sha256"] = hashlib.sha256(content).hexdigest()
        # A killed process leaves shards that no index names; the next run writes them again.
        self._write_index(
            {
                "tokens": self.index["tokens"] + self.count,
                "pieces": self.index["pieces"] + self.taken,
                "shards": [*self.index["shards"], entry],
            }
        )
        self._clear()

    def _clear(self) -> None:
        self.parts: list[np.ndarray] = []
        self.begins: list[int] = []
        self.count = self.taken = 0

    def _write_index(self, changes: dict[str, Any]) -> None:
        self.index = {name: value for name, value in (self.index | changes).items() if name != "sha256"}
        self.index["sha256"] = sealed_dir.digest(self.index)
        atomic_io.write(self.folder / INDEX, (json.dumps(self.index, indent=1) + "\n").encode())


@contextlib.contextmanager
def new_or_continued(folder: Path) -> Iterator[None]:
    """Make and lock the folder for a writer.

    Raises ValueError if another process writes into it, or if it holds something else than tokens.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What a killed run leaves before its first shard belongs to us, too.
        own = {INDEX, TOKENIZER, DOCUMENTS, LOCK}
        others = [
            path.name
            for path in sorted(folder.iterdir())
            if path.name not in own and not path.name.startswith((".", "shard-"))
        ]
        if others:
            raise ValueError(f"{folder} holds {others[0]!r}, which is no file of tokens; choose another folder")
        with exclusive_lock(folder / LOCK, f"into {folder}"):
            yield
    except OSError as error:
        raise ValueError(f"cannot write {error.filename or folder}: {error.strerror or error}") from error


def _name(number: int) -> str:
    return f"shard-{number:05d}"


def _difference(old: dict[str, Any], new: dict[str, Any], name: str) -> str:
    if name == "tokenizer":
        return TOKENIZER
    before, now = old["source"], new["source"]
    return ", ".join(key for key in {**before, **now} if before.get(key) != now.get(key))


def _index(folder: Path) -> dict[str, Any] | None:
    """The index of a folder, complete or not; None without one. Raises ValueError for a corrupt one."""
    path = folder / INDEX
    if not path.exists():
        return None
    index = sealed_dir.parsed(path, atomic_io.read(path, atomic_io.MOST_TEXT))
    if not isinstance(index, dict) or "format" not in index or "shards" not in index:
        raise ValueError(f"{path} is not an index of tokens; it was not written by longspan tokenize")
    if index["format"] != FORMAT:
        raise ValueError(f"{path} has format {index['format']}; this version reads format {FORMAT}")
    if index.get("sha256") != (own := sealed_dir.digest(index)):
        raise ValueError(f"{path} was changed or damaged: its sha256 is {own}, not {index.get('sha256')}")
    return index
