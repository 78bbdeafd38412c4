"""Put a demo's figures and pictures into the docs.

    longspan demo --out demo
    python tools/figures.py demo/demo.json

copies ``demo.json`` and its picture from the demo's folder to ``docs/images`` and writes the figures between the two
markers of ``docs/results/demo.md``. Without an argument it only writes them again, from ``docs/images/demo.json``.

    python tools/figures.py --draw

draws the docs' other pictures, by the commands in DRAWN and the model that comes with the package.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan.cli import entry

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, IMAGES = DOCS / "results" / "demo.md", DOCS / "images"
PICTURES = ("throughput.png",)
DRAWN = {
    "mnist.png": "generate mnist --count 49",
    "mnist_completions.png": "generate mnist --complete test --count 15",
}
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"

SETTINGS = {"digits": "digits, 64 pixels, trained", "mnist_784": "MNIST's size, 784 pixels, untrained"}
CANDIDATES = {
    "linear": "linear, as an RNN",
    "softmax_cached": "softmax, keys and values kept",
    "softmax_recompute": "softmax, prefix recomputed",
}


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
    speed = {s: {c: number(facts, "images_per_second", s, c) for c in CANDIDATES} for s in SETTINGS}
    long = speed["mnist_784"]
    lines = [
        "| held-out digits | bits per pixel |",
        "|---|---|",
        f"| linear | {number(facts, 'bits_per_dim', 'linear'):.3f} |",
        f"| softmax | {number(facts, 'bits_per_dim', 'softmax'):.3f} |",
        f"| a histogram per pixel, no model | {number(facts, 'bits_per_dim', 'histogram'):.3f} |",
        "",
        f"| images per second | {' | '.join(CANDIDATES.values())} |",
        f"|---|{'---|' * len(CANDIDATES)}",
        *(f"| {SETTINGS[s]} | {' | '.join(readable(float(row[c])) for c in CANDIDATES)} |" for s, row in speed.items()),
        "",
        f"At 784 pixels, `linear` makes {readable(long['linear'] / long['softmax_cached'])} times as many images per "
        f"second as softmax with its keys and values kept, and "
        f"{readable(long['linear'] / long['softmax_recompute'])} times as many as softmax without.",
        "",
        "| state of one image | bytes |",
        "|---|---|",
        *(f"| {name} | {readable(value)} |" for name, value in leaves(facts.get("state_bytes", {}))),
        "",
        *(f"At 784 pixels: {how}." for how in [facts.get("mnist_784", {}).get("how")] if how),
        "Machine: " + "; ".join(f"{k} {readable(v)}".strip() for k, v in leaves(facts.get("machine", "unknown"))) + ".",
        "Time: " + "; ".join(f"{k} {readable(v)} s".strip() for k, v in leaves(facts.get("seconds", "unknown"))) + ".",
        "Written by `python tools/figures.py` from `docs/images/demo.json`.",
    ]
    return "\n".join(lines)


def place(page: str, figures: str) -> str:
    """``page`` with what stands between the markers replaced. Raises ValueError where a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page of the demo needs the markers {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise ValueError("usage: python tools/figures.py [demo/demo.json | --draw]")
    if arguments == ["--draw"]:
        for name, command in DRAWN.items():
            if entry.main([*command.split(), "--out", str(IMAGES / name)]):
                raise ValueError(f"{name} could not be drawn")
        return
    source = Path(arguments[0]) if arguments else IMAGES / "demo.json"
    try:
        page = place(PAGE.read_text(encoding="utf-8"), render(json.loads(source.read_text(encoding="utf-8"))))
        if arguments:
            IMAGES.mkdir(exist_ok=True)
            for name in PICTURES:
                shutil.copyfile(source.with_name(name), IMAGES / name)
            shutil.copyfile(source, IMAGES / "demo.json")
    except OSError as error:
        raise ValueError(
            f"cannot read {error.filename}: {error.strerror}; make it by: longspan demo --out demo"
        ) from error
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as problem:
        sys.exit(f"figures: {problem}")
