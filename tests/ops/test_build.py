"""Where native kernels come from: the installation, the cache, the compiler; and what happens where one is bad."""

import contextlib
import ctypes
import dataclasses
import errno
import hashlib
import json
import os
import platform
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock, mock_open

import pytest
import torch

import longspan
from longspan import Decoder, DecoderConfig, backend
from longspan._utils import atomic_io
from longspan.attention import REGISTRY
from longspan.cli.entry import main
from longspan.generation import native_trial
from longspan.generation.native_decoder import Engine
from longspan.ops import convolution, gated, sparse
from longspan.ops.native import build
from longspan.ops.native.build import (
    instruction_sets,
    interface,
    notice,
    openmp,
    prebuilt,
    store,
    toolchain,
    trial,
    trusted,
)
from longspan.ops.quantized import formats

try:
    COMPILER = toolchain.find_compiler()
    REASON = ""
except toolchain.Unavailable as error:
    COMPILER, REASON = [], str(error)
needs_compiler = pytest.mark.skipif(bool(REASON), reason=REASON)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

TINY = 'extern "C" int longspan_answer() { return ANSWER; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of this test's own, and a process that has loaded nothing yet."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LONGSPAN_ISA", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name, empty in (("_found", {}), ("_own", {}), ("_threads", {}), ("_expected", {}), ("_warned", set())):
        monkeypatch.setattr(build, name, empty)
    yield tmp_path / "cache" / "native"
    join()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """One function in a file and a header instead of the kernels of a family, and no trial; -> the source."""
    source, header = tmp_path / "linear" / "tiny.cpp", tmp_path / "linear" / "tiny.h"
    source.parent.mkdir()
    source.write_text('#include "tiny.h"\n' + TINY)
    header.write_text("#define ANSWER 42\n")
    monkeypatch.setattr(toolchain, "SOURCES", (source,))
    monkeypatch.setattr(toolchain, "HEADERS", (header,))
    monkeypatch.setitem(interface.FAMILIES, "linear", {"tiny": {"longspan_answer": (interface.INT, ())}})
    monkeypatch.setattr(trial, "run", lambda libraries, tested: None)
    monkeypatch.setattr(trial, "ready", contextlib.nullcontext)
    return source


