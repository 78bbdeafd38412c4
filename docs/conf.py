"""Sphinx: ``make docs``. The pages about mechanisms and about the files are written from the package first."""

import re
import runpy
from collections.abc import Iterator
from importlib.metadata import version as installed
from inspect import cleandoc
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import longspan
from longspan._utils import png
from longspan.attention.base import REGISTRY, Attention, own_options
from longspan.attention.families import FAMILIES, LEGEND
from longspan.cli import describe, dispatch

project, author, copyright = "longspan", "the longspan contributors", "the longspan contributors"
version = release = installed("longspan")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
# Formulas are MathML, which browsers set by themselves: the pages need no network and no script of anybody's.
html_math_renderer = "mathml"
html_theme, html_title = "furo", f"longspan {release}"
html_static_path, html_css_files = ["static"], ["narrow.css", "formulas.css"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"

HERE = Path(__file__).parent
REFERENCE = HERE / "reference"
MECHANISMS = REFERENCE / "mechanisms"
# Small enough that each one is built, as ``longspan show`` builds it, with a picture that has room on a page.
DIM, HEADS = 64, 2


def row(cls: type[Attention]) -> str:
    """A mechanism's row in the table."""
    first = cleandoc(cls.__doc__ or "").splitlines()[0].replace("|", "\\|")
    paper = f"[{cls.paper}](https://arxiv.org/abs/{cls.paper})"
    link = f"[`{cls.name}`](mechanisms/{cls.family}.md#{cls.name.replace('_', '-')})"
    return f"| {link} | {first} | {cost(cls)} | {', '.join(describe.forms(cls))} | {paper} |"


def section(cls: type[Attention]) -> str:
    """A mechanism's own part of its family's page."""
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
            "\n".join(("| option | default | meaning |", "|---|---|---|", *options))
            if options
            else "It has no options.",
            f"* **Cost**: {cost(cls)} for a sequence of $N$ tokens.\n* **Forms**: {', '.join(describe.forms(cls))}.\n"
            f"* **State** of one sequence, {DIM} channels in {HEADS} heads: {state(attention)}.\n"
            f"* **Backend** on a CPU: {backend(cls, attention.causal)}.\n"
            f"* **Paper**: {authors.replace(' and ', '; ')}: *{title}*, {year}, "
            f"[arXiv:{cls.paper}](https://arxiv.org/abs/{cls.paper}).",
            *drawing(cls),
            "Examples:",
            "```sh\n" + "\n".join(f'longspan check "{spec}"' for spec in cls.examples) + "\n```",
        )
    )


def prose(cls: type[Attention]) -> Iterator[str]:
    """The paragraphs of the docstring, without what they say of single options, which is in the table."""
    for paragraph in describe.sentences(cls):
        kept = " ".join(sentence for sentence in paragraph if not re.match(r"``\w+``: ", sentence))
        if kept:
            yield kept


def formulas(equations: tuple[str, ...]) -> str:
    """The equations one below the other; on a narrow screen the parts of one move to the next line."""
    return "\n\n".join(f"```{{container}} equation\n{_parts(equation)}\n```" for equation in equations)


def _parts(equation: str) -> str:
    return " ".join(rf"$\displaystyle {part}$" for part in re.split(r"(?<=,) \\quad ", equation))


def cost(cls: type[Attention]) -> str:
    """The time that it takes, as a formula."""
    return "$" + cls.cost.replace("log", r"\log") + "$"


def state(attention: Attention) -> str:
    """What a recurrent state takes, after 256 and after 4096 tokens."""
    if not attention.causal:
        return "none, it sees whole sequences"
    few, many = (longspan.states.nbytes(attention.init_state(1, tokens)) for tokens in (256, 4096))
    return f"{few:,} bytes" + ("" if few == many else f" after 256 tokens, {many:,} after 4096")


