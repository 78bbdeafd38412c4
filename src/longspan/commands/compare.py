"""``longspan compare``: training runs side by side, in a table and one picture of their curves."""

import json
import math
from pathlib import Path
from typing import Any

from .parser import Parser, make


def parser() -> Parser:
    parser = make(
        "compare",
        "Training runs side by side: what differs between their settings, steps, time, and validation bits; and their "
        "curves by step and by time in one picture. Runs that still go on count as far as they have come.",
        "longspan compare runs/linear runs/softmax --out curves.png",
        "longspan compare runs/* --json",
    )
    parser.add_argument("folders", type=str, nargs="+", help="folders of training runs")
    parser.add_argument("--out", type=str, default="", help="draw the curves as this PNG file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(args) -> int:
    from .. import extras, pictures, runs

    if args.out:
        extras.need("the picture", "matplotlib", "PIL")
        pictures.check(args.out)
    found = [runs.facts(folder) for folder in args.folders]
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(table(found))
    if args.out:
        draw(Path(args.out), {one["folder"]: runs.metrics(one["folder"]) for one in found})
        print(f"curves: {args.out}")
    return 0


def table(found: list[dict[str, Any]]) -> str:
    """The runs as columns of text, the settings in which they differ beside what came of them."""
    from ..bench.report import aligned

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
    rows = [
        [
            one["folder"],
            *(str(one[part].get(name, "")) for part, name in differ),
            "" if one["parameters"] is None else f"{one['parameters']:,}",
            f"{one['steps']} of {one['run'].get('steps', '?')}",
            f"{one['seconds']:.0f} s",
            "" if one["bits"] is None else f"{one['bits']:.4f}",
            "" if one["best_step"] is None else str(one["best_step"]),
        ]
        for one in found
    ]
    return aligned([head, *rows])


def draw(path: Path, curves: dict[str, list[dict[str, float]]]) -> None:
    """Validation bits of each run by step and by time, as one PNG, whole or not at all."""
    from ..bench.plots import pyplot

    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for panel, column, label in zip(panels, ("step", "elapsed"), ("step", "seconds"), strict=True):
        for name, rows in curves.items():
            scored = [row for row in rows if not math.isnan(row["validation_bits"])]
            panel.plot(
                [row[column] for row in scored], [row["validation_bits"] for row in scored], "o-", ms=3, label=name
            )
        panel.set(xlabel=label)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="validation bits")
    panels[0].legend(fontsize=8)
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
    temporary.replace(path)
