"""Run an experiment point by point; each point is saved when it is done."""

import importlib.metadata
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspan._utils import atomic_io, optional_deps, png, signals
from longspan._utils.locks import exclusive_lock
from longspan.models import checkpoint

from .._utils import plots
from . import page, provenance
from .experiment import Experiment, Place, Result, Row, Track, words

# Total time of the points. Older results lack the clock time.
NOTHING_YET = {"cpu_seconds": 0.0, "clock_seconds": 0.0}


def run(name: str, experiment: Experiment, scale: str, settings: Any, out: Path, track: Track) -> Result:
    """Measure every point that ``out/NAME.json`` lacks; write that file after each, and finally a picture
    and ``NAME.md``.

    -> experiment, source, scale, settings, longspan (its version), commit (of its checkout, "" outside one), versions,
    data (checksums), machines, cpu_seconds and clock_seconds (of all points) and rows: the fields of each point
    together with its figures. Ctrl-C loses the current point, except for what it saved in
    ``out/NAME-work``.

    Raises ``signals.Interrupted``, which names what was saved, after Ctrl-C and SIGTERM; ValueError if a model cannot
    be built, the files cannot be written (any more), another process runs it, or the folder holds the experiment with
    other settings, data or version; ImportError without matplotlib or what the experiment needs.
    """
    optional_deps.need("the experiments", "matplotlib", "PIL", *experiment.needs)
    settings.buildable()
    png.claim_folder(out)
    png.check(out / f"{name}.png")
    for end in ("json", "md"):
        atomic_io.check_output(out / f"{name}.{end}")
    plots.pyplot()
    with exclusive_lock(out / f".{name}.lock", str(out / f"{name}.json")):
        return _run(name, experiment, scale, settings, out, track)


def _run(name: str, experiment: Experiment, scale: str, settings: Any, out: Path, track: Track) -> Result:
    """``run`` in a folder without another process at this experiment."""
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
        raise signals.with_text(error, f"interrupted: {_kept(path, points)}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ValueError(f"{where}{error.strerror or error}; {_kept(path, points)}") from error
    return result


def show(name: str, experiment: Experiment, result: Result, out: Path) -> None:
    """Write ``out/NAME.png`` and ``out/NAME.md`` of a complete result."""
    picture(out / f"{name}.png", experiment, result)
    checkpoint.write_text(out / f"{name}.md", page.fragment(experiment, result, page.pictures(out, name)))


def missing(path: Path, experiment: Experiment, settings: Any) -> list[Row]:
    """Points that ``path`` lacks for these settings, regardless of the data."""
    points = experiment.points(settings)
    try:
        result = json.loads(atomic_io.read_text(path))
        asked = [json.loads(json.dumps(asdict(settings))), importlib.metadata.version("longspan")]
        return _left(points, result["rows"] if [result["settings"], result["longspan"]] == asked else [])
    except (OSError, ValueError, KeyError, TypeError):
        return points


def _left(points: list[Row], rows: list[Row]) -> list[Row]:
    return [point for point in points if not any(point.items() <= row.items() for row in rows)]


def _kept(path: Path, points: list[Row]) -> str:
    rows = json.loads(atomic_io.read_text(path))["rows"]
    kept = f"{len(rows)} of {len(points)} points are in {path}" if rows else "before the first point was done"
    return f"{kept}; the same command goes on from there"


def picture(path: Path, experiment: Experiment, result: Result, *, dark: bool = False) -> None:
    """Draw a result as one PNG, atomically; ``dark``: and as one for dark pages."""
    plt = plots.pyplot()
    figure = experiment.draw(plt, result)
    plots.save(plt, figure, path, dark=dark)


def _begun(path: Path, name: str, experiment: Experiment, scale: str, settings: Any, work: Path) -> Result:
    """Load the existing part of a result, or start a new one."""
    version = importlib.metadata.version("longspan")
    asked = json.loads(json.dumps(asdict(settings)))
    data = experiment.data(settings)
    fresh = {"experiment": name, "source": experiment.source, "scale": scale, "settings": asked, "longspan": version}
    if not path.exists():
        if work.exists():
            raise ValueError(f"{work} belongs to a {path.name} that is not there; delete it or choose another --out")
        return {**fresh, "data": data, "machines": [], **NOTHING_YET, "rows": []}
    try:
        result = json.loads(atomic_io.read_text(path))
        found = {"longspan": result["longspan"], **result["settings"]}
        old = {f"data.{key}": value for key, value in result.get("data", data).items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no {name} experiment; choose another folder with --out") from error
    new = {"longspan": version, **asked, **{f"data.{key}": value for key, value in data.items()}}
    for fact, value in _differences(new, found | old):
        raise ValueError(f"{path} was made with {fact}={words(value)}; choose another folder with --out or delete it")
    return {**NOTHING_YET, **result, "source": experiment.source}


def _took_part(result: Result, packages: tuple[str, ...]) -> None:
    """Record the environment of the next rows in addition to that of the earlier ones."""
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
