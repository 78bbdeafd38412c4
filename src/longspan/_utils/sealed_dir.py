"""A folder of files that cannot change, or be exchanged for another's, unnoticed: config.json has the digest of each.

config.json holds plain values, among them ``format``; ``files``, the size and the sha256 of each other file; and
``sha256``, that of its own content, however that is laid out.

A folder appears under its name complete or not at all: it is filled beside it and renamed. Where a folder of that name
exists, it steps aside under the name ``.NAME.TOKEN.old`` first; readers look there when they find none, so that a
process killed between the two renames costs nothing. Several processes may write to one name at once: each content is
whole, and the last one stays. No reader or writer ever waits for another one.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from . import atomic_io
from .version import VERSION

CONFIG = "config.json"
FORMAT = 2
# How often a reader begins anew, some microseconds each, because a writer has changed the names under its hands.
TRIES = 50
# What the system says of a name that a folder, a file or a link has already.
OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)

Content = Callable[[str], bytes | None]


def seal(folder: Path, header: dict[str, Any]) -> None:
    """Write config.json for what is in ``folder``, and sync all of it. Raises ValueError for values that JSON lacks."""
    entries = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            entries[path.name] = _entry(path.stat().st_size, hashlib.file_digest(file, "sha256"))
    try:
        plain = json.loads(json.dumps({"format": FORMAT} | header | {"files": entries}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{CONFIG} holds plain values only: {error}") from error
    text = json.dumps(plain | {"sha256": digest(plain)}, indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    # As readable as config.json, whatever the library that wrote them thinks.
    mode = (folder / CONFIG).stat().st_mode
    for path in (*folder.iterdir(), folder):
        if path != folder:
            path.chmod(mode)
        atomic_io.sync(path)


def swap(temporary: Path, folder: Path) -> None:
    """Rename ``temporary`` to ``folder``; at each moment a complete one is there, under its name or ``.NAME.*.old``."""
    while True:
        try:
            os.rename(temporary, folder)
            break
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
        # Another process that writes here may have moved it already, and may put its own in the place.
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, atomic_io.sibling_path(folder, "old"))
            atomic_io.sync(folder.parent)
    atomic_io.sync(folder.parent)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove what processes that were killed have left beside ``folder``; what is being written stays."""
    # Listed first: of those that step aside from now on, one may be the only one.
    replaced = atomic_io.all_beside(folder, "old")
    if (folder / CONFIG).exists():
        for path in replaced:
            atomic_io.remove(path)
    atomic_io.tidy(folder)


def resolve_replaced(folder: Path) -> Path:
    """``folder``, or the newest that has stepped aside from there, if a kill has left nothing but that."""
    return folder if folder.exists() else next(iter(_aside(folder)), folder)


def _aside(folder: Path) -> list[Path]:
    """Those that have stepped aside from there, the newest first; some may be half removed."""
    written = {}
    for path in atomic_io.all_beside(folder, "old"):
        with contextlib.suppress(OSError):
            written[path] = (path / CONFIG).stat().st_mtime_ns
    return sorted(written, key=lambda path: written[path], reverse=True)


def _places(folder: Path) -> Iterator[Path]:
    yield folder
    # Looked for only where there is none of the name.
    yield from _aside(folder)


def there(folder: Path) -> bool:
    """Whether there is a sealed folder of this name, which may have stepped aside."""
    # At any moment a writer may exchange what has just been found, so that only a row of failures is an answer.
    return any((resolve_replaced(folder) / CONFIG).exists() for _ in range(TRIES))


@contextlib.contextmanager
def opened(folder: Path, *names: str) -> Iterator[tuple[Path, dict[str, Any], Content]]:
    """Where a folder is, what its config.json says, and a function that gives the content of the files ``names``.

    All are of one moment, though the folder be replaced meanwhile, and a content is exactly what was written; None
    where there is no such file.

    Raises ValueError for a folder that is missing or not sealed, and for a file that was changed or damaged.
    """
    folder, found = _open(folder, names)
    with contextlib.ExitStack() as stack:
        for file in found.values():
            stack.enter_context(file)
        with atomic_io.reading(folder / CONFIG):
            text = atomic_io.read_rest(found[CONFIG], folder / CONFIG, atomic_io.MOST_TEXT)
        header = _header(folder / CONFIG, text)

        def content(name: str) -> bytes | None:
            return _verified(folder / name, found[name], header["files"].get(name)) if name in found else None

        yield folder, header, content


def parsed(path: Path, content: bytes) -> Any:
    """What a JSON file says. Raises ValueError, which names the file, where it is corrupt."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def digest(header: dict[str, Any]) -> str:
    """The sha256 that belongs into the header of config.json."""
    rest = {name: value for name, value in header.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _open(folder: Path, names: tuple[str, ...]) -> tuple[Path, dict[str, BinaryIO]]:
    with atomic_io.reading(folder):
        for at in (place for _ in range(TRIES) for place in _places(folder)):
            with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
                found: dict[str, BinaryIO] = {CONFIG: stack.enter_context(atomic_io.open_regular(at / CONFIG))}
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        found[name] = stack.enter_context(atomic_io.open_regular(at / name))
                # The same config.json before and after: what was opened in between belongs to it.
                same = os.path.samestat(os.fstat(found[CONFIG].fileno()), os.stat(at / CONFIG))
                # One that has stepped aside may be half removed by now.
                if same and (at == folder or len(found) > len(names)):
                    stack.pop_all()
                    return at, found
        if not folder.is_dir():
            raise ValueError(f"no checkpoint at {folder}: there is no such folder")
    raise ValueError(f"{folder} is no checkpoint: it has no {CONFIG}")


def _header(path: Path, text: bytes) -> dict[str, Any]:
    header = parsed(path, text)
    if not isinstance(header, dict) or "format" not in header:
        raise ValueError(f"{path} belongs to another program: it names no format of a longspan checkpoint")
    if header["format"] != FORMAT:
        raise ValueError(f"{path} has format {header['format']}; this longspan {VERSION} reads format {FORMAT}")
    if header.get("sha256") != (own := digest(header)):
        raise ValueError(
            f"{path} was changed or damaged since it was written: its sha256 is {own}, not {header.get('sha256')}; "
            f"restore it from a copy, or take another checkpoint; after a change on purpose, write the sha256 into it"
        )
    if not isinstance(header.get("files"), dict):
        raise ValueError(f"{path} is corrupt: it names no files")
    return header


def _verified(path: Path, file: BinaryIO, entry: Any) -> bytes:
    with atomic_io.reading(path):
        size = os.fstat(file.fileno()).st_size
        if not isinstance(entry, dict) or entry.get("bytes") != size:
            found = f"it has {size} bytes"
        else:
            content = file.read()
            if entry == _entry(len(content), hashlib.sha256(content)):
                return content
            found = f"its sha256 is {hashlib.sha256(content).hexdigest()}"
    raise ValueError(
        f"{path} was changed or damaged since it was written: {found}, and {CONFIG} says {entry}; restore it from a "
        f"copy, or take another checkpoint"
    )


def _entry(size: int, digest: Any) -> dict[str, Any]:
    return {"bytes": size, "sha256": digest.hexdigest()}
