"""Tables and picture of the speech experiment, with the published figures next to ours."""

from typing import Any

from longspan._utils import spec
from longspan.attention import build

from .._utils import palette, plot_labels, plots
from .._utils.tables import Table, duration
from . import published
from .experiment import Result, Row

LSTM, SOFTMAX = "lstm", "softmax"
PARTS = {"test": "unseen speakers", "official": "official test", "validation": "validation"}


def called(encoder: str) -> str:
    """Return the publication's name of an encoder; the name itself if it has none.

    >>> called("reformer(rounds=4)"), called("lstm"), called("linear")
    ('lsh-4', 'Bi-LSTM', 'linear')
    """
    if encoder == LSTM:
        return "Bi-LSTM"
    return f"lsh-{build(encoder, 2, 1).rounds}" if spec.head(encoder) == "reformer" else encoder


def rows(result: Result, what: str) -> list[Row]:
    """The rows of one kind of point."""
    return [row for row in result["rows"] if row["what"] == what]


def kinds(result: Result) -> dict[str, str]:
    """Counted errors -> their unit: labels, and words where these differ."""
    unit = result["settings"]["units"].removesuffix("s")
    return {"labels": unit} | ({} if unit == "word" else {"words": "word"})


def tables(result: Result) -> list[Table]:
    """Errors of unseen speakers; of other held-out utterances; seconds of an epoch; of a step by length."""
    return [errors(result), *others(result), epochs(result), *steps(result)]


def errors(result: Result) -> Table:
    """Errors on unseen speakers, greedily and by the beam."""
    counted, beam = kinds(result), f"{result['settings']['beams']} beams"
    head = [f"{unit} errors, {how}" for how in ("%", beam) for unit in counted.values()]
    table = [["unseen speakers", "parameters", *head, "published phoneme errors, %"]]
    for row in rows(result, "training"):
        found = row["errors"]["test"]
        shown = [percent(found[how][what]) for how in ("greedy", "beam") for what in counted]
        theirs = [f"{one.errors:.2f}" for one in published.SPEECH if one.name == called(row["encoder"])]
        table.append([row["encoder"], f"{row['parameters']:,}", *shown, *theirs])
    return table


def others(result: Result) -> list[Table]:
    """Errors, greedily, on the held-out parts that share their speakers with the training."""
    found = rows(result, "training")
    parts = [part for part in (found[0]["errors"] if found else {}) if part != "test"]
    tables = []
    for part in parts:
        counted = kinds(result)
        table = [[PARTS[part], *(f"{unit} errors, %" for unit in counted.values())]]
        for row in found:
            table.append([row["encoder"], *(percent(row["errors"][part]["greedy"][what]) for what in counted)])
        tables.append(table)
    return tables


def epochs(result: Result) -> Table:
    """Seconds of an epoch's updates, and relative to softmax, with the published ones."""
    found = {row["encoder"]: row for row in rows(result, "training")}
    theirs = {one.name: one for one in published.SPEECH}
    head = ["an epoch", "updates", "frames", "time", "relative to softmax", "published", "relative to softmax"]
    table = [head]
    for name, row in found.items():
        relative = f"{row['seconds'] / found[SOFTMAX]['seconds']:.2f}" if SOFTMAX in found else ""
        shown = [f"{row['updates']:,}", f"{row['frames']:,}", duration(row["seconds"]), relative]
        one = theirs.get(called(name))
        if one is not None:
            shown += [duration(one.epoch), f"{one.epoch / theirs[SOFTMAX].epoch:.2f}"]
        table.append([name, *shown])
    return table


def steps(result: Result) -> list[Table]:
    """Seconds of a step by frames, and relative to softmax."""
    found = rows(result, "step")
    names = list(found[0]["seconds"]) if found else []
    head = [f"{row['frames']} frames" for row in found]
    table = [["a training step", *head]]
    table += [[name, *(duration(row["seconds"][name]) for row in found)] for name in names]
    if SOFTMAX not in names:
        return [table] if found else []
    others = [name for name in names if name != SOFTMAX]
    relative = [["relative to softmax", *head]]
    for name in others:
        relative.append([name, *(f"{row['seconds'][name] / row['seconds'][SOFTMAX]:.2f}" for row in found)])
    return [table, *([relative] if others else [])]


def percent(rate: float) -> str:
    """A rate in per cent."""
    return f"{100 * rate:.2f}"


def draw(plt: Any, result: Result) -> Any:
    """Validation errors by epoch; errors of unseen speakers by seconds of an epoch; steps by length."""
    names = spec.split(result["settings"]["encoders"])
    looks = palette.looks(names)
    figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.6), layout="constrained")
    grid[1, 1].set_axis_off()
    axes = grid.flat[:3]
    unit = result["settings"]["units"].removesuffix("s")
    named = []
    for row in rows(result, "training"):
        name = row["encoder"]
        look = {"color": looks[name].color, "marker": looks[name].marker}
        epochs, _, found = zip(*row["curve"], strict=True)
        axes[0].plot(epochs, [100 * one for one in found], label=name, markersize=3, **look)
        errors = 100 * row["errors"]["test"]["greedy"]["labels"]
        axes[1].plot(row["seconds"], errors, label=name, linestyle="", **look)
        named.append((name, row["seconds"], errors, 36.0))
    axes[0].set(title="training", xlabel="epochs", ylabel=f"{unit} errors on validation utterances, %", ylim=(0, None))
    axes[1].set(
        title="speakers that are not in the training",
        xlabel="seconds of an epoch",
        ylabel=f"{unit} errors, %",
        xlim=(0, 1.3 * axes[1].get_xlim()[1]),
        ylim=(0, 1.3 * axes[1].get_ylim()[1]),
    )
    found = sorted(rows(result, "step"), key=lambda row: row["frames"])
    relative = bool(found) and SOFTMAX in found[0]["seconds"]
    for name in found[0]["seconds"] if found else []:
        values = [row["seconds"][name] / (row["seconds"][SOFTMAX] if relative else 1) for row in found]
        axes[2].plot(
            [row["frames"] for row in found], values, color=looks[name].color, marker=looks[name].marker, label=name
        )
    said = "seconds, relative to softmax" if relative else "seconds"
    axes[2].set(title="a training step", xlabel="frames of an utterance", ylabel=said, ylim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    plots.legend(figure, axes)
    if named:
        plot_labels.put(axes[1], *zip(*named, strict=True))
    return figure
