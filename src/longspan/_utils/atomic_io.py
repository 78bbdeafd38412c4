"""Reading of regular files, and files and folders that appear under their name whole or not at all.

Only regular files are read, and only regular files are replaced: a FIFO would block, a device may have no end, and a
file renamed over a device destroys it.

The file NAME is first written in the same folder as ``.NAME.TOKEN.tmp``, with a unique token, synced
to the disk and then renamed. Its writer keeps it locked, where the system has such locks: that is how the next one
tells what a killed process has left from what a living one is at.
"""

import codecs
import contextlib
import errno
import os
import re
import secrets
import select
import shutil
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar

from . import memory

try:
    import fcntl
except ImportError:  # Windows, where what was left stays until somebody removes it
    fcntl = None


B = TypeVar("B", bytes, bytearray)
# Attempts to make a temporary file or folder that stays there until it is locked.
TRIES = 1000
# Bytes that a config, a recipe, a table or another text of a run may have.
MOST_TEXT = 2**28
_PIECE = 2**20
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: str | os.PathLike) -> BufferedReader:
    """Open a regular file for reading; links are followed, and nothing is waited for.

    Raises OSError for what cannot be opened and for a folder, a FIFO, a device or a socket; ValueError for a path that
    no file can have.
    """
    path = check(Path(path))
    # Asked before as well, since opening a device can have effects.
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
        if not select.select([descriptor], [], [], seconds)[0]:
            raise OSError(errno.ETIMEDOUT, f"no program wrote to this FIFO within {seconds:g} s", str(path))
        os.set_blocking(descriptor, True)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file of at most ``most`` bytes; None: half of the memory that is free.

    Raises ValueError, which names the file, where it cannot be read, is not a regular file or is larger.
    """
    with reading(path), open_regular(path) as file:
        return read_rest(file, path, most)


def read_text(path: Path) -> str:
    """The content of a UTF-8 file of at most ``MOST_TEXT`` bytes. Raises ValueError, which names the file."""
    try:
        return read(path, MOST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def read_rest(file: BinaryIO, path: Path, most: int | None = None) -> bytes:
    """What an open regular file still holds; sizes and errors as in ``read``."""
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
    """The size of what an open regular file still holds. Raises ValueError where it is more than ``most``."""
    size = max(0, os.fstat(file.fileno()).st_size - file.tell())
    if size > most:
        raise ValueError(_too_large(path, size, most, why))
    return size


def _too_large(path: Path, size: int, most: int, why: str) -> str:
    return f"{path} has {size:,} bytes or more, and {most:,} are allowed" + (f": {why}" if why else "")


def without_mark(content: B) -> B:
    """The content of a text file without the byte order mark of UTF-8, with which editors on Windows begin files."""
    return content.removeprefix(codecs.BOM_UTF8)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the system's errors into a ValueError that names what could not be read."""
    check(path)
    try:
        yield
    except OSError as error:
        # Of a file inside a folder, where the system names it.
        where = error.filename if isinstance(error.filename, str | os.PathLike) else path
        raise ValueError(f"cannot read {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the system know the file that they are about, also where it was open already."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write(path: Path, content: bytes) -> None:
    """Write a file so that it has its old content or the new one, never a part of it; no link is followed.

    Raises OSError, which names the file, where it cannot be written, its old content then stays; and for what
    ``check_output`` refuses.
    """
    try:
        _refuse_output(check(path))
        tidy(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        temporary, descriptor = _claim(path, lambda made: os.open(made, flags, 0o666))
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
                if os.name == "nt":  # where no open file can be renamed
                    file.close()
                # Still locked, so that nobody takes it for what a killed process has left.
                os.replace(temporary, path)
        except BaseException:
            remove(temporary)
            raise
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_output(path: Path) -> None:
    """Check, before the work that makes a file, that its name can be given to one.

    Raises ValueError where a folder, a FIFO, a device or a socket has the name, or a link to one, for a place among
    the devices or the files of the kernel, and for a path that no file can have.
    """
    try:
        _refuse_output(check(path))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_output(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        _require_regular(os.stat(path), path)
    # /dev/stdout is a link, which may lead to a regular file, and would be replaced itself.
    if (place := _of_the_system(path.parent)) is not None:
        raise OSError(errno.EINVAL, f"no file can be written into {place}; choose another folder", str(path))


def _of_the_system(folder: Path) -> str | None:
    """The folder of devices, or of the kernel's files, that ``folder`` is a part of."""
    real = os.path.realpath(folder)
    for place in ("/dev", "/proc", "/sys"):
        if real == place or real.startswith(f"{place}/"):
            # /dev/shm is a file system of its own, for anybody's files.
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
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` for its new content, to be renamed; what is not renamed is removed in the end."""
    temporary, descriptor = _claim(path, _make_folder)
    try:
        yield temporary
    finally:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(descriptor)


def sibling_path(path: Path, end: str) -> Path:
    """A new name for something that belongs to ``path``: ``.NAME.TOKEN.end``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{end}")


def all_beside(path: Path, end: str) -> list[Path]:
    """What is there under such names."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.{end}")
    try:
        return [path.with_name(name) for name in sorted(os.listdir(path.parent)) if pattern.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def tidy(path: Path) -> None:
    """Remove what killed processes have left of ``path`` half-written, and nothing that a living one is at."""
    if fcntl is None:
        return
    for left in all_beside(path, "tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # Locked until it is gone, for a writer that has made it just now and waits for the lock.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(left)
            finally:
                os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def sync(path: Path) -> None:
    """See that a file's content or a folder's names are on the disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Path) -> Path:
    """The path itself. Raises ValueError for one that no file can have."""
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is no path: it holds a NUL")
    return path


def _claim(path: Path, make: Callable[[Path], int | None]) -> tuple[Path, int]:
    """Make a temporary file or folder and lock it -> its name and its descriptor, whose closing ends the lock.

    ``make`` returns None where somebody has removed what it made before it could be opened.
    """
    for _ in range(TRIES):
        temporary = sibling_path(path, "tmp")
        if (descriptor := make(temporary)) is None:
            continue
        if fcntl is None:
            return temporary, descriptor
        # Some network file systems lock no folders; there, nobody else can lock this one either, so it is safe.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Somebody who tidied up may have come before the lock.
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)
    raise OSError(errno.EAGAIN, f"what is made in {path.parent} vanishes at once", str(path))


def _make_folder(path: Path) -> int | None:
    os.mkdir(path)
    try:
        # Windows opens no folders, and has no such locks for them.
        return os.open(os.devnull if os.name == "nt" else path, os.O_RDONLY)
    except FileNotFoundError:
        return None
