"""The page of files: every file of both packages with the first sentence of its docstring. ``make docs`` writes it."""

import ast
import itertools
import re
from pathlib import Path

from . import DOCS, ROOT

PACKAGES = (ROOT / "src" / "longspan", ROOT / "lab" / "src" / "longspan_lab")
SUFFIXES = (".py", ".cpp", ".h")


def phrase(path: Path) -> str:
    """The first sentence of a file's docstring, or of the comment that it opens with; a folder's is in __init__.py.

    Raises:
        ValueError: If the file opens with neither.
    """
    if path.is_dir():
        return phrase(path / "__init__.py")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        opening = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
        opening = "\n".join(line.removeprefix("//").strip() for line in comment)
    first = re.split(r"(?<=[^.]\.)\s|\n\n", opening.strip(), maxsplit=1)[0]
    if not first:
        raise ValueError(f"{path} opens with no sentence on what it is")
    return " ".join(first.split()).rstrip(".:")


def rows(folder: Path, depth: int = 0) -> list[str]:
    """A folder and its contents, files first, as a nested list."""
    # Folders of C++ sources have no __init__.py, and so no sentence; each of their files has one.
    sentence = f": {phrase(folder)}" if (folder / "__init__.py").exists() else ""
    lines = [f"{'  ' * depth}* `{folder.name}/`{sentence}"]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and any(file.suffix in SUFFIXES for file in path.rglob("*")):
            lines += rows(path, depth + 1)
        elif path.suffix in SUFFIXES and path.name != "__init__.py":
            lines.append(f"{'  ' * (depth + 1)}* `{path.name}`: {phrase(path)}")
    return lines


def page() -> str:
    """The page as Markdown."""
    opening = "Every file with its first sentence. [](../explanation/architecture.md) shows how they work together."
    return "\n".join(("# Source files", "", opening, "", *(line for package in PACKAGES for line in rows(package)), ""))


PAGES = {DOCS / "reference" / "files.md": page}
