"""Pictures of measurements, on double logarithmic axes."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import atomic_io

MODES = ("forward", "forward+backward")
MARKS = "osD^vP*X<>"
BESIDE = 6  # candidates whose names find room beside their lines; more stand below the panel


def pyplot() -> Any:
    """matplotlib, without a screen. Raises ImportError where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('the benchmarks draw with matplotlib: pip install "longspan[plot]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw the result of a benchmark as one PNG, whole or not at all."""
    plt = pyplot()
    figure = PICTURES[result["benchmark"]](plt, result)
    facts = result["machine"]
    figure.suptitle(f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}", fontsize=9)
    save(plt, figure, path)


def save(plt: Any, figure: Any, path: Path) -> None:
    """Write a figure as one PNG, whole or not at all. Raises OSError, with the file's name."""
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=120, format="png")
    finally:
        plt.close(figure)
    atomic_io.write(path, content.getvalue())


def _panels(plt: Any, count: int) -> tuple[Any, list[Any]]:
    """A figure with up to three panels side by side, or more in rows of two."""
    # Where nothing was measured the picture has one empty panel.
    count = max(count, 1)
    columns = count if count < 4 else 2
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 4.4 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat)


def _lines(axis: Any, rows: Iterable[dict[str, Any]], x: str, y: str, title: str, xlabel: str, ylabel: str) -> None:
    """One line per candidate, in the order in which they come; the same candidate looks the same in every panel."""
    rows = [row for row in rows if row.get(y) is not None]
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    for name in names:
        points = sorted((row[x], row[y]) for row in rows if row["candidate"] == name)
        colour, mark = _look(axis, name)
        # What does other work than the rest of the panel is dashed.
        module = any(row.get("group") == "module" for row in rows if row["candidate"] == name)
        label, style = (f"{name.removesuffix('@module')}, whole module", "--") if module else (name, "-")
        axis.plot(*zip(*points, strict=True), style, marker=mark, color=colour, label=label, markersize=5)
    axis.set(xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel=ylabel)
    ticks = sorted({row[x] for row in rows})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    _decades(axis)
    axis.grid(alpha=0.3)
    if len(names) > BESIDE:
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    elif names:
        axis.legend(fontsize=8)


