"""Files: downloads checked by sha256, and readers that say what is wrong with a file."""

import gzip
import hashlib
import importlib.util
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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

    Raises ValueError for a file that is not there or cannot be read, and for truncated or corrupt compression.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    match path.suffix:
        case ".gz":
            unpack, errors = gzip.decompress, (OSError, EOFError, zlib.error)
        case ".xz":
            # Some builds of Python have no lzma; they still read everything else.
            import lzma

            unpack, errors = lzma.decompress, lzma.LZMAError
        case _:
            return data
    try:
        return unpack(data)
    except errors as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}){describe(path, published)}") from error


def describe(path: Path, published: str = "") -> str:
    """The end of a message about a bad file: its sha256 and, where one is known, the one it should have."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"; its sha256 is {found}" + (f", the published file's is {published}" if published else "")


def _pooch():
    try:
        import pooch
    except ImportError as error:
        raise ImportError('downloads need pooch: pip install "longspan[data]"') from error
    return pooch
