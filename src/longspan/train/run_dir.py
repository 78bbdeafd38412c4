"""The run directory: ownership, existing checkpoints, and where to resume."""

import contextlib
import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from .._utils import atomic_io
from .._utils.locks import exclusive_lock
from ..models import checkpoint
from ..models.checkpoint import DATA, TOKENIZER
from ..models.config import DecoderConfig
from . import launch
from .config import TrainConfig

CONFIG, LOCK = "config.yaml", ".lock"
# A resumed run may change these fields: they determine where and how long, not what.
FREE = ("steps", "out", "seconds", "save_every", "keep", "logger", "peak_tflops", "async_checkpoints", "timeout")
# These may change as long as each step reads the same examples.
SHARES = ("batch", "accumulate", "devices", "nodes", "sequence_parallel")


def recipe(config: DecoderConfig, run: TrainConfig) -> dict[str, Any]:
    """A config and a run as plain values for ``longspan train --config``; a decoder needs no kind."""
    kind = checkpoint.kind_of(config)
    return {"model": ({} if kind == "decoder" else {"kind": kind}) | asdict(config), "run": asdict(run)}


def begun(folder: str | Path) -> bool:
    """Whether a run was started in ``folder`` and can be resumed."""
    return (Path(folder) / CONFIG).exists()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make and lock the folder; if the run never starts, remove what was made.

    Raises ValueError if another process holds the lock, or if the folder cannot be written.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, made)
        with _named(f"cannot write the run's folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(folder / LOCK, f"into {folder}"))
        stack.callback(_tidy, folder)
        yield


def claim(folder: Path, recipe: dict[str, Any], resume: bool) -> None:
    """Check that the locked folder can be used. Raises ValueError if it has another run, or nothing to resume."""
    with _named(f"cannot read the run's folder {folder}"):
        taken = bool(_content(folder))
        if resume and not taken:
            raise ValueError(f"nothing to resume in {folder}; start the run without resume")
        if taken and not resume:
            if not begun(folder):
                raise ValueError(f"{folder} is not empty and holds no run; choose another folder with out")
            command = f"longspan train --config {shlex.quote(str(folder / CONFIG))} --resume"
            if recipe["model"].get("kind") == checkpoint.CHANGES:
                command = "longspan finetune ... --resume"
            raise ValueError(
                f"{folder} holds a run; resume it with `{command}`, in Python with resume=True and the settings of "
                f"{CONFIG}, or choose another folder with out"
            )
        if resume:
            _same(folder, recipe)


def adjusted(folder: Path, run: TrainConfig) -> TrainConfig:
    """The run with as many micro-batches per step as give the examples per step of the run in ``folder``.

    With streams each row of the batch has a state, so the number of rows must stay. All processes call this.

    Raises ValueError if the devices cannot share the examples of a step evenly.
    """
    if run.stream or not begun(folder):
        return run
    before = _recipe(folder / CONFIG)["run"]
    wanted = _rows(before) * before["accumulate"]
    # The first process may have written its adjusted config by the time that the others read it.
    meant = launch.first() and run.accumulate != before["accumulate"]
    if run.step_examples == wanted or run.batch != before["batch"] or meant:
        return run
    accumulate, rest = divmod(wanted, run.batch * run.readers)
    if rest:
        share = "" if wanted % run.readers else f"set run.batch to a divisor of {wanted // run.readers}, or "
        raise ValueError(
            f"cannot resume {folder} on {run.world} devices with run.batch={run.batch}: a step has {wanted} examples, "
            f"which is not a multiple of {run.batch * run.readers}; {share}choose another number of devices"
        )
    return replace(run, accumulate=accumulate)


def start(folder: Path) -> tuple[Path | None, str]:
    """The checkpoint to resume from (None: the beginning), and a remark if it is not ``last``.

    Raises ValueError for a ``last`` that is not a pointer.
    """
    at = folder / "checkpoints"
    if (at / "last").exists():
        pointer(at / "last")
        return checkpoint.resolve(folder, prefer="last"), ""
    found = sorted(path for path in at.glob("step-*") if (path / checkpoint.TRAINING).exists())
    if not found:
        return None, ""
    return found[-1], f"{at / 'last'} is missing; continuing from {found[-1].name}, the newest checkpoint"


def check_data(start: Path, data: str, dataset: Any) -> None:
    """Compare data with those that the training of a checkpoint has read.

    Compared are the sha256 of the data and that of the tokenizer. Checkpoints of older versions have the latter only.

    Args:
        start: the checkpoint.
        data: the name of the data.
        dataset: the data; see ``data.load``.

    Raises:
        ValueError: for other data, and for another tokenizer.
    """
    header = checkpoint.read_config(start)
    tokenizer = getattr(dataset, "tokenizer", "").encode()
    before, now = header.get(DATA, dataset.checksum), dataset.checksum
    what = "other data"
    if TOKENIZER in header["files"] and before == now:
        before, now = header["files"][TOKENIZER]["sha256"], hashlib.sha256(tokenizer).hexdigest()
        what = "another tokenizer"
    if before != now:
        raise ValueError(
            f"cannot resume {start} with {what}: {data} has changed since then, its sha256 is {now} instead of "
            f"{before}; restore it, or start another run with another out"
        )


def pointer(path: Path) -> str:
    """The name of the checkpoint that ``checkpoints/last`` or ``checkpoints/best`` holds. Raises ValueError."""
    try:
        return atomic_io.read_text(path).strip()
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: it does not hold the name of a checkpoint ({error})") from error


def kept(folder: Path) -> str:
    """The last good checkpoint, as part of a message."""
    last = folder / "checkpoints" / "last"
    return f"the last good checkpoint is {pointer(last)}" if last.exists() else "nothing was saved yet"


def _content(folder: Path) -> list[str]:
    """Names in the folder, without the leftovers of a run that never started."""
    return [path.name for path in folder.iterdir() if path.name != LOCK and not path.name.startswith(f".{CONFIG}.")]


def _tidy(folder: Path) -> None:
    """Remove the leftovers of a run that never started."""
    with contextlib.suppress(OSError):
        for path in [] if _content(folder) else folder.iterdir():
            if path.name != LOCK:
                path.unlink()


def _remove(made: list[Path]) -> None:
    """Remove these folders while they are empty, the innermost first."""
    with contextlib.suppress(OSError):
        for one in made:
            one.rmdir()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn OSErrors into ValueErrors that begin with ``what``."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}") from error


