"""Name what is not a regular file as input or output: it is refused in one line, at once, and stays what it is.

FIFOs, sockets, devices (where they can be made), links to them, dangling and circular links, folders, names below a
file, names that no file can have, and places in /dev and /proc. What can be written is written whole and alone.
"""

import contextlib
import functools
import io
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import longspan
from longspan import data
from longspan._utils import atomic_io, png
from longspan.cli import entry
from longspan.models import checkpoint
from longspan.speech import wav
from longspan.train import run_summary
from longspan.train.learned import history
from longspan_lab._utils import plots
from longspan_lab.data import proteins, series
from longspan_lab.experiments.experiment import Place
from longspan_lab.speech import fsdd

from . import Case
from ._bounds import bounded, complaint

SHORT, LONG = 40, 3000
SECONDS, GIB = 10.0, 1.0
NODES = ("fifo", "socket", "device", "endless", "link to fifo", "link to device", "dangling", "circle", "folder")
# None of them is, or becomes, a file that belongs to somebody.
PLACES = ("below a file/x", "a\0b", "x" * 300, "/proc/longspan-attack", "/dev/fd/longspan-attack", "/proc/self/fd/x")
ENDLESS = ("/dev/zero", "/dev/full", "/proc/self/mem")


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    inputs, outputs = _readers(folder / "run"), _writers()
    for number in range(count):
        choice = random.Random(f"{seed}/{number}")
        reads = choice.random() < 0.5
        name = choice.choice(sorted(inputs if reads else outputs))
        what = choice.choice((*NODES, *PLACES, *(ENDLESS if reads else ())))
        case = functools.partial(_attack, folder, inputs if reads else outputs, name, what, reads)
        yield f"{number} {name}: {what[:40]!r}", case


def _attack(folder: Path, calls: dict[str, Callable[[Path], Any]], name: str, what: str, reads: bool) -> str | None:
    place = folder / "place"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "below a file").touch()
    path = Path(what) if what.startswith("/") else place / (f"x{_end(name)}" if what in NODES else what)
    if what in NODES and not _make(path, what):
        return None
    before = _seen(place)
    try:
        with bounded(SECONDS, GIB), contextlib.redirect_stdout(io.StringIO()):
            calls[name](path)
    except OSError as error:
        # The name is in the error, from which the command line makes its line.
        return None if error.filename else complaint(error)
    except Exception as error:
        return complaint(error) or _changed(before, place, path, written=False)
    # A text may be a folder, but not an empty one; and a link may give way to a file.
    if reads or what != "dangling":
        return "it was taken"
    return _changed(before, place, path, written=True)


def _changed(before: dict, place: Path, path: Path, written: bool) -> str | None:
    after = _seen(place)
    if written:
        if path.is_symlink():
            return "the link is still there"
        before, after = ({name: one for name, one in found.items() if name != path.name} for found in (before, after))
    return None if before == after else f"it left {sorted(after)} of {sorted(before)}"


def _seen(place: Path) -> dict[str, tuple]:
    """What is in the folder: kinds and numbers of files."""
    found = {name: os.lstat(place / name) for name in os.listdir(place)}
    return {name: (one.st_ino, stat.S_IFMT(one.st_mode), one.st_size) for name, one in found.items()}


def _make(path: Path, what: str) -> bool:
    """Make something that is no regular file; False where it cannot be made here."""
    other = path.with_name("other")
    match what:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                try:
                    one.bind(str(path))
                except OSError:
                    return False
        case "device" | "endless":
            try:
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3 if what == "device" else 5))
            except PermissionError:
                return False
        case "link to fifo":
            os.mkfifo(other)
            path.symlink_to(other.name)
        case "link to device":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to("absent")
        case "circle":
            path.symlink_to(path.name)
        case "folder":
            path.mkdir()
    return True


def _end(name: str) -> str:
    return name.rpartition(" ")[2] if " ." in name else ""


def _command(*words: str) -> Callable[[Path], None]:
    """A command line whose word PATH is the path. Raises what stands on its line, where it ends with code 2."""

    def call(path: Path) -> None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = entry.main([word.replace("PATH", str(path)) for word in words])
        if code:
            text = said.getvalue()
            assert code == entry.WRONG, f"exit code {code}: {text}"
            raise ValueError(text.removesuffix("\n"))

    return call


