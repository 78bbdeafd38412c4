"""The files of the package, each with its opening sentence: all of them on a page, the folders in the README.

    python tools/tree.py

writes the README's part; ``make docs`` makes the page. Nothing is typed in by hand.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, SOURCE = ROOT / "README.md", ROOT / "src" / "longspan"
BEGIN, END = "<!-- tree:begin -->", "<!-- tree:end -->"
DEEPEST = 1  # folders below that are on the page alone
SUFFIXES = (".py", ".cpp", ".h")


def phrase(path: Path) -> str:
    """The first sentence of a file's docstring, or of the comment that it opens with; a folder's is in __init__.py."""
    if path.is_dir():
        return phrase(path / "__init__.py")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
        said = "\n".join(line.removeprefix("//").strip() for line in comment)
    first = re.split(r"(?<=[^.]\.)\s|\n\n", said.strip(), maxsplit=1)[0]
    if not first:
        raise ValueError(f"{path} opens with no sentence on what it is")
    return " ".join(first.split()).rstrip(".:")


def rows(folder: Path, depth: int = 0) -> list[str]:
    """A folder and what is in it, files first, as a nested list."""
    # A folder of C++ sources has no sentence of its own; each of its files has.
    said = f": {phrase(folder)}" if (folder / "__init__.py").exists() else ""
    lines = [f"{'  ' * depth}* `{folder.name}/`{said}"]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and any(file.suffix in SUFFIXES for file in path.rglob("*")):
            lines += rows(path, depth + 1)
        elif path.suffix in SUFFIXES and path.name != "__init__.py":
            lines.append(f"{'  ' * (depth + 1)}* `{path.name}`: {phrase(path)}")
    return lines


def page() -> str:
    """The whole tree, as Markdown."""
    opening = (
        "Every file with its first sentence. [](../explanation/architecture.md) shows how the files work together."
    )
    return "\n".join(("# The files", "", opening, "", *rows(SOURCE), ""))


def folders() -> str:
    """The folders with their sentences, as a block of the README."""
    found = [(f"src/{SOURCE.name}/", phrase(SOURCE)), *_below(SOURCE, 1)]
    width = max(len(name) for name, _ in found) + 2
    return "\n".join(("```text", *(f"{name:<{width}}{said.replace('``', '`')}" for name, said in found), "```"))


def _below(folder: Path, depth: int) -> Iterator[tuple[str, str]]:
    if depth <= DEEPEST:
        for path in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
            yield f"{'  ' * depth}{path.name}/", phrase(path)
            yield from _below(path, depth + 1)


def place(text: str) -> str:
    """The README with the folders as they are. Raises ValueError where it lacks the markers."""
    start, end = text.find(BEGIN), text.find(END)
    if not 0 <= start < end:
        raise ValueError(f"the README needs the markers {BEGIN} and {END}, in this order")
    return f"{text[: start + len(BEGIN)]}\n{folders()}\n{text[end:]}"


if __name__ == "__main__":
    README.write_text(place(README.read_text(encoding="utf-8")), encoding="utf-8")