def backend(cls: type[Attention], causal: bool) -> str:
    """What serves whole sequences and steps on the machine that makes these pages."""
    calls = dispatch.probe_backends(cls.name, DIM, HEADS, causal=causal)["calls"]
    return "; ".join(f"{kind}: {dispatch.format_call(call)}" for kind, call in calls.items())


def drawing(cls: type[Attention]) -> tuple[str, ...]:
    """A picture of what is seen and the command that draws it, where that is a pattern."""
    spec = cls.examples[0]
    try:
        images = describe.picture(spec, DIM, HEADS)
    except ValueError:
        return ()
    name = f"{cls.name}.png"
    png.save(MECHANISMS / name, images, columns=len(images), size=256)
    heads = ", head by head" if len(images) > 1 else ""
    return (
        f"What each query sees in `{spec}`{heads}: queries downwards, keys to the right, black is seen.",
        f"![Which keys each query of {spec} sees]({name})",
        f'```sh\nlongspan show "{spec}" --dim {DIM} --heads {HEADS} --draw {name}\n```',
    )


def pages() -> None:
    """Write the page of all mechanisms, and one for each family that has any."""
    MECHANISMS.mkdir(exist_ok=True)
    classes = [REGISTRY[name] for name in longspan.list_mechanisms()]
    families = {name: [cls for cls in classes if cls.family == name] for name in FAMILIES}
    families = {name: members for name, members in families.items() if members}
    head = ("| name | what it does | cost | forms | paper |", "|---|---|---|---|---|")
    tables = (
        "\n".join((f"## {FAMILIES[name]}", "", *head, *map(row, members), "")) for name, members in families.items()
    )
    legend = "\n".join(f"* {words}." for words in LEGEND.values())
    toc = "\n".join(("```{toctree}", ":maxdepth: 1", "", *(f"mechanisms/{name}" for name in families), "```"))
    REFERENCE.joinpath("mechanisms.md").write_text(
        "\n".join(
            (
                "# Mechanisms",
                "",
                "Each is built by its name and options, `longspan.build(spec, dim, heads)`, and proven by"
                " `longspan check SPEC`. `longspan show SPEC` prints its formulas, options and costs. The cost is the"
                " time for one sequence of N tokens with heads of size D.",
                "",
                toc,
                "",
                *tables,
                "## Symbols",
                "",
                "Every page uses these; what else an equation has is said below it.",
                "",
                legend,
                "",
            )
        ),
        encoding="utf-8",
    )
    for name, members in families.items():
        opening = f"# {FAMILIES[name]}\n\nSymbols that all pages share are [here](../mechanisms.md#symbols).\n\n"
        text = opening + "\n\n".join(section(cls) for cls in members) + "\n"
        MECHANISMS.joinpath(f"{name}.md").write_text(text, encoding="utf-8")


def typeset(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Formulas between dollar signs in a docstring, as reStructuredText has them."""
    text, flags = "\n".join(lines), re.MULTILINE | re.DOTALL
    text = re.sub(
        r"^\$\$\n(.+?)\n\$\$$", lambda found: f".. math::\n\n   {' '.join(found[1].split())}", text, flags=flags
    )
    text = re.sub(r"\$([^$]+)\$", lambda found: f":math:`{' '.join(found[1].split())}`", text)
    lines[:] = text.split("\n")


def mathml(latex: str, *, block: bool = False) -> str:
    """A formula as browsers set it, with TeX's thin space between a function and an argument without brackets."""
    said = tex2mathml(latex, as_block=block)
    space = '<mo lspace="0" rspace="0.1667em">&ApplyFunction;</mo>'
    return re.sub(r"<mo>&ApplyFunction;</mo>(?=\s*<m(?!o\b))", space, said)


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(f'<span class="math notranslate nohighlight">{mathml(node.astext())}</span>')
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math notranslate nohighlight">{mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", typeset)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))


pages()
for made, script in {"files.md": "tree.py", "cli.md": "cli_page.py"}.items():
    text = runpy.run_path(str(HERE.parent / "tools" / script))["page"]()
    REFERENCE.joinpath(made).write_text(text, encoding="utf-8")
