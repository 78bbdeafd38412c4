"""Write the reference page of the command line from the parsers; ``make docs`` runs it."""

from longspan.cli.entry import COMMANDS


def page() -> str:
    """Every command with what it does, as Markdown."""
    rows = (f"| `longspan {name}` | {does} |" for name, (_, does) in COMMANDS.items())
    return "\n".join(("# Command line", "", "| command | what it does |", "|---|---|", *rows, ""))
