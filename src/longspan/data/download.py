"""Files: downloads checked by sha256, and readers that say what is wrong with a file."""

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

# Bytes that a compressed file may unpack to: a small one can be made to fill any memory.
MOST = 2**32
PIECE = 2**20
PACKED = (".gz", ".xz")
# How a truncated or corrupt tar.gz shows itself.
ARCHIVE_ERRORS = (tarfile.TarError, OSError, EOFError, zlib.error)


def fetch(urls: Sequence[str], sha256: str, folder: Path, seconds: float = 30.0) -> Path:
    """The file behind the first of ``urls`` that delivers the content with this ``sha256`` (hex), kept in ``folder``.

    The urls are mirrors of one file and end with its name. A file that is there already with the right content is not
    downloaded again; one that arrives with another content is never kept. ``seconds`` is how long a silent server is
    waited for.

    Raises ValueError when no mirror delivers, naming the checksum and each mirror's failure, and when the folder
    cannot be written; ImportError without pooch.
    """
    pooch = _pooch()
    name = urls[0].rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write the cache folder {folder}: {reason}; set LONGSPAN_CACHE to another") from error
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
    """The content of a file, uncompressed where its name ends with .gz or .xz.

    ``published`` is the sha256 (hex) that the file is known to have; messages name it.

    Raises ValueError for a file that is not there, is not a regular file or cannot be read, for truncated or corrupt
    compression, for one that unpacks to more than ``MOST`` bytes, and for more than half of the memory that is free.
    """
    if path.suffix not in PACKED:
        return atomic_io.read(path)
    buffer = bytearray()
    append(path, buffer, published)
    return bytes(buffer)


def append(path: Path, buffer: bytearray, published: str = "", times: int = 2) -> None:
    """``read`` into the end of a buffer, piece by piece, so that the content is in memory once.

    ``times``: how many times the size of the content must be free in memory.
    """
    most = memory.available() // times
    why = f"{times} times as much must be free in memory"
    with opened(path, published) as file:
        if path.suffix not in PACKED:
            atomic_io.refuse_larger(file, path, most, why)
        elif most > MOST:
            most, why = MOST, "if it is what it should be, unpack it by hand"
        begin = len(buffer)
        while piece := file.read(PIECE):
            buffer += piece
            if len(buffer) - begin > most:
                raise ValueError(f"{path} unpacks to more than {most} bytes; {why}")


@contextlib.contextmanager
def opened(path: Path, published: str = "") -> Iterator[BinaryIO]:
    """A file to read from, which unpacks as it is read; otherwise as ``read``."""
    with atomic_io.reading(path):
        raw = atomic_io.open_regular(path)
    with raw:
        match path.suffix:
            case ".gz":
                file, errors = gzip.GzipFile(fileobj=raw), (OSError, EOFError, zlib.error)
            case ".xz":
                # Some builds of Python have no lzma; they still read everything else.
                import lzma

                file, errors = lzma.LZMAFile(raw), (OSError, EOFError, lzma.LZMAError)
            case _:
                with atomic_io.reading(path):
                    yield raw
                return
        try:
            yield file  # type: ignore[misc]
        except errors as error:
            raise ValueError(f"{path} is truncated or corrupt ({error}){describe(path, published)}") from error


def take(file: BinaryIO, most: int) -> bytes:
    """What comes next of a file, so many bytes at most; memory is only taken for what is there."""
    buffer = bytearray()
    while len(buffer) < most and (piece := file.read(min(most - len(buffer), PIECE))):
        buffer += piece
    return bytes(buffer)


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The regular files inside a tar.gz whose names are wanted: (name, content), read as a stream, never unpacked.

    Raises ValueError where the archive cannot be opened, or what is wanted is larger than ``read`` allows; what
    ``ARCHIVE_ERRORS`` lists for one that is truncated or corrupt.
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
                raise ValueError(f"{path} has more in it than fits: {member.name} alone is {member.size:,} bytes")
            file = archive.extractfile(member)
            assert file is not None
            yield member.name, file.read()


def describe(path: Path, published: str = "") -> str:
    """The end of a message about a bad file: its sha256 and, where one is known, the one it should have."""
    with atomic_io.reading(path), atomic_io.open_regular(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return f"; its sha256 is {found}" + (f", the published file's is {published}" if published else "")


def _pooch() -> Any:
    try:
        import pooch
    except ImportError as error:
        raise ImportError('downloads need pooch: pip install "longspan[data]"') from error
    return pooch
