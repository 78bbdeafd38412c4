"""Pictures of measurements, on double logarithmic axes."""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspan._utils import atomic_io
from longspan._utils.pyplot import png, pyplot

from . import palette

MODES = ("forward", "forward+backward")
MARKS = palette.MARKERS
PANEL = (4.5, 3.9)  # inches; with type of 9 points, two panels are readable where a page shows them 700 pixels wide


def draw(path: Path, result: dict[str, Any], *, dark: bool = False) -> None:
    """Draw the result of a benchmark as one PNG, whole or not at all; ``dark`` as in ``save``."""
    plt = pyplot()
    figure = PICTURES[result["benchmark"]](plt, result)
    facts = result["machine"]
    title = f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}"
    # In the results of benchmarks whose figures depend on it.
    title += f", {facts['instruction set']}" if "instruction set" in facts else ""
    figure.suptitle(title, fontsize=9)
    save(plt, figure, path, dark=dark)


def save(plt: Any, figure: Any, path: Path, *, dark: bool = False) -> None:
    """Write a figure as one PNG, whole or not at all.

    Args:
        plt: what ``pyplot`` returns.
        figure: the figure, which is closed afterwards.
        path: the file.
        dark: also write the picture for a dark page, to ``dark_path(path)``.

    Raises:
        OSError: A file cannot be written; the message has its name.
    """
    try:
        contents = {path: png(figure)}
        if dark:
            darken(figure)
            contents[dark_path(path)] = png(figure)
    finally:
        plt.close(figure)
    for file, content in contents.items():
        atomic_io.write(file, content)


def dark_path(path: Path) -> Path:
    """Where the version of a picture for dark pages is.

    >>> dark_path(Path("images/hybrids.png")).name
    'hybrids-dark.png'
    """
    return path.with_name(f"{path.stem}-dark{path.suffix}")


def darken(figure: Any) -> None:
    """Give everything in a figure its color on a dark page."""
    from matplotlib.collections import Collection
    from matplotlib.colors import to_rgba_array
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    def dark(colors: Any) -> Any:
        return [palette.on_dark(color) for color in to_rgba_array(colors)]

    for artist in figure.findobj():
        match artist:
            case Text():
                artist.set_color(dark(artist.get_color())[0])
            case Line2D():
                inside, edge = artist.get_markerfacecolor(), artist.get_markeredgecolor()
                artist.set_color(dark(artist.get_color())[0])
                for color, change in ((inside, artist.set_markerfacecolor), (edge, artist.set_markeredgecolor)):
                    if not (isinstance(color, str) and color == "none"):
                        change(dark(color)[0])
            case Patch():
                face, edge = dark(artist.get_facecolor())[0], dark(artist.get_edgecolor())[0]
                artist.set_facecolor(face)
                artist.set_edgecolor(edge)
            case Collection() if artist.get_array() is None:
                face, edge = dark(artist.get_facecolor()), dark(artist.get_edgecolor())
                artist.set_facecolor(face)
                artist.set_edgecolor(edge)


def _panels(plt: Any, count: int) -> tuple[Any, list[Any]]:
    """A figure with up to two panels side by side, or more in rows of two."""
    # Where nothing was measured the picture has one empty panel.
    count = max(count, 1)
    columns = min(count, 2)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:count])


def legend(figure: Any, axes: Iterable[Any], columns: int = 4, **options: Any) -> None:
    """One legend below all panels, outside of the data.

    Args:
        figure: a figure, or a part of one, with a constrained layout.
        axes: its panels; each label is listed once.
        columns: the most columns of the legend; fewer if it would be wider than the figure.
        options: further arguments of ``figure.legend``.
    """
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    for count in range(min(columns, len(found)), 0, -1):
        made = figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=count, fontsize=9, **options
        )
        if count == 1 or made.get_window_extent(figure.canvas.get_renderer()).width <= figure.bbox.width:
            break
        made.remove()


def thousands(count: float) -> str:
    """A number of tokens or the like: 1024 is 1k, 65536 is 64k.

    >>> thousands(512), thousands(16384), thousands(784)
    ('512', '16k', '784')
    """
    return f"{count / 1024:g}k" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