def join():
    """Wait for what is compiled ahead."""
    for thread in list(build._threads.values()):
        thread.join()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def running(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def never(*_, **__):
    pytest.fail("it was called")


@needs_compiler
class TestStore:
    def test_is_private_and_used_again(self, tiny, folder, monkeypatch):
        assert build.load("linear/tiny").longspan_answer() == 42
        files = sorted(folder.iterdir())
        assert sorted(path.suffix for path in files) == [".json", ".so"]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        monkeypatch.setattr(toolchain, "compile", never)
        assert build.load("linear/tiny").longspan_answer() == 42

    @pytest.mark.parametrize(
        "damage",
        [
            lambda library, seal: library.write_bytes(library.read_bytes() + b"\0"),
            lambda library, seal: library.unlink(),
            lambda library, seal: library.chmod(0o666),
            lambda library, seal: seal.unlink(),
            lambda library, seal: seal.chmod(0o620),
            lambda library, seal: seal.write_text(seal.read_text()[:40]),
            lambda library, seal: seal.write_text('{"compiler": "x", "answer": 1}'),
        ],
        ids=["other bytes", "gone", "others may write", "no seal", "open seal", "half a seal", "another seal"],
    )
    def test_a_file_that_cannot_be_trusted_is_compiled_anew(self, damage, tiny, folder):
        _, good = store.provide("linear", COMPILER, folder)
        (seal,) = folder.glob("*.json")
        damage(folder / good.library, seal)
        assert store.read(seal) is None if seal.exists() else True
        path, again = store.provide("linear", COMPILER, folder)
        assert store.read(seal) == again
        assert ctypes.CDLL(str(path)).longspan_answer() == 42

    @pytest.mark.parametrize(
        "change",
        [
            lambda patch, tiny: tiny.write_text(TINY.replace("ANSWER", "41")),
            lambda patch, tiny: tiny.with_suffix(".h").write_text("#define ANSWER 43\n"),
            lambda patch, tiny: patch.setattr(store, "processor", lambda: "another processor"),
            lambda patch, tiny: patch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-g")),
            lambda patch, tiny: patch.setattr(toolchain, "version", lambda compiler: "another compiler"),
            lambda patch, tiny: patch.setattr(openmp, "share", lambda: ""),
            lambda patch, tiny: patch.setenv("LONGSPAN_ISA", instruction_sets.usable()[-1].name),
        ],
        ids=["source", "header", "processor", "flags", "compiler", "OpenMP", "instruction set"],
    )
    def test_what_the_code_depends_on_is_in_the_key(self, change, tiny, monkeypatch):
        before = store.key("linear", COMPILER)
        assert store.key("linear", COMPILER) == before
        change(monkeypatch, tiny)
        assert store.key("linear", COMPILER) != before

    def test_all_sources_count(self):
        kernels = sorted(toolchain.FOLDER.rglob("*"))
        assert set(toolchain.SOURCES) == {path for path in kernels if path.suffix == ".cpp"}
        assert {*toolchain.SOURCES, *toolchain.HEADERS} == {path for path in kernels if path.suffix in (".cpp", ".h")}

    @pytest.fixture(params=["it is a file", "it is mounted noexec", "it is read-only"])
    def unusable(self, request, tiny, folder, monkeypatch):
        """A cache folder in which no library can be kept; -> the folder of its kernels."""
        match request.param:
            case "it is a file":
                folder.parent.touch()
            case "it is mounted noexec":
                flags = {str(folder): getattr(os, "ST_NOEXEC", 8)}
                monkeypatch.setattr(os, "ST_NOEXEC", 8, raising=False)
                monkeypatch.setattr(os, "statvfs", lambda path: Mock(f_flag=flags.get(str(path), 0)), raising=False)
            case "it is read-only":
                make = atomic_io.new_folder

                def new_folder(path, mode):
                    if path.parent == folder:
                        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
                    return make(path, mode)

                monkeypatch.setattr(atomic_io, "new_folder", new_folder)
        return folder

    def test_kernels_are_kept_in_a_second_folder_where_the_first_cannot_be_used(self, unusable, tmp_path, monkeypatch):
        with pytest.warns(
            RuntimeWarning, match=f"the cache folder cannot be used .{unusable}.*LONGSPAN_CACHE"
        ) as warned:
            assert build.loaded("linear/tiny").longspan_answer() == 42
        assert len(warned) == 1
        found = build.find("linear/tiny")
        assert str(unusable) in found.why
        assert found.path.startswith(f"{tmp_path}/temporary/longspan-{os.getuid()}/native/")
        monkeypatch.setattr(toolchain, "compile", never)
        assert build.find("linear/tiny").path == found.path

    def test_without_a_folder_they_are_compiled_for_this_process(self, unusable, tmp_path, monkeypatch):
        (tmp_path / "temporary" / f"longspan-{os.getuid()}").touch()
        before = sorted((tmp_path / "temporary").iterdir())
        with pytest.warns(RuntimeWarning, match="every process compiles its kernels again"):
            assert build.loaded("linear/tiny").longspan_answer() == 42
        assert sorted((tmp_path / "temporary").iterdir()) == before
        monkeypatch.setattr(toolchain, "compile", never)
        assert build.find("linear/tiny").library.longspan_answer() == 42

    def test_folders_of_killed_compilations_are_removed(self, tiny, folder):
        left = folder / f".compilation.{'0' * 16}.tmp"
        left.mkdir(parents=True)
        (left / "0.o").touch()
        folder.parent.chmod(0o700)
        folder.chmod(0o700)
        assert build.load("linear/tiny").longspan_answer() == 42
        assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".so"]

    @pytest.mark.parametrize("above", [0, 1, 2], ids=["native", "the cache", "above the cache"])
    def test_a_folder_where_others_may_write_is_not_used(self, above, tiny, folder, tmp_path, monkeypatch):
        """Nor one below it: they could put their own in the place of what was checked."""
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "open" / "cache"))
        folder = tmp_path / "open" / "cache" / "native"
        folder.mkdir(parents=True)
        bad = (folder, *folder.parents)[above]
        bad.chmod(0o777)
        with pytest.raises(trusted.Untrusted, match=f"^{bad}: other users"):
            store.provide("linear", COMPILER, folder)
        with pytest.warns(RuntimeWarning, match=f"the cache folder cannot be used .{bad}: other"):
            assert build.load("linear/tiny").longspan_answer() == 42
        assert str(bad) in build.find("linear/tiny").why
        assert list(folder.iterdir()) == []

    def test_a_folder_below_one_where_names_are_their_owners_is_used(self, tiny, tmp_path):
        """Like /tmp: all users may write there, but only rename their own files."""
        tmp_path.chmod(0o1777)
        assert store.provide("linear", COMPILER, tmp_path / "mine" / "native")[0].parent == tmp_path / "mine" / "native"
        assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700

    @pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give folders away")
    def test_a_folder_that_belongs_to_somebody_else_is_not_used(self, tiny, tmp_path):
        cache = tmp_path / "cache"
        (cache / "native").mkdir(parents=True)
        os.chown(cache, 65534, 65534)
        with pytest.raises(trusted.Untrusted, match=f"^{cache}: it belongs to another user"):
            store.provide("linear", COMPILER, cache / "native")

    def test_what_was_checked_is_what_is_loaded(self, tiny, folder, tmp_path):
        path, seal = store.provide("linear", COMPILER, folder)
        other = tmp_path / "other.so"
        name = trusted.library(path, seal.sha256)
        tiny.with_suffix(".h").write_text("#define ANSWER 666\n")
        toolchain.compile(COMPILER, other, "-O1", openmp=False)
        os.replace(other, path)
        if sys.platform == "linux":
            assert ctypes.CDLL(name).longspan_answer() == 42
        path.chmod(0o600)
        with pytest.raises(trusted.Untrusted, match="checksum"):
            trusted.library(path, seal.sha256)
        assert store.read(next(folder.glob("*.json"))) is None

    @needs_linux
    def test_finding_it_again_opens_nothing_more(self, tiny):
        build.find("linear/tiny")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            build.find("linear/tiny")
        assert len(os.listdir("/proc/self/fd")) == before

    def test_no_link_is_followed(self, tiny, folder, tmp_path):
        path, seal = store.provide("linear", COMPILER, folder)
        os.replace(path, tmp_path / "moved.so")
        path.symlink_to(tmp_path / "moved.so")
        assert store.read(next(folder.glob("*.json"))) is None
        with pytest.raises(OSError, match=re.escape(path.name)):
            trusted.library(path, seal.sha256)
        assert not store.provide("linear", COMPILER, folder)[0].is_symlink()

    @pytest.mark.parametrize("name", ["../x.so", "/x.so", ""])
    def test_a_seal_names_a_library_of_its_own_folder(self, name, tiny, folder):
        _, seal = store.provide("linear", COMPILER, folder)
        (path,) = folder.glob("*.json")
        path.write_text(json.dumps(dataclasses.asdict(seal) | {"library": name}))
        assert store.read(path) is None

    def test_a_cache_without_a_meaning(self, tiny, monkeypatch):
        monkeypatch.setenv("LONGSPAN_CACHE", "~no-such-user/x")
        with pytest.warns(RuntimeWarning, match="LONGSPAN_CACHE: '~no-such-user/x' has no meaning") as warned:
            assert build.load("linear/tiny").longspan_answer() == 42
        assert len(warned) == 1

    def test_without_a_home(self, tiny, tmp_path, monkeypatch):
        """As in a container whose user the system does not know."""
        for name in ("LONGSPAN_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        found = build.find("linear/tiny")
        assert found.library.longspan_answer() == 42
        assert found.path.startswith(f"{tmp_path}/longspan-{os.getuid()}/native/")
        assert not found.unusable

    def test_nowhere_to_store_it(self, tiny, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "file"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
        with pytest.raises(build.Unavailable, match="the compiled kernels cannot be stored or loaded: "):
            build.load("linear/tiny")

    @pytest.mark.full
    def test_processes_at_once(self, tiny, folder):
        code = (
            "import ctypes, pathlib, sys\n"
            "from longspan.ops.native.build import store, toolchain, trial\n"
            "source, folder, *compiler = sys.argv[1:]\n"
            "toolchain.SOURCES, trial.run = (pathlib.Path(source),), lambda libraries, tested: None\n"
            "path, seal = store.provide('linear', compiler, pathlib.Path(folder))\n"
            "sys.exit(ctypes.CDLL(str(path)).longspan_answer())\n"
        )
        count = tiny.with_suffix(".count")
        # Only the compilation is slow enough for the others to come meanwhile.
        text = f'case "$*" in *" -c "*) echo >> {count}; sleep 1;; esac; exec {COMPILER[0]} "$@"'
        command = [sys.executable, "-c", code, str(tiny), str(folder), script(tiny.with_suffix(".sh"), text)]
        processes = [subprocess.Popen(command) for _ in range(3)]
        assert [process.wait(timeout=120) for process in processes] == [42] * 3
        assert len(store.seals(folder)) == 1
        assert len(list(folder.iterdir())) == 2
        assert len(count.read_text()) == 1

    def test_a_compiler_with_options(self, tiny, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", f"{COMPILER[0]} -DUNUSED=1")
        assert toolchain.find_compiler() == [COMPILER[0], "-DUNUSED=1"]
        assert build.load("linear/tiny").longspan_answer() == 42


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A compiler that records the files that it gets, and fails; -> the names of the families so far."""
    log = tmp_path / "log"
    text = f'for part; do case "$part" in *.cpp) echo "$part" >> {log};; esac; done; [ "$1" = --version ] && echo fake'
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "none")
    return lambda: {Path(line).parent.name for line in log.read_text().splitlines()} if log.exists() else set()


class TestFamilies:
    """Each family of kernels is compiled, loaded, and fails on its own."""

    def test_every_source_is_in_one(self):
        assert {source.parent.name for source in toolchain.SOURCES} == set(interface.FAMILIES)
        assert sorted(s for family in interface.FAMILIES for s in toolchain.sources(family)) == list(toolchain.SOURCES)
        assert set(native_trial.COMPARISONS) == set(interface.FAMILIES)

    @pytest.mark.parametrize("family", interface.FAMILIES)
    def test_only_the_called_one_is_compiled(self, family, counted):
        x, weights = torch.randn(1, 2, 5, 4), torch.ones(2, 3)
        calls = {
            "linear": lambda: longspan.build("linear", 8, 2)(torch.randn(1, 5, 8)),
            "gated": lambda: gated.recur(x, x, x, beta=torch.ones(1, 2, 5)),
            "general": lambda: longspan.general_delta_rule(x, x, x, read=x, erase=x),
            "convolution": lambda: convolution.convolve(x[0, :, :, :2], weights),
            "scan": lambda: longspan.diagonal_scan(x[0], -torch.ones(2, 5, 4)),
            "quantized": lambda: longspan.quantized_linear(
                torch.ones(1, 32), formats.quantize(torch.ones(1, 32), "Q8_0")
            ),
            "pattern": lambda: sparse.native.why_not(x, x, x),
            "decode": lambda: Engine.why_not(Decoder(DecoderConfig(vocab=2, length=2, dim=8, heads=2, depth=1))),
        }
        assert counted() == set()
        with pytest.warns(RuntimeWarning, match="without its native CPU kernels: "):
            calls[family]()
        assert counted() == {family}
        assert {unit.partition("/")[0] for unit in build.tried()} == {family}

    @pytest.mark.parametrize("name", REGISTRY)
    def test_a_mechanism_with_several_declares_them(self, name, monkeypatch):
        """So that its first call compiles them together."""
        cls, used = REGISTRY[name], set()
        monkeypatch.setattr(build, "loaded", lambda unit: used.add(unit.partition("/")[0]))
        for text in cls.examples:
            used.clear()
            causal = "causal" in cls.directions
            with torch.no_grad():
                longspan.build(text, 16, 4, causal=causal)(torch.randn(2, 29, 16))
            assert len(used) < 2 or used == set(cls.kernels)

    @needs_compiler
    @pytest.mark.parametrize(("grad", "following"), [(True, "backward"), (False, "step")])
    def test_what_a_call_needs_next_is_compiled_meanwhile(self, grad, following, tmp_path, monkeypatch):
        units = [f"{family}/{part}" for family in ("linear", "gated") for part in ("forward", following)]
        sources = [tmp_path / f"{unit}.cpp" for unit in units]
        tried = []
        for source in sources:
            source.parent.mkdir(exist_ok=True)
            source.write_text(TINY.replace("ANSWER", "42"))
        monkeypatch.setattr(toolchain, "SOURCES", tuple(sources))
        for family in ("linear", "gated"):
            parts = {part: {"longspan_answer": (interface.INT, ())} for part in ("forward", following)}
            monkeypatch.setitem(interface.FAMILIES, family, parts)
        monkeypatch.setattr(trial, "run", lambda libraries, tested: tried.append((tested, set(libraries))))
        monkeypatch.setattr(trial, "ready", contextlib.nullcontext)
        build.expect("gated")
        with torch.set_grad_enabled(grad):
            assert build.loaded("linear/forward").longspan_answer() == 42
        join()
        # The trial of a backward pass needs the forward pass.
        more = {unit: {unit.replace("backward", "forward"), unit} for unit in units}
        assert sorted(tried) == sorted(more.items())
        monkeypatch.setattr(toolchain, "compile", never)
        assert [build.loaded(unit).longspan_answer() for unit in units] == [42] * 4

    @needs_compiler
    def test_a_failure_leaves_the_others_usable(self, tiny, tmp_path, monkeypatch):
        broken = tmp_path / "gated" / "broken.cpp"
        broken.parent.mkdir()
        broken.write_text("#error it is broken\n")
        monkeypatch.setattr(toolchain, "SOURCES", (tiny, broken))
        with pytest.warns(RuntimeWarning, match="CPU kernels: .*gated/broken.cpp:1:.* error: #error it is broken"):
            assert build.loaded("gated/broken") is None
        assert build.loaded("linear/tiny").longspan_answer() == 42

    def test_what_all_lack_is_said_once(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", str(tmp_path / "none"))
        with pytest.warns(RuntimeWarning) as warned:
            assert [build.loaded(family) for family in build.FAMILIES] == [None] * len(build.FAMILIES)
        assert len(warned) == 1

    @needs_compiler
    def test_the_code_of_one_does_not_depend_on_sources_of_others(self, tiny, tmp_path, monkeypatch):
        other = tmp_path / "gated" / "other.cpp"
        other.parent.mkdir()
        monkeypatch.setattr(toolchain, "SOURCES", (tiny, other))
        keys = []
        for text in ("int a;\n", "int b;\n"):
            other.write_text(text)
            keys.append((store.key("linear", COMPILER), store.key("gated", COMPILER)))
        assert keys[0][0] == keys[1][0]
        assert keys[0][1] != keys[1][1]

    def test_no_more_compilers_at_once_than_cores(self, tmp_path, monkeypatch):
        monkeypatch.setattr(toolchain, "cores", lambda: 1)
        alone = ["sh", "-c", f"mkdir {tmp_path}/running && sleep 0.02 && rmdir {tmp_path}/running && echo $0"]
        assert toolchain.together([[*alone, str(i)] for i in range(4)]) == [f"{i}\n" for i in range(4)]


@needs_compiler
class TestNotice:
    """The line on stderr while kernels are compiled."""

    @pytest.fixture
    def lines(self, tiny, monkeypatch):
        """The lines so far; a trial waits for the first one."""
        lines, printed, say = [], threading.Event(), notice.say

        def record(text):
            lines.append(text)
            say(text)
            printed.set()

        monkeypatch.setattr(notice, "say", record)
        monkeypatch.setattr(notice, "AFTER", 0.1)
        monkeypatch.setattr(trial, "run", lambda libraries, tested: printed.wait(30))
        monkeypatch.delenv("LONGSPAN_QUIET", raising=False)
        return lines

    def test_is_printed_once_and_not_where_they_are_compiled_already(self, lines, capsys):
        assert build.loaded("linear/tiny").longspan_answer() == 42
        (line,) = lines
        assert "(linear)" in line
        assert capsys.readouterr().err == f"{line}\n"
        build._found.clear()
        assert build.loaded("linear/tiny").longspan_answer() == 42
        assert capsys.readouterr().err == ""
        assert lines == [line]

    def test_is_left_out_where_quiet_is_asked_for(self, lines, monkeypatch):
        monkeypatch.setenv("LONGSPAN_QUIET", "1")
        monkeypatch.setattr(trial, "run", lambda libraries, tested: None)
        timer = Mock()
        monkeypatch.setattr(notice.threading, "Timer", timer)
        assert build.loaded("linear/tiny").longspan_answer() == 42
        timer.return_value.start.assert_not_called()

    def test_is_left_out_where_it_does_not_take_long(self, lines, monkeypatch):
        monkeypatch.setattr(notice, "AFTER", 30.0)
        with notice.shown(), notice.compiling("linear/tiny"):
            (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        timer.join(10)
        assert not timer.is_alive()
        assert lines == []


@needs_compiler
class TestLock:
    """One process compiles while others wait; no lock file keeps anybody from compiling, or is left."""

    @pytest.fixture
    def lock(self, tiny, folder):
        folder.mkdir(parents=True, mode=0o700)
        folder.parent.chmod(0o700)
        return folder / f"{store.key('linear', COMPILER)}.lock"

    def test_one_that_a_dead_process_left(self, lock, folder):
        lock.touch(mode=0o600)
        store.provide("linear", COMPILER, folder)
        assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".so"]

    def test_one_that_cannot_be_taken(self, lock, folder):
        lock.mkdir()
        assert store.provide("linear", COMPILER, folder)[1].library

    def test_no_link_is_followed(self, lock, folder, tmp_path, monkeypatch):
        monkeypatch.setattr(store, "WAIT", 0.2)
        lock.symlink_to(tmp_path / "other")
        assert store.provide("linear", COMPILER, folder)[1].library
        assert not (tmp_path / "other").exists()

    def test_one_that_is_held_for_too_long(self, lock, folder, monkeypatch):
        monkeypatch.setattr(store, "WAIT", 0.2)
        code = (
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
        )
        command = [sys.executable, "-I", "-c", code, str(lock)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            holder.stdout.readline()
            assert store._lock(lock) is None
            assert store.provide("linear", COMPILER, folder)[1].library
            assert lock.exists()
            holder.communicate("\n")

    def test_what_another_process_compiled_meanwhile_is_taken(self, lock, folder, monkeypatch):
        seal, make = store.Seal("another", failed="it is a test"), Mock()

        def locked(path):
            path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(seal)))
            path.with_suffix(".json").chmod(0o600)
            return contextlib.nullcontext()

        monkeypatch.setattr(store, "_locked", locked)
        monkeypatch.setattr(store, "_make", make)
        with pytest.raises(build.Unavailable, match="it is a test"):
            store.provide("linear", COMPILER, folder)
        make.assert_not_called()


class TestWithout:
    """No compiler, or a bad one: one warning, and the torch path serves."""

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (None, "the C.. compiler that CXX=.* names was not found; install it, or unset CXX"),
            ("", "CXX=.* is not a command: No closing quotation; quote it as in a shell, or unset CXX"),
            ("echo it is broken >&2; exit 3", "failed with code 3: it is broken"),
            (
                "echo 'a.cpp:1: error: no such thing\n 1 | x\n   | ^' >&2; exit 1",
                "code 1: a.cpp:1: error: no such thing$",
            ),
            ("kill -SEGV $$", "terminated by SIGSEGV"),
            ("sleep 600 & sleep 600", "did not finish"),
            ('case "$1" in --version) echo slow;; *) sleep 600 & sleep 600;; esac', "did not finish"),
        ],
        ids=["absent", "half a quote", "failing", "wordy", "crashing", "hanging", "hanging at work"],
    )
    def test_one_warning_and_the_torch_path(self, text, reason, tmp_path, monkeypatch):
        chosen = str(tmp_path / "none") if text is None else script(tmp_path / "compiler", text) if text else "g++ '"
        monkeypatch.setenv("CXX", chosen)
        for limit in ("SECONDS", "VERSION_SECONDS"):
            monkeypatch.setattr(toolchain, limit, 0.5)
        module, x = longspan.build("linear", 8, 2), torch.randn(2, 1, 8)
        with torch.no_grad():
            with pytest.warns(RuntimeWarning, match=f"without its native CPU kernels: .*{reason}"):
                y, _ = module(x, module.init_state(2))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                again, _ = module(x, module.init_state(2))
        assert torch.equal(y, again)
        torch.testing.assert_close(y, module(x)[0].detach(), atol=1e-6, rtol=1e-6)
        with backend("native"), torch.no_grad(), pytest.raises(ValueError, match="cannot serve"):
            module(x, module.init_state(2))

    def test_a_compiler_that_prints_much_is_cut(self, tmp_path, monkeypatch):
        text = "head -c 5000000 /dev/zero | tr '\\0' x >&2; exit 3"
        monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
        with pytest.raises(build.Unavailable, match="failed with code 3: x+[.]{3}$") as error:
            build.load("linear/forward")
        assert len(str(error.value)) < 2 * toolchain.SHOWN

    @needs_linux
    def test_nothing_of_a_hanging_compiler_goes_on(self, tmp_path, monkeypatch):
        pid = tmp_path / "pid"
        compiler = script(tmp_path / "compiler", f"sleep 600 > {tmp_path}/out 2>&1 & echo $! > {pid}; wait")
        monkeypatch.setattr(toolchain, "VERSION_SECONDS", 0.5)
        with pytest.raises(toolchain.Hangs):
            toolchain.version([compiler])
        end = time.monotonic() + 20
        while running(pid.read_text().strip()):
            assert time.monotonic() < end
            time.sleep(0.05)

    def test_a_hanging_compiler_is_not_waited_for_twice(self, folder, tmp_path, monkeypatch):
        count = tmp_path / "count"
        text = f'case "$1" in --version) echo slow;; *) echo >> {count}; sleep 60;; esac'
        monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
        monkeypatch.setattr(toolchain, "SECONDS", 1)
        for _ in range(2):
            with pytest.raises(build.Unavailable, match="did not finish .*longspan doctor --clear"):
                build.load("linear/forward")
            join()
        assert 1 <= len(count.read_text()) <= len(toolchain.sources("linear"))
        assert main(["doctor", "--clear"]) == 0
        assert not folder.exists()

    def test_windows_is_not_served_yet(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "win32")
        with pytest.raises(build.Unavailable, match="not built on Windows yet"):
            toolchain.find_compiler()

    @needs_compiler
    @pytest.mark.slow
    def test_a_compiler_without_openmp_serves_with_one_thread(self, folder, tmp_path, monkeypatch):
        text = f'case "$*" in *-fopenmp*) echo no OpenMP >&2; exit 1;; esac; exec {COMPILER[0]} "$@"'
        monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
        # Their trial has found that the kernels are correct.
        build.load("linear/forward")
        (seal,) = store.seals(folder)
        assert "-fopenmp" not in seal.flags

    def test_threads_at_once_load_once(self, monkeypatch):
        calls = []

        def load(family):
            calls.append(1)
            time.sleep(0.2)
            raise build.Unavailable("it is a test")

        monkeypatch.setattr(build, "load", load)
        with warnings.catch_warnings(record=True) as warned, ThreadPoolExecutor(4) as pool:
            warnings.simplefilter("always")
            assert list(pool.map(lambda _: build.loaded("linear/forward"), range(4))) == [None] * 4
        assert len(calls) == len(warned) == 1


@needs_compiler
class TestTrial:
    """Kernels that compile, and then crash or compute something else, are found out before the user's first call."""

    @pytest.fixture
    def bad(self, tmp_path, monkeypatch):
        def write(body):
            source = tmp_path / "linear" / "forward.cpp"
            source.parent.mkdir()
            # The only unit of the family.
            monkeypatch.setitem(interface.FAMILIES, "linear", {"forward": interface.functions("linear/forward")})
            source.write_text(
                "".join(f'extern "C" int {name}() {{ {body} }}\n' for name in interface.functions("linear"))
            )
            monkeypatch.setattr(toolchain, "SOURCES", (source,))

        return write

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ("__builtin_trap();", ".* terminated by SIG(ILL|TRAP)"),
            ("return 0;", "a sequence's output .* is off by "),
        ],
        ids=["crashes", "is wrong"],
    )
    def test_is_failed_once_and_remembered(self, body, reason, bad, folder, monkeypatch, capsys):
        bad(body)
        with pytest.raises(build.Unavailable, match=f"the compiled kernels failed their trial: {reason}"):
            build.load("linear/forward")
        monkeypatch.setattr(toolchain, "compile", never)
        with pytest.raises(build.Unavailable, match="longspan doctor --clear"):
            build.load("linear/forward")
        assert list(folder.glob("*.so")) == []
        monkeypatch.setattr(build, "FAMILIES", ("linear",))
        assert main(["doctor"]) == 0
        assert "failed their trial" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.slow
    @pytest.mark.parametrize("family", interface.FAMILIES)
    def test_finds_wrong_kernels_of_every_family(self, family, tmp_path):
        source, library = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
        # Functions without arguments return constants, which no kernel can do without.
        values = {name: 512 if not arguments else 0 for name, (_, arguments) in interface.functions(family).items()}
        source.write_text("".join(f'extern "C" long {name}() {{ return {n}; }}\n' for name, n in values.items()))
        toolchain.run([*COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)])
        with pytest.raises(trial.Failed, match="failed their trial: .* is off by "):
            trial.run({family: library}, family)

    def test_that_does_not_end(self, bad, tmp_path, monkeypatch):
        bad("for (volatile int i = 0;; i = i + 1) {}")
        toolchain.compile(COMPILER, tmp_path / "bad.so", toolchain.THIS_MACHINE, openmp=False)
        monkeypatch.setattr(toolchain, "SECONDS", 0.5)
        with pytest.raises(trial.Failed, match="failed their trial: .* did not finish"):
            trial.run({"linear": tmp_path / "bad.so"}, "linear")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("exit 0", "is not a Python"),
            ("echo 'ImportError: no module' >&2; exit 1", "code 1: ImportError: no module"),
            ("kill -KILL $$", "terminated by SIGKILL"),
        ],
        ids=["another program", "broken", "killed"],
    )
    def test_that_says_nothing_of_the_kernels_is_not_remembered(self, text, reason, tmp_path, folder, monkeypatch):
        monkeypatch.setattr(toolchain, "compile", lambda compiler, library, *_, **__: library.touch() or "")
        monkeypatch.setattr(sys, "executable", script(tmp_path / "program", text))
        with pytest.raises(build.Unavailable, match=f"the compiled kernels cannot be tested: .*{reason}"):
            build.load("linear/forward")
        join()
        assert list(folder.iterdir()) == []


