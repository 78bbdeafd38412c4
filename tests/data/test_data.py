"""Laws of the data: fixed splits, tokens in generation order, and errors that name what is wrong with a file."""

import dataclasses
import gzip
import hashlib
import lzma
import struct
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from data_files import check_cifar, cifar_parts, idx, mnist_folder, noise, same, shared
from longspan.data import absolute, download, images, load, unit


def test_digits_are_the_whole_of_scikit_learns():
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    data = load("digits")
    assert (data.vocab, data.length, data.grid, data.unit) == (17, 64, (8, 8), "dim")
    assert [data.count(s) for s in ("train", "validation", "test")] == [1444, 177, 176]
    rows = torch.cat([torch.cat([data.splits[s].long(), data.labels[s][:, None]], 1) for s in data.splits])
    whole = torch.from_numpy(np.column_stack([pixels, classes])).long()
    assert sorted(rows.tolist()) == sorted(whole.tolist())


def test_digits_splits_are_stratified_and_never_change():
    data = load("digits")
    for split in ("validation", "test"):
        assert set(data.labels[split].bincount(minlength=10).tolist()) <= {17, 18}
    assert data.checksum == "2be6d92a863583b78c5f6e9e77891b4a457d69dd1d4ecc8e0468cdcbe4683da0"
    torch.manual_seed(99)
    assert same(load("digits"), data)


def test_digits_take_and_picture():
    data = load("digits", 64)
    indices = torch.tensor([3, 0, 170, 3])
    rows = data.take("test", indices)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, data.splits["test"][indices].long())
    pictures = data.picture(rows)
    assert pictures.shape == (4, 8, 8)
    assert pictures.dtype == torch.uint8
    assert torch.equal((pictures.reshape(4, 64) / 255 * 16).round().long(), rows)
    assert pictures.max() == 255
    assert data.picture(rows.to(torch.uint8)).equal(pictures)


def test_a_dataset_is_frozen_and_prints_in_a_line():
    data = load("digits")
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.length = 3
    assert len(repr(data)) < 200


@pytest.mark.parametrize("style", ["{}-{}", "{}.{}"])
@pytest.mark.parametrize("compress", [False, True])
def test_mnist_from_a_folder(tmp_path, style, compress):
    data = load(f"mnist:{mnist_folder(tmp_path, style, compress)}")
    pixels, classes = torch.from_numpy(noise(5003, 28, 28)), torch.from_numpy(noise(5003, high=10)).long()
    assert (data.vocab, data.length, data.grid, data.unit) == (256, 784, (28, 28), "dim")
    assert [data.count(s) for s in ("train", "validation", "test")] == [3, 5000, 7]
    assert torch.equal(data.take("train", torch.arange(3)).reshape(3, 28, 28), pixels[:3].long())
    assert torch.equal(data.picture(data.take("validation", torch.arange(5000))), pixels[3:])
    assert torch.equal(torch.cat([data.labels["train"], data.labels["validation"]]), classes)


def test_real_mnist():
    data = load(f"mnist:{shared('mnist')}", 784)
    assert [data.count(s) for s in ("train", "validation", "test")] == [55000, 5000, 10000]
    # The first labels of the published files.
    assert data.labels["train"][:5].tolist() == [5, 0, 4, 1, 9]
    assert data.labels["test"][:5].tolist() == [7, 2, 1, 0, 4]
    pixels = torch.cat([data.splits["train"], data.splits["validation"]])
    # LeCun et al.: the mean pixel of the training set is 0.1307.
    assert pixels.sum(dtype=torch.float64).item() / pixels.numel() / 255 == pytest.approx(0.1307, abs=5e-5)


def test_a_compressed_file_unpacks_to_at_most_the_size_in_its_header(tmp_path, monkeypatch):
    path = mnist_folder(tmp_path, compress=True) / "t10k-labels-idx1-ubyte.gz"
    whole = gzip.decompress(path.read_bytes())
    unpacked, read = [], gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda *a: unpacked.append(found := read(*a)) or found)
    path.write_bytes(gzip.compress(whole + bytes(10**7)))
    with pytest.raises(ValueError, match=rf"{path} has more bytes .* 15; its sha"):
        load(f"mnist:{tmp_path}")
    assert len(b"".join(unpacked[-3:])) == len(whole) + 1
    monkeypatch.setattr(images, "MOST", 6)
    with pytest.raises(ValueError, match=rf"train-images-idx3-ubyte.gz announces {5003 * 784} bytes; .* unpack it by"):
        load(f"mnist:{tmp_path}")


