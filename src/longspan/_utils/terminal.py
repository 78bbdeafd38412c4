"""The width of the terminal, and text wrapped to it."""

import shutil
import textwrap
from collections.abc import Iterable

FALLBACK = 80  # columns where the output is not a terminal
NARROWEST = 40


def columns() -> int:
    """Columns of the terminal; 80 where the output is not a terminal. The variable COLUMNS overrides both."""
    return max(NARROWEST, shutil.get_terminal_size((FALLBACK, 24)).columns)


def wrapped(text: str, indent: int = 0, first: str | None = None, width: int | None = None) -> list[str]:
    """Lines of a text at most as wide as the terminal.

    Args:
        text: one paragraph. Words longer than a line, such as paths, are not broken.
        indent: spaces before each line.
        first: what the first line begins with instead of these spaces.
        width: columns; None: those of the terminal.
    """
    return textwrap.wrap(
        text,
        width or columns(),
        initial_indent=" " * indent if first is None else first,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def entry(label: str, texts: Iterable[str], indent: int, width: int | None = None) -> list[str]:
    """Lines of a label and its texts, each text in a wrapped paragraph that begins at column ``indent``."""
    lines: list[str] = []
    for text in texts:
        first = f"{label:<{indent}}" if not lines else " " * indent
        # The label is no word of the paragraph, so a long first word stays next to it.
        body = wrapped(text, indent, width=width) or [""]
        lines += [first + body[0].strip(), *body[1:]]
    return [line.rstrip() for line in lines]
