"""Reads regular files, and writes files and folders atomically.

Only regular files are read and replaced: a FIFO would block, a device may be endless, and a file renamed over a device
destroys it.

A file NAME is first written to ``.NAME.TOKEN.tmp`` in the same folder, with a unique token, then synced and renamed.
The writer holds a lock on it where the system has such locks. The next writer thus distinguishes leftovers of a killed
process from files in use.
"""

import codecs
import contextlib
import errno
import os
import re
import secrets
import selectors
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar

from . import memory

try:
    import fcntl
except ImportError:  # Windows, where leftovers stay until removed by hand
    fcntl = None


B = TypeVar("B", bytes, bytearray)
# Attempts to make a temporary file or folder that stays there until it is locked.
TRIES = 1000
# Largest size in bytes of a config, recipe, table or other text of a run.
MOST_TEXT = 2**28
_PIECE = 2**20
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: str | os.PathLike) -> BufferedReader:
    """Open a regular file for reading, without blocking; links are followed.

    Raises OSError for what cannot be opened and for a folder, a FIFO, a device or a socket; ValueError for a path that
    no file can have.
    """
    path = check(Path(path))
    # Checked before opening too, since opening a device can have effects.
    _require_regular(os.stat(path), path)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags)
    try:
        _require_regular(os.fstat(descriptor), path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_stream(path: str | os.PathLike, seconds: float = 5.0) -> BinaryIO:
    """Open a regular file, or a FIFO that another program writes to; wait for its first bytes up to ``seconds``.

    Raises OSError for what cannot be opened, for a folder, a device or a socket, and for a FIFO without a writer;
    ValueError for a path that no file can have.
    """
    path = check(Path(path))
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return open_regular(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise OSError(errno.ETIMEDOUT, f"no program wrote to this FIFO within {seconds:g} s", str(path))
        os.set_blocking(descriptor, True)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path, most: int | None = None) -> bytes:
    """Read a regular file of at most ``most`` bytes; None means half of the free memory.

    Raises ValueError, which names the file, if it cannot be read, is not a regular file or is larger.
    """
    with reading(path), open_regular(path) as file:
        return read_rest(file, path, most)


def read_text(path: Path) -> str:
    """Read a UTF-8 file of at most ``MOST_TEXT`` bytes. Raises ValueError, which names the file."""
    try:
        return read(path, MOST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def read_rest(file: BinaryIO, path: Path, most: int | None = None) -> bytes:
    """Read the rest of an open regular file; sizes and errors as in ``read``."""
    why = ""
    if most is None:
        most, why = memory.available() // 2, "twice as much must be free in memory"
    # One more than its size: it may grow, and the files in /proc have the size 0.
    pieces = [file.read(refuse_larger(file, path, most, why) + 1)]
    while piece := file.read(_PIECE):
        pieces.append(piece)
        if (size := sum(map(len, pieces))) > most:
            raise ValueError(_too_large(path, size, most, why))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def refuse_larger(file: BinaryIO, path: Path, most: int, why: str = "") -> int:
    """Return the size of the rest of an open regular file. Raises ValueError if it exceeds ``most``."""
    size = max(0, os.fstat(file.fileno()).st_size - file.tell())
    if size > most:
        raise ValueError(_too_large(path, size, most, why))
    return size


def _too_large(path: Path, size: int, most: int, why: str) -> str:
    return f"{path} has {size:,} bytes or more, and {most:,} are allowed" + (f": {why}" if why else "")


def without_mark(content: B) -> B:
    """Return a text file's content without the UTF-8 byte order mark that editors on Windows write."""
    return content.removeprefix(codecs.BOM_UTF8)


def refuse_nul(content: bytes | bytearray, where: object) -> None:
    """Raise ValueError for a NUL: text has none, and UTF-16 without a byte order mark has one next to each letter."""
    if (place := content.find(0)) >= 0:
        line = content.count(b"\n", 0, place) + 1
        raise ValueError(f"line {line} of {where} has a NUL, which no text has; convert UTF-16 to UTF-8")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn OSError into a ValueError that names the file that could not be read."""
    check(path)
    try:
        yield
    except OSError as error:
        # Inside a folder, the system names the file.
        where = error.filename if isinstance(error.filename, str | os.PathLike) else path
        raise ValueError(f"cannot read {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file name to an OSError that has none, as for a file that was open already."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file atomically: it has its old content or the new one, never a part. Links are replaced.

    Args:
        path: The file.
        content: Its content, or pieces of it.

    Raises OSError, which names the file, if it cannot be written or ``check_output`` rejects it. The old content stays.
    """
    try:
        _refuse_output(check(path))
        tidy(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        temporary, descriptor = _claim(path, lambda made: os.open(made, flags, 0o666))
        try:
            with open(descriptor, "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(descriptor)
                if os.name == "nt":  # where no open file can be renamed
                    file.close()
                # Still locked, so that no process mistakes it for a leftover.
                os.replace(temporary, path)
        except BaseException:
            remove(temporary)
            raise
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_output(path: Path) -> None:
    """Check an output path before the work that makes the file.

    Raises ValueError if the path is a folder, a FIFO, a device or a socket, or a link to one, if it lies in ``/dev``,
    ``/proc`` or ``/sys``, or if no file can have this path.
    """
    try:
        _refuse_output(check(path))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_output(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        _require_regular(os.stat(path), path)
    # /dev/stdout may be a link to a regular file, and the link would be replaced.
    if (place := _of_the_system(path.parent)) is not None:
        raise OSError(errno.EINVAL, f"no file can be written into {place}; choose another folder", str(path))


def _of_the_system(folder: Path) -> str | None:
    """Return the system folder (``/dev``, ``/proc``, ``/sys``) that contains ``folder``, or None."""
    real = os.path.realpath(folder)
    for place in ("/dev", "/proc", "/sys"):
        if real == place or real.startswith(f"{place}/"):
            # /dev/shm is a separate file system for ordinary files.
            with contextlib.suppress(OSError):
                return place if place != "/dev" or os.stat(real).st_dev == os.stat(place).st_dev else None
            return place
    return None


def _require_regular(found: os.stat_result, path: Path) -> None:
    """Raise OSError for what is not a regular file."""
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


@contextlib.contextmanager
def new_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Make a temporary folder next to ``path``, to be renamed; without a rename it is removed at the end."""
    temporary, descriptor = _claim(path, lambda made: _make_folder(made, mode))
    try:
        yield temporary
    finally:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(descriptor)


def sibling_path(path: Path, end: str) -> Path:
    """Return a new hidden name next to ``path``: ``.NAME.TOKEN.end``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{end}")


def existing_siblings(path: Path, end: str) -> list[Path]:
    """Return the existing files and folders with such names."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.{end}")
    try:
        return [path.with_name(name) for name in sorted(os.listdir(path.parent)) if pattern.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def tidy(path: Path) -> None:
    """Remove temporary files that killed processes left for ``path``; those in use stay."""
    if fcntl is None:
        return
    for left in existing_siblings(path, "tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # Locked until it is removed: a writer may have just made it and wait for the lock.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(left)
            finally:
                os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def sync(path: Path) -> None:
    """Sync a file's content or a folder's names to disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Path) -> Path:
    """Return the path. Raises ValueError if no file can have it."""
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is not a path: it contains a NUL")
    return path


def _claim(path: Path, make: Callable[[Path], int | None]) -> tuple[Path, int]:
    """Make and lock a temporary file or folder -> its name and its descriptor; closing that ends the lock.

    ``make`` returns None if another process removed the new folder before it was opened.
    """
    for _ in range(TRIES):
        temporary = sibling_path(path, "tmp")
        if (descriptor := make(temporary)) is None:
            continue
        if fcntl is None:
            return temporary, descriptor
        # Some network file systems cannot lock folders; then no other process can lock this one either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another process may have tidied up before the lock.
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)
    raise OSError(errno.EAGAIN, f"what is made in {path.parent} vanishes at once", str(path))


def _make_folder(path: Path, mode: int) -> int | None:
    os.mkdir(path, mode)
    try:
        # Windows cannot open or lock folders.
        return os.open(os.devnull if os.name == "nt" else path, os.O_RDONLY)
    except FileNotFoundError:
        return None