@pytest.mark.parametrize("compress", [gzip, lzma], ids=["gz", "xz"])
def test_a_compressed_text_unpacks_to_no_more_than_memory_holds(tmp_path, monkeypatch, compress):
    path = tmp_path / f"a.txt.{'gz' if compress is gzip else 'xz'}"
    path.write_bytes(compress.compress(bytes(10**6)))
    assert load(f"text:{path}").count("train")
    monkeypatch.setattr(download, "MOST", 10**6 - 1)
    with pytest.raises(ValueError, match=rf"{path} unpacks to more than 999999 bytes; .* unpack it by hand"):
        load(f"text:{path}")


def test_a_header_that_tells_of_too_much_takes_no_memory(tmp_path):
    folder = mnist_folder(tmp_path, train_images=struct.pack(">4I", 2051, 2**32 - 1, 28, 28))
    with pytest.raises(ValueError, match=rf"has 16 bytes .* announces {16 + (2**32 - 1) * 784}; its sha256"):
        load(f"mnist:{folder}")


def test_mnist_names_the_missing_file(tmp_path):
    folder = mnist_folder(tmp_path)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    looked = "t10k-labels-idx1-ubyte, t10k-labels-idx1-ubyte.gz, t10k-labels.idx1-ubyte, t10k-labels.idx1-ubyte.gz"
    with pytest.raises(ValueError, match=f"no t10k-labels-idx1-ubyte in {tmp_path}: looked for {looked}"):
        load(f"mnist:{folder}")
    with pytest.raises(ValueError, match=f"no train-images-idx3-ubyte in {tmp_path}/nowhere"):
        load(f"mnist:{folder}/nowhere")


def test_mnist_names_sizes_and_checksums_of_a_truncated_file(tmp_path):
    whole = idx(noise(5003, 28, 28))
    cut = whole[:-100]
    folder = mnist_folder(tmp_path, train_images=cut)
    found, published = (
        hashlib.sha256(cut).hexdigest(),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    )
    message = f"train-images-idx3-ubyte has {len(cut)} bytes .* {len(whole)}; its sha256 is {found}.*{published}"
    with pytest.raises(ValueError, match=message):
        load(f"mnist:{folder}")
    path = mnist_folder(tmp_path / "gz", compress=True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    published = "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
    with pytest.raises(ValueError, match=f"{path} is truncated or corrupt .*; its sha256 is .*{published}"):
        load(f"mnist:{path.parent}")


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"train_images": idx(noise(5003))}, "begin as an idx file of images of 28x28 bytes .magic 2051.; its sha256"),
        ({"train_images": idx(noise(5003, 5, 5))}, "train-images-idx3-ubyte does not begin as an idx file"),
        ({"t10k_labels": idx(noise(7, 28, 28))}, "begin as an idx file of labels bytes .magic 2049.; its sha256"),
        ({"t10k_labels": b"\0\0"}, "t10k-labels-idx1-ubyte does not begin as an idx file"),
        ({"t10k_labels": idx(noise(11))}, "has 7 t10k images but 11 labels"),
        ({"train_images": idx(noise(5000, 28, 28)), "train_labels": idx(noise(5000))}, "has 5000 training images"),
    ],
)
def test_mnist_refuses_foreign_files(tmp_path, replaced, message):
    with pytest.raises(ValueError, match=message):
        load(f"mnist:{mnist_folder(tmp_path, **replaced)}")


