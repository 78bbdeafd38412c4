"""Small files of noise in the formats of the real data, for the tests of the data."""

import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.data import Dataset

SHARED = Path(__file__).parents[2] / "shared" / "data"


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"no {name} data next to the repository")
    return SHARED / name


def noise(*shape: int, high: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def records(pictures: np.ndarray, labels: np.ndarray) -> bytes:
    """(n,32,32,3), (n,) -> CIFAR-10 records: label, then all red, all green, all blue."""
    planes = pictures.transpose(0, 3, 1, 2).reshape(len(pictures), -1)
    return np.concatenate([labels[:, None], planes], 1).tobytes()


def mnist_folder(folder: Path, style: str = "{}-{}", compress: bool = False, **replaced: bytes) -> Path:
    """A folder of 5003 training and 7 test images of noise."""
    files = {}
    for part, count in (("train", 5003), ("t10k", 7)):
        files[f"{part}_images"] = (style.format(f"{part}-images", "idx3-ubyte"), idx(noise(count, 28, 28)))
        files[f"{part}_labels"] = (style.format(f"{part}-labels", "idx1-ubyte"), idx(noise(count, high=10)))
    folder.mkdir(exist_ok=True)
    for key, (name, content) in files.items():
        content = replaced.get(key, content)
        (folder / (name + ".gz" * compress)).write_bytes(gzip.compress(content) if compress else content)
    return folder


def same(one: Dataset, two: Dataset) -> bool:
    return all(torch.equal(one.splits[s], two.splits[s]) for s in one.splits) and one.checksum == two.checksum


def cifar_parts() -> dict[str, bytes]:
    sizes = {"data_batch_1.bin": 11, "data_batch_2.bin": 13, "test_batch.bin": 5}
    return {
        name: records(noise(count, 32, 32, 3, seed=i), noise(count, high=10, seed=i))
        for i, (name, count) in enumerate(sizes.items())
    }


def check_cifar(data: Dataset) -> None:
    pictures = torch.from_numpy(np.concatenate([noise(11, 32, 32, 3), noise(13, 32, 32, 3, seed=1)]))
    assert (data.vocab, data.length, data.grid, data.unit) == (256, 3072, (32, 32, 3), "dim")
    assert [data.count(s) for s in ("train", "validation", "test")] == [22, 2, 5]
    assert torch.equal(data.picture(data.take("train", torch.arange(22))), pictures[:22])
    assert torch.equal(data.picture(data.take("validation", torch.arange(2))), pictures[22:])
    # Generation order: red, green, blue of the first pixel, then of its right neighbor.
    assert torch.equal(data.splits["train"][3, :6], pictures[3, 0, :2].flatten())
    assert torch.equal(data.labels["test"], torch.from_numpy(noise(5, high=10, seed=2)).long())


def pack(path: Path, members: dict[str, bytes]) -> str:
    """Write a tar.gz; return its sha256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()
