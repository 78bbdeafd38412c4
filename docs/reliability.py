"""Write the counts of the attacks into docs/reliability.md.

cd tests && python -m attacks --json FILE
python docs/reliability.py FILE

Several files are put together, of attacks that were run one after the other with numbers of cases of their own.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "reliability.md"
BEGIN, END = "<!-- attacks:begin -->", "<!-- attacks:end -->"


def table(found: dict[str, Any]) -> str:
    """What was found as Markdown: a row for each attack, and where the figures come from."""
    rows = [
        f"| `{row['attack']}` | {row['cases']:,} | {row['failures']} | {row['seconds']} |" for row in found["attacks"]
    ]
    cases, failures, seconds = (sum(row[key] for row in found["attacks"]) for key in ("cases", "failures", "seconds"))
    return "\n".join(
        (
            "| attack | cases | failures | seconds |",
            "|---|---|---|---|",
            *rows,
            f"| all | {cases:,} | {failures} | {seconds} |",
            "",
            f"By `python -m attacks` in `tests` (seed {found['seed']}) at commit {found['commit'][:7] or 'unknown'} on "
            f"{found['processor']}, "
            f"{found['cores']} cores, {found['system']}, torch {found['torch']}.",
        )
    )


def written(text: str, found: dict[str, Any]) -> str:
    """The page with its table written anew."""
    return re.sub(f"{BEGIN}\n.*?{END}", lambda _: f"{BEGIN}\n{table(found)}\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    several = [json.loads(Path(file).read_text(encoding="utf-8")) for file in sys.argv[1:]]
    counts = several[0] | {"attacks": sorted((r for one in several for r in one["attacks"]), key=lambda r: r["attack"])}
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), counts), encoding="utf-8")