def test_cifar10_from_a_folder(tmp_path):
    for name, content in cifar_parts().items():
        (tmp_path / name).write_bytes(content)
    check_cifar(load(f"cifar10:{tmp_path}"))
    # The same file compressed next to the raw one is not read twice.
    (tmp_path / "data_batch_1.bin.gz").write_bytes(gzip.compress((tmp_path / "data_batch_1.bin").read_bytes()))
    check_cifar(load(f"cifar10:{tmp_path}"))
    for old, new in (("data_batch_1", "train_1"), ("data_batch_2", "train_2"), ("test_batch", "test_0")):
        path = tmp_path / f"{old}.bin"
        (tmp_path / f"{new}.bin.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    (tmp_path / "data_batch_1.bin.gz").unlink()
    check_cifar(load(f"cifar10:{tmp_path}"))


def test_real_cifar10():
    data = load(f"cifar10:{shared('cifar10')}")
    assert [data.count(s) for s in ("train", "validation", "test")] == [2700, 300, 1000]
    # The first pixel and labels of the published data_batch_1 and test_batch.
    assert data.splits["train"][0, :3].tolist() == [59, 62, 63]
    assert data.labels["train"][:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.splits["test"][0, :3].tolist() == [158, 112, 49]


def test_digits_need_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[train\]"'):
        load("digits")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "data_batch_1.bin",
            b"\0" * 3072,
            "has 3072 bytes .*not a multiple of a CIFAR-10 record's 3073; the next would be 3073",
        ),
        ("data_batch_1.bin", b"\0" * 6000, "has 6000 bytes .* 6146; its sha256 is"),
        ("data_batch_1.bin", b"", "has 0 bytes"),
        ("data_batch_1.bin", b"\x0a" * 3073, "is not CIFAR-10: label 10 where 0 ... 9 are known; its sha256 is"),
        ("data_batch_1.bin", b"\0" * 9 * 3073, "has 9 training images"),
    ],
    ids=["short", "between", "empty", "label", "few"],
)
def test_cifar10_refuses_foreign_files(tmp_path, name, content, message):
    (tmp_path / "test_batch.bin").write_bytes(cifar_parts()["test_batch.bin"])
    with pytest.raises(ValueError, match=rf"no CIFAR-10 records in {tmp_path}: looked for data_batch_\*.bin.\.gz."):
        load(f"cifar10:{tmp_path}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(f"cifar10:{tmp_path}")
    (tmp_path / "test_batch.bin").unlink()
    (tmp_path / name).write_bytes(cifar_parts()[name])
    with pytest.raises(ValueError, match=rf"no CIFAR-10 records in {tmp_path}: looked for test\*.bin.\.gz.$"):
        load(f"cifar10:{tmp_path}")


def test_text_windows(tmp_path):
    content = bytes(noise(1009).tolist())
    (tmp_path / "a.txt").write_bytes(content)
    data = load(f"text:{tmp_path / 'a.txt'}", 7)
    assert (data.vocab, data.length, data.grid, data.unit, data.labels) == (256, 7, (), "byte", {})
    assert data.checksum == hashlib.sha256(content).hexdigest()
    parts = {"train": content[:909], "validation": content[909:959], "test": content[959:]}
    assert data.count("train") == 909 - 7 + 1
    offsets = torch.tensor([0, 902, 13])
    assert data.take("train", offsets).tolist() == [list(content[i : i + 7]) for i in offsets.tolist()]
    for split in ("validation", "test"):
        assert data.count(split) == 7
        windows = data.take(split, torch.arange(7))
        assert windows.dtype == torch.int64
        assert windows.flatten().tolist() == list(parts[split][:49])


def test_text_from_every_kind_of_file(tmp_path):
    parts = {"b.txt": b"b" * 5003, "a/z.txt": b"a" * 1009, "c.txt.gz": b"c" * 13, "d.txt.xz": b"d" * 17}
    (tmp_path / "a").mkdir()
    for name, content in parts.items():
        compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(name[-3:], bytes)
        (tmp_path / name).write_bytes(compress(content))
        if len(content) > 1000:
            whole = load(f"text:{tmp_path / name}", 5).checksum
            assert whole == hashlib.sha256(content).hexdigest()
    (tmp_path / "notes.md").write_bytes(b"not text")
    joined = b"".join(parts[name] for name in ("a/z.txt", "b.txt", "c.txt.gz", "d.txt.xz"))
    assert load(f"text:{tmp_path}", 5).checksum == hashlib.sha256(joined).hexdigest()


def test_real_text():
    data = load(f"text:{shared('text') / 'tinyshakespeare.txt.gz'}")
    # The sha256 by which this text is known.
    assert data.checksum == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert data.length == 256
    assert bytes(data.take("train", torch.tensor([0]))[0, :14].tolist()) == b"First Citizen:"


def test_the_standard_library_is_text_everywhere():
    data = load("text:stdlib")
    assert 6_000_000 < sum(len(stream) for stream in data.splits.values()) <= 8_000_000
    root = Path(sysconfig.get_paths()["stdlib"])
    start = b"".join((root / name).read_bytes() for name in sorted(p.name for p in root.glob("_*.py")))
    first = bytes(data.splits["train"][:20].tolist())
    assert start.startswith(first)
    assert same(load("text:stdlib"), data)


def test_the_standard_library_skips_what_is_not_its_own(tmp_path, monkeypatch):
    files = {
        "z.py": b"z" * 99,
        "pack/a.py": b"p" * 99,
        "site-packages/x.py": b"x",
        "test/x.py": b"x",
        "pack/tests/x.py": b"x",
        "encodings/x.py": b"x",
        "_sysconfigdata_linux.py": b"x",
        "config-3.11/x.py": b"x",
        "a.txt": b"x",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert load("text:stdlib", 3).checksum == hashlib.sha256(b"z" * 99 + b"p" * 99).hexdigest()
    for name in ("z.py", "pack/a.py"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"no Python sources in {tmp_path}; pass text:PATH"):
        load("text:stdlib", 3)


def test_a_folder_in_the_place_of_a_text_is_refused(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match=r"cannot read .*folder.txt: Is a directory"):
        load(f"text:{tmp_path}")


@pytest.mark.parametrize(("size", "length", "windows"), [(1, 7, 1), (6, 7, 1), (7, 7, 1), (9, 7, 2), (139, 7, 23)])
def test_a_short_text_is_whole_in_each_split_if_asked_for(tmp_path, size, length, windows):
    content = bytes(range(1, size + 1))
    (tmp_path / "a.txt").write_bytes(content)
    found = load(f"text:{tmp_path}/a.txt", length, short=True)
    for split in ("train", "validation", "test"):
        assert bytes(found.splits[split].tolist()) == content
        assert found.documents[split].tolist() == [0]
    rows = found.take("test", torch.arange(found.count("test")))
    assert (len(rows), rows.flatten().tolist()) == (windows, list(content[: rows.numel()]))
    # All of it, but a rest that no window has.
    assert rows.shape[1] <= length
    assert size - rows.numel() < windows


def test_a_text_that_is_long_enough_is_split_in_any_case(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(140))
    one, other = (load(f"text:{tmp_path}/a.txt", 7, short=short) for short in (False, True))
    assert {s: len(t) for s, t in one.splits.items()} == {s: len(t) for s, t in other.splits.items()}
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="has 0 bytes"):
        load(f"text:{tmp_path}/a.txt", 7, short=True)


@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_few_pairs_and_labeled_texts_are_whole_in_each_split_if_asked_for(tmp_path, kind):
    rows = {"pairs": "ab\tcd\n" * 3, "labels": "text\tlabel\n" + "ab\t1\n" * 3}
    (tmp_path / "a.tsv").write_text(rows[kind])
    with pytest.raises(ValueError, match="none of which is in"):
        load(f"{kind}:{tmp_path}/a.tsv")
    found = load(f"{kind}:{tmp_path}/a.tsv", short=True)
    assert [found.count(split) for split in found.splits] == [3, 3, 3]


def test_absolute_names_and_units():
    for name in ("digits", "text:stdlib", "pairs:dates", "pairs:/a.tsv", "labels:majority", "labels:/a/b.tsv"):
        assert absolute(name) == name
    assert absolute("mnist:files") == f"mnist:{Path.cwd()}/files"
    assert absolute("text:~/a.txt") == f"text:{Path.home()}/a.txt"
    assert absolute("pairs:a.tsv") == f"pairs:{Path.cwd()}/a.tsv"
    names = ("pairs:dates", "text:a", "digits", "labels:x")
    assert [unit(name) for name in names] == ["token", "byte", "dim", "label"]


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        (
            "digit",
            0,
            "unknown data set 'digit' .did you mean 'digits'.*known: cifar10, digits, labels, mnist, pairs, text",
        ),
        ("mnist:", 0, "nothing follows the colon of 'mnist:'; pass e.g. mnist:FOLDER"),
        ("digits:folder", 0, "digits .*got 'folder'"),
        ("digits", 63, "length=63: digits has 64 tokens per image; leave length at 0"),
        ("digits", -1, "length=-1: must be >= 0"),
        ("text", 0, "text:stdlib, or text:PATH"),
        ("labels", 0, "labels:FILE"),
        ("pairs", 0, "pairs:FILE.*pairs:dates"),
        ("pairs:", 0, "nothing follows the colon of 'pairs:'"),
    ],
)
def test_load_refuses(name, length, message):
    with pytest.raises(ValueError, match=message):
        load(name, length)