def _recipe(path: Path) -> dict[str, dict[str, Any]]:
    """The recipe in a run's config.yaml, complete. Raises ValueError if it is corrupt."""
    try:
        found = yaml.safe_load(atomic_io.read_text(path))
        # A field that an older version did not have had the value of its default.
        kind = found["model"].get("kind", "decoder")
        usual = {"kind": kind} | asdict(checkpoint.MODEL_CLASSES[kind][0]())
        return {"model": usual | found["model"], "run": asdict(TrainConfig(**found["run"]))}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _corrupt(path) from error


def _corrupt(path: Path) -> ValueError:
    return ValueError(f"{path} is corrupt: it holds no model and run")


def _sharing(run: dict[str, Any]) -> tuple[int, ...]:
    """What ``SHARES`` must keep: the examples of a step; with streams the rows and the micro-batches of a step."""
    rows = _rows(run)
    return (rows, run["accumulate"]) if run["stream"] else (rows * run["accumulate"],)


def _rows(run: dict[str, Any]) -> int:
    """The examples of a micro-batch on all devices."""
    return run["batch"] * (run["devices"] * run["nodes"] // run["sequence_parallel"])


def _same(folder: Path, recipe: dict[str, Any]) -> None:
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} holds no run: it has no {CONFIG}; choose another folder by out")
    before = _recipe(path)
    try:
        now = {"model": {"kind": "decoder"} | recipe["model"], "run": recipe["run"]}
        then = before["run"]
        free = FREE + (SHARES if _sharing(then) == _sharing(recipe["run"]) else ())
        # Checkpoints of fsdp are in parts, one for each process.
        free += ("strategy",) if "fsdp" not in {then["strategy"], recipe["run"]["strategy"]} else ()
        differ = [
            f"{part}.{name} ({old.get(name, 'absent')} -> {new.get(name, 'absent')})"
            for part, old, new in ((part, before[part], now[part]) for part in ("model", "run"))
            for name in dict.fromkeys((*old, *new))
            if old.get(name) != new.get(name) and not (part == "run" and name in free)
        ]
        fewer = recipe["run"]["steps"] < before["run"]["steps"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _corrupt(path) from error
    if fewer:
        differ.append(f"run.steps ({before['run']['steps']} -> {recipe['run']['steps']}; it may only grow)")
    if differ:
        raise ValueError(f"cannot resume {folder} with other settings: {', '.join(differ)}")
