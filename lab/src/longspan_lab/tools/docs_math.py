"""Formulas for Sphinx: MathML, which browsers typeset by themselves, so that pages need no network and no script."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def typeset(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Turn formulas between dollar signs in a docstring into reStructuredText, in place."""
    text, flags = "\n".join(lines), re.MULTILINE | re.DOTALL
    text = re.sub(
        r"^( *)\$\$\n(.+?)\n *\$\$$",
        lambda found: f"{found[1]}.. math::\n\n{found[1]}   {' '.join(found[2].split())}",
        text,
        flags=flags,
    )
    text = re.sub(r"\$([^$]+)\$", lambda found: f":math:`{' '.join(found[1].split())}`", text)
    lines[:] = text.split("\n")


def mathml(latex: str, *, block: bool = False) -> str:
    """A formula as MathML, with TeX's thin space between a function and an argument without parentheses."""
    found = tex2mathml(latex, as_block=block)
    space = '<mo lspace="0" rspace="0.1667em">&ApplyFunction;</mo>'
    return re.sub(r"<mo>&ApplyFunction;</mo>(?=\s*<m(?!o\b))", space, found)


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(f'<span class="math notranslate nohighlight">{mathml(node.astext())}</span>')
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math notranslate nohighlight">{mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register both with Sphinx."""
    app.connect("autodoc-process-docstring", typeset)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
