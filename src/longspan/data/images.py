"""Images as rows of tokens: scikit-learn's digits, MNIST and CIFAR-10."""

import math
import re
import struct
from pathlib import Path, PurePosixPath

import numpy as np

from .._utils.cache_dirs import cache_folder, expanded
from .._utils.optional_deps import install
from .dataset import Dataset
from .dataset import images as dataset
from .download import ARCHIVE_ERRORS, MOST, describe, fetch, members, opened, read, take

_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
# The official files' sha256: compressed (as downloaded) and raw.
_MNIST = {
    "train-images-idx3-ubyte": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
_CIFAR_MIRRORS = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)
_CIFAR_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_BATCH = re.compile(r"(data_batch_|test_batch).*\.bin")
_CIFAR_RECORD = 1 + 3 * 32 * 32


def digits(source: str = "") -> Dataset:
    """1797 hand-written digits of 8x8 pixels with levels 0 ... 16, from scikit-learn (UCI, Alpaydin 1998).

    Of each class, the images whose number in file order ends in 8 are for validation, those whose number ends in 9 for
    the test: 1444, 177 and 176 images.

    Raises ValueError for a source, ImportError without scikit-learn.
    """
    if source:
        raise ValueError(f"digits are part of scikit-learn and accept no folder; got {source!r}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(f"digits requires scikit-learn: {install('train')}") from error
    pixels, classes = load_digits(return_X_y=True)
    pixels, classes = np.asarray(pixels, np.uint8), np.asarray(classes)
    turn = np.empty(len(classes), np.int64)
    for digit in range(10):
        turn[classes == digit] = np.arange(np.count_nonzero(classes == digit)) % 10
    where = {"train": turn < 8, "validation": turn == 8, "test": turn == 9}
    parts = {split: (pixels[chosen], classes[chosen]) for split, chosen in where.items()}
    return dataset("digits", (8, 8), 17, parts)


def mnist(source: str = "") -> Dataset:
    """70,000 hand-written digits of 28x28 pixels (LeCun, Cortes and Burges 1998) from a folder of idx files.

    The four files may be raw or .gz, and named train-images-idx3-ubyte or train-images.idx3-ubyte. Any data in this
    layout is accepted; downloads are checked. The last 5000 training images are for validation.

    Raises ValueError for missing, truncated or invalid files, and if the download fails; ImportError if a download
    needs pooch.
    """
    if source:
        folder = expanded(source)
    else:
        folder = cache_folder() / "mnist"
        for name, (compressed, _) in _MNIST.items():
            fetch([f"{mirror}{name}.gz" for mirror in _MNIST_MIRRORS], compressed, folder)
    (images, classes), (test, test_classes) = (
        (_idx(folder, f"{part}-images-idx3-ubyte"), _idx(folder, f"{part}-labels-idx1-ubyte"))
        for part in ("train", "t10k")
    )
    for part, rows, labels in (("train", images, classes), ("t10k", test, test_classes)):
        if len(rows) != len(labels):
            raise ValueError(f"{folder} has {len(rows)} {part} images but {len(labels)} labels for them")
    if len(images) <= 5000:
        raise ValueError(
            f"{folder} has {len(images)} training images; it needs more than 5000, since the last 5000 are for "
            "validation"
        )
    parts = {
        "train": (images[:-5000], classes[:-5000]),
        "validation": (images[-5000:], classes[-5000:]),
        "test": (test, test_classes),
    }
    return dataset(f"mnist:{source}" if source else "mnist", (28, 28), 256, parts)


def cifar10(source: str = "") -> Dataset:
    """60,000 color images of 32x32 pixels (Krizhevsky 2009) from a folder of binary records.

    The folder has data_batch_*.bin or train*.bin, and test_batch.bin or test*.bin, each raw or .gz, read in the order
    of their names. A record has a label byte and 1024 bytes each of red, green and blue. Tokens are in generation
    order: pixels row by row, with red, green and blue of each. The last tenth of the training images is for validation.

    Raises ValueError for missing, truncated or invalid files, and if the download fails; ImportError if a download
    needs pooch.
    """
    if source:
        (images, classes), test = _cifar_folder(expanded(source))
    else:
        (images, classes), test = _cifar_tar(fetch(_CIFAR_MIRRORS, _CIFAR_SHA256, cache_folder() / "cifar10"))
    if len(images) < 10:
        raise ValueError(
            f"{source} has {len(images)} training images; it needs at least 10, since a tenth is for validation"
        )
    cut = len(images) - len(images) // 10
    parts = {"train": (images[:cut], classes[:cut]), "validation": (images[cut:], classes[cut:]), "test": test}
    return dataset(f"cifar10:{source}" if source else "cifar10", (32, 32, 3), 256, parts)


def _idx(folder: Path, name: str) -> np.ndarray:
    """One idx file: the magic number, the sizes (big-endian), then unsigned bytes."""
    known = [f"{base}{end}" for base in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    path = next((folder / file for file in known if (folder / file).is_file()), None)
    if path is None:
        raise ValueError(f"no {name} in {folder}: looked for {', '.join(known)}")
    published = _MNIST[name][path.suffix != ".gz"]
    kind, magic, shape = ("images of 28x28", 2051, (28, 28)) if "images" in name else ("labels", 2049, ())
    size = 8 + 4 * len(shape)
    with opened(path, published) as file:
        head = file.read(size)
        # The header has the number of images, which determines the size of the file.
        count = int.from_bytes(head[4:8])
        if head != struct.pack(f">{size // 4}I", magic, count, *shape):
            end = describe(path, published)
            raise ValueError(f"{path} does not begin as an idx file of {kind} bytes (magic {magic}){end}")
        expected = count * math.prod(shape)
        if path.suffix == ".gz" and expected > MOST:
            raise ValueError(
                f"the header of {path} announces {expected} bytes; if the file is right, unpack it by hand"
            )
        data, more = take(file, expected), file.read(1)
    if more or len(data) != expected:
        found, end = "more" if more else size + len(data), describe(path, published)
        raise ValueError(f"{path} has {found} bytes (uncompressed), but its header announces {size + expected}{end}")
    return np.frombuffer(data, np.uint8).reshape(-1, *shape)


def _cifar_folder(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    found = []
    for patterns in (("data_batch_*.bin", "train*.bin"), ("test*.bin",)):
        # Keyed by the name without .gz, so that a file that is both raw and compressed counts once.
        files = {p.name.removesuffix(".gz"): p for e in (".gz", "") for k in patterns for p in folder.glob(k + e)}
        if not files:
            looked = ", ".join(f"{pattern}[.gz]" for pattern in patterns)
            raise ValueError(f"no CIFAR-10 records in {folder}: looked for {looked}")
        parts = [_records(read(path), path) for _, path in sorted(files.items())]
        found.append(tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return tuple(found)


def _cifar_tar(path: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    train, test = {}, {}
    try:
        for member, content in members(path, lambda name: _BATCH.fullmatch(PurePosixPath(name).name) is not None):
            name = PurePosixPath(member).name
            (test if name.startswith("test") else train)[name] = content
    except ARCHIVE_ERRORS as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}){describe(path, _CIFAR_SHA256)}") from error
    if not train or not test:
        raise ValueError(f"no data_batch_*.bin and test_batch.bin in {path}{describe(path, _CIFAR_SHA256)}")
    found = []
    for files in (train, test):
        parts = [_records(data, path, name) for name, data in sorted(files.items())]
        found.append(tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return tuple(found)


def _records(data: bytes, path: Path, member: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Records of label, red, green, blue -> images (n,32,32,3), labels (n,)."""
    name = f"{member} in {path}" if member else str(path)
    if not data or len(data) % _CIFAR_RECORD:
        whole = max(1, -(-len(data) // _CIFAR_RECORD)) * _CIFAR_RECORD
        raise ValueError(
            f"{name} has {len(data)} bytes (uncompressed), not a multiple of a CIFAR-10 record's {_CIFAR_RECORD}; "
            f"the next would be {whole}{describe(path)}"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_RECORD)
    if records[:, 0].max() > 9:
        raise ValueError(f"{name} is not CIFAR-10: label {records[:, 0].max()} where 0 ... 9 are known{describe(path)}")
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]