def _lines(
    axis: Any,
    rows: Iterable[dict[str, Any]],
    x: str,
    y: str,
    title: str,
    xlabel: str,
    ylabel: str,
    looks: dict[str, palette.Look],
) -> None:
    """One line per candidate, in the order in which they come."""
    rows = [row for row in rows if row.get(y) is not None]
    for name in dict.fromkeys(row["candidate"] for row in rows):
        points = sorted((row[x], row[y]) for row in rows if row["candidate"] == name)
        look = looks[name]
        # What does other work than the rest of the panel is dashed.
        module = any(row.get("group") == "module" for row in rows if row["candidate"] == name)
        label, style = (f"{name.removesuffix('@module')}, whole module", "--") if module else (name, look.linestyle)
        axis.plot(*zip(*points, strict=True), style, marker=look.marker, color=look.color, label=label)
    axis.set(xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel=ylabel)
    ticks = sorted({row[x] for row in rows})
    axis.set_xticks(ticks, [thousands(tick) for tick in ticks])
    _decades(axis)
    axis.grid(alpha=0.3)


def _decades(panel: Any, axis: Any = None) -> None:
    """Ticks of a logarithmic axis as plain numbers: at 1, 2 and 5 of every decade, or at 1 where there are many.

    The axis is the vertical one of the panel unless it is given.
    """
    from matplotlib.ticker import LogLocator

    axis = panel.yaxis if axis is None else axis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)))
    axis.set_major_formatter("{x:,g}")
    panel.minorticks_off()


def _looks(result: dict[str, Any], key: str = "candidate") -> dict[str, palette.Look]:
    """A look for each candidate of a result."""
    return palette.looks(row[key] for row in result["rows"] if key in row)


def _attention(plt: Any, result: dict[str, Any]) -> Any:
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in result["rows"])]
    figure, axes = _panels(plt, 2 * len(modes))
    looks = _looks(result)
    for i, mode in enumerate(modes):
        rows = [{**row, "ms": 1e3 * row["seconds"]} for row in result["rows"] if row["mode"] == mode]
        _lines(axes[i], rows, "length", "ms", mode, "tokens", "time, ms", looks)
        memory = axes[len(modes) + i]
        _lines(memory, rows, "length", "mb", f"peak memory, {mode}", "tokens", "MB beyond the inputs", looks)
    legend(figure, axes)
    return figure


def _step(plt: Any, result: dict[str, Any]) -> Any:
    figure, (left, right) = _panels(plt, 2)
    rows = [{**row, "us": 1e6 * row["seconds"]} for row in result["rows"]]
    looks = _looks(result)
    _lines(left, rows, "batch", "us", "one token of one layer", "batch", "time, us", looks)
    bound = "time / time to scale the state in place"
    _lines(right, rows, "batch", "to_bound", "relative to the bound", "batch", bound, looks)
    legend(figure, (left, right))
    return figure


def _convolution(plt: Any, result: dict[str, Any]) -> Any:
    """Bars against moving the bytes once, a panel for each case."""
    cases = list(dict.fromkeys((row["what"], row["batch"], row["dtype"]) for row in result["rows"]))
    figure, axes = _panels(plt, len(cases))
    looks = _looks(result)
    for axis, one in zip(axes, cases, strict=False):
        rows = [row for row in result["rows"] if (row["what"], row["batch"], row["dtype"]) == one]
        names = [row["candidate"] for row in rows]
        axis.barh(names, [row["to_bound"] for row in rows], color=[looks[name].color for name in names])
        axis.axvline(1.0, color=palette.BASELINE, linewidth=1, linestyle=":")
        axis.invert_yaxis()
        axis.set(title=f"{one[0]}, batch {one[1]}, {one[2]}", xlabel="time / time to move the bytes once")
        axis.grid(alpha=0.3, axis="x")
    return figure


def _weights(plt: Any, result: dict[str, Any]) -> Any:
    """Time by rows of products, and of decode steps."""
    kinds = {"product": "one product", "decoder": "one token of a decoder"}
    found = [what for what in kinds if any(row["what"] == what for row in result["rows"])]
    figure, axes = _panels(plt, len(found))
    looks = _looks(result)
    for axis, what in zip(axes, found, strict=False):
        rows = [{**row, "ms": 1e3 * row["seconds"]} for row in result["rows"] if row["what"] == what]
        _lines(axis, rows, "rows", "ms", kinds[what], "rows", "time, ms", looks)
    legend(figure, axes)
    return figure


