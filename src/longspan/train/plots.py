"""Plot learned spans by step and head, and ponder time by position and in an example."""

from pathlib import Path
from typing import Any

from .._utils import atomic_io
from .._utils.pyplot import png, pyplot

SHOWN = 96  # tokens of the example


def draw(path: Path, history: list[dict[str, Any]], text: bool) -> None:
    """Plot the result of ``learned.history`` into a PNG file, written atomically.

    Raises OSError with the name of the file, and ImportError without matplotlib. ``text``: tokens are bytes.
    """
    plt, last = pyplot(), history[-1]
    panels = [*((_steps, _heads) if "spans" in last else ()), *((_positions,) if "ponder" in last else ())]
    rows = 1 + ("ponder" in last)
    figure = plt.figure(figsize=(4.5 * max(len(panels), 2), 3.9 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, len(panels))
    for i, panel in enumerate(panels):
        panel(figure.add_subplot(grid[0, i]), history)
    if "ponder" in last:
        _example(figure.add_subplot(grid[1, :]), last, text)
    try:
        content = png(figure)
    finally:
        plt.close(figure)
    atomic_io.write(path, content)


def _steps(axis: Any, history: list[dict[str, Any]]) -> None:
    """Spans by step, a line for each head, a color for each layer."""
    steps = [one["step"] for one in history]
    for color, (layer, heads) in enumerate(history[-1]["spans"]):
        for head in range(len(heads)):
            spans = [one["spans"][color][1][head] for one in history]
            label = None if head else f"layer {layer}"
            axis.plot(steps, spans, ".-", color=f"C{color % 10}", linewidth=1.2, markersize=4, label=label)
    axis.set(title="spans by step", xlabel="training steps", ylabel="span of a head, tokens")
    _from_nothing(axis)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)


def _heads(axis: Any, history: list[dict[str, Any]]) -> None:
    """The last spans, head by head, grouped by layer."""
    at, ticks = 0, []
    for color, (layer, heads) in enumerate(history[-1]["spans"]):
        places = list(range(at, at + len(heads)))
        axis.bar(places, heads, color=f"C{color % 10}")
        ticks.append((sum(places) / len(places), f"layer {layer}"))
        at += len(heads) + 1
    axis.set_xticks(*zip(*ticks, strict=True))
    axis.set(title=f"spans of the heads, step {history[-1]['step']}", ylabel="tokens")
    _from_nothing(axis)
    axis.grid(axis="y", alpha=0.3)


def _from_nothing(axis: Any) -> None:
    """Start the axis at 0 and end it at 1 or more, so that spans near 0 look small."""
    axis.set_ylim(0, max(1.0, axis.get_ylim()[1]))


def _positions(axis: Any, history: list[dict[str, Any]]) -> None:
    """Ponder time by position, at the first and the last evaluation."""
    for one in dict.fromkeys((0, len(history) - 1)):
        ponder = history[one]["ponder"]
        axis.plot(range(len(ponder)), ponder, color="C0" if one else "0.7", label=f"step {history[one]['step']}")
    axis.set(title="ponder time by position", xlabel="position in an example", ylabel="steps and remainder, mean")
    axis.set_ylim(0, 1.1 * max(max(one["ponder"]) for one in history))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)


def _example(axis: Any, last: dict[str, Any], text: bool) -> None:
    """Ponder time where each token of one example is predicted."""
    tokens, ponder = last["example"][:SHOWN], last["example_ponder"][:SHOWN]
    axis.bar(range(len(ponder)), ponder, color="C0")
    if text:
        axis.set_xticks(range(len(tokens)), [_letter(token) for token in tokens], fontsize=7, family="monospace")
    else:
        axis.set_xlabel("position")
    axis.set_xlim(-0.8, len(ponder) - 0.2)
    axis.set(title="ponder time where each token of a validation example is predicted", ylabel="steps and remainder")
    axis.grid(axis="y", alpha=0.3)


def _letter(byte: int) -> str:
    """A byte as one visible character."""
    signs = {10: "\u21b5", 32: "\u2423", 9: "\u21e5", 36: r"\$"}
    return signs.get(byte, chr(byte) if 32 < byte < 127 else "\u00b7")
