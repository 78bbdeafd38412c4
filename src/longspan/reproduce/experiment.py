"""What an experiment is, and how one runs: point by point, each kept as soon as it is done."""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import checkpoint, extras, files, pictures, signals
from ..bench import plots
from ..bench.report import Table
from ..lock import alone
from . import page, provenance

Result = dict[str, Any]
Row = dict[str, Any]
Track = Callable[[Iterable[Any], int, str], Iterable[Any]]
QUICK = "quick"
# What the points took together. Results of earlier days do not have the clock's.
NOTHING_YET = {"cpu_seconds": 0.0, "clock_seconds": 0.0}
DEVICES: dict[str, None] = {"cpu": None, "cuda": None}


class Place(NamedTuple):
    """Where a point that takes long may keep what it has, and how it shows that it is getting on.

    ``folder``: the experiment's own, ``out/NAME-work``, made by who first needs it; everything in it belongs to the
    settings of ``out/NAME.json``. Pictures besides the experiment's own go to ``folder.parent`` as ``NAME-*.png``.
    ``track(items, total, label)``: yields the items, with a bar on a terminal.
    """

    folder: Path
    track: Track

    def load(self, name: str) -> Row | None:
        """What ``save`` was last given under this name; None where there is nothing.

        Raises ValueError for a file of another kind.
        """
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            with files.open_regular(path) as file:
                return torch.load(file, weights_only=True)
        # A foreign file may make the unpickler stumble over anything.
        except Exception as error:
            raise ValueError(f"{path} is corrupt or foreign; delete it") from error

    def save(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep plain values and tensors, whole or not at all. Raises OSError, with the file's name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(dict(values), content)
        files.write(self.folder / f"{name}.pt", content.getvalue())


def setting(default: Any, what: str) -> Any:
    """A field of an experiment's settings: its default, and what the help of its flag says."""
    return field(default=default, metadata={"help": what})


def synthetic(settings: Any) -> dict[str, str]:
    """No data but what the seed makes."""
    return {}


class Buildable:
    """The base of an experiment's settings."""

    def buildable(self) -> None:
        """Raise ValueError for a model that cannot be built.

        Asked before any point is measured, since it should not wait for its turn; and not when settings are made, as
        those of all scales are with the module: models take time, even where they are nothing but shapes.
        """


class Experiment(NamedTuple):
    """A published result that can be had again.

    ``scales`` (name -> settings; "laptop" always, "gpu" and "paper" where there is more) and ``quick`` are frozen
    dataclasses of the same type, a ``Buildable``, whose fields (whole and broken numbers, words, and tuples of numbers
    or words, each with a ``help`` in its metadata) are the flags of the command. ``points`` lists what is to be
    measured as plain dicts; ``measure(settings, point, place)`` gives one point's figures, which depend on the settings
    and the point alone, except for timings; ``tables`` and ``draw`` show the result, which ``run`` describes.
    """

    about: str
    scales: dict[str, Any]
    quick: Any
    points: Callable[[Any], list[Row]]
    measure: Callable[[Any, Row, Place], Row]
    tables: Callable[[Result], list[Table]]
    draw: Callable[[Any, Result], Any]
    source: str  # what is reproduced, and where the published figures, if there are any, are from
    differs: str  # what is not as published, and why, in sentences
    data: Callable[[Any], dict[str, str]] = synthetic  # settings -> name -> sha256 of the data used
    takes: tuple[str, ...] = ("data",)  # settings, where there are such, that name data; see ``beside``
    minutes: float = 0.0  # of processor time that the scale of a laptop takes, as far as runs tell; 0: not known
    needs: tuple[str, ...] = ()  # packages besides those that draw, whose versions are written down

    def settings(self, scale: str) -> Any:
        """The settings of a scale, or the quick ones. Raises ValueError for a scale that there is not."""
        if scale == QUICK:
            return self.quick
        if scale not in self.scales:
            raise ValueError(f"this experiment has no scale {scale!r}; it has: {', '.join(self.scales)}")
        return self.scales[scale]

    def beside(self, settings: Any, folder: Path) -> Any:
        """The settings with the data that ``folder`` has: a setting of ``takes`` that is the bare name of a folder in
        it, as ``mnist`` or one of several words with semicolons between, becomes ``mnist:FOLDER/mnist``.

        What names its source itself stays, as ``text:stdlib`` does.
        """

        def placed(word: str) -> str:
            return f"{word}:{folder / word}" if word.isidentifier() and (folder / word).is_dir() else word

        words = {one.name: getattr(settings, one.name).split(";") for one in fields(settings) if one.name in self.takes}
        return replace(settings, **{name: "; ".join(placed(one.strip()) for one in words[name]) for name in words})


def run(name: str, experiment: Experiment, scale: str, settings: Any, out: Path, track: Track) -> Result:
    """Measure every point that ``out/NAME.json`` does not hold yet; write that file after each, and at last a picture
    and ``NAME.md``.

    -> experiment, source, scale, settings, longspan (its version), commit (of its checkout, "" outside one), versions,
    data (checksums), machines, cpu_seconds and clock_seconds (of all points) and rows: the fields of each point
    together with its figures. Ctrl-C loses the point at which it comes, up to what that point keeps in
    ``out/NAME-work``.

    Raises ``signals.Interrupted``, which says what is kept, after Ctrl-C and SIGTERM; ValueError where a model cannot
    be built, the files cannot be written (any more), another process is at it, or the folder holds the experiment with
    other settings, data or version; ImportError without matplotlib or what the experiment needs.
    """
    extras.need("the experiments", "matplotlib", "PIL", *experiment.needs)
    settings.buildable()
    pictures.claim_folder(out)
    pictures.check(out / f"{name}.png")
    for end in ("json", "md"):
        files.check_output(out / f"{name}.{end}")
    plots.pyplot()
    with alone(out / f".{name}.lock", str(out / f"{name}.json")):
        return _run(name, experiment, scale, settings, out, track)


def _run(name: str, experiment: Experiment, scale: str, settings: Any, out: Path, track: Track) -> Result:
    """``run`` in a folder in which nobody else is at this experiment."""
    path = out / f"{name}.json"
    place = Place(out / f"{name}-work", track)
    result = _begun(path, name, experiment, scale, settings, place.folder)
    rows, points = result["rows"], experiment.points(settings)
    todo = _left(points, rows)
    if todo:
        _took_part(result, experiment.needs)
        _write(path, result)
    try:
        for point in track(todo, len(todo), name):
            begin, since = time.process_time(), time.monotonic()
            rows.append({**point, **experiment.measure(settings, point, place)})
            result["cpu_seconds"] = round(result["cpu_seconds"] + time.process_time() - begin, 2)
            result["clock_seconds"] = round(result["clock_seconds"] + time.monotonic() - since, 2)
            _write(path, result)
        show(name, experiment, result, out)
    except KeyboardInterrupt as error:
        raise signals.told(error, f"interrupted: {_kept(path, points)}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ValueError(f"{where}{error.strerror or error}; {_kept(path, points)}") from error
    return result


def show(name: str, experiment: Experiment, result: Result, out: Path) -> None:
    """Write ``out/NAME.png`` and ``out/NAME.md`` of a whole result."""
    picture(out / f"{name}.png", experiment, result)
    checkpoint.write_text(out / f"{name}.md", page.fragment(experiment, result, page.pictures(out, name)))


def missing(path: Path, experiment: Experiment, settings: Any) -> list[Row]:
    """The points that ``path`` does not hold with these settings, whatever data they were measured on."""
    points = experiment.points(settings)
    try:
        result = json.loads(files.read_text(path))
        asked = [json.loads(json.dumps(asdict(settings))), importlib.metadata.version("longspan")]
        return _left(points, result["rows"] if [result["settings"], result["longspan"]] == asked else [])
    except (OSError, ValueError, KeyError, TypeError):
        return points


def _left(points: list[Row], rows: list[Row]) -> list[Row]:
    return [point for point in points if not any(point.items() <= row.items() for row in rows)]


def _kept(path: Path, points: list[Row]) -> str:
    rows = json.loads(files.read_text(path))["rows"]
    kept = f"{len(rows)} of {len(points)} points are in {path}" if rows else "before the first point was done"
    return f"{kept}; the same command goes on from there"


def picture(path: Path, experiment: Experiment, result: Result) -> None:
    """Draw a result as one PNG, whole or not at all."""
    plt = plots.pyplot()
    figure = experiment.draw(plt, result)
    plots.save(plt, figure, path)


def generator(seed: int, *names: object) -> torch.Generator:
    """Random numbers that depend on these arguments alone, so that points can be measured in any order."""
    digest = hashlib.sha256(json.dumps([seed, *names], sort_keys=True).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


@contextlib.contextmanager
def drawing(seed: int, *names: object) -> Iterator[None]:
    """What PyTorch draws inside, as some mechanisms do, depends on these alone, and nothing outside on that."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, *names).initial_seed())
        yield


def at_least(least: int, **values: int | tuple[int, ...]) -> None:
    """Raise ValueError unless each of these numbers, or each of several, is that large."""
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < least:
            raise ValueError(f"{name}={page.words(value)} must be at least {least}")


def check_device(name: str) -> None:
    """Raise ValueError where torch does not see the device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no GPU here; --device cpu measures on the processor")


def _begun(path: Path, name: str, experiment: Experiment, scale: str, settings: Any, work: Path) -> Result:
    """What is there of this result; a new one where nothing is."""
    version = importlib.metadata.version("longspan")
    asked = json.loads(json.dumps(asdict(settings)))
    data = experiment.data(settings)
    fresh = {"experiment": name, "source": experiment.source, "scale": scale, "settings": asked, "longspan": version}
    if not path.exists():
        if work.exists():
            raise ValueError(f"{work} belongs to a {path.name} that is not there; delete it or choose another --out")
        return {**fresh, "data": data, "machines": [], **NOTHING_YET, "rows": []}
    try:
        result = json.loads(files.read_text(path))
        found = {"longspan": result["longspan"], **result["settings"]}
        old = {f"data.{key}": value for key, value in result.get("data", data).items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no {name} experiment; choose another folder with --out") from error
    new = {"longspan": version, **asked, **{f"data.{key}": value for key, value in data.items()}}
    for fact, value in _differences(new, found | old):
        raise ValueError(
            f"{path} was made with {fact}={page.words(value)}; choose another folder with --out or delete it"
        )
    return {**NOTHING_YET, **result, "source": experiment.source}


def _took_part(result: Result, packages: tuple[str, ...]) -> None:
    """Write down with what the rows to come are measured, beside what the others were measured with."""
    commit, versions, machine = provenance.commit(), provenance.versions(packages), provenance.machine()
    if result["rows"]:
        commit = provenance.joined(result.get("commit", provenance.MISSING), commit)
        versions = provenance.merged(result.get("versions", {}), versions)
    result |= {"commit": commit, "versions": versions}
    if machine not in result["machines"]:
        result["machines"].append(machine)


def _write(path: Path, result: Result) -> None:
    last = ("machines", *NOTHING_YET, "rows")
    order = [*(key for key in result if key not in last), *last]
    checkpoint.write_text(path, json.dumps({key: result[key] for key in order}, indent=1) + "\n")


def _differences(asked: Row, found: Row) -> Iterator[tuple[str, Any]]:
    for fact in [*asked, *(fact for fact in found if fact not in asked)]:
        if asked.get(fact) != found.get(fact):
            yield fact, found.get(fact)
