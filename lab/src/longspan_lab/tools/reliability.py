"""Write the counts of the attacks into docs/reference/guarantees.md.

    cd tests && python -m attacks --json FILE
    python -m longspan_lab.tools reliability FILE

Pass several files to merge separate runs. Rows of the page that no file contains stay as they are.
"""

import json
import re
from pathlib import Path
from typing import Any

from . import DOCS
from .blocks import place

PAGE = DOCS / "reference" / "guarantees.md"
MADE = re.compile(r"\(seeds? ([\d, ]+)\) on (.+)\.$", re.MULTILINE)
ROW = re.compile(r"\| `(\w+)` \| ([\d,]+) \| (\d+) \| (\d+) \| (\w+) \|")


def existing_rows(text: str) -> list[tuple[dict[str, Any], str]]:
    """The rows of the page's table, each with its commit."""
    found = []
    for name, cases, failures, seconds, commit in ROW.findall(text):
        counts = {"cases": int(cases.replace(",", "")), "failures": int(failures), "seconds": int(seconds)}
        found.append(({"attack": name, **counts}, commit))
    return found


def table(runs: list[dict[str, Any]], before: str = "") -> str:
    """The results as Markdown: one row per attack, then the machine.

    Args:
        runs: Contents of JSON files of ``python -m attacks``.
        before: The page so far; its rows for other attacks stay.
    """
    found = [(row, run["commit"][:7] or "unknown") for run in runs for row in run["attacks"]]
    new = {row["attack"] for row, _ in found}
    found += [pair for pair in existing_rows(before) if pair[0]["attack"] not in new]
    found.sort(key=_name)
    rows = [
        f"| `{row['attack']}` | {row['cases']:,} | {row['failures']} | {row['seconds']} | {commit} |"
        for row, commit in found
    ]
    cases, failures, seconds = (sum(row[key] for row, _ in found) for key in ("cases", "failures", "seconds"))
    machines = [f"{run['processor']}, {run['cores']} cores, {run['system']}, torch {run['torch']}" for run in runs]
    seeds = [str(run["seed"]) for run in runs]
    if earlier := MADE.search(before):
        seeds += earlier[1].split(", ")
        machines += earlier[2].split("; ")
    return "\n".join(
        (
            "| attack | cases | failures | seconds | at commit |",
            "|---|---|---|---|---|",
            *rows,
            f"| all | {cases:,} | {failures} | {seconds} | |",
            "",
            f"By `python -m attacks` in `tests` (seed {', '.join(dict.fromkeys(seeds))}) on "
            f"{'; '.join(dict.fromkeys(machines))}.",
        )
    )


def _name(pair: tuple[dict[str, Any], str]) -> str:
    return pair[0]["attack"]


def update(text: str, runs: list[dict[str, Any]]) -> str:
    """The page with a new table."""
    return place(text, "attacks", table(runs, text))


def main(*files: str) -> None:
    """Write the counts in these files into the page."""
    runs = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
