"""Pages of the docs that programs write: whole ones, and blocks between markers such as ``<!-- laws:begin -->``."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

Blocks = Mapping[str, Callable[[], str]]  # name of the markers -> the function that writes the text between them


def place(text: str, name: str, content: str) -> str:
    """The page with this text between the markers of that name. Raises ValueError for a page without them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    start, stop = text.find(begin), text.find(end)
    if not 0 <= start < stop:
        raise ValueError(f"the page needs the markers {begin} and {end}, in this order")
    return f"{text[: start + len(begin)]}\n\n{content}\n\n{text[stop:]}"


def replace(text: str, block: Callable[[str], str]) -> str:
    """The page with each marked block replaced by what ``block`` returns for its name, line breaks included."""
    marked = r"(<!-- (\w+):begin -->\n).*?(<!-- \2:end -->)"
    return re.sub(marked, lambda found: f"{found[1]}{block(found[2])}{found[3]}", text, flags=re.DOTALL)


def written(page: Path, content: Blocks | Callable[[], str]) -> str:
    """The text of a page, with its blocks written anew, or as a whole."""
    if not isinstance(content, Mapping):
        return content()
    text = page.read_text(encoding="utf-8")
    for name, block in content.items():
        text = place(text, name, block())
    return text


def write(pages: Mapping[Path, Blocks | Callable[[], str]]) -> None:
    """Write each page of a program, of its table ``PAGES``."""
    for page, content in pages.items():
        page.write_text(written(page, content), encoding="utf-8")