def test_a_dataset_refuses():
    data, pairs, labels = load("digits"), load("pairs:reverse"), load("labels:majority")
    known = r"unknown split 'tests' .did you mean 'test'.*known: test, train, validation"
    for each in (data, pairs, labels):
        for call in (lambda each=each: each.count("tests"), lambda each=each: each.take("tests", torch.arange(3))):
            with pytest.raises(ValueError, match=known):
                call()
    with pytest.raises(ValueError, match="indices 0 ... 99999 .* 0 ... "):
        pairs.take("train", torch.tensor([0, 99999]))
    for indices in (torch.tensor([0, 176]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"indices .* 0 ... 175, the examples of test"):
            data.take("test", indices)
    for indices in (torch.tensor(3), torch.tensor([3], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"indices must be int64 of shape \(B,\); got"):
            data.take("test", indices)
    for rows in (torch.zeros(64, dtype=torch.int64), torch.zeros(2, 63, dtype=torch.int64), torch.zeros(2, 64)):
        with pytest.raises(ValueError, match=r"rows of digits must be integers of shape \(B, 64\); got"):
            data.picture(rows)
    with pytest.raises(ValueError, match=r"tokens 17 ... 17 .* 0 ... 16"):
        data.picture(torch.full((2, 64), 17))
    with pytest.raises(ValueError, match="text:stdlib is text"):
        load("text:stdlib").picture(torch.zeros(2, 256, dtype=torch.int64))
