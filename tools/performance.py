"""Put benchmarks' figures and pictures into docs/results/performance.md.

    longspan bench KIND --out FOLDER
    python tools/performance.py FOLDER

copies the JSON, CSV and PNG files of the kinds that FOLDER has to ``benchmarks/results/MACHINE``, where MACHINE is the
first of ``MACHINES``, and writes the tables between the page's markers, each from the first machine that has it.
Without an argument it only writes them again.
"""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

from longspan.bench import report

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS = DOCS / "results" / "performance.md", DOCS.parent / "benchmarks" / "results"
MACHINES = ("xeon-amx-2-cores", "xeon-avx512-2-cores", "epyc-2-cores", "epyc-avx2-2-cores")
# What is measured -> the module of longspan.bench that can tell it.
KINDS = {
    "limits": "limits",
    "attention": "attention",
    "step": "step",
    "generate": "decoding",
    "gated": "gated",
    "depth": "depth",
    "convolution": "convolution",
    "transformers": "hybrids",
    "pattern": "pattern",
}
BLOCK = "<!-- {}:begin -->\n{}<!-- {}:end -->"


def block(name: str) -> str:
    """The tables of one benchmark, as they were printed, and its picture; of a kind without results, that they lack."""
    machine = next((m for m in MACHINES if (RESULTS / m / f"{name}.json").exists()), MACHINES[0])
    path = RESULTS / machine / f"{name}.json"
    if name in KINDS and not path.exists():
        return f"\nNot measured yet: `python tools/performance.py FOLDER` puts {name}.json of a run's FOLDER here.\n\n"
    result = json.loads(path.read_text(encoding="utf-8"))
    kind = result["benchmark"]
    text = report.show(result, importlib.import_module(f"longspan.bench.{KINDS[kind]}").text)
    picture = f"../../benchmarks/results/{machine}/{name}.png"
    return f"\n![{name}]({picture})\n\n```text\n{text}\n```\n\n"


def page(text: str) -> str:
    """The page with every marked block written anew."""
    return re.sub(
        r"<!-- (\w+):begin -->\n.*?<!-- \1:end -->",
        lambda found: BLOCK.format(found[1], block(found[1]), found[1]),
        text,
        flags=re.DOTALL,
    )


def main(folders: list[str]) -> None:
    """Copy what is new, write the page."""
    (RESULTS / MACHINES[0]).mkdir(parents=True, exist_ok=True)
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.json"))):
        found = json.loads(path.read_text(encoding="utf-8"))
        # Of other kinds, such as ``members``, other pages tell.
        if found.get("benchmark") in KINDS and not found.get("partial"):
            for ending in (".json", ".csv", ".png"):
                shutil.copyfile(path.with_suffix(ending), RESULTS / MACHINES[0] / path.with_suffix(ending).name)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
