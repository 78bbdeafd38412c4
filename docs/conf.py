"""Sphinx: ``make docs``. The page of mechanisms is written from the registry first."""

from importlib.metadata import version as installed
from inspect import cleandoc
from pathlib import Path

import longspan
from longspan.attention.base import REGISTRY, Attention, own_options

project, author, copyright = "longspan", "the longspan contributors", "the longspan contributors"
version = release = installed("longspan")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme, html_title = "furo", f"longspan {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"


def forms(cls: type[Attention]) -> str:
    """How a mechanism can be used, from the facts on its class."""
    extra = {"cross": bool(cls.contexts), "packed": "segments" in cls.takes, "prefix": "prefix" in cls.takes}
    return ", ".join((*cls.directions, *(name for name, has in extra.items() if has)))


def row(cls: type[Attention]) -> str:
    """A mechanism's row in the table."""
    first = cleandoc(cls.__doc__ or "").splitlines()[0].replace("|", "\\|")
    paper = f"[{cls.paper}](https://arxiv.org/abs/{cls.paper})"
    return f"| [`{cls.name}`](#{cls.name.replace('_', '-')}) | {first} | {cls.cost} | {forms(cls)} | {paper} |"


def section(cls: type[Attention]) -> str:
    """A mechanism's own part of the page."""
    options = ", ".join(f"{name}={p.default!r}" for name, p in own_options(cls).items())
    authors, title, year = cls.citation
    return "\n\n".join(
        (
            f"({cls.name.replace('_', '-')})=\n## {cls.name}",
            f"```text\n{cls.name}({options})\n```",
            cleandoc(cls.__doc__ or ""),
            f"Examples: {'; '.join(f'`{spec}`' for spec in cls.examples)}.",
            f"{authors.replace(' and ', '; ')}: *{title}*, {year}.",
        )
    )


def page() -> str:
    """Everything that is registered, as Markdown."""
    classes = [REGISTRY[name] for name in longspan.names()]
    return "\n".join(
        (
            "# Mechanisms",
            "",
            "Each is built by its name and options, `longspan.build(spec, dim, heads)`, and proven by"
            " `longspan check SPEC`. The cost is the time for one sequence of N tokens with heads of size D.",
            "",
            "| name | what it does | cost | forms | paper |",
            "|---|---|---|---|---|",
            *map(row, classes),
            "",
            *(f"{section(cls)}\n" for cls in classes),
        )
    )


Path(__file__).with_name("mechanisms.md").write_text(page(), encoding="utf-8")
