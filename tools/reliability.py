"""Write the counts of the attacks into docs/reference/guarantees.md.

cd tests && python -m attacks --json FILE
python tools/reliability.py FILE

Several files are put together, of attacks that were run one after the other. Rows of the page that no file has stay.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "guarantees.md"
BEGIN, END = "<!-- attacks:begin -->", "<!-- attacks:end -->"


ROW = re.compile(r"\| `(\w+)` \| ([\d,]+) \| (\d+) \| (\d+) \| (\w+) \|")


def kept(text: str) -> list[tuple[dict[str, Any], str]]:
    """The rows of the page's table, each with its commit."""
    found = []
    for name, cases, failures, seconds, commit in ROW.findall(text):
        counts = {"cases": int(cases.replace(",", "")), "failures": int(failures), "seconds": int(seconds)}
        found.append(({"attack": name, **counts}, commit))
    return found


def table(several: list[dict[str, Any]], before: str = "") -> str:
    """What was found as Markdown: a row for each attack, and where the figures come from."""
    found = [(row, one["commit"][:7] or "unknown") for one in several for row in one["attacks"]]
    new = {row["attack"] for row, _ in found}
    found = sorted([*found, *(pair for pair in kept(before) if pair[0]["attack"] not in new)], key=_named)
    rows = [
        f"| `{row['attack']}` | {row['cases']:,} | {row['failures']} | {row['seconds']} | {commit} |"
        for row, commit in found
    ]
    cases, failures, seconds = (sum(row[key] for row, _ in found) for key in ("cases", "failures", "seconds"))
    places = dict.fromkeys(
        f"{one['processor']}, {one['cores']} cores, {one['system']}, torch {one['torch']}" for one in several
    )
    seeds = ", ".join(dict.fromkeys(str(one["seed"]) for one in several))
    return "\n".join(
        (
            "| attack | cases | failures | seconds | at commit |",
            "|---|---|---|---|---|",
            *rows,
            f"| all | {cases:,} | {failures} | {seconds} | |",
            "",
            f"By `python -m attacks` in `tests` (seed {seeds}) on {'; '.join(places)}.",
        )
    )


def _named(pair: tuple[dict[str, Any], str]) -> str:
    return pair[0]["attack"]


def written(text: str, several: list[dict[str, Any]]) -> str:
    """The page with its table written anew."""
    return re.sub(f"{BEGIN}\n.*?{END}", lambda _: f"{BEGIN}\n{table(several, text)}\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    several = [json.loads(Path(file).read_text(encoding="utf-8")) for file in sys.argv[1:]]
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), several), encoding="utf-8")
