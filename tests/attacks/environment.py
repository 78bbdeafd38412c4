"""Garbage in the environment: no traceback and one line at most, and the answer is the same as without it.

Homes and caches that are missing or mean nothing, compilers that are no commands, ranks that are no numbers; and, for
root on Linux, a user that the system does not know.
"""

import contextlib
import functools
import io
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

import longspan
from longspan._utils import cache_dirs, signals
from longspan.cli import entry
from longspan.data import absolute
from longspan.ops.native import build
from longspan.ops.native.build import toolchain

from . import Case
from ._bounds import TooLong, bounded, complaint

SHORT, LONG = 15, 3000
SECONDS, GIB = 20.0, 1.0
OTHER_USER = 54321
UNSET = None
WORDS = (UNSET, "", " ", "x", "-1", "'", '"', "\\", "~", "~no-such-user", "~no-such-user/x", "relative", "a" * 5000)
PATHS = (*WORDS, "/proc/x", "/dev/null", "/dev/null/x", "FOLDER/file", "FOLDER/fifo", "FOLDER/open", "FOLDER/new/deep")
VARIABLES = {
    "HOME": PATHS,
    "LONGSPAN_CACHE": PATHS,
    "XDG_CACHE_HOME": PATHS,
    "TMPDIR": PATHS,
    "CXX": (*PATHS, "g++ '", 'c++ "', "''", "c++ -x", "no-such-compiler", "$(x)", "c++ \\"),
    "LONGSPAN_ISA": (*WORDS, "native", "generic", "AVX2", "avx512 "),
    "RANK": (*WORDS, "0", "1.5", "\u0663", "99999999999999999999999"),
    "LOCAL_RANK": (*WORDS, "0", "0x0"),
    "SLURM_PROCID": (*WORDS, "0"),
}


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    # What it imports is not counted.
    _run({})
    (folder / "file").touch()
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    os.mkfifo(folder / "fifo")
    for number in range(count):
        choice = random.Random(f"{seed}/{number}")
        chosen = choice.sample(sorted(VARIABLES), choice.randint(1, 4))
        change = {name: choice.choice(VARIABLES[name]) for name in chosen}
        change = {name: text and text.replace("FOLDER", str(folder)) for name, text in change.items()}
        unknown = number % 10 == 9 and hasattr(os, "getuid") and os.getuid() == 0
        case = functools.partial(_in_child, change) if unknown else functools.partial(_attack, change, folder)
        yield f"{number} {'other user, ' * unknown}{change!r}"[:200].replace(str(folder), "FOLDER"), case


def _attack(change: dict[str, str | None], folder: Path) -> str | None:
    before = Path.cwd()
    work = folder / "work"
    work.mkdir(exist_ok=True)
    os.chdir(work)
    try:
        with bounded(SECONDS, GIB):
            return _run(change)
    except TooLong as error:
        return str(error)
    finally:
        os.chdir(before)
        shutil.rmtree(work)


def _run(change: dict[str, str | None]) -> str | None:
    environment = {name: text for name, text in os.environ.items() if name not in change}
    environment |= {name: text for name, text in change.items() if text is not None}
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(tempfile, "tempdir", None),
        # Kernels are looked for in one place alone, and compiled in none.
        mock.patch.object(build, "_found", dict.fromkeys(build.UNITS)),
    ):
        return _kernels() or _paths() or _command() or _signals()


def _kernels() -> str | None:
    """A call that looks for kernels, on a machine whose compiler compiles nothing: one warning, the same answer."""
    q, k, v = (torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))).unbind()
    with longspan.backend("torch"):
        right = longspan.linear_attention(q, k, v)
    nothing = mock.Mock(side_effect=toolchain.Unavailable("nothing is compiled in an attack"))
    with (
        mock.patch.object(build, "_found", {}),
        mock.patch.object(build.prebuilt, "find", return_value=None),
        mock.patch.object(toolchain, "version", return_value="a compiler"),
        mock.patch.object(toolchain, "compile", nothing),
        mock.patch.object(build.trial, "ready", contextlib.nullcontext),
        mock.patch.object(build, "compile_ahead"),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        try:
            found = longspan.linear_attention(q, k, v)
        except Exception as error:
            return f"a call raised {type(error).__name__}: {error}"
    if not torch.allclose(found, right, atol=1e-5, rtol=1e-5):
        return "the answer is another one"
    lines = [str(one.message) for one in said if "native CPU kernels" in str(one.message)]
    if len(lines) != 1 or "\n" in lines[0]:
        return f"it warned {lines}"
    return None


def _paths() -> str | None:
    for call in (
        cache_dirs.cache_folder,
        functools.partial(absolute, "text:~/a"),
        functools.partial(absolute, "text:~x/a"),
    ):
        try:
            call()
        except Exception as error:
            if said := complaint(error):
                return said
    return None


def _command() -> str | None:
    """A training that cannot begin, whatever the environment is."""
    err = io.StringIO()
    words = ["train", "--model.vocab", "256", "--run.data", "text:~/no/such/text", "--run.out", "run"]
    with contextlib.redirect_stderr(err):
        code = entry.main(words)
    if code != entry.WRONG or err.getvalue().count("\n") != 1:
        return f"exit code {code}: {err.getvalue()!r}"
    if os.path.lexists("run"):
        return "it left a folder"
    return None


def _signals() -> str | None:
    try:
        signals.first_rank()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _in_child(change: dict[str, str | None]) -> str | None:
    """The same as a user that is in no list, in a folder where it may write, without the variables that name one."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        os.chmod(folder, 0o777)
        # Python warns of forks where there are threads; the child starts none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if not child:
            try:
                os.chdir(folder)
                os.setgroups([])
                os.setgid(OTHER_USER)
                os.setuid(OTHER_USER)
                torch.set_num_threads(1)
                said = _run({"HOME": UNSET, "LONGSPAN_CACHE": UNSET, "XDG_CACHE_HOME": UNSET} | change)
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, (said or "").encode()[:2000])
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as file:
            said = file.read().decode()
        os.waitpid(child, 0)
    return said or None