def _generate(plt: Any, result: dict[str, Any]) -> Any:
    steps = [{**row, "ms": 1e3 * row["seconds"]} for row in result["rows"] if row["what"] == "step"]
    images = [row for row in result["rows"] if row["what"] == "images"]
    batches = list(dict.fromkeys(row["batch"] for row in steps))
    figure, axes = _panels(plt, len(batches) + bool(images))
    looks = palette.looks(row["candidate"] for row in [*steps, *images])
    for axis, batch in zip(axes, batches, strict=False):
        rows = [row for row in steps if row["batch"] == batch]
        _lines(axis, rows, "position", "ms", f"one token, batch {batch}", "position, tokens", "time, ms", looks)
    if images:
        _lines(axes[-1], images, "batch", "images_per_second", "whole images", "batch", "images per second", looks)
    legend(figure, axes)
    return figure


def _gated(plt: Any, result: dict[str, Any]) -> Any:
    modes = list(dict.fromkeys(row["mode"] for row in result["rows"]))
    rules = result["options"]["rules"]
    figure, axes = _panels(plt, len(modes))
    looks = _looks(result)
    for axis, mode in zip(axes, modes, strict=False):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        batch = max(row["batch"] for row in rows)
        rows = [row for row in rows if row["batch"] == batch]
        for name in dict.fromkeys(row["candidate"] for row in rows):
            found = [(1e3 * row["seconds"], rules.index(row["rule"])) for row in rows if row["candidate"] == name]
            axis.plot(*zip(*found, strict=True), looks[name].marker, color=looks[name].color, label=name, markersize=8)
        axis.set(xscale="log", xlabel="time, ms", title=f"{mode}, batch {batch}" if mode == "step" else mode)
        axis.set_yticks(range(len(rules)), rules)
        axis.set_ylim(len(rules) - 0.5, -0.5)
        _decades(axis, axis.xaxis)
        axis.grid(alpha=0.3)
    legend(figure, axes)
    return figure


def _limits(plt: Any, result: dict[str, Any]) -> Any:
    figure, (left, right) = _panels(plt, 2)
    products = [{**row, "candidate": row["dtype"]} for row in result["rows"] if row["limit"] == "gemm"]
    traffic = [{**row, "candidate": row["limit"]} for row in result["rows"] if row["limit"] != "gemm"]
    looks = palette.looks(row["candidate"] for row in [*products, *traffic])
    _lines(left, products, "size", "value", "products of square matrices", "rows and columns", "GFLOP/s", looks)
    _lines(right, traffic, "size", "value", "moving bytes", "size of the array, MB", "GB/s", looks)
    legend(figure, (left, right))
    return figure


def _pattern(plt: Any, result: dict[str, Any]) -> Any:
    rows = [{**row, "ms": 1e3 * row["seconds"]} for row in result["rows"] if row["mode"] in MODES]
    texts, modes = (list(dict.fromkeys(row[name] for row in rows)) for name in ("pattern", "mode"))
    looks = palette.looks(row["candidate"] for row in rows)
    size = (3.2 * (len(modes) + 1), 3.3 * max(len(texts), 1))
    figure, axes = plt.subplots(
        max(len(texts), 1), len(modes) + 1, figsize=size, layout="constrained", squeeze=False, sharey="col"
    )
    for line, text in zip(axes, texts, strict=False):
        same = [row for row in rows if row["pattern"] == text]
        for axis, mode in zip(line, modes, strict=False):
            found = (row for row in same if row["mode"] == mode)
            _lines(axis, found, "length", "ms", f"{_wrapped(text)}\n{mode}", "tokens", "time, ms", looks)
        found, title = (row for row in same if row["mode"] == modes[-1]), f"{_wrapped(text)}\nmemory, {modes[-1]}"
        _lines(line[-1], found, "length", "mb", title, "tokens", "MB beyond the inputs", looks)
        for axis in line:
            axis.title.set_fontsize(9)
    legend(figure, axes.flat)
    return figure


def _wrapped(text: str) -> str:
    """A pattern in lines that fit a narrow panel."""
    return "\n".join(textwrap.wrap(text, 34, break_long_words=False)) or text