def _decades(axis: Any) -> None:
    """Ticks at 1, 2 and 5 of every decade, written as plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def _look(axis: Any, name: str) -> tuple[str, str]:
    """Colour and mark: the next ones, kept for the whole figure."""
    looks = axis.figure.__dict__.setdefault("looks", {})
    count = len(looks)
    # The eleventh has the first's colour, and another mark.
    return looks.setdefault(name, (f"C{count % 10}", MARKS[(count + count // 10) % len(MARKS)]))


def _attention(plt: Any, result: dict[str, Any]) -> Any:
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in result["rows"])]
    figure, axes = _panels(plt, 2 * len(modes))
    for i, mode in enumerate(modes):
        rows = [{**row, "ms": 1e3 * row["seconds"]} for row in result["rows"] if row["mode"] == mode]
        _lines(axes[i], rows, "length", "ms", mode, "tokens", "ms")
        _lines(axes[len(modes) + i], rows, "length", "mb", f"peak memory, {mode}", "tokens", "MB beyond the inputs")
    return figure


def _step(plt: Any, result: dict[str, Any]) -> Any:
    figure, (left, right) = _panels(plt, 2)
    rows = [{**row, "us": 1e6 * row["seconds"]} for row in result["rows"]]
    _lines(left, rows, "batch", "us", "one token of one layer", "batch", "us")
    _lines(right, rows, "batch", "to_bound", "against the bound", "batch", "time / scaling the state in place")
    return figure


def _convolution(plt: Any, result: dict[str, Any]) -> Any:
    """Bars against moving the bytes once, a panel for each case."""
    cases = list(dict.fromkeys((row["what"], row["batch"], row["dtype"]) for row in result["rows"]))
    figure, axes = _panels(plt, len(cases))
    for axis, one in zip(axes, cases, strict=False):
        rows = [row for row in result["rows"] if (row["what"], row["batch"], row["dtype"]) == one]
        axis.barh([row["candidate"] for row in rows], [row["to_bound"] for row in rows])
        axis.axvline(1.0, color="k", linewidth=0.8)
        axis.invert_yaxis()
        axis.set(title=f"{one[0]}, batch {one[1]}, {one[2]}", xlabel="time / moving the bytes once")
        axis.grid(alpha=0.3, axis="x")
    return figure


def _generate(plt: Any, result: dict[str, Any]) -> Any:
    steps = [{**row, "ms": 1e3 * row["seconds"]} for row in result["rows"] if row["what"] == "step"]
    images = [row for row in result["rows"] if row["what"] == "images"]
    batches = list(dict.fromkeys(row["batch"] for row in steps))
    figure, axes = _panels(plt, len(batches) + bool(images))
    for axis, batch in zip(axes, batches, strict=False):
        rows = [row for row in steps if row["batch"] == batch]
        _lines(axis, rows, "position", "ms", f"one token, batch {batch}", "position", "ms")
    if images:
        _lines(axes[-1], images, "batch", "images_per_second", "whole images", "batch", "images per second")
    return figure


def _gated(plt: Any, result: dict[str, Any]) -> Any:
    modes = list(dict.fromkeys(row["mode"] for row in result["rows"]))
    rules = result["options"]["rules"]
    figure, axes = _panels(plt, len(modes))
    for axis, mode in zip(axes, modes, strict=False):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        batch = max(row["batch"] for row in rows)
        names = list(dict.fromkeys(row["candidate"] for row in rows))
        for i, name in enumerate(names):
            found = {
                row["rule"]: 1e3 * row["seconds"] for row in rows if (row["candidate"], row["batch"]) == (name, batch)
            }
            width = 0.8 / len(names)
            at = [rules.index(rule) + (i - (len(names) - 1) / 2) * width for rule in found]
            axis.bar(at, list(found.values()), width, label=name, color=_look(axis, name)[0])
        axis.set(yscale="log", ylabel="ms", title=f"{mode}, batch {batch}" if mode == "step" else mode)
        axis.set_xticks(range(len(rules)), [rule.replace(" ", "\n") for rule in rules], fontsize=8)
        _decades(axis)
        axis.grid(alpha=0.3, axis="y")
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(names))
    return figure


def _limits(plt: Any, result: dict[str, Any]) -> Any:
    figure, (left, right) = _panels(plt, 2)
    products = [{**row, "candidate": row["dtype"]} for row in result["rows"] if row["limit"] == "gemm"]
    traffic = [{**row, "candidate": row["limit"]} for row in result["rows"] if row["limit"] != "gemm"]
    _lines(left, products, "size", "value", "square matrix products", "size", "GFLOP/s")
    _lines(right, traffic, "size", "value", "moving bytes", "MB of array", "GB/s")
    return figure


def _pattern(plt: Any, result: dict[str, Any]) -> Any:
    rows = [{**row, "ms": 1e3 * row["seconds"]} for row in result["rows"] if row["mode"] in MODES]
    texts, modes = (list(dict.fromkeys(row[name] for row in rows)) for name in ("pattern", "mode"))
    figure, axes = plt.subplots(
        len(texts),
        len(modes) + 1,
        figsize=(5.2 * (len(modes) + 1), 4.4 * len(texts)),
        layout="constrained",
        squeeze=False,
    )
    for line, text in zip(axes, texts, strict=True):
        same = [row for row in rows if row["pattern"] == text]
        for axis, mode in zip(line, modes, strict=False):
            _lines(
                axis, (row for row in same if row["mode"] == mode), "length", "ms", f"{text}\n{mode}", "tokens", "ms"
            )
        memory, what = (row for row in same if row["mode"] == modes[-1]), f"{text}\npeak memory, {modes[-1]}"
        _lines(line[-1], memory, "length", "mb", what, "tokens", "MB beyond the inputs")
        for axis in line:
            axis.title.set_fontsize(9)
    return figure


def _members(plt: Any, result: dict[str, Any]) -> Any:
    """A row for each family, time on the left and memory on the right; softmax is in every one of them, in black.

    Where all were measured at one length, there are no lines to draw: a bar for each then, slowest on top.
    """
    mode = MODES[int(result["options"]["backward"])]
    measured = [row for row in result["rows"] if row["mode"] == mode]
    if len({row["length"] for row in measured}) == 1:
        return _bars(plt, measured, mode)
    families = list(dict.fromkeys(one["family"] for one in result["growth"]))
    figure, axes = plt.subplots(
        len(families), 2, figsize=(11.0, 4.8 * len(families)), layout="constrained", squeeze=False
    )
    for (left, right), family in zip(axes, families, strict=True):
        # Colours begin anew in every family; there are more mechanisms than colours.
        figure.__dict__["looks"] = {"softmax": ("k", ".")}
        rows = [
            {**row, "ms": 1e3 * row["seconds"]} | ({"mb": max(row["mb"], 0.1)} if "mb" in row else {})
            for row in measured
            if row["family"] == family or row["candidate"] == "softmax"
        ]
        _lines(left, rows, "length", "ms", f"{family}: {mode}", "tokens", "ms")
        _lines(right, rows, "length", "mb", f"{family}: peak memory, {mode}", "tokens", "MB beyond the inputs")
    return figure


def _bars(plt: Any, rows: list[dict[str, Any]], mode: str) -> Any:
    """Time and peak memory of each candidate at one length, side by side."""
    rows = sorted(rows, key=lambda row: row["seconds"])
    size = {"figsize": (11.0, max(3.0, 1.5 + 0.3 * len(rows))), "layout": "constrained", "sharey": True}
    figure, (left, right) = plt.subplots(1, 2, **size)
    places, names = range(len(rows)), [row["candidate"] for row in rows]
    left.barh(places, [1e3 * row["seconds"] for row in rows], color="C0")
    right.barh(places, [row.get("mb", 0.0) for row in rows], color="C1")
    left.set_yticks(places, names, fontsize=8)
    left.set(title=f"{mode}, {rows[0]['length']} tokens", xlabel="ms")
    right.set(title=f"peak memory, {mode}", xlabel="MB beyond the inputs")
    for axis in (left, right):
        axis.grid(alpha=0.3, axis="x")
    return figure


def _depth(plt: Any, result: dict[str, Any]) -> Any:
    """Memory by depth, on plain axes; what was computed from a line is hollow."""
    figure, (axis,) = _panels(plt, 1)
    for i, name in enumerate(dict.fromkeys(row["candidate"] for row in result["rows"])):
        rows = [row for row in result["rows"] if row["candidate"] == name]
        measured = [(row["depth"], row["mb"] / 1024) for row in rows if "mb" in row]
        beyond = [(row["depth"], row["expected_mb"] / 1024) for row in rows if "expected_mb" in row]
        if measured:
            axis.plot(*zip(*measured, strict=True), "o-", color=f"C{i}", label=name)
        if beyond:
            line = [*measured[-1:], *beyond]
            axis.plot(*zip(*line, strict=True), "o:", color=f"C{i}", markerfacecolor="none")
    axis.set(xlabel="blocks", ylabel="GB at the peak of a training step", ylim=(0, None))
    axis.set_title(f"{result['options']['attention']}, {result['options']['length']} tokens", fontsize=10)
    axis.set_xticks(sorted({row["depth"] for row in result["rows"]}))
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    return figure


def _transformers(plt: Any, result: dict[str, Any]) -> Any:
    """How many times as fast each model is, by what it does."""
    rows = [row for row in result["rows"] if row["candidate"] == "longspan"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = _panels(plt, max(len(modes), 1))
    for axis, mode in zip(axes, modes, strict=False):
        found = {f"{r['model']}\n{r['dtype']}": r["times_transformers"] for r in rows if r["mode"] == mode}
        axis.bar(range(len(found)), list(found.values()), 0.6)
        axis.axhline(1.0, color="k", linewidth=0.8)
        axis.set(title=mode, ylabel="times as fast as transformers")
        axis.set_xticks(range(len(found)), list(found), fontsize=8)
        axis.grid(alpha=0.3, axis="y")
    return figure


PICTURES = {
    "depth": _depth,
    "convolution": _convolution,
    "transformers": _transformers,
    "members": _members,
    "attention": _attention,
    "step": _step,
    "generate": _generate,
    "gated": _gated,
    "pattern": _pattern,
    "limits": _limits,
}
