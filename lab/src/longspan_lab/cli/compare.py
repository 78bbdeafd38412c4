"""``longspan compare``: a table of training runs and a plot of their curves."""

import json
import math
from pathlib import Path
from typing import Any

from longspan.cli.parser import Parser, make


def parser() -> Parser:
    parser = make(
        "compare",
        "Compare training runs: the settings that differ, steps, wall time, best validation bits and, for "
        "encoder-decoders, the share of targets generated exactly. --out plots the curves by step and by time. Runs "
        "that have not finished are included up to their last evaluation.",
        "longspan compare runs/linear runs/softmax --out curves.png",
        "longspan compare runs/* --json",
    )
    parser.add_argument("folders", type=str, nargs="+", metavar="RUN", help="a run directory")
    parser.add_text("--out", "FILE", "plot the curves into this PNG file")
    parser.add_flag("--json", "print JSON instead of a table")
    return parser


def run(args) -> int:
    from longspan._utils import optional_deps, png
    from longspan.train import run_summary

    if args.out:
        optional_deps.need("the plot", "matplotlib", "PIL")
        png.check(args.out)
    found = [run_summary.facts(folder) for folder in args.folders]
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(table(found))
    if args.out:
        draw(Path(args.out), {one["folder"]: run_summary.metrics(one["folder"]) for one in found})
        print(f"curves: {args.out}")
    return 0


def table(found: list[dict[str, Any]]) -> str:
    """A text table of the runs: the settings that differ, then the results."""
    from longspan._utils import terminal

    from .._utils.tables import aligned

    differ = [
        (part, name)
        for part in ("model", "run")
        for name in dict.fromkeys(name for one in found for name in one[part])
        if name != "out" and len({str(one[part].get(name)) for one in found}) > 1
    ]
    unit = "/".join(dict.fromkeys(one["unit"] for one in found))
    head = [
        "run",
        *(f"{part}.{name}" for part, name in differ),
        "parameters",
        "steps",
        "time",
        f"bits/{unit}",
        "at step",
    ]
    has_exact = any(one["exact"] is not None for one in found)
    rows = [
        [
            one["folder"],
            *(str(one[part].get(name, "")) for part, name in differ),
            "" if one["parameters"] is None else f"{one['parameters']:,}",
            f"{one['steps']} of {one['run'].get('steps', '?')}",
            f"{one['seconds']:.0f} s",
            "" if one["bits"] is None else f"{one['bits']:.4f}",
            "" if one["best_step"] is None else str(one["best_step"]),
            *(["" if one["exact"] is None else f"{one['exact']:.1%}"] if has_exact else []),
        ]
        for one in found
    ]
    return aligned([head + ["exact"] * has_exact, *rows], terminal.columns())


def draw(path: Path, curves: dict[str, list[dict[str, float]]]) -> None:
    """Plot validation bits and exact match of each run by step and by time; the PNG is written atomically."""
    from .._utils import palette, plots

    plt = plots.pyplot()
    # Folders are often named after the mechanism.
    looks = palette.looks(Path(name).name for name in curves)
    labels = {"validation_bits": "validation bits", "validation_exact": "exact match"}
    labels = {name: label for name, label in labels.items() if any(_scored(rows, name) for rows in curves.values())}
    count = max(1, len(labels))
    figure, panels = plt.subplots(
        count, 2, figsize=(9.0, 3.9 * count), layout="constrained", sharey="row", sharex="col", squeeze=False
    )
    for line, (value, label) in zip(panels, labels.items(), strict=False):
        for panel, column in zip(line, ("step", "elapsed"), strict=True):
            for name, rows in curves.items():
                scored = _scored(rows, value)
                panel.plot(
                    [row[column] for row in scored],
                    [row[value] for row in scored],
                    ms=3,
                    label=name,
                    **looks[Path(name).name]._asdict(),
                )
            panel.grid(alpha=0.3)
        line[0].set(ylabel=label)
    for panel, label in zip(panels[-1], ("step", "seconds"), strict=True):
        panel.set(xlabel=label)
    plots.legend(figure, panels.flat, 3)
    plots.save(plt, figure, path)


def _scored(rows: list[dict[str, float]], name: str) -> list[dict[str, float]]:
    """The rows that have this metric."""
    return [row for row in rows if not math.isnan(row[name])]
