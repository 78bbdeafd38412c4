"""Folders whose files are protected by digests in config.json, written atomically.

config.json holds plain values: ``format``; ``files``, with size and sha256 of each other file; and ``sha256``, the
digest of its content, independent of formatting.

A folder is filled under a temporary name and renamed. An existing folder of that name is first renamed to
``.NAME.TOKEN.old``. Readers look there if they find none, so a process killed between the two renames loses nothing.
Several processes may write to one name: each content is complete, and the last one stays. Readers and writers never
wait for each other.
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
# Retries of a reader, some microseconds each, while a writer renames folders.
TRIES = 50
# Errors of the system for a name that exists already.
OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)

Content = Callable[[str], bytes | None]


def seal(folder: Path, header: dict[str, Any]) -> None:
    """Write config.json for the files of ``folder``, and sync all. Raises ValueError for values that JSON lacks."""
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
    # The same permissions for all files, whichever library wrote them.
    mode = (folder / CONFIG).stat().st_mode
    for path in (*folder.iterdir(), folder):
        if path != folder:
            path.chmod(mode)
        atomic_io.sync(path)


def swap(temporary: Path, folder: Path) -> None:
    """Rename ``temporary`` to ``folder``; a complete folder always exists, under its name or ``.NAME.*.old``."""
    while True:
        try:
            os.rename(temporary, folder)
            break
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
        # Another writer may have moved it already, and may put another folder in its place.
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, atomic_io.sibling_path(folder, "old"))
            atomic_io.sync(folder.parent)
    atomic_io.sync(folder.parent)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove what killed processes left next to ``folder``; folders in use stay."""
    # Listed first: a folder renamed to .old from now on may be the only complete one.
    replaced = atomic_io.existing_siblings(folder, "old")
    if (folder / CONFIG).exists():
        for path in replaced:
            atomic_io.remove(path)
    atomic_io.tidy(folder)


def resolve_replaced(folder: Path) -> Path:
    """Return ``folder``, or its newest ``.old`` version if a kill left only that."""
    return folder if folder.exists() else next(iter(_aside(folder)), folder)


def _aside(folder: Path) -> list[Path]:
    """The ``.old`` versions of a folder, newest first; some may be partly removed."""
    written = {}
    for path in atomic_io.existing_siblings(folder, "old"):
        with contextlib.suppress(OSError):
            written[path] = (path / CONFIG).stat().st_mtime_ns
    return sorted(written, key=lambda path: written[path], reverse=True)


def _places(folder: Path) -> Iterator[Path]:
    yield folder
    # Only searched if there is no folder of the name.
    yield from _aside(folder)


def there(folder: Path) -> bool:
    """Whether a sealed folder of this name exists, possibly as an ``.old`` version."""
    # A writer may rename the folder at any moment, so one failure proves nothing.
    return any((resolve_replaced(folder) / CONFIG).exists() for _ in range(TRIES))


@contextlib.contextmanager
def opened(folder: Path, *names: str, optional: tuple[str, ...] = ()) -> Iterator[tuple[Path, dict[str, Any], Content]]:
    """Open a sealed folder -> its path, the content of its config.json, and a function that reads the files ``names``
    and ``optional``, which not every folder of the kind has.

    All belong to one save, even if the folder is replaced meanwhile. The function verifies digests, and returns None
    for a file that does not exist.

    Raises ValueError for a folder that is missing or not sealed, and for a file that was changed or damaged.
    """
    folder, found = _open(folder, names, optional)
    with contextlib.ExitStack() as stack:
        for file in found.values():
            stack.enter_context(file)
        with atomic_io.reading(folder / CONFIG):
            text = atomic_io.read_rest(found[CONFIG], folder / CONFIG, atomic_io.MOST_TEXT)
        header = _header(folder / CONFIG, text)

        def content(name: str) -> bytes | None:
            if name in found:
                return _verified(folder / name, found[name], header["files"].get(name))
            if name in optional and name in header["files"]:
                raise ValueError(f"{folder} has no {name}, which {CONFIG} records; restore it from a copy")
            return None

        yield folder, header, content


def parsed(path: Path, content: bytes) -> Any:
    """Parse a JSON file's content. Raises ValueError, which names the file, if it is corrupt."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def digest(header: dict[str, Any]) -> str:
    """Return the sha256 of config.json's content, without its own entry."""
    rest = {name: value for name, value in header.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _open(folder: Path, names: tuple[str, ...], optional: tuple[str, ...]) -> tuple[Path, dict[str, BinaryIO]]:
    with atomic_io.reading(folder):
        for at in (place for _ in range(TRIES) for place in _places(folder)):
            with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
                found: dict[str, BinaryIO] = {CONFIG: stack.enter_context(atomic_io.open_regular(at / CONFIG))}
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        found[name] = stack.enter_context(atomic_io.open_regular(at / name))
                # An .old version may be partly removed by now.
                whole = at == folder or len(found) > len(names)
                for name in optional:
                    with contextlib.suppress(FileNotFoundError):
                        found[name] = stack.enter_context(atomic_io.open_regular(at / name))
                # config.json is the same before and after, so the files opened in between belong to it.
                same = os.path.samestat(os.fstat(found[CONFIG].fileno()), os.stat(at / CONFIG))
                if same and whole:
                    stack.pop_all()
                    return at, found
        if not folder.is_dir():
            raise ValueError(f"no checkpoint at {folder}: there is no such folder")
    raise ValueError(f"{folder} is not a checkpoint: it has no {CONFIG}")


def _header(path: Path, text: bytes) -> dict[str, Any]:
    header = parsed(path, text)
    if not isinstance(header, dict) or "format" not in header:
        raise ValueError(f"{path} belongs to another program: it names no format of a longspan checkpoint")
    if header["format"] != FORMAT:
        raise ValueError(f"{path} has format {header['format']}; this longspan {VERSION} reads format {FORMAT}")
    if header.get("sha256") != (own := digest(header)):
        raise ValueError(
            f"{path} was changed or damaged since it was written: its sha256 is {own}, not {header.get('sha256')}; "
            f"restore it from a copy, or take another checkpoint; after a deliberate change, update the sha256"
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
        f"{path} was changed or damaged since it was written: {found}, and {CONFIG} records {entry}; restore it from a "
        f"copy, or take another checkpoint"
    )


def _entry(size: int, digest: Any) -> dict[str, Any]:
    return {"bytes": size, "sha256": digest.hexdigest()}
