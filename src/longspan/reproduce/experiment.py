"""What an experiment is, and how one runs: point by point, each kept as soon as it is done."""

import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import checkpoint, pictures
from ..bench import guard, plots
from ..bench.report import Table, aligned

Result = dict[str, Any]
Row = dict[str, Any]
Track = Callable[[Iterable[Row], int, str], Iterable[Row]]


class Experiment(NamedTuple):
    """A published result that can be had again.

    ``full`` and ``quick`` are frozen dataclasses of the same type, whose fields (whole and broken numbers, words, and
    tuples of numbers or words, each with a ``help`` in its metadata) are the flags of the command. ``points`` lists
    what is to be measured as plain dicts; ``measure`` gives one point's figures, which depend on the settings and the
    point alone; ``tables`` and ``draw`` show the result, which ``run`` describes.
    """

    about: str
    full: Any
    quick: Any
    points: Callable[[Any], list[Row]]
    measure: Callable[[Any, Row], Row]
    tables: Callable[[Result], list[Table]]
    draw: Callable[[Any, Result], Any]
    source: str  # what is reproduced, and where the published figures, if there are any, are from


def run(name: str, experiment: Experiment, settings: Any, out: Path, track: Track) -> Result:
    """Measure every point that ``out/NAME.json`` does not hold yet; write that file after each, and a picture at last.

    -> experiment, source, settings, longspan (its version), machines, cpu_seconds and rows: the fields of each point
    together with its figures. Ctrl-C loses the point at which it comes.

    Raises ValueError where the files cannot be written or the folder holds the experiment with other settings,
    ImportError without matplotlib.
    """
    path = out / f"{name}.json"
    pictures.claim_folder(out)
    pictures.check(path.with_suffix(".png"))
    plots.pyplot()
    result = _begun(path, name, experiment, settings)
    rows, points = result["rows"], experiment.points(settings)
    todo = [point for point in points if not any(point.items() <= row.items() for row in rows)]
    machine = {fact: value for fact, value in guard.machine().items() if fact != "load"}
    if todo and machine not in result["machines"]:
        result["machines"].append(machine)
    try:
        for point in track(todo, len(todo), name):
            begin = time.process_time()
            rows.append({**point, **experiment.measure(settings, point)})
            result["cpu_seconds"] = round(result["cpu_seconds"] + time.process_time() - begin, 2)
            checkpoint.write_text(path, json.dumps(result, indent=1) + "\n")
    except KeyboardInterrupt as error:
        kept = f"{len(rows)} of {len(points)} points are in {path}" if rows else "before the first point was done"
        raise KeyboardInterrupt(f"interrupted: {kept}; the same command goes on from there") from error
    picture(path.with_suffix(".png"), experiment, result)
    return result


def picture(path: Path, experiment: Experiment, result: Result) -> None:
    """Draw a result as one PNG, whole or not at all."""
    plt = plots.pyplot()
    figure = experiment.draw(plt, result)
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
    os.replace(temporary, path)


def show(experiment: Experiment, result: Result) -> str:
    """The result as text: its tables, the settings and where it was had."""
    settings = "; ".join(f"{name} {_words(value)}" for name, value in result["settings"].items())
    notes = [f"Reproduces: {result['source']}.", f"Settings: {settings}."]
    notes += [f"Machine: {'; '.join(f'{k} {v}' for k, v in machine.items())}." for machine in result["machines"]]
    notes.append(f"Took {result['cpu_seconds']:.0f} s of processor time, with longspan {result['longspan']}.")
    return "\n\n".join([*(aligned(table) for table in experiment.tables(result)), "\n".join(notes)])


def generator(seed: int, *names: object) -> torch.Generator:
    """Random numbers that depend on these arguments alone, so that points can be measured in any order."""
    digest = hashlib.sha256(json.dumps([seed, *names], sort_keys=True).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def at_least(least: int, **values: int | tuple[int, ...]) -> None:
    """Raise ValueError unless each of these numbers, or each of several, is that large."""
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < least:
            raise ValueError(f"{name}={_words(value)} must be at least {least}")


def _begun(path: Path, name: str, experiment: Experiment, settings: Any) -> Result:
    """What is there of this result; a new one where nothing is."""
    version = importlib.metadata.version("longspan")
    asked = json.loads(json.dumps(asdict(settings)))
    fresh = {"experiment": name, "source": experiment.source, "settings": asked, "longspan": version}
    if not path.exists():
        return {**fresh, "machines": [], "cpu_seconds": 0.0, "rows": []}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        found = {"longspan": result["longspan"], **result["settings"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no {name} experiment; choose another folder with --out") from error
    for fact, value in _differences({"longspan": version, **asked}, found):
        raise ValueError(f"{path} was made with {fact}={_words(value)}; choose another folder with --out or delete it")
    return {**result, **fresh}


def _differences(asked: Row, found: Row) -> Iterator[tuple[str, Any]]:
    for fact in [*asked, *(fact for fact in found if fact not in asked)]:
        if asked.get(fact) != found.get(fact):
            yield fact, found.get(fact)


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
