"""The report of a linearization: numbers, a table and a picture."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._utils import atomic_io
from .._utils.optional_deps import install
from .._utils.progress import say
from .._utils.pyplot import png, pyplot
from ..train.config import TrainConfig
from .tasks import Task

NAMES: dict[str, str] = {"carried over": "weights carried over", "kept": "layers, some kept softmax"}


def write(result: Any, config: Any, run: TrainConfig, task: Task) -> None:
    """Write report.json, report.md and, where matplotlib is installed, report.png into the folder of a result."""
    folder, size = Path(result.folder), run.step_examples * task.data.length
    facts = {
        "teacher": config.source,
        "attention": result.attention,
        "data": task.data.name,
        "unit": task.unit,
        "split": result.split,
        "losses": result.losses,
        "best": result.best,
        "closed": result.closed,
        "tokens": {"layers": config.layer_steps * size, task.stage: run.steps * size},
        "layers": list(result.layers),
        "config": asdict(config),
        "run": asdict(run),
    }
    atomic_io.write(folder / "report.json", f"{json.dumps(facts, indent=2)}\n".encode())
    atomic_io.write(folder / "report.md", f"{table(facts)}\n".encode())
    if find_spec("matplotlib") is None:
        say(f"report.png is drawn with matplotlib: {install('plot')}")
        return
    draw(folder / "report.png", facts)


def read(folder: Path) -> str:
    """Return the table in a folder."""
    return atomic_io.read_text(folder / "report.md").rstrip()


def table(facts: dict[str, Any]) -> str:
    """Return the losses and the layers as Markdown."""
    losses, tokens = facts["losses"], facts["tokens"]
    gap = losses["carried over"] - losses["teacher"]
    lines = [f"| model | tokens | {facts['unit']}, {facts['split']} | gap closed |", "|---|---:|---:|---:|"]
    for name, value in losses.items():
        share = f"{(losses['carried over'] - value) / gap:.1%}" if gap > 0 and name != "carried over" else ""
        seen = f"{tokens[name]:,}" if name in tokens else ""
        lines.append(f"| {NAMES.get(name, name)} | {seen} | {value:.4f} | {share} |")
    best = facts["best"]
    if best != list(losses)[-1]:
        lines += ["", f"model/ is the student of the line {NAMES.get(best, best)}, whose loss on validation is lower."]
    lines += ["", "| layer | teacher | student | error before | error | cost | gain | kept |"]
    lines += ["|---:|---|---|---:|---:|---:|---:|---|"]
    for one in facts["layers"]:
        after = [f"{one['error']:.1%}", f"{one['cost']:.4f}", f"{one['gain']:.4f}"] if "error" in one else [""] * 3
        cells = (one["layer"], one["teacher"], one["student"], f"{one['before']:.1%}", *after)
        lines.append(f"| {' | '.join(map(str, cells))} | {'softmax' if one.get('kept') else ''} |")
    lost = [f"layer {one['layer']}: {', '.join(one['left_out'])}" for one in facts["layers"] if one["left_out"]]
    lines += ["", f"left out, as the mechanism has none: {'; '.join(lost)}."] if lost else []
    lines += [
        "",
        "error: that of the layer's outputs, relative to the teacher's, before and after the first stage. cost: by how "
        "much the loss of the teacher rises with this layer converted. gain: by how much the loss of the student falls "
        "with the teacher's layer. "
        "The layers with the largest gain deserve to stay softmax.",
    ]
    return "\n".join(lines)


def draw(path: Path, facts: dict[str, Any]) -> None:
    """Draw the losses by stage, and the errors and costs of the layers, into a PNG file."""
    plt, losses, layers = pyplot(), facts["losses"], facts["layers"]
    measured = [one for one in layers if "error" in one]
    figure, axes = plt.subplots(1, 3 if measured else 2, figsize=(11 if measured else 8, 3.4), layout="constrained")
    names = [name for name in losses if name != "teacher"]
    places = [str(NAMES.get(name, name)).replace(" ", "\n") for name in names]
    axes[0].plot(places, [losses[name] for name in names], "o-", color="C0")
    axes[0].axhline(losses["teacher"], color="#666666", linestyle="--", linewidth=1)
    axes[0].annotate("teacher", (0.02, losses["teacher"]), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    axes[0].set(title="loss by stage", ylabel=f"{facts['unit']}, {facts['split']}")
    _bars(axes[1], "relative error of the layers", layers, {"before": "carried over", "error": "after the stage"})
    axes[1].set_ylabel("|student - teacher| / |teacher|")
    if measured:
        _bars(
            axes[2],
            "one layer after the first stage",
            measured,
            {"cost": "cost of converting", "gain": "gain of keeping"},
        )
        axes[2].set_ylabel(f"{facts['unit']}, validation")
    try:
        content = png(figure)
    finally:
        plt.close(figure)
    atomic_io.write(path, content)


def _bars(axis: Any, title: str, layers: list[dict[str, Any]], series: dict[str, str]) -> None:
    """Bars of each layer, one for each entry that there is."""
    shown = {name: label for name, label in series.items() if name in layers[0]}
    width = 0.8 / len(shown)
    for i, (name, label) in enumerate(shown.items()):
        places = [at + (i - (len(shown) - 1) / 2) * width for at in range(len(layers))]
        axis.bar(places, [one[name] for one in layers], width, color=f"C{i}", label=label)
    axis.set_xticks(range(len(layers)), [str(one["layer"]) for one in layers])
    axis.set(title=title, xlabel="layer")
    axis.grid(axis="y", alpha=0.3)
    if len(shown) > 1:
        axis.legend(fontsize=8)
