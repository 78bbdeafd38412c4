"""``longspan list``: the mechanisms that there are."""

import json
import textwrap

from .parser import Parser, make


def parser() -> Parser:
    parser = make(
        "list",
        "The mechanisms that there are: what each one is, its cost for a sequence of N tokens with heads of size D, "
        "the forms that it has, its paper.",
        "longspan list",
        "longspan list --json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(args) -> int:
    from . import describe

    rows = describe.mechanisms()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['cost']:<8}  {', '.join(row['forms'])}  arXiv:{row['paper']}")
        print(textwrap.fill(row["summary"], 110, initial_indent=" " * (width + 2), subsequent_indent=" " * (width + 2)))
    return 0
