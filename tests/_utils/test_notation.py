"""Formulas in a terminal: every equation has a line of Unicode, and so has every formula in words."""

import inspect

import pytest

import longspan
from longspan._utils import latex as notation
from longspan.attention.base import REGISTRY
from longspan.attention.families import FAMILIES, LEGEND
from longspan.cli import describe
from longspan.cli.entry import main

LINES = {
    r"S_{t-1}": "Sₜ₋₁",
    r"k_t v_t^\top": "kₜ vₜᵀ",
    r"W_g x_t \odot \mathrm{silu}(o_t)": "W_g xₜ ⊙ silu(oₜ)",
    r"e^{q \cdot k / \sqrt D}": "e^(q·k/√D)",
    r"\sum_{j \in \mathcal{A}_i} v_j": "∑_(j∈Aᵢ) vⱼ",
    r"\prod_{l=j+1}^i H_l \cdots H_1": "∏ₗ₌ⱼ₊₁ⁱ Hₗ ⋯ H₁",
    r"\frac{a + b}{2}": "(a + b)/2",
    r"\frac{1}{\sqrt{D + 1}}": "1/(√(D + 1))",
    r"\exp\left(-\frac{\lVert q - k \rVert^2}{2}\right)": "exp(-(‖q - k‖²)/2)",
    r"\log \alpha_t": "log αₜ",
    r"\lfloor i / b \rfloor \bmod 2": "⌊i / b⌋ mod 2",
    r"\lbrace j : \lvert i - j \rvert < w \rbrace": "{j : |i - j| < w}",
    r"\bar v_u, \quad \text{or } x^\prime": "v̄ᵤ,    or x\N{PRIME}",
}


@pytest.mark.parametrize("latex", LINES)
def test_a_formula_is_a_line_of_unicode(latex):
    assert notation.text(latex) == LINES[latex]


@pytest.mark.parametrize("latex", [r"\smash{x}", r"\begin{aligned}"])
def test_what_is_not_known_is_refused(latex):
    with pytest.raises(ValueError, match=r"longspan\._utils\.latex"):
        notation.text(latex)


@pytest.mark.parametrize("name", longspan.list_mechanisms())
def test_every_mechanism_has_formulas_on_the_page_and_in_a_terminal(name, capsys, monkeypatch):
    # What takes longest.
    monkeypatch.setattr(describe, "_flops", lambda *_, **options: (1, 1))
    cls = REGISTRY[name]
    assert cls.family != "others"
    assert cls.equations
    for equation in cls.equations:
        line = notation.text(equation)
        assert not set("\\$\1\2\3") & set(line), line
        assert equation.count("{") == equation.count("}")
    assert "$" not in notation.inline(inspect.cleandoc(cls.__doc__ or ""))
    assert main(["show", name, "--dim", "24", "--heads", "2"]) == 0
    said = capsys.readouterr().out
    assert "".join(notation.text(cls.equations[0]).split()) in "".join(said.split())
    assert "$" not in said
    assert "\\" not in said


def test_a_family_has_members():
    assert {cls.family for cls in REGISTRY.values()} == set(FAMILIES) - {"others"}


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="unknown family of mechanisms 'liner'.*did you mean 'linear'"):
        type(
            "New",
            (longspan.Attention,),
            {
                "__doc__": "New.",
                "name": "new",
                "paper": "0",
                "citation": ("A", "B", 2000),
                "cost": "N",
                "family": "liner",
            },
        )


def test_the_legend_is_of_symbols_that_are_used():
    equations = "".join(equation for cls in REGISTRY.values() for equation in cls.equations)
    for symbol, words in LEGEND.items():
        assert symbol in equations
        assert "$" not in notation.inline(words)


def test_facts_have_the_equations_as_they_are_written():
    (facts,) = describe.facts("linear", 8, 2)
    assert facts["equations"] == list(REGISTRY["linear"].equations)
    assert facts["family"] == "linear"
