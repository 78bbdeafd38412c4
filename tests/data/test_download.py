"""Laws of the downloads: only the right content is kept, once, and failures name every mirror."""

import hashlib
import io
import sys
import tarfile

import pytest

from data_files import check_cifar, cifar_parts, mnist_folder, pack, same
from longspan._utils import memory
from longspan.data import cache_folder, download, fetch, images, load
from support.downloads import serving


@pytest.fixture
def server(tmp_path):
    """A folder served over http on this machine: (folder, address, requested paths)."""
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as (address, asked):
        yield tmp_path / "served", address, asked


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_fetch_tries_the_mirrors_in_turn_and_downloads_once(server, tmp_path):
    folder, address, asked = server
    (folder / "good").mkdir()
    (folder / "bad").mkdir()
    (folder / "good" / "tiny.bin").write_bytes(b"right")
    (folder / "bad" / "tiny.bin").write_bytes(b"wrong")
    checksum = hashlib.sha256(b"right").hexdigest()
    urls = [f"{address}{part}/tiny.bin" for part in ("absent", "bad", "good")]
    for _ in range(2):
        assert fetch(urls, checksum, tmp_path / "kept").read_bytes() == b"right"
        assert len(set(asked)) == 3
        assert asked.count("/good/tiny.bin") == 1
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["tiny.bin"]


def test_fetch_never_keeps_what_fails_its_checksum(server, tmp_path):
    folder, address, _ = server
    (folder / "tiny.bin").write_bytes(b"wrong")
    checksum = hashlib.sha256(b"right").hexdigest()
    urls = [f"{address}tiny.bin", f"{address}absent/tiny.bin"]
    with pytest.raises(ValueError, match=rf"cannot download tiny.bin \(sha256 {checksum}\) into .*does not match.*404"):
        fetch(urls, checksum, tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []


def test_fetch_replaces_a_file_that_was_damaged(server, tmp_path):
    folder, address, _ = server
    (folder / "tiny.bin").write_bytes(b"right")
    (tmp_path / "tiny.bin").write_bytes(b"damaged")
    fetch([f"{address}tiny.bin"], hashlib.sha256(b"right").hexdigest(), tmp_path)
    assert (tmp_path / "tiny.bin").read_bytes() == b"right"


def test_fetch_reports_a_refused_connection(tmp_path):
    # Port 9 of this machine is not in use.
    with pytest.raises(ValueError, match=r"cannot download tiny.bin .*; http://127.0.0.1:9/tiny.bin: "):
        fetch(["http://127.0.0.1:9/tiny.bin"], "0" * 64, tmp_path)


def test_fetch_reports_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        ValueError, match=f"cannot write the cache folder {tmp_path}/file/deeper: .*; set LONGSPAN_CACHE"
    ):
        fetch(["http://127.0.0.1:9/tiny.bin"], "0" * 64, tmp_path / "file" / "deeper")


def test_downloads_need_pooch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[data\]"'):
        fetch(["http://127.0.0.1:9/tiny.bin"], "0" * 64, tmp_path)


def test_the_cache_folder(monkeypatch, cache):
    assert cache_folder() == cache
    monkeypatch.delenv("LONGSPAN_CACHE")
    assert "longspan" in cache_folder().parts


def test_mnist_is_downloaded_once(server, cache, monkeypatch):
    folder, address, asked = server
    mnist_folder(folder, compress=True)
    known = {p.name.removesuffix(".gz"): (hashlib.sha256(p.read_bytes()).hexdigest(), "") for p in folder.iterdir()}
    monkeypatch.setattr(images, "_MNIST", known)
    monkeypatch.setattr(images, "_MNIST_MIRRORS", (f"{address}absent/", address))
    first = load("mnist")
    assert len(list((cache / "mnist").iterdir())) == 4
    asked.clear()
    assert same(load("mnist"), first)
    assert not asked
    assert same(load(f"mnist:{folder}"), first)


def test_cifar10_is_downloaded_and_read_without_unpacking(server, cache, monkeypatch):
    folder, address, _ = server
    members = {f"../../cifar-10-batches-bin/{name}": content for name, content in cifar_parts().items()}
    members["cifar-10-batches-bin/batches.meta.txt"] = b"airplane"
    monkeypatch.setattr(images, "_CIFAR_SHA256", pack(folder / "cifar-10-binary.tar.gz", members))
    monkeypatch.setattr(images, "_CIFAR_MIRRORS", (f"{address}cifar-10-binary.tar.gz",))
    check_cifar(load("cifar10"))
    assert [p.name for p in cache.rglob("*") if p.is_file()] == ["cifar-10-binary.tar.gz"]


def test_a_bad_cifar10_archive_is_named(server, cache, monkeypatch):
    folder, address, _ = server
    monkeypatch.setattr(images, "_CIFAR_MIRRORS", (f"{address}cifar-10-binary.tar.gz",))
    path = folder / "cifar-10-binary.tar.gz"
    monkeypatch.setattr(images, "_CIFAR_SHA256", pack(path, {"test_batch.bin": cifar_parts()["test_batch.bin"]}))
    with pytest.raises(ValueError, match=r"no data_batch_\*.bin and test_batch.bin in .*; its sha256 is"):
        load("cifar10")
    monkeypatch.setattr(images, "_CIFAR_SHA256", pack(path, {**cifar_parts(), "data_batch_1.bin": b"\0" * 5}))
    with pytest.raises(ValueError, match=r"data_batch_1.bin in .*tar.gz has 5 bytes"):
        load("cifar10")
    pack(path, cifar_parts())
    path.write_bytes(path.read_bytes()[:-1000])
    monkeypatch.setattr(images, "_CIFAR_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match=r"tar.gz is truncated or corrupt .*; its sha256 is"):
        load("cifar10")


def test_an_archive_that_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    """A small archive can have large files in it."""
    monkeypatch.setattr(memory, "available", lambda: 2**12)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        for name, size in (("a", 2**10), ("unwanted", 2**20), ("b", 2**10), ("c", 1)):
            entry = tarfile.TarInfo(name)
            entry.size = size
            archive.addfile(entry, io.BytesIO(bytes(size)))
    found = []
    with pytest.raises(ValueError, match=r"x.tar.gz .*c has 1 bytes"):
        found.extend(name for name, _ in download.members(tmp_path / "x.tar.gz", lambda name: len(name) == 1))
    assert dict(download.members(tmp_path / "x.tar.gz", "ab".__contains__)) == {"a": bytes(2**10), "b": bytes(2**10)}
