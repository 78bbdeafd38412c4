"""The page of files: every file of the package with the sentence that it opens with. Nothing is typed in by hand."""

import ast
import itertools
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "longspan"
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
    lines = [f"{'  ' * depth}* `{folder.name}/`: {phrase(folder)}"]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and any(path.rglob("*.py")):
            lines += rows(path, depth + 1)
        elif path.suffix in SUFFIXES and path.name != "__init__.py":
            lines.append(f"{'  ' * (depth + 1)}* `{path.name}`: {phrase(path)}")
    return lines


def page() -> str:
    """The whole tree, as Markdown."""
    opening = (
        "Every file opens with the sentence that is repeated here; [](architecture.md) says how they work together."
    )
    return "\n".join(("# The files", "", opening, "", *rows(SOURCE), ""))
