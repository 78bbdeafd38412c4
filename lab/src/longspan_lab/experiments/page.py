"""A result as text for the screen and as Markdown, from its JSON alone."""

import shlex
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from longspan._utils import terminal

from .._utils.tables import aligned
from .experiment import Experiment, Result, words
from .provenance import MISSING

# key of the JSON, its title, what an empty one means
FACTS = (("versions", "Versions", ""), ("data", "Data, sha256", "none, generated from the seed"))


def show(experiment: Experiment, result: Result, width: int | None = None) -> str:
    """The result as text: tables, command, settings and machines, at most ``width`` columns wide (None: no limit)."""
    settings = "; ".join(f"{name} {words(value)}" for name, value in result["settings"].items())
    notes = [f"Reproduces: {result['source']}.", f"Command: {command(experiment, result)}", f"Settings: {settings}."]
    commit = {"": "none, outside a checkout", None: MISSING}.get(result.get("commit"), result.get("commit"))
    notes.append(f"Scale: {result.get('scale', MISSING)}. Commit: {commit}.")
    notes += [f"{title}: {_facts(result.get(key), empty)}." for key, title, empty in FACTS]
    notes += [f"Machine: {_facts(machine)}." for machine in result["machines"]]
    clock = f", {result['clock_seconds']:.0f} s by the clock" if result.get("clock_seconds") else ""
    notes.append(f"Took {result['cpu_seconds']:.0f} s of processor time{clock}, with longspan {result['longspan']}.")
    if width:
        notes = [line for note in notes for line in terminal.wrapped(note, 2, first="", width=width)]
    return "\n\n".join([*(aligned(table, width) for table in experiment.tables(result)), "\n".join(notes)])


def fragment(experiment: Experiment, result: Result, images: Iterable[str]) -> str:
    """Return Markdown: the pictures, the text of ``show``, and the deviations from the publication."""
    shown = "\n\n".join(f"![{Path(image).stem}]({image})" for image in images)
    differs = f"Deviations from the publication: {experiment.differs}"
    return f"{shown}\n\n```text\n{show(experiment, result)}\n```\n\n{differs}\n"


def pictures(folder: Path, name: str) -> list[str]:
    """The names of an experiment's pictures in a folder: ``NAME.png`` first, then ``NAME-*.png``; no dark versions."""
    found = [folder / f"{name}.png", *sorted(folder.glob(f"{name}-*.png"))]
    return [path.name for path in found if path.exists() and not path.stem.endswith("-dark")]


def command(experiment: Experiment, result: Result) -> str:
    """Return the command that reproduces the result: the scale, and settings that differ from it.

    A result without a scale is compared with the laptop settings.
    """
    scale = result.get("scale", "laptop")
    parts = ["longspan", "reproduce", result["experiment"]]
    parts += ["--quick"] if scale == "quick" else ["--scale", scale]
    usual = experiment.settings(scale)
    usual = {field.name: words(getattr(usual, field.name)) for field in fields(usual)}
    for name, value in result["settings"].items():
        if words(value) != usual.get(name):
            parts += [f"--{name.replace('_', '-')}", words(value)]
    return shlex.join(parts)


def _facts(facts: Any, empty: str = "") -> str:
    if facts is None:
        return MISSING
    return "; ".join(f"{name} {value}" for name, value in facts.items()) or empty
