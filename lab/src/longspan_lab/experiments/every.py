"""Run every experiment in turn: skip finished ones, report those that cannot run, write one page of all results."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from longspan._utils import atomic_io, optional_deps, png
from longspan.models import checkpoint

from .._utils import plots
from . import EXPERIMENTS, page, runner
from .experiment import QUICK, Result, Track

PAGE = "reproduction.md"
# Clock minutes per minute of processor time before the first run; on two cores it lies between a half and one.
USUAL = 0.7


class Outcome(NamedTuple):
    """The outcome of one experiment: "done", "done before", or why it could not run."""

    name: str
    said: str
    failed: bool = False


def names(scale: str, only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[str]:
    """The experiments that have a scale, in the order of their names.

    Raises ValueError if one of ``only`` lacks the scale.
    """
    for name in only:
        EXPERIMENTS[name].settings(scale)
    there = [name for name, one in EXPERIMENTS.items() if scale == QUICK or scale in one.scales]
    return [name for name in there if name not in set(skip) and (not only or name in set(only))]


def run(
    chosen: list[str], scale: str, out: Path, data: Path | None, track: Track, say: Callable[[str], None]
) -> list[Outcome]:
    """Run these experiments at a scale, each as ``longspan reproduce NAME`` would, and write ``out/PAGE``.

    ``data``: a folder with a folder for each kind of data, see ``Experiment.with_data``. If one experiment cannot run,
    because data or a package is missing, the others still run. ``say`` receives a line before each, with the expected
    time of the experiment and of all that remain.

    Raises ``signals.Interrupted`` as ``experiment.run`` does; ValueError and ImportError where nothing could be written
    or drawn.
    """
    optional_deps.need("the experiments", "matplotlib", "PIL")
    png.claim_folder(out)
    atomic_io.check_output(out / PAGE)
    plots.pyplot()
    expected = {name: minutes(name, scale, out, data) for name in chosen}
    found: list[Outcome] = []
    pace = Pace()
    for number, name in enumerate(chosen, 1):
        begin, head = time.monotonic(), f"{name} ({number} of {len(chosen)})"
        try:
            one, settings = EXPERIMENTS[name], _settings(name, scale, data)
            if runner.missing(out / f"{name}.json", one, settings):
                say(f"{head}: {pace.line(expected[name], sum(expected[after] for after in chosen[number - 1 :]))}")
                runner.run(name, one, scale, settings, out, track)
                pace.record(expected[name], time.monotonic() - begin)
                found.append(Outcome(name, "done"))
            else:
                say(f"{head}: done before")
                _shown(name, out)
                found.append(Outcome(name, "done before"))
        except (ValueError, ImportError) as error:
            if isinstance(error, ImportError) and "pip install" not in str(error):
                raise
            found.append(Outcome(name, " ".join(str(error).split()), failed=True))
            say(f"{name} cannot run: {found[-1].said}")
        # After each experiment, so that an interruption leaves a page of the finished ones.
        checkpoint.write_text(out / PAGE, text(out, scale, found))
    return found


class Pace:
    """Clock minutes per minute of processor time, from the experiments of this call."""

    def __init__(self):
        self.expected, self.taken = 0.0, 0.0

    def record(self, expected: float, seconds: float) -> None:
        """Record that an experiment expected to take these minutes of processor time took these seconds."""
        if expected:
            self.expected, self.taken = self.expected + expected, self.taken + seconds / 60

    def clock(self, minutes: float) -> str:
        """Convert minutes of processor time to clock time.

        >>> pace = Pace()
        >>> pace.record(2.0, 60.0)
        >>> pace.clock(50.0)
        '25:00'
        """
        return tqdm.format_interval(60 * minutes * (self.taken / self.expected if self.expected else USUAL))

    def line(self, own: float, left: float) -> str:
        """Format the expected time of an experiment and of all that remain, from processor time; 0: unknown.

        >>> Pace().line(10.0, 30.0), Pace().line(0.0, 0.0)
        ('takes about 07:00; about 21:00 left in all', 'begins')
        """
        if not left:
            return "begins"
        takes = f"takes about {self.clock(own)}" if own else "takes a time that is not known"
        return f"{takes}; about {self.clock(left)} left in all"


def minutes(name: str, scale: str, out: Path, data: Path | None) -> float:
    """Expected remaining minutes of processor time of an experiment; 0.0: unknown or none."""
    one = EXPERIMENTS[name]
    try:
        settings = _settings(name, scale, data)
    except ValueError:
        # Its error is reported when its turn comes.
        return 0.0
    left = len(runner.missing(out / f"{name}.json", one, settings)) / len(one.points(settings))
    return one.minutes * left if scale == "laptop" else 0.0


def _settings(name: str, scale: str, data: Path | None) -> Any:
    one = EXPERIMENTS[name]
    settings = one.settings(scale)
    return settings if data is None else one.with_data(settings, data)


def _shown(name: str, out: Path) -> None:
    """Draw a result from its JSON if its picture or page is missing."""
    path = out / f"{name}.json"
    if not (path.with_suffix(".png").exists() and path.with_suffix(".md").exists()):
        runner.show(name, EXPERIMENTS[name], json.loads(atomic_io.read_text(path)), out)


def text(out: Path, scale: str, found: Iterable[Outcome]) -> str:
    """Return the page of a folder in Markdown: its complete results, and the experiments that could not run."""
    results = dict(_results(out))
    said = {one.name: one.said for one in found if one.failed}
    head = ["# Reproduced results", f"`longspan reproduce all {_flag(scale)} --out FOLDER` wrote this page."]
    rows = ["| experiment | what it measures | took | result |", "|---|---|---|---|"]
    for name, one in EXPERIMENTS.items():
        state = f"[below](#{name})" if name in results else said.get(name, "not measured")
        took = _interval(results[name].get("clock_seconds", 0)) if name in results else ""
        rows.append(f"| `{name}` | {one.about} | {took} | {state.replace('|', '/')} |")
    total = sum(result.get("clock_seconds", 0) for result in results.values())
    parts = ["\n\n".join(head), "\n".join(rows), f"All experiments together took {_interval(total)} by the clock."]
    for name, result in results.items():
        parts.append(f"## {name}\n\n{page.fragment(EXPERIMENTS[name], result, page.pictures(out, name)).rstrip()}")
    return "\n\n".join(parts) + "\n"


def _interval(seconds: float) -> str:
    """Format clock time as hours, minutes and seconds; - if it was not recorded."""
    return tqdm.format_interval(seconds) if seconds else "-"


def _flag(scale: str) -> str:
    return f"--{QUICK}" if scale == QUICK else f"--scale {scale}"


def _results(out: Path) -> Iterator[tuple[str, Result]]:
    """Yield the results that were drawn, which happens when they are complete."""
    for name in EXPERIMENTS:
        path = out / f"{name}.json"
        if path.exists() and path.with_suffix(".png").exists():
            yield name, json.loads(atomic_io.read_text(path))


def summary(found: Iterable[Outcome]) -> str:
    """Return one line per outcome."""
    states: Mapping[bool, str] = {True: "cannot run: ", False: ""}
    return "\n".join(f"{one.name}: {states[one.failed]}{one.said}" for one in found)
