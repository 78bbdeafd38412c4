"""Pages about mechanisms, written from the registry: one table of all mechanisms, and one page for each family.

    python -m longspan_lab.tools mechanism_pages

writes ``docs/reference/mechanisms.md`` and ``docs/reference/mechanisms/``; ``make docs`` does so before it builds.
"""

import re
from collections.abc import Iterator
from inspect import cleandoc

import longspan
from longspan._utils import png
from longspan.attention.base import REGISTRY, Attention, own_options
from longspan.attention.families import FAMILIES, LEGEND
from longspan.cli import describe, dispatch

from . import DOCS

REFERENCE = DOCS / "reference"
MECHANISMS = REFERENCE / "mechanisms"
# Small, since each mechanism is built once, and large enough that a picture of its pattern fits a page.
DIM, HEADS = 64, 2
SECTION = re.compile(r"(Args|Attributes|Shape|Returns|Raises|Examples?|References):")  # of a Google-style docstring


def row(cls: type[Attention]) -> str:
    """A mechanism's row in the table."""
    first = cleandoc(cls.__doc__ or "").splitlines()[0].replace("|", "\\|")
    paper = f"[{cls.paper}](https://arxiv.org/abs/{cls.paper})"
    link = f"[`{cls.name}`](mechanisms/{cls.family}.md#{cls.name.replace('_', '-')})"
    return f"| {link} | {first} | {cost(cls)} | {', '.join(describe.forms(cls))} | {paper} |"


def section(cls: type[Attention]) -> str:
    """A mechanism's section of its family's page."""
    attention = longspan.build(cls.name, DIM, HEADS, causal="causal" in cls.directions)
    authors, title, year = cls.citation
    options = [
        f"| `{name}` | `{parameter.default!r}` | {describe.meaning(cls, name)} |"
        for name, parameter in own_options(cls).items()
    ]
    return "\n\n".join(
        (
            f"({cls.name.replace('_', '-')})=\n## {cls.name}",
            cleandoc(cls.__doc__ or "").partition("\n")[0],
            formulas(cls.equations),
            *prose(cls),
            "\n".join(("| option | default | meaning |", "|---|---|---|", *options)) if options else "No options.",
            f"* **Time**: {cost(cls)} for a sequence of $N$ tokens.\n* **Forms**: {', '.join(describe.forms(cls))}.\n"
            f"* **State** of one sequence, {DIM} channels in {HEADS} heads: {state(attention)}.\n"
            f"* **Backend** on a CPU: {backend(cls, attention.causal)}.\n"
            f"* **Paper**: {_plain(authors).replace(' and ', '; ')}: *{title}*, {year}, "
            f"[arXiv:{cls.paper}](https://arxiv.org/abs/{cls.paper}).",
            *drawing(cls),
            "Conformance checks:",
            "```sh\n" + "\n".join(f'longspan check "{spec}"' for spec in cls.examples) + "\n```",
        )
    )


def _plain(authors: str) -> str:
    """Names from BibTeX as plain text."""
    return re.sub(r"[{}]", "", authors.replace(r"{\c c}", "ç").replace(r"{\L}", "Ł"))


def prose(cls: type[Attention]) -> Iterator[str]:
    """The paragraphs of the docstring without the sentences on options, which are in the table."""
    for paragraph in describe.sentences(cls):
        kept = " ".join(sentence for sentence in paragraph if not re.match(r"``\w+``: ", sentence))
        if kept and not SECTION.match(kept):
            yield kept


def formulas(equations: tuple[str, ...]) -> str:
    """The equations one below the other; on a narrow screen the parts of one move to the next line."""
    return "\n\n".join(f"```{{container}} equation\n{_parts(equation)}\n```" for equation in equations)


def _parts(equation: str) -> str:
    return " ".join(rf"$\displaystyle {part}$" for part in re.split(r"(?<=,) \\quad ", equation))


def cost(cls: type[Attention]) -> str:
    """The time complexity as a formula."""
    return "$" + cls.cost.replace("log", r"\log") + "$"


def state(attention: Attention) -> str:
    """The size of a recurrent state after 256 and after 4096 tokens."""
    if not attention.causal:
        return "none, since it reads whole sequences"
    few, many = (longspan.states.nbytes(attention.init_state(1, tokens)) for tokens in (256, 4096))
    return f"{few:,} bytes" + ("" if few == many else f" after 256 tokens, {many:,} after 4096")


def backend(cls: type[Attention], causal: bool) -> str:
    """The backends of whole sequences and of steps on the machine that builds these pages."""
    calls = dispatch.probe_backends(cls.name, DIM, HEADS, causal=causal)["calls"]
    return "; ".join(f"{kind}: {dispatch.format_call(call)}" for kind, call in calls.items())


def drawing(cls: type[Attention]) -> tuple[str, ...]:
    """A picture of the pattern and the command that draws it; empty for a mechanism without a pattern."""
    spec = cls.examples[0]
    try:
        images = describe.picture(spec, DIM, HEADS)
    except ValueError:
        return ()
    name = f"{cls.name}.png"
    png.save(MECHANISMS / name, images, columns=len(images), size=256)
    heads = ", one picture for each head" if len(images) > 1 else ""
    return (
        f"The pattern of `{spec}`{heads}. Rows are queries, columns are keys, and black pairs are visible.",
        f"```{{image}} {name}\n:alt: visible pairs of queries and keys of {spec}\n:class: pattern\n```",
        f'```sh\nlongspan show "{spec}" --dim {DIM} --heads {HEADS} --draw {name}\n```',
    )


def main() -> None:
    """Write the page of all mechanisms, and one for each family that has members."""
    MECHANISMS.mkdir(exist_ok=True)
    classes = [REGISTRY[name] for name in longspan.list_mechanisms()]
    families = {name: [cls for cls in classes if cls.family == name] for name in FAMILIES}
    families = {name: members for name, members in families.items() if members}
    head = ("| name | summary | time | forms | paper |", "|---|---|---|---|---|")
    tables = (
        "\n".join((f"## {FAMILIES[name]}", "", "````{container} mechanisms", *head, *map(row, members), "````", ""))
        for name, members in families.items()
    )
    legend = "\n".join(f"* {words}." for words in LEGEND.values())
    toc = "\n".join(("```{toctree}", ":maxdepth: 1", "", *(f"mechanisms/{name}" for name in families), "```"))
    REFERENCE.joinpath("mechanisms.md").write_text(
        "\n".join(
            (
                "# Mechanisms",
                "",
                "`longspan.build(spec, dim, heads)` builds a mechanism from its name and options."
                " `longspan show SPEC` prints its formulas, options and costs. `longspan check SPEC` runs its"
                " conformance checks. Time is for one sequence of $N$ tokens with heads of $D$ channels.",
                "",
                toc,
                "",
                *tables,
                "(symbols)=",
                "## Symbols",
                "",
                "All pages share these symbols. Each section explains the others below its equations.",
                "",
                legend,
                "",
            )
        ),
        encoding="utf-8",
    )
    for name, members in families.items():
        opening = f"# {FAMILIES[name]}\n\n[Symbols](../mechanisms.md#symbols) that all pages share.\n\n"
        text = opening + "\n\n".join(section(cls) for cls in members) + "\n"
        MECHANISMS.joinpath(f"{name}.md").write_text(text, encoding="utf-8")
