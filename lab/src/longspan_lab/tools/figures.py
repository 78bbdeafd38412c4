"""Put a demo's figures into the docs, and draw the pictures in docs/images.

    longspan demo --out demo
    python -m longspan_lab.tools figures demo/demo.json

copies ``demo.json`` and its picture from the demo's folder to ``docs/images`` and writes the figures between the two
markers of ``docs/results/demo.md``. Without an argument it only writes them again, from ``docs/images/demo.json``.

    python -m longspan_lab.tools figures --draw

draws the charts in ``docs/images`` from the JSON files in ``benchmarks/results``, and the pictures of digits by the
commands in DRAWN with the model that comes with the package.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from longspan.cli import entry

from .._utils import plots
from ..experiments import demo
from . import DOCS, ROOT

PAGE, IMAGES = DOCS / "results" / "demo.md", DOCS / "images"
PICTURES = ("training.png", "training-dark.png")
MEASURED = ROOT / "benchmarks" / "results" / "epyc-2-cores"
LENGTHS, HYBRIDS = "every.json", ("transformers.json", "transformers_bfloat16.json", "transformers_qwen_granite.json")
MECHANISMS = ("softmax", "local", "linear", "gated_deltanet")
MODELS, MODES = ("kimi", "granite", "mamba2", "qwen3.5"), ("prefill", "training step")
DRAWN = {
    "mnist.png": "generate mnist --count 49",
    "mnist_completions.png": "generate mnist --complete test --count 15",
}
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"


def number(facts: dict[str, Any], *keys: str) -> float:
    """The number at ``facts[key][key]...``. Raises ValueError where there is none."""
    value: Any = facts
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the demo's figures have no number {'.'.join(keys)}")
    return value


def leaves(value: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything inside nested dicts, the name being the path of keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, *path, str(key).replace("_", " "))
    else:
        yield ", ".join(path), value


def readable(value: Any) -> str:
    """Three significant digits for a number with a fraction, separators for a whole one, text as it is."""
    match value:
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float() if abs(value) >= 100:
            return f"{value:,.0f}"
        case float():
            return f"{value:#.3g}".rstrip(".")
    return ", ".join(readable(item) for item in value) if isinstance(value, list | tuple) else str(value)


def render(facts: dict[str, Any]) -> str:
    """The page's lines for a ``demo.json``. Raises ValueError for one that lacks a figure."""
    for group in ("bits_per_dim", "images_per_second", "state_bytes"):
        for spec in demo.SPECS:
            number(facts, group, "softmax_cached" if (group, spec) == ("images_per_second", "softmax") else spec)
    if not facts.get("lengths", {}).get("rows"):
        raise ValueError("the demo's figures have no rows in lengths")
    lines = []
    for title, (head, *rows) in demo.tables(facts).items():
        lines += [f"{title[0].upper()}{title[1:]}:", "", f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|"]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    speed, histogram = number(facts, "shipped", "images_per_second"), number(facts, "bits_per_dim", "histogram")
    return "\n".join(
        [
            *lines,
            f"The layers: {facts['lengths']['how']}.",
            f"The shipped MNIST model drew {readable(float(speed))} images of 28 x 28 pixels per second.",
            f"A histogram of each pixel, without a model: {histogram:.3f} bits per pixel.",
            "Machine: "
            + "; ".join(f"{k} {readable(v)}".strip() for k, v in leaves(facts.get("machine", "unknown")))
            + ".",
            f"Time: {readable(number(facts, 'seconds'))} s, of processor time "
            f"{readable(number(facts, 'processor_seconds'))} s.",
            "Written by `python -m longspan_lab.tools figures` from `docs/images/demo.json`.",
        ]
    )


def charts() -> None:
    """Draw ``time-and-state.png`` and ``hybrids.png`` from the committed results of benchmarks."""
    plt, found = plots.pyplot(), read(LENGTHS)
    rows = [row for row in found["rows"] if row["candidate"] in MECHANISMS and row["mode"] == "forward+backward"]
    steps = [row for row in found["rows"] if row["candidate"] in MECHANISMS and row["mode"] == "step"]
    rows += [{key: row[key] for key in ("candidate", "length", "state_bytes")} for row in steps]
    rows.sort(key=lambda row: MECHANISMS.index(row["candidate"]))
    facts = found["machine"]
    layer = (
        f"one causal attention layer of {found['options']['dim']} channels and {found['options']['heads']} heads, ",
        f"float32, on {facts['processor']}, {facts['threads']} cores",
    )
    _save(plt, "time-and-state", partial(plots.time_and_state, plt, rows), layer)
    rows = [row for name in HYBRIDS for row in read(name)["rows"] if row["candidate"] == "longspan"]
    order = {name: place for place, name in enumerate(MODELS)}
    rows.sort(key=lambda row: (order[row["model"]], row["dtype"] != "float32"))
    facts, tokens = read(HYBRIDS[0])["machine"], read(HYBRIDS[0])["options"]["length"]
    call = (f"accelerate() on {facts['processor']}, {facts['threads']} cores, ", f"one sequence of {tokens:,} tokens")
    _save(plt, "hybrids", partial(plots.speedups, plt, rows, MODES), call)


def _save(plt: Any, name: str, drawn: Callable[..., Any], title: Iterable[str]) -> None:
    """Write a chart four times: wide and, for phones, narrow; light and dark."""
    for ending, narrow in (("", False), ("-narrow", True)):
        figure = drawn(narrow=narrow)
        figure.suptitle(("\n" if narrow else "").join(title), fontsize=9.5)
        plots.save(plt, figure, IMAGES / f"{name}{ending}.png", dark=True)


def read(name: str) -> dict[str, Any]:
    """A committed result of a benchmark."""
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


def place(text: str, figures: str) -> str:
    """``text`` with what stands between the markers replaced. Raises ValueError where a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page of the demo needs the markers {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def main(*arguments: str) -> None:
    if len(arguments) > 1:
        raise ValueError("usage: python -m longspan_lab.tools figures [demo/demo.json | --draw]")
    if arguments == ("--draw",):
        charts()
        for name, command in DRAWN.items():
            if entry.main([*command.split(), "--out", str(IMAGES / name)]):
                raise ValueError(f"{name} could not be drawn")
        return
    source = Path(arguments[0]) if arguments else IMAGES / "demo.json"
    try:
        text = place(PAGE.read_text(encoding="utf-8"), render(json.loads(source.read_text(encoding="utf-8"))))
        if arguments:
            IMAGES.mkdir(exist_ok=True)
            for name in PICTURES:
                shutil.copyfile(source.with_name(name), IMAGES / name)
            shutil.copyfile(source, IMAGES / "demo.json")
    except OSError as error:
        raise ValueError(
            f"cannot read {error.filename}: {error.strerror}; make it by: longspan demo --out demo"
        ) from error
    PAGE.write_text(text, encoding="utf-8")
