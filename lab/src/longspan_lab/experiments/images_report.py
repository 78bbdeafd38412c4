"""Tables and picture of the images experiment, with the published figures next to ours."""

from collections.abc import Callable, Iterable
from typing import Any

from longspan._utils import spec

from .._utils import palette
from .._utils.tables import Table, duration
from . import paper
from .experiment import Result, Row
from .images_speed import RECOMPUTED

OPEN = "not in this run"
MEASURED = {"linear", "softmax"}  # measured by every run


def tables(result: Result) -> list[Table]:
    """Bits per dim; images per second; the ratio by the number of tokens."""
    return [bits(result), speed(result), *ratios(result)]


def rows(result: Result, what: str) -> list[Row]:
    """The rows of one kind of point."""
    return [row for row in result["rows"] if row["what"] == what]


def bits(result: Result) -> Table:
    """Each training at equal steps, and when the fastest finished."""
    found, published = rows(result, "training"), paper.methods(result["settings"]["data"])
    shared = min((row["curve"][-1][1] for row in found), default=0.0)
    head = ["bits/dim", "parameters", "steps", "time", "validation", f"after {duration(shared)}", "test", "published"]
    table = [head]
    for row in found:
        steps, seconds, _ = row["curve"][-1]
        ours = f"{row['validation']:.3f}", at_time(row["curve"], shared), f"{row['test']:.3f}"
        theirs = {f"{m.bits:.3f}" for m in published if m.name == paper.called(row["attention"])}
        table.append(
            [paper.title(row["attention"]), f"{row['parameters']:,}", f"{steps:,}", duration(seconds), *ours, *theirs]
        )
    ours = {paper.called(row["attention"]) for row in found} | MEASURED
    others = [m for m in published if m.name not in ours]
    return table + [[m.name, *[""] * 5, OPEN, f"{m.bits:.3f}"] for m in others]


def at_time(curve: list[list], seconds: float) -> str:
    """Validation bits after that time: those of the last evaluation before."""
    found = [value for _, spent, value in curve if spent <= seconds]
    return f"{found[-1]:.3f}" if found else ""


def speed(result: Result) -> Table:
    """Images per second of whole images, the first attention's speed-up in brackets, and the published figures."""
    found, published = rows(result, "images"), paper.methods(result["settings"]["data"])
    head = ["images per second", *(f"batch {row['batch']}" for row in found)]
    table = [head + (["published, GPU", "published, CPU, batch 1"] if published else [])]
    first = spec.split(result["settings"]["attentions"])[0]
    for name in found[0]["seconds"] if found else []:
        shown = [_gain(row["images_per_second"], name, first) for row in found]
        own, again = name.removesuffix(RECOMPUTED), name.endswith(RECOMPUTED)
        method, ending = (paper.called(own), again), RECOMPUTED if again else ""
        table.append(
            [
                paper.title(own) + ending,
                *shown,
                *_published(published, lambda m, method=method: (m.name, not m.state) == method),
            ]
        )
    ours = {paper.called(name) for name in spec.split(result["settings"]["attentions"])} | MEASURED
    for name in dict.fromkeys(m.name for m in published if m.name not in ours):
        table.append([name, *[OPEN] * len(found), *_published(published, lambda m, name=name: m.name == name)])
    return table


def ratios(result: Result) -> Iterable[Table]:
    """By batch: a token's time and the bytes of the states, by number of tokens before it."""
    first, *others = spec.split(result["settings"]["attentions"])
    for batch in result["settings"]["batches"]:
        found = [row for row in rows(result, "token") if row["batch"] == batch]
        head = [f"one token, batch {batch}, after", first]
        for name in others:
            head += [name, f"time of {name} / {first}", f"bytes of {name} / {first}"]
        table = [head]
        for row in sorted(found, key=lambda row: row["tokens"]):
            line = [f"{row['tokens']:,}", _time(row, first)]
            for name in others:
                both = row["seconds"].get(name), row["seconds"].get(first)
                line += [_time(row, name), f"{both[0] / both[1]:.2f}" if all(both) else ""]
                line.append(f"{row['bytes'][name] / row['bytes'][first]:.2f}")
            table.append(line)
        yield table


