"""Every experiment, one after the other: what is there already is skipped, what cannot run is told, one page of all."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from .._utils import atomic_io, optional_deps, plots, png
from ..models import checkpoint
from . import EXPERIMENTS, page, runner
from .experiment import QUICK, Result, Track

PAGE = "reproduction.md"
# Minutes of the clock for one of processor time, before anything was run: two cores need between a half of it and all.
USUAL = 0.7


class Outcome(NamedTuple):
    """What came of one experiment: "done", "done before", or why it could not run."""

    name: str
    said: str
    failed: bool = False


def names(scale: str, only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[str]:
    """The experiments that have a scale, in the order of their names.

    Raises ValueError for one of ``only`` that has it not.
    """
    for name in only:
        EXPERIMENTS[name].settings(scale)
    there = [name for name, one in EXPERIMENTS.items() if scale == QUICK or scale in one.scales]
    return [name for name in there if name not in set(skip) and (not only or name in set(only))]


def run(
    chosen: list[str], scale: str, out: Path, data: Path | None, track: Track, say: Callable[[str], None]
) -> list[Outcome]:
    """Run these experiments at a scale, into ``out`` as ``longspan reproduce NAME`` does each, and write ``out/PAGE``.

    ``data``: a folder with one of each kind of data, see ``Experiment.beside``. One that cannot run, for want of data,
    a package or a folder of its own, does not end the others. ``say`` gets a line before each: what it is expected to
    take, and how long all that is left.

    Raises ``signals.Interrupted`` as ``experiment.run`` does; ValueError and ImportError where nothing could be written
    or drawn at all.
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
                pace.told(expected[name], time.monotonic() - begin)
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
        # After each, so that there is a page of what there is whenever this ends.
        checkpoint.write_text(out / PAGE, text(out, scale, found))
    return found


class Pace:
    """Minutes of the clock for a minute of processor time, as far as experiments of this call have told."""

    def __init__(self):
        self.expected, self.taken = 0.0, 0.0

    def told(self, expected: float, seconds: float) -> None:
        """One that was expected to take so many minutes of processor time took these seconds."""
        if expected:
            self.expected, self.taken = self.expected + expected, self.taken + seconds / 60

    def clock(self, minutes: float) -> str:
        """These minutes of processor time as time of the clock.

        >>> pace = Pace()
        >>> pace.told(2.0, 60.0)
        >>> pace.clock(50.0)
        '25:00'
        """
        return tqdm.format_interval(60 * minutes * (self.taken / self.expected if self.expected else USUAL))

    def line(self, own: float, left: float) -> str:
        """What an experiment is expected to take, and all that is left with it, of processor time both; 0: not known.

        >>> Pace().line(10.0, 30.0), Pace().line(0.0, 0.0)
        ('takes about 07:00; about 21:00 left in all', 'begins')
        """
        if not left:
            return "begins"
        takes = f"takes about {self.clock(own)}" if own else "takes a time that is not known"
        return f"{takes}; about {self.clock(left)} left in all"


def minutes(name: str, scale: str, out: Path, data: Path | None) -> float:
    """Minutes of processor time that an experiment is expected to take from here; 0.0: not known, or nothing."""
    one = EXPERIMENTS[name]
    try:
        settings = _settings(name, scale, data)
    except ValueError:
        # It says why when its turn comes.
        return 0.0
    left = len(runner.missing(out / f"{name}.json", one, settings)) / len(one.points(settings))
    return one.minutes * left if scale == "laptop" else 0.0


def _settings(name: str, scale: str, data: Path | None) -> Any:
    one = EXPERIMENTS[name]
    settings = one.settings(scale)
    return settings if data is None else one.beside(settings, data)


def _shown(name: str, out: Path) -> None:
    """See that a result is drawn, which needs nothing but its JSON."""
    path = out / f"{name}.json"
    if not (path.with_suffix(".png").exists() and path.with_suffix(".md").exists()):
        runner.show(name, EXPERIMENTS[name], json.loads(atomic_io.read_text(path)), out)


def text(out: Path, scale: str, found: Iterable[Outcome]) -> str:
    """The page of a folder, in Markdown: every result that it holds whole, from its JSON, and what could not run."""
    results = dict(_results(out))
    said = {one.name: one.said for one in found if one.failed}
    head = ["# Published results, had again", f"`longspan reproduce all {_flag(scale)} --out FOLDER` wrote this page."]
    rows = ["| experiment | what it measures | took | result |", "|---|---|---|---|"]
    for name, one in EXPERIMENTS.items():
        state = f"[below](#{name})" if name in results else said.get(name, "not measured")
        took = _interval(results[name].get("clock_seconds", 0)) if name in results else ""
        rows.append(f"| `{name}` | {one.about} | {took} | {state.replace('|', '/')} |")
    total = sum(result.get("clock_seconds", 0) for result in results.values())
    parts = ["\n\n".join(head), "\n".join(rows), f"All of it took {_interval(total)} by the clock."]
    for name, result in results.items():
        parts.append(f"## {name}\n\n{page.fragment(EXPERIMENTS[name], result, page.pictures(out, name)).rstrip()}")
    return "\n\n".join(parts) + "\n"


def _interval(seconds: float) -> str:
    """Hours, minutes and seconds of the clock; - where none were written down."""
    return tqdm.format_interval(seconds) if seconds else "-"


def _flag(scale: str) -> str:
    return f"--{QUICK}" if scale == QUICK else f"--scale {scale}"


def _results(out: Path) -> Iterator[tuple[str, Result]]:
    """Those that were drawn, which is done when they are whole."""
    for name in EXPERIMENTS:
        path = out / f"{name}.json"
        if path.exists() and path.with_suffix(".png").exists():
            yield name, json.loads(atomic_io.read_text(path))


def summary(found: Iterable[Outcome]) -> str:
    """What came of them, a line each."""
    states: Mapping[bool, str] = {True: "cannot run: ", False: ""}
    return "\n".join(f"{one.name}: {states[one.failed]}{one.said}" for one in found)