def _members(plt: Any, result: dict[str, Any]) -> Any:
    """A row for each family, time on the left and memory on the right; softmax is in every one of them.

    Where all were measured at one length, there are no lines to draw: a bar for each then, slowest on top.
    """
    mode = MODES[int(result["options"]["backward"])]
    measured = [row for row in result["rows"] if row["mode"] == mode]
    if len({row["length"] for row in measured}) == 1:
        return _bars(plt, measured, mode)
    families = list(dict.fromkeys(one["family"] for one in result["growth"])) or [""]
    looks = palette.looks(row["candidate"] for row in measured)
    figure = plt.figure(figsize=(2 * PANEL[0], (PANEL[1] + 0.5) * len(families)), layout="constrained")
    parts = figure.subfigures(len(families), 1, squeeze=False).flat
    for part, family in zip(parts, families, strict=True):
        left, right = part.subplots(1, 2)
        rows = [
            {**row, "ms": 1e3 * row["seconds"]} | ({"mb": max(row["mb"], 0.1)} if "mb" in row else {})
            for row in measured
            if row["family"] == family or row["candidate"] == "softmax"
        ]
        _lines(left, rows, "length", "ms", f"{family}: {mode}", "tokens", "time, ms", looks)
        _lines(right, rows, "length", "mb", f"{family}: peak memory", "tokens", "MB beyond the inputs", looks)
        legend(part, (left, right))
    return figure


def _bars(plt: Any, rows: list[dict[str, Any]], mode: str) -> Any:
    """Time and peak memory of each candidate at one length, side by side."""
    rows = sorted(rows, key=lambda row: row["seconds"])
    size = {"figsize": (2 * PANEL[0], max(3.0, 1.5 + 0.26 * len(rows))), "layout": "constrained", "sharey": True}
    figure, (left, right) = plt.subplots(1, 2, **size)
    places, names = range(len(rows)), [row["candidate"] for row in rows]
    colors = [palette.color(name) for name in names]
    left.barh(places, [1e3 * row["seconds"] for row in rows], color=colors)
    right.barh(places, [row.get("mb", 0.0) for row in rows], color=colors)
    left.set_yticks(places, names)
    left.set(title=f"{mode}, {rows[0]['length']} tokens", xlabel="time, ms")
    right.set(title=f"peak memory, {mode}", xlabel="MB beyond the inputs")
    for axis in (left, right):
        axis.grid(alpha=0.3, axis="x")
    return figure