class TestPrebuilt:
    @pytest.fixture
    def shipped(self, tiny, tmp_path, monkeypatch):
        """An installation with prebuilt kernels, which return 7; -> the library for this processor."""
        monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
        prebuilt.FOLDER.mkdir()
        path = prebuilt.FOLDER / f"{prebuilt.best().name}.so"
        tiny.write_text(TINY.replace("ANSWER", "7"))
        toolchain.compile(COMPILER, path, "-O1", openmp=False)
        tiny.write_text(TINY.replace("ANSWER", "42"))
        self.list(path)
        return path

    def list(self, *paths):
        lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
        (prebuilt.FOLDER / prebuilt.LIST).write_text("".join(lines))

    @needs_compiler
    def test_come_first_and_need_no_compiler(self, shipped, folder, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        found = build.find("linear/tiny")
        assert found.library.longspan_answer() == 7
        assert found.path == str(shipped)
        assert found.origin == f"prebuilt for {prebuilt.best().name}"
        assert not folder.exists()

    @needs_compiler
    @pytest.mark.parametrize("damage", ["other bytes", "gone", "not listed", "no list", "half a list", "no library"])
    def test_damaged_ones_are_replaced_by_compiled_ones(self, damage, shipped, monkeypatch):
        match damage:
            case "other bytes":
                shipped.write_bytes(shipped.read_bytes() + b"\0")
            case "gone":
                shipped.unlink()
            case "not listed":
                self.list()
            case "no list":
                (prebuilt.FOLDER / prebuilt.LIST).unlink()
            case "half a list":
                (prebuilt.FOLDER / prebuilt.LIST).write_text("0123")
            case "no library":
                shipped.write_text("what another system would open")
                self.list(shipped)
        found = build.find("linear/tiny")
        assert found.library.longspan_answer() == 42
        assert str(prebuilt.FOLDER) in found.why
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(build.Unavailable, match="the prebuilt kernels cannot be used: .*CXX="):
            build.load("linear/tiny")

    @needs_compiler
    def test_a_forced_instruction_set_has_its_library(self, shipped, folder, monkeypatch):
        chosen = instruction_sets.usable()[-1].name
        other = shipped.with_name(f"{chosen}.so")
        content = shipped.read_bytes()
        shipped.unlink()
        other.write_bytes(content)
        self.list(other)
        monkeypatch.setenv("LONGSPAN_ISA", chosen)
        found = build.find("linear/tiny")
        assert (found.path, found.origin) == (str(other), f"prebuilt for {chosen}")
        assert f"LONGSPAN_ISA={chosen}" in found.why
        assert not folder.exists()


EVERYTHING = frozenset().union(*(one.needs for sets in instruction_sets.TABLE.values() for one in sets))


@pytest.fixture
def processor(monkeypatch):
    """``processor(machine, without)``: one with every feature but some."""

    def make(machine="x86_64", without=""):
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(instruction_sets, "features", lambda: EVERYTHING - set(without.split()))

    return make


class TestInstructionSets:
    @pytest.mark.parametrize(
        ("machine", "without", "name"),
        [
            ("x86_64", "", "avx512_bf16"),
            ("x86_64", "avx512_bf16", "avx512_vnni"),
            ("x86_64", "avx512_vnni", "avx512"),
            ("x86_64", "avx512vl", "avx2"),
            ("x86_64", "avx512f fma", "generic"),
            ("aarch64", "", "neon_dotprod"),
            ("arm64", "asimddp", "neon"),
        ],
    )
    def test_the_best_that_the_processor_can_run(self, machine, without, name, processor):
        processor(machine, without)
        assert prebuilt.best().name == name

    def test_an_unknown_processor_gets_what_all_can_run(self, monkeypatch):
        monkeypatch.setattr("builtins.open", Mock(side_effect=PermissionError))
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(sys, "platform", "linux")
        assert instruction_sets.features() == frozenset()
        assert prebuilt.best().name == "generic"

    def test_another_kind_of_processor(self, monkeypatch):
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(build.Unavailable, match="riscv64"):
            prebuilt.best()
        assert instruction_sets.target() == toolchain.THIS_MACHINE

    @pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="/proc/cpuinfo of x86-64")
    def test_features_are_those_of_the_processor(self):
        assert {"fpu", "sse2"} <= instruction_sets.features()

    def test_features_of_arm64(self, monkeypatch):
        monkeypatch.setattr("builtins.open", mock_open(read_data="processor\t: 0\nFeatures\t: fp asimd asimddp\n"))
        monkeypatch.setattr(sys, "platform", "linux")
        assert instruction_sets.features() == {"fp", "asimd", "asimddp"}

    def test_features_of_macos(self, processor, monkeypatch):
        features = "FPU SSE2 FMA MOVBE F16C AVX1.0\nBMI1 AVX2 BMI2\nLAHF LZCNT\n"
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(instruction_sets.subprocess, "run", lambda *_, **__: Mock(stdout=features))
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        assert prebuilt.best().name == "avx2"

    @pytest.mark.parametrize("value", ["", "native"])
    def test_native_forces_none(self, value, processor, monkeypatch):
        processor()
        monkeypatch.setenv("LONGSPAN_ISA", value)
        assert instruction_sets.forced() is None
        assert instruction_sets.target() == toolchain.THIS_MACHINE

    def test_lower_ones_can_be_forced(self, processor, monkeypatch):
        processor()
        monkeypatch.setenv("LONGSPAN_ISA", "avx2")
        assert prebuilt.best().name == "avx2"
        assert instruction_sets.target() == "-march=x86-64-v3"

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("avx512", "'avx512' needs a processor with avx512f, avx512vl; pass native, avx2 or generic$"),
            ("avx3", "'avx3': x86_64 processors do not have it; pass native, avx512, avx2 or generic$"),
            ("amx_bf16", "'amx_bf16': no kernel has code for it; pass native, avx512, avx2 or generic$"),
        ],
        ids=["not on this processor", "unknown", "without code"],
    )
    def test_impossible_ones_are_refused(self, value, reason, tiny, processor, monkeypatch):
        processor("x86_64", "avx512f avx512vl")
        monkeypatch.setenv("LONGSPAN_ISA", value)
        monkeypatch.setattr(toolchain, "compile", never)
        with pytest.raises(build.Unavailable, match=f"LONGSPAN_ISA={reason}"):
            build.find("linear/tiny")
        with pytest.warns(RuntimeWarning, match=f"without its native CPU kernels: LONGSPAN_ISA={reason}"):
            assert build.loaded("linear/tiny") is None

    def test_a_set_is_built_once_a_source_has_code_for_it(self, tiny, processor):
        assert [one.name for one in instruction_sets.built()] == ["avx512", "avx2", "generic"]
        tiny.with_suffix(".h").write_text("#define ANSWER 42\n#if defined(__AVX512BF16__)\n#endif\n")
        # The text of files that do not change is read once.
        instruction_sets._code.cache_clear()
        processor()
        assert [one.name for one in instruction_sets.built()] == ["avx512_bf16", "avx512", "avx2", "generic"]
        assert prebuilt.best().name == "avx512_bf16"
        processor("x86_64", "avx512_bf16")
        assert prebuilt.best().name == "avx512"

    @needs_compiler
    def test_the_table_has_flags_of_the_compiler_and_names_of_the_report(self, tmp_path):
        """A library reports every set up to its own."""
        header, names = toolchain.FOLDER / "shared" / instruction_sets.REPORT, []
        for one in reversed(instruction_sets.known()):
            names.append(one.name)
            library = tmp_path / f"{one.name}.so"
            flags = ["-shared", "-fPIC", "-O1", *one.flags.split(), "-x", "c++"]
            toolchain.run([*COMPILER, *flags, str(header), "-o", str(library)])
            report = ctypes.CDLL(str(library)).longspan_isa
            report.restype = ctypes.c_char_p
            assert report().decode().split() == names

    @needs_compiler
    @pytest.mark.skipif("avx2" not in [one.name for one in instruction_sets.owned()], reason="needs AVX2")
    def test_a_compiler_that_cannot_follow_is_refused(self, tiny, monkeypatch):
        tiny.write_text(f'#include "{toolchain.FOLDER}/shared/isa.h"\n#include "tiny.h"\n{TINY}')
        monkeypatch.setenv("LONGSPAN_ISA", "avx2")
        assert build.find("linear/tiny").isa == "avx2"
        monkeypatch.setenv("CXX", f"{COMPILER[0]} -mno-avx2")
        with pytest.raises(build.Unavailable, match="LONGSPAN_ISA=avx2, but the compiler generates code for generic"):
            build.find("linear/tiny")
        monkeypatch.delenv("LONGSPAN_ISA")
        assert build.find("linear/tiny").isa == "generic"
