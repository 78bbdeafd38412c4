"""Only regular files are read and replaced; nothing waits, loops or fills the memory."""

import errno
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import longspan
from longspan import data
from longspan._utils import atomic_io, cache_dirs, memory, png
from longspan.cli.entry import main
from longspan.speech import wav
from longspan.train import run_dir as run_folder
from longspan.train.learned import history
from longspan_lab.bench import report

posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
linux = pytest.mark.skipif(sys.platform != "linux", reason="it names /dev and /proc")
KINDS = ("FIFO", "socket", "link to a FIFO", "link to a device", "folder")


def node(path, kind):
    """Something that is no regular file, under this name."""
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                # The name of a socket has few bytes.
                before = Path.cwd()
                os.chdir(path.parent)
                try:
                    one.bind(path.name)
                finally:
                    os.chdir(before)
        case "link to a FIFO":
            os.mkfifo(path.with_name("fifo"))
            path.symlink_to("fifo")
        case "link to a device":
            path.symlink_to(os.devnull)
        case "folder":
            path.mkdir()
    return path


def state():
    return longspan.build("linear", 8, 2).init_state(1)


READERS = {
    "read": atomic_io.read,
    "read_text": atomic_io.read_text,
    "load_state": lambda path: longspan.states.load(path, like=state()),
    "wav": wav.read,
    "wav in chunks": lambda path: next(wav.chunks(path, 0.1)),
    "text": lambda path: data.load(f"text:{path}"),
    "pairs": lambda path: data.load(f"pairs:{path}"),
    "pointer": run_folder.pointer,
}
WRITERS = {
    "write": lambda path: atomic_io.write(path, b"new"),
    "check_output": atomic_io.check_output,
    "save_state": lambda path: longspan.states.save(state(), path),
    "picture": lambda path: png.save(path, torch.zeros(1, 2, 2, dtype=torch.uint8)),
    "checkpoint": lambda path: longspan.save(decoder(), path),
}


def decoder():
    return longspan.Decoder(longspan.DecoderConfig(dim=8, depth=1, heads=2, feedforward=16, vocab=5))


@posix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(name, kind, tmp_path, monkeypatch):
    # Seconds until a program writes to a FIFO.
    monkeypatch.setattr(atomic_io.open_stream, "__defaults__", (0.05,))
    path = node(tmp_path / "x.txt", kind)
    if (name, kind) == ("text", "folder"):
        pytest.skip("a text may be a folder")
    with pytest.raises(ValueError, match=r"x\.txt") as raised:
        READERS[name](path)
    assert "\n" not in str(raised.value)


@posix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
def test_only_regular_files_are_replaced(name, kind, tmp_path):
    if (name, kind) == ("checkpoint", "folder"):
        pytest.skip("a checkpoint is a folder")
    path = node(tmp_path / "x.png", kind)
    before = {one: os.lstat(tmp_path / one) for one in os.listdir(tmp_path)}
    with pytest.raises((ValueError, OSError)) as raised:
        WRITERS[name](path)
    assert "x.png" in str(raised.value)
    assert {one: os.lstat(tmp_path / one) for one in os.listdir(tmp_path)} == before


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make devices")
def test_a_device_stays_a_device(tmp_path, capsys):
    path = tmp_path / "null.png"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices can be made here")
    for name in WRITERS:
        with pytest.raises((ValueError, OSError), match="null.png"):
            WRITERS[name](path)
    assert main(["generate", "mnist", "--count", "1", "--out", str(path)]) == 2
    assert main(["export", "mnist", str(path)]) == 2
    assert capsys.readouterr().err.count("it is a character device, not a regular file") == 2
    assert stat.S_ISCHR(os.lstat(path).st_mode)