def _depth(plt: Any, result: dict[str, Any]) -> Any:
    """Memory by depth, on plain axes; what was computed from a line is hollow."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for name, look in _looks(result).items():
        rows = [row for row in result["rows"] if row["candidate"] == name]
        measured = [(row["depth"], row["mb"] / 1024) for row in rows if "mb" in row]
        beyond = [(row["depth"], row["expected_mb"] / 1024) for row in rows if "expected_mb" in row]
        style = {"marker": look.marker, "color": look.color}
        if measured:
            axis.plot(*zip(*measured, strict=True), label=name, **style)
        if beyond:
            line = [*measured[-1:], *beyond]
            axis.plot(*zip(*line, strict=True), ":", markerfacecolor="white", **style)
    axis.set(xlabel="blocks", ylabel="peak memory of a training step, GB", ylim=(0, None))
    axis.set_title(f"{result['options']['attention']}, {result['options']['length']} tokens; hollow: computed")
    axis.set_xticks(sorted({row["depth"] for row in result["rows"]}))
    axis.grid(alpha=0.3)
    legend(figure, [axis])
    return figure


def _rewind(plt: Any, result: dict[str, Any]) -> Any:
    """The share of an edit, the time of a call by its tokens, and the speed-up by drafts."""
    figure, axes = plt.subplots(1, 3, figsize=(3 * PANEL[0], PANEL[1]), layout="constrained")
    panels = (("edit", "share", "an edit, of the whole prompt"), ("verify", "steps", "a call, in single steps"))
    for axis, (part, field, label) in zip(axes, (*panels, ("text", "speed", "speed-up of a text")), strict=True):
        rows = [row for row in result["rows"] if row["part"] == part]
        facts = ("candidate", "dtype", "model", "text")
        names = [", ".join(str(row[fact]) for fact in facts if fact in row) for row in rows]
        axis.barh(names, [row[field] for row in rows])
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.grid(alpha=0.3, axis="x")
    return figure


def _transformers(plt: Any, result: dict[str, Any]) -> Any:
    """The speed-up of each model, by what it does."""
    rows = [row for row in result["rows"] if row["candidate"] == "longspan" and "times_transformers" in row]
    return speedups(plt, rows)


def _rwkv7(plt: Any, result: dict[str, Any]) -> Any:
    """Tokens per second of each candidate, a panel for each mode."""
    rows = result["rows"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = plt.subplots(1, max(len(modes), 1), figsize=(9.0, 2.8), layout="constrained", squeeze=False)
    for axis, mode in zip(axes.flat, modes, strict=False):
        found = {row["candidate"]: row["tokens_per_second"] for row in rows if row["mode"] == mode}
        bars = axis.barh(list(found), list(found.values()), color=palette.IMPLEMENTATIONS["longspan"])
        axis.bar_label(bars, [f" {value:,.0f}" for value in found.values()])
        axis.set(title=mode, xlabel="tokens per second", xlim=(0, 1.3 * axis.get_xlim()[1]))
        axis.invert_yaxis()
        axis.grid(alpha=0.3, axis="x")
    return figure


def _profile(plt: Any, result: dict[str, Any]) -> Any:
    """A bar for each kernel and length, divided by stage, with the share of the bound at its end.

    A panel for each mode and bound. Waiting is a share of threads x wall time, the stages are shares of the rest, so
    that a bar has 100 %. Where stages were not measured, the bar is the share of the bound itself.
    """
    rows = [row for row in result["rows"] if row["what"] == "sequence"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    # Older results have one bound.
    bounds = list(dict.fromkeys(row.get("bound", "GEMM") for row in rows))
    groups = [[row for row in rows if row.get("bound", "GEMM") == bound] for bound in bounds]
    rates = {"GEMM": "the peak of matrix products", "copy": "the rate of a copy"}
    # Half a bar of space between two kernels.
    heights = [len(_values(of, "kernel")) * (len(_values(of, "length")) + 0.5) for of in groups]
    size = (9.0, max(2.8, 1.1 + 0.5 * max(len(groups), 1) + 0.21 * sum(heights)))
    grid = {"height_ratios": heights} if heights else {}
    panels = {"layout": "constrained", "squeeze": False, "sharey": "row", "gridspec_kw": grid}
    figure, axes = plt.subplots(max(len(groups), 1), max(len(modes), 1), figsize=size, **panels)
    staged = any("waiting" in row for row in rows)
    stages = [stage for stage in palette.STAGES if staged and any(_part(row, stage) for row in rows)]
    for line, bound, of in zip(axes, bounds, groups, strict=False):
        for axis, mode in zip(line, modes, strict=False):
            _profile_bars(axis, [row for row in of if row["mode"] == mode], _places(of), stages)
            right = f"; right: % of {'GEMM' if bound == 'GEMM' else 'a copy'}" if staged and len(groups) > 1 else ""
            axis.set_title(mode + right)
            if not staged or of is groups[-1]:
                axis.set_xlabel(f"% of {'threads x wall time' if staged else rates[bound]}")
        lengths = _values(of, "length")
        line[0].set_yticks(
            list(_places(of).values()),
            [f"{kernel}  {thousands(n)}" if n == lengths[0] else thousands(n) for kernel, n in _places(of)],
        )
        line[0].invert_yaxis()
    title = f"right of each bar: share of {rates[bounds[0]]}" if staged and len(bounds) == 1 else None
    legend(figure, axes.flat, columns=7 if len(groups) > 1 else 6, title=title)
    return figure


def _values(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _places(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Where the bar of each kernel and length is."""
    lengths = _values(rows, "length")
    return {
        (kernel, length): i * (len(lengths) + 0.5) + j
        for i, kernel in enumerate(_values(rows, "kernel"))
        for j, length in enumerate(lengths)
    }


def _profile_bars(
    axis: Any, rows: list[dict[str, Any]], places: dict[tuple[str, int], float], stages: list[str]
) -> None:
    here = {places[row["kernel"], row["length"]]: row for row in rows}
    ends = dict.fromkeys(here, 0.0)
    for stage in stages:
        part = {at: 100 * _part(row, stage) for at, row in here.items()}
        color = palette.STAGES[stage]
        axis.barh(list(part), list(part.values()), 0.86, [ends[at] for at in part], color=color, label=stage)
        ends = {at: ends[at] + part[at] for at in here}
    if not stages:
        ends = {at: 100 * row["share"] for at, row in here.items()}
        axis.barh(list(ends), list(ends.values()), 0.86, color=palette.IMPLEMENTATIONS["native"])
    for at, row in here.items():
        axis.text(ends[at] + 1, at, f"{row['share']:.0%}", va="center", fontsize=8.5)
    axis.margins(y=0.02)
    # The numbers at the ends take the room on the right.
    axis.set(xlim=(0, 114 if stages else 1.2 * max([*ends.values(), 1e-9])))
    if stages:
        axis.set_xticks(range(0, 101, 20))
    axis.grid(alpha=0.3, axis="x")
    axis.tick_params(axis="y", length=0)