def _writers() -> dict[str, Callable[[Path], Any]]:
    state, image = longspan.build("linear", 8, 2).init_state(1), torch.zeros(1, 2, 2, dtype=torch.uint8)
    return {
        "write_text": lambda path: checkpoint.write_text(path, "new"),
        "save_state": lambda path: longspan.states.save(state, path),
        "picture .png": lambda path: png.save(path, image),
        "figure .png": _figure,
        "save": lambda path: _save(path) if not path.is_dir() else _refused(),
        "generate .png": _command("generate", "mnist", "--count", "1", "--out", "PATH"),
        # The whole of it takes seconds.
        "export": lambda path: _refused() if _dangling(path) else _command("export", "text", "PATH")(path),
        "show .png": _command("show", "sparse(pattern='band(2)')", "--tokens", "8", "--draw", "PATH"),
        "train": lambda path: _refused() if _empty(path) else _command("train", *_tiny("PATH"))(path),
        "bench": lambda path: _refused() if _empty(path) else _command("bench", "limits", "--out", "PATH")(path),
    }


def _readers(run: Path) -> dict[str, Callable[[Path], Any]]:
    """Everything that reads a file by its name, and files inside a run's folder."""
    like = longspan.build("linear", 8, 2).init_state(1)
    inside = functools.partial(_inside, _run(run))
    return {
        "load_state": lambda path: longspan.states.load(path, like=like),
        "load": longspan.load,
        "wav": wav.read,
        "wav in pieces": lambda path: next(wav.chunks(path, 0.1)),
        "text .txt": lambda path: data.load(f"text:{path}"),
        "text .gz": lambda path: data.load(f"text:{path}"),
        "text .xz": lambda path: data.load(f"text:{path}"),
        "pairs": lambda path: data.load(f"pairs:{path}"),
        "mnist": lambda path: data.load(f"mnist:{path}"),
        "series": lambda path: series.load(f"ett:{path}"),
        "proteins": lambda path: proteins.load(f"protein:{path}"),
        "recordings": lambda path: fsdd.recordings(str(path)),
        "kept values .pt": _kept,
        "recipe": _command("train", "--config", "PATH"),
        "data": _command("train", *_tiny("unused"), "--run.data", "text:PATH"),
        "transcribe .wav": _command("transcribe", "digits", "PATH"),
        "eval": _command("eval", "PATH"),
        "compare": _command("compare", "PATH"),
        **{
            f"{call.__name__} of {name}": functools.partial(inside, name, call)
            for name, calls in {
                "config.yaml": (run_summary.facts,),
                "metrics.csv": (run_summary.facts,),
                "learned.jsonl": (history,),
                "checkpoints/last": (longspan.load, run_summary.facts),
                "checkpoints/step/config.json": (longspan.load,),
                "checkpoints/step/model.safetensors": (longspan.load, run_summary.facts),
                "checkpoints/step/training.pt": (checkpoint.load_training,),
            }.items()
            for call in calls
        },
    }


def _inside(run: Path, name: str, call: Callable[[Path], Any], path: Path) -> None:
    """Call something on a copy of a run, in which a link to ``path`` has the name."""
    copy = run.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    (copy / name).unlink()
    if "\0" in str(path) or not os.path.lexists(path):
        _refused()
    (copy / name).symlink_to(path)
    call(copy / "checkpoints" / "step" if "training" in name else copy)
    # A table that is not there has no rows, and so has one whose link leads nowhere.
    if not path.exists() and name in ("metrics.csv", "learned.jsonl"):
        _refused()


def _run(folder: Path) -> Path:
    _save(folder / "checkpoints" / "step", training={"seen": 1})
    for name, text in {
        "checkpoints/last": "step\n",
        "config.yaml": "model: {}\nrun: {data: digits}\n",
        "metrics.csv": "step,validation_bits,tokens_per_second,seconds\n1,3,5,10\n",
        "learned.jsonl": "",
    }.items():
        (folder / name).write_text(text)
    return folder


def _save(path: Path, **more: Any) -> None:
    model = longspan.Decoder(longspan.DecoderConfig(dim=4, depth=1, heads=2, feedforward=4, vocab=5, length=3))
    longspan.save(model, path, **more)


def _figure(path: Path) -> None:
    atomic_io.check_output(path)
    plt = plots.pyplot()
    plots.save(plt, plt.figure(figsize=(1, 1)), path)


def _tiny(out: str) -> list[str]:
    words = "--model.vocab 256 --model.dim 4 --run.steps 1 --run.data text:absent --run.out"
    return [*words.split(), out]


def _empty(path: Path) -> bool:
    """Whether a run could begin there."""
    return "\0" not in str(path) and path.is_dir()


def _dangling(path: Path) -> bool:
    return "\0" not in str(path) and path.is_symlink() and not path.exists()


def _kept(path: Path) -> None:
    found = Place(path.parent, track=lambda items, *_: items).load(path.stem) if path.suffix == ".pt" else None
    if found is None:
        _refused()


def _refused() -> None:
    raise ValueError("it does not apply")