def _time(row: Row, name: str) -> str:
    return duration(row["seconds"][name]) if name in row["seconds"] else "left out"


def _gain(found: dict[str, float], name: str, first: str) -> str:
    gain = "" if name == first else f" ({found[first] / found[name]:.3g}x)"
    return f"{found[name]:.3g}{gain}"


def _published(methods: Iterable[paper.Method], wanted: Callable[[paper.Method], bool]) -> list[str]:
    return [text for m in methods if wanted(m) for text in (f"{m.images_per_second:g}", f"{1 / m.cpu:.3g}")]


def draw(plt: Any, result: Result) -> Any:
    """Bits by steps and by time; images per second; the ratio by tokens, with that of the bytes."""
    names = spec.split(result["settings"]["attentions"])
    figure, axes = plt.subplots(2, 2, figsize=(9.4, 9.6), layout="constrained")
    (steps, time), (speeds, ratio) = axes
    looks = palette.looks(names)
    for row in rows(result, "training"):
        look: dict[str, Any] = looks[row["attention"]]._asdict()
        counts, seconds, values = zip(*row["curve"], strict=True)
        steps.plot(counts, values, label=row["attention"], **look)
        time.plot([one / 60 for one in seconds], values, label=row["attention"], **look)
    steps.set(title="at equal steps", xlabel="training steps", ylabel="validation bits per dim")
    time.set(title="at equal time", xlabel="minutes of training", ylabel="validation bits per dim")
    _bars(speeds, result, names)
    styles = ["-", "--", "-."]
    for name in names[1:]:
        for j, batch in enumerate(result["settings"]["batches"]):
            found = [
                row for row in rows(result, "token") if row["batch"] == batch and {name, names[0]} <= {*row["seconds"]}
            ]
            x = [row["tokens"] for row in found]
            y = [row["seconds"][name] / row["seconds"][names[0]] for row in found]
            ratio.plot(
                x,
                y,
                looks[name].marker,
                linestyle=styles[j % 3],
                color=looks[name].color,
                label=f"time, {name}, {batch} at once",
            )
        every = {row["tokens"]: row["bytes"][name] / row["bytes"][names[0]] for row in rows(result, "token")}
        look = {"color": looks[name].color, "linewidth": 1, "linestyle": ":"}
        ratio.plot(*zip(*sorted(every.items()), strict=True), **look, label=f"bytes, {name}")
    ratio.axhline(1, color="black", linewidth=1, linestyle=":")
    ratio.set(title=f"one token, relative to {names[0]}", xlabel="tokens before it", ylabel="ratio", xscale="log")
    ratio.set_yscale("log")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            # Many bars and lines leave no room between them.
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2} if axis in axes[1] else {}
            axis.legend(fontsize=8, **below)
    return figure


def _bars(axis: Any, result: Result, names: list[str]) -> None:
    found = rows(result, "images")
    labels = list(found[0]["seconds"]) if found else []
    looks = palette.looks(names)
    for i, label in enumerate(labels):
        own = label.removesuffix(RECOMPUTED)
        look = {"color": looks[own].color, "hatch": "//" if label != own else "", "edgecolor": "white"}
        places = [j * (len(labels) + 1) + i for j in range(len(found))]
        values = [row["images_per_second"][label] for row in found]
        axis.bar_label(axis.bar(places, values, label=label, **look), [f"{value:.2g}" for value in values], fontsize=7)
    axis.set_xticks(
        [j * (len(labels) + 1) + (len(labels) - 1) / 2 for j in range(len(found))],
        [f"{row['batch']} at once" for row in found],
    )
    axis.set(title="whole images, by the same trained models", ylabel="images per second", yscale="log")
    axis.margins(y=0.2)
