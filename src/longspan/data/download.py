"""Files: downloads checked by sha256, and readers that say what is wrong with a file."""

import contextlib
import gzip
import hashlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .. import files

# Bytes that a compressed file may unpack to: a small one can be made to fill any memory.
MOST = 2**32


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

    Raises ValueError for a file that is not there or cannot be read, for truncated or corrupt compression, and for one
    that unpacks to more than ``MOST`` bytes.
    """
    with opened(path, published) as file:
        if path.suffix not in (".gz", ".xz"):
            return file.read()
        data = take(file, MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"{path} unpacks to more than {MOST} bytes; if it is what it should be, unpack it by hand")
    return data


@contextlib.contextmanager
def opened(path: Path, published: str = "") -> Iterator[BinaryIO]:
    """A file to read from, which unpacks as it is read; otherwise as ``read``."""
    with files.reading(path):
        raw = open(path, "rb")
    with raw:
        match path.suffix:
            case ".gz":
                file, errors = gzip.GzipFile(fileobj=raw), (OSError, EOFError, zlib.error)
            case ".xz":
                # Some builds of Python have no lzma; they still read everything else.
                import lzma

                file, errors = lzma.LZMAFile(raw), (OSError, EOFError, lzma.LZMAError)
            case _:
                with files.reading(path):
                    yield raw
                return
        try:
            yield file  # type: ignore[misc]
        except errors as error:
            raise ValueError(f"{path} is truncated or corrupt ({error}){describe(path, published)}") from error


def take(file: BinaryIO, most: int) -> bytes:
    """What comes next of a file, so many bytes at most; memory is only taken for what is there."""
    pieces = []
    while most and (piece := file.read(min(most, 2**20))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def describe(path: Path, published: str = "") -> str:
    """The end of a message about a bad file: its sha256 and, where one is known, the one it should have."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"; its sha256 is {found}" + (f", the published file's is {published}" if published else "")


def _pooch() -> Any:
    try:
        import pooch
    except ImportError as error:
        raise ImportError('downloads need pooch: pip install "longspan[data]"') from error
    return pooch
