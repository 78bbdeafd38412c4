"""``longspan list``: the registered mechanisms."""

import json

from .._utils import terminal
from .parser import Parser, make

INDENT = 4


def parser() -> Parser:
    parser = make(
        "list",
        "List the mechanisms: name, time for a sequence of N tokens with heads of size D, arXiv number of the paper, "
        "supported forms, and a summary.",
        "longspan list",
        "longspan list --json",
    )
    parser.add_flag("--json", "print JSON instead of a table")
    return parser


def run(args) -> int:
    from . import describe

    rows = describe.mechanisms()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    name, cost = (max(len(row[field]) for row in rows) for field in ("name", "cost"))
    for row in rows:
        print(f"{row['name']:<{name}}  {row['cost']:<{cost}}  arXiv:{row['paper']}")
        for text in (", ".join(row["forms"]), row["summary"].replace("``", "")):
            print("\n".join(terminal.wrapped(text, INDENT)))
    return 0