def _part(row: dict[str, Any], stage: str) -> float:
    """The part of threads x wall time in a stage, or waiting."""
    waiting = row.get("waiting", 1.0)
    return waiting if stage == "waiting" else (1 - waiting) * row.get(f"stage {stage}", 0.0)


def _serve(plt: Any, result: dict[str, Any]) -> Any:
    """Tokens per second, and the time to the first token and between tokens, by number of streams."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.8), layout="constrained")
    rows = result["rows"]
    for way, style in zip(dict.fromkeys(row["way"] for row in rows), ("-", "--", ":"), strict=False):
        color = palette.IMPLEMENTATIONS.get(way.partition(",")[0], palette.IMPLEMENTATIONS["longspan"])
        of = [row for row in rows if row["way"] == way]
        streams = [row["streams"] for row in of]
        rate = [row["tokens_per_second"] for row in of]
        left.plot(streams, rate, style, marker="o", color=color, label=way)
        for what, shade in (("first", "#d55e00"), ("gap", "#009e73")):
            name = {"first": "first token", "gap": "gap"}[what]
            label = f"{name}, 99 %, {way}"
            right.plot(streams, [row[f"{what}_p99"] for row in of], style, marker="o", color=shade, label=label)
    left.set(ylabel="tokens per second", ylim=(0, None))
    left.yaxis.set_major_formatter("{x:,g}")
    right.set(ylabel="seconds", yscale="log")
    for axis in (left, right):
        counts = sorted({row["streams"] for row in rows})
        axis.set(xlabel="streams", xscale="log")
        axis.set_xticks(counts, [f"{n:,}" for n in counts], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    _decades(right)
    return figure


MODELS = {  # names in the benchmark of transformers -> names in pictures
    "kimi": "Kimi-Linear",
    "mamba2": "Mamba-2",
    "granite": "Granite 4.0 hybrid",
    "qwen3.5": "Qwen3.5",
    "mamba_layer": "a layer of Mamba",
}


def speedups(plt: Any, rows: list[dict[str, Any]], modes: Iterable[str] = (), *, narrow: bool = False) -> Any:
    """Bars of the speed-up over stock transformers, a panel for each mode, all with the same scale.

    Args:
        plt: what ``pyplot`` returns.
        rows: those of longspan in results of the benchmark ``hybrids``, with ``model``, ``dtype``, ``mode`` and
            ``times_transformers``.
        modes: which modes, in this order; none: all in the order of the rows.
        narrow: one panel below the other, for a phone.

    Returns:
        The figure.
    """
    modes = list(modes) or list(dict.fromkeys(row["mode"] for row in rows))
    models, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "dtype"))
    count, height = max(len(modes), 1), 0.4 * len(models) * max(len(dtypes), 1)
    shape, size = (
        ((count, 1), (4.4, 0.8 + (0.9 + 0.7 * height) * count)) if narrow else ((1, count), (9.0, 1.2 + height))
    )
    shared = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(*shape, figsize=(size[0], max(2.6, size[1])), **shared)
    colors = dict(zip(dtypes, ("#8a8a8a", palette.IMPLEMENTATIONS["longspan"]), strict=False))
    height = 0.8 / max(len(dtypes), 1)
    for axis, mode in zip(axes.flat, modes, strict=False):
        for i, dtype in enumerate(dtypes):
            found = {
                row["model"]: row["times_transformers"] for row in rows if (row["mode"], row["dtype"]) == (mode, dtype)
            }
            at = [models.index(name) + (i - (len(dtypes) - 1) / 2) * height for name in found]
            bars = axis.barh(at, list(found.values()), height * 0.92, label=dtype, color=colors.get(dtype))
            axis.bar_label(bars, [f" {value:.1f}x" for value in found.values()])
        axis.axvline(1.0, color=palette.BASELINE, linewidth=1, linestyle=":")
        axis.set(title=mode)
        axis.set_yticks(range(len(models)), [MODELS.get(name, name) for name in models])
        axis.grid(alpha=0.3, axis="x")
    for axis in axes[-1]:
        axis.set(xlabel="speed-up over transformers")
    # The numbers at the ends of the bars take the room on the right.
    axes.flat[0].set_xlim(0, 1.18 * max((row["times_transformers"] for row in rows), default=1.0))
    axes.flat[0].invert_yaxis()
    legend(figure, axes.flat)
    return figure


def time_and_state(plt: Any, rows: list[dict[str, Any]], *, narrow: bool = False) -> Any:
    """Time and size of the state by length, both axes logarithmic, each line with its name at the end.

    Args:
        plt: what ``pyplot`` returns.
        rows: dictionaries with ``candidate``, ``length`` and ``seconds``, ``state_bytes`` or both.
        narrow: one panel below the other, for a phone.

    Returns:
        The figure, with two panels.
    """
    shape, size = ((2, 1), (4.4, 6.6)) if narrow else ((1, 2), (9.2, 3.9))
    figure, (left, right) = plt.subplots(*shape, figsize=size, layout="constrained")
    looks = palette.looks(row["candidate"] for row in rows)
    lengths = sorted({row["length"] for row in rows})
    for axis, key, factor in ((left, "seconds", 1e3), (right, "state_bytes", 1.0)):
        ends = {}
        for name, look in looks.items():
            points = sorted((r["length"], factor * r[key]) for r in rows if r["candidate"] == name and r.get(key))
            if points:
                axis.plot(*zip(*points, strict=True), color=look.color, marker=look.marker, label=name)
                ends[name] = points[-1]
        axis.set(xscale="log", yscale="log", xlabel="tokens N")
        axis.set_xticks(lengths, [thousands(length) for length in lengths])
        axis.grid(alpha=0.3)
        axis.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
        axis.margins(y=0.1)
        _name_ends(axis, ends, looks)
    left.set(title="one sequence, forward + backward", ylabel="time, ms")
    right.set(title="state after N tokens", ylabel="size of the state")
    _decades(left)
    right.yaxis.set_major_locator(_base_two())
    right.yaxis.set_major_formatter(lambda value, _: readable_bytes(value))
    right.minorticks_off()
    return figure


def _base_two() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(base=4.0)


def _name_ends(axis: Any, ends: dict[str, tuple[float, float]], looks: dict[str, palette.Look]) -> None:
    """Write each line's name right of its last point, moved up or down where two would meet."""
    axis.figure.canvas.draw()
    height = 13.0  # points per name
    places: dict[str, float] = {}
    last = -math.inf
    for name, point in sorted(ends.items(), key=lambda item: item[1][1]):
        if point[0] < max(x for x, _ in ends.values()):
            places[name] = axis.transData.transform(point)[1]
            continue
        y = max(axis.transData.transform(point)[1], last + height * axis.figure.dpi / 72)
        places[name], last = y, y
    last_length = max(x for x, _ in ends.values())
    for name, (x, value) in ends.items():
        shift = (places[name] - axis.transData.transform((x, value))[1]) * 72 / axis.figure.dpi
        # A line that ends early has its name above, where no other line follows.
        early = x < last_length
        axis.annotate(
            name,
            (x, value),
            (-3, 8) if early else (7, shift),
            textcoords="offset points",
            va="center",
            ha="right" if early else "left",
            color=looks[name].color,
            fontweight="bold",
            annotation_clip=False,
        )


def readable_bytes(count: float) -> str:
    """A size with a binary unit.

    >>> readable_bytes(66560), readable_bytes(2**21), readable_bytes(512)
    ('65 KiB', '2 MiB', '512 B')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


PICTURES = {
    "depth": _depth,
    "rewind": _rewind,
    "convolution": _convolution,
    "weights": _weights,
    "transformers": _transformers,
    "rwkv7": _rwkv7,
    "profile": _profile,
    "serve": _serve,
    "serve_peer": _serve,
    "members": _members,
    "attention": _attention,
    "step": _step,
    "generate": _generate,
    "gated": _gated,
    "pattern": _pattern,
    "limits": _limits,
}
