"""Downloads checked by sha256, and readers with precise errors."""

import contextlib
import gzip
import hashlib
import importlib.util
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .._utils import atomic_io, memory
from .._utils.optional_deps import install

# Largest unpacked size of a compressed file, which protects against decompression bombs.
MOST = 2**32
PIECE = 2**20
PACKED = (".gz", ".xz")
# Errors of a truncated or corrupt tar.gz.
ARCHIVE_ERRORS = (tarfile.TarError, OSError, EOFError, zlib.error)


def fetch(urls: Sequence[str], sha256: str, folder: Path, seconds: float = 30.0) -> Path:
    """Download a file once and keep it in ``folder``.

    A file that is already there with the right content is not downloaded again. A file with other content is not kept.

    Args:
        urls: mirrors of one file, which end with its name; tried in order.
        sha256: checksum of the file (hex).
        folder: the target folder.
        seconds: timeout of a server that does not respond.

    Returns:
        The path of the file.

    Raises:
        ValueError: if no mirror delivers the file, with the checksum and the error of each, and if the folder cannot be
            written.
        ImportError: without pooch.
    """
    pooch = _pooch()
    name = urls[0].rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"cannot write the cache folder {folder}: {reason}; set LONGSPAN_CACHE to another folder"
        ) from error
    bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    get: Any = pooch.HTTPDownloader(progressbar=bar, timeout=seconds)
    failures = []
    for url in urls:
        try:
            return Path(pooch.retrieve(url, f"sha256:{sha256}", name, folder, downloader=get))
        except (OSError, ValueError) as error:
            failures.append(f"{url}: {' '.join(str(error).split())}")
    raise ValueError(f"cannot download {name} (sha256 {sha256}) into {folder}; " + "; ".join(failures))


def read(path: Path, published: str = "") -> bytes:
    """The content of a file, unpacked if its name ends with .gz or .xz.

    Args:
        path: the file.
        published: expected sha256 (hex) for error messages.

    Raises:
        ValueError: for a file that is missing, not regular, unreadable, truncated or corrupt, that unpacks to more than
            ``MOST`` bytes, or to more than half of the free memory.
    """
    if path.suffix not in PACKED:
        return atomic_io.read(path)
    buffer = bytearray()
    append(path, buffer, published)
    return bytes(buffer)


def append(path: Path, buffer: bytearray, published: str = "", times: int = 2) -> None:
    """``read`` a file into the end of a buffer, so that the content is in memory only once.

    ``times``: memory that must be free, as a multiple of the content's size.
    """
    most = memory.available() // times
    why = f"{times} times as much must be free in memory"
    with opened(path, published) as file:
        if path.suffix not in PACKED:
            atomic_io.refuse_larger(file, path, most, why)
        elif most > MOST:
            most, why = MOST, "if the file is right, unpack it by hand"
        begin = len(buffer)
        while piece := file.read(PIECE):
            buffer += piece
            if len(buffer) - begin > most:
                raise ValueError(f"{path} unpacks to more than {most} bytes; {why}")


@contextlib.contextmanager
def opened(path: Path, published: str = "") -> Iterator[BinaryIO]:
    """Open a file for reading, with unpacking; arguments and errors as in ``read``."""
    with atomic_io.reading(path):
        raw = atomic_io.open_regular(path)
    with raw:
        match path.suffix:
            case ".gz":
                file, errors = gzip.GzipFile(fileobj=raw), (OSError, EOFError, zlib.error)
            case ".xz":
                # Some builds of Python have no lzma.
                import lzma

                file, errors = lzma.LZMAFile(raw), (OSError, EOFError, lzma.LZMAError)
            case _:
                with atomic_io.reading(path):
                    yield raw
                return
        try:
            yield file  # pyright: ignore[reportReturnType] (both read bytes)
        except errors as error:
            raise ValueError(f"{path} is truncated or corrupt ({error}){describe(path, published)}") from error


def take(file: BinaryIO, most: int) -> bytes:
    """Read at most ``most`` bytes; memory is allocated only for bytes that are there."""
    buffer = bytearray()
    while len(buffer) < most and (piece := file.read(min(most - len(buffer), PIECE))):
        buffer += piece
    return bytes(buffer)


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the regular files in a tar.gz whose names are ``wanted``, without unpacking to disk.

    Raises ValueError if the archive cannot be opened or the files are larger than ``read`` allows, and one of
    ``ARCHIVE_ERRORS`` if it is truncated or corrupt.
    """
    left = min(MOST, memory.available() // 2)
    with atomic_io.reading(path):
        raw = atomic_io.open_regular(path)
    with raw, tarfile.open(fileobj=raw, mode="r:gz") as archive:
        for member in archive:
            if not member.isfile() or not wanted(member.name):
                continue
            left -= member.size
            if left < 0:
                raise ValueError(f"{path} contains more than fits into memory; {member.name} has {member.size:,} bytes")
            file = archive.extractfile(member)
            assert file is not None
            yield member.name, file.read()


def describe(path: Path, published: str = "") -> str:
    """The end of a message about an invalid file: its sha256 and, if known, the expected one."""
    with atomic_io.reading(path), atomic_io.open_regular(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return f"; its sha256 is {found}" + (f", the published file's is {published}" if published else "")


def _pooch() -> Any:
    try:
        import pooch
    except ImportError as error:
        raise ImportError(f"downloads require pooch: {install('data')}") from error
    return pooch