def test_files_and_links_to_files_are_replaced(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("absent")
    for name in ("link", "dangling", "new"):
        atomic_io.write(tmp_path / name, b"new")
        assert not (tmp_path / name).is_symlink()
        assert atomic_io.read(tmp_path / name) == b"new"
    assert (tmp_path / "file").read_bytes() == b"old"
    assert not (tmp_path / "absent").exists()


@linux
@pytest.mark.parametrize("path", ["/dev/longspan-test", "/dev/fd/longspan-test", "/proc/longspan-test", "/proc/1/x"])
@pytest.mark.parametrize("name", ["check_output", "save_state"])
def test_nothing_is_written_among_devices(name, path):
    with pytest.raises(ValueError, match="cannot write .*: no file can be written into /(dev|proc); choose another"):
        WRITERS[name](path if name == "save_state" else Path(path))
    assert not os.path.lexists(path)


@linux
def test_shared_memory_is_a_place_for_files():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        atomic_io.write(Path(folder, "x"), b"new")
        assert atomic_io.read(Path(folder, "x")) == b"new"


@linux
@pytest.mark.parametrize("name", ["save", "train", "bench"])
def test_a_place_where_nothing_can_be_made_is_refused_at_once(name, capsys):
    """Creating a file there raises FileNotFoundError, which is not mistaken for a folder that was removed."""
    match name:
        case "save":
            with pytest.raises(ValueError, match="cannot write the checkpoint /proc/x: No such file or directory"):
                longspan.save(decoder(), "/proc/x")
        case "train":
            assert main(["train", "--config", "digits", "--run.steps", "1", "--run.out", "/proc/x"]) == 2
        case "bench":
            assert main(["bench", "attention", "--lengths", "64", "--out", "/proc/x"]) == 2
    assert capsys.readouterr().err.count("\n") == (name != "save")


def test_a_file_that_vanishes_each_time_is_not_made_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_io, "TRIES", 3)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OSError, match="vanishes at once") as raised:
        atomic_io.write(tmp_path / "x", b"new")
    assert raised.value.errno == errno.EAGAIN


class TestSizes:
    @pytest.fixture(autouse=True)
    def little(self, monkeypatch):
        monkeypatch.setattr(memory, "available", lambda: 2000)

    def test_a_file_may_have_half_of_the_memory(self, tmp_path):
        path = tmp_path / "x"
        path.write_bytes(b"x" * 1000)
        assert atomic_io.read(path) == b"x" * 1000
        path.write_bytes(b"x" * 1001)
        with pytest.raises(ValueError, match="x has 1,001 bytes or more, and 1,000 are allowed: twice as much must"):
            atomic_io.read(path)

    def test_a_file_with_a_hole_is_not_read(self, tmp_path):
        with open(tmp_path / "x", "wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(ValueError, match="x has 1,099,511,627,776 bytes or more, and 1,000 are allowed"):
            atomic_io.read(tmp_path / "x")

    @linux
    def test_a_file_without_a_size_is_read_to_its_end(self, monkeypatch):
        assert atomic_io.read(Path("/proc/self/stat"), 4000).endswith(b"\n")
        with pytest.raises(ValueError, match="/proc/self/stat has .* bytes or more, and 10 are allowed$"):
            atomic_io.read(Path("/proc/self/stat"), 10)


class TestMemory:
    @pytest.fixture(autouse=True)
    def system(self, tmp_path, monkeypatch):
        monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(memory, "CGROUPS", tmp_path)
        (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:  7 kB\n")

    @pytest.mark.parametrize(
        ("limit", "use", "cached", "free"),
        [("5000", "4000", "0", 1000), ("5000", "4000", "500", 1500), ("5000", "6000", "0", 0), ("max", "1", "0", 7168)],
    )
    def test_is_what_a_container_leaves(self, limit, use, cached, free, tmp_path):
        assert memory.available() == 7 * 1024
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{use}\n")
        (tmp_path / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\n")
        assert memory.available() == free

    def test_is_that_of_the_machine_without_a_container_limit(self, tmp_path):
        (tmp_path / "meminfo").write_text("nothing")
        assert memory.available() > 2**20


class TestHomes:
    def test_an_unknown_user_is_one_line(self, capsys):
        words = ["train", "--config", "digits", "--run.steps", "1", "--run.data", "text:~no-such-user/x"]
        assert main([*words, "--model.vocab", "256"]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert "'~no-such-user/x' has no meaning: the system knows no home of a user 'no-such-user'" in message

    def test_a_cache_without_a_home(self, tmp_path, monkeypatch):
        for name in ("LONGSPAN_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)

        def unknown():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", unknown)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        folder = cache_dirs.cache_folder()
        assert folder.parent == tmp_path
        folder.symlink_to(tmp_path)
        with pytest.raises(ValueError, match="LONGSPAN_CACHE"):
            cache_dirs.cache_folder()


@posix
def test_a_benchmark_is_not_measured_for_a_file_that_cannot_be_written(tmp_path):
    os.mkfifo(tmp_path / "attention.csv")
    with pytest.raises(ValueError, match="attention.csv: it is a FIFO"), report.claimed(tmp_path, "attention"):
        pytest.fail("it began")


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "spans": 5}',
        '{"step": 1, "spans": [[1, []]]}',
        '{"step": 1, "ponder": [NaN]}',
        '{"step": "1"}',
        "{}",
        "[]",
        "what",
    ],
)
def test_what_training_does_not_write_is_no_history(line, tmp_path):
    (tmp_path / "learned.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"learned.jsonl is corrupt"):
        history(tmp_path)
