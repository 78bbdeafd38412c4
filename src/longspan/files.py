"""Files and folders that appear under their name whole or not at all, whoever is killed and whoever else writes there.

What is to be called NAME is first written beside it as ``.NAME.TOKEN.tmp``, under a token that nobody else has, synced
to the disk and then renamed. Its writer keeps it locked, where the system has such locks: that is how the next one
tells what a killed process has left from what a living one is at.
"""

import codecs
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where what was left stays until somebody removes it
    fcntl = None


def read(path: Path) -> bytes:
    """The content of a file. Raises ValueError, which names the file, where it cannot be read."""
    with reading(path):
        return path.read_bytes()


def without_mark(content: bytes) -> bytes:
    """The content of a text file without the byte order mark of UTF-8, with which editors on Windows begin files."""
    return content.removeprefix(codecs.BOM_UTF8)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the system's errors into a ValueError that names what could not be read."""
    check(path)
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


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

    Raises OSError, which names the file, where it cannot be written; its old content then stays.
    """
    try:
        tidy(check(path))
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


def beside(path: Path, end: str) -> Path:
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
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
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


def _claim(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Make a temporary file or folder and lock it -> its name and its descriptor, whose closing ends the lock."""
    while True:
        temporary = beside(path, "tmp")
        try:
            descriptor = make(temporary)
        except FileNotFoundError:
            if path.parent.is_dir():
                continue  # swept between the two calls that make a folder and open it
            raise
        if fcntl is None:
            return temporary, descriptor
        # Some network file systems lock no folders; there, nobody else can lock this one either, so it is safe.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Somebody who tidied up may have come before the lock.
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)


def _make_folder(path: Path) -> int:
    os.mkdir(path)
    # Windows opens no folders, and has no such locks for them.
    return os.open(os.devnull if os.name == "nt" else path, os.O_RDONLY)
