"""Folders and files that no other user can replace or change: the only ones from which code is loaded."""

import errno
import hashlib
import os
import stat
import sys
from pathlib import Path

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_names: dict[str, str] = {}  # by sha256: descriptors of libraries


class Untrusted(PermissionError):
    """Another user could replace a folder or a file; the message has its name and the reason."""

    def __init__(self, path: Path, why: str):
        super().__init__(errno.EPERM, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def folder(path: Path) -> Path:
    """Return the real path of a folder that only this user can write, created if needed.

    Raises:
        Untrusted: another user owns the folder, can write to it, or can rename a folder above it.
        OSError: the folder cannot be created.
    """
    real = Path(os.path.realpath(path))
    for above in reversed(real.parents):
        if not above.exists():
            above.mkdir(mode=0o700, exist_ok=True)
        _check_above(above)
    real.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(real)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(real))
    _check_own(real, found)
    return real


def open_file(path: Path) -> int:
    """Open a regular file that only this user can write, without following links; return its descriptor.

    Raises Untrusted for other files, and OSError if the file does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Untrusted(path, "it is not a regular file")
        _check_own(path, found)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def content(path: Path) -> bytes:
    """Return the content of such a file. Raises as ``open_file`` does."""
    with open(open_file(path), "rb") as file:
        return file.read()


def library(path: Path, sha256: str) -> str:
    """Return a name by which the linker opens exactly the file with this sha256.

    On Linux it is the name of a descriptor, which stays open, since the linker takes a library of the same name for the
    same library; the same content has one descriptor. Raises Untrusted for other content, and as ``open_file`` does.
    """
    descriptor = open_file(path)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise Untrusted(path, "it does not match its checksum")
    except BaseException:
        os.close(descriptor)
        raise
    name = f"/proc/self/fd/{descriptor}"
    # Elsewhere the path: no other user can rename a folder on it.
    kept = _names.setdefault(sha256, name) if sys.platform == "linux" and os.path.exists(name) else str(path)
    if kept != name:
        os.close(descriptor)
    return kept


def _check_above(path: Path) -> None:
    found = os.lstat(path)
    if found.st_uid not in (0, os.getuid()):
        raise Untrusted(path, "it belongs to another user, who could replace its contents")
    if found.st_mode & _WRITABLE and not found.st_mode & stat.S_ISVTX:
        raise Untrusted(path, "other users can write to it; run chmod go-w on it")


def _check_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise Untrusted(path, "it belongs to another user")
    if found.st_mode & _WRITABLE:
        raise Untrusted(path, "other users can write to it; run chmod go-w on it")
