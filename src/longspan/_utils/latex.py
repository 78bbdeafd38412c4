r"""Formulas in a terminal: the LaTeX equations of mechanisms as a line of Unicode text.

It supports the LaTeX commands that these equations use; ``tests/_utils/test_notation.py`` checks all of them. The docs
typeset the same LaTeX.
"""

# Letters that look like others are what this file is about.
# ruff: noqa: RUF001
import re

OPEN, CLOSE, WIDE = "\1\2\3"  # marks of brackets that open and close by the same sign, and of a wide space
GREEK = "alpha beta gamma delta epsilon theta kappa lambda mu nu pi rho sigma tau phi chi omega Delta Sigma Omega"
SYMBOLS = dict(zip(GREEK.split(), "αβγδεθκλμνπρστφχωΔΣΩ", strict=True)) | {
    "cdot": "·",
    "odot": " ⊙ ",
    "oplus": " ⊕ ",
    "times": "×",
    "pm": "±",
    "sum": "∑",
    "prod": "∏",
    "ldots": "…",
    "cdots": "⋯",
    "infty": "∞",
    "le": " ≤ ",
    "ge": " ≥ ",
    "ne": " ≠ ",
    "in": " ∈ ",
    "approx": " ≈ ",
    "propto": " ∝ ",
    "sim": " ~ ",
    "to": " → ",
    "mapsto": " ↦ ",
    "iff": " ⇔ ",
    "cup": " ∪ ",
    "cap": " ∩ ",
    "setminus": " ∖ ",
    "mid": " | ",
    "bmod": " mod ",
    "top": "ᵀ",
    "prime": "′",
    "rceil": CLOSE + "⌉",
    "rfloor": CLOSE + "⌋",
    "lvert": "|" + OPEN,
    "lVert": "‖" + OPEN,
    "rvert": CLOSE + "|",
    "rVert": CLOSE + "‖",
    "lceil": "⌈" + OPEN,
    "lfloor": "⌊" + OPEN,
    "quad": WIDE,
    ",": " ",
    ";": " ",
    "!": "",
    "{": "{",
    "}": "}",
    "lbrace": "{",
    "rbrace": "}",
    "leftarrow": " ← ",
    "left": "",
    "right": "",
    "bigl": "",
    "bigr": "",
    "Bigl": "",
    "Bigr": "",
}
NAMED = ("exp", "log", "max", "min", "cos", "sin", "tanh", "det")  # set upright, as they are
ACCENTS = {"bar": "\u0304", "tilde": "\u0303", "hat": "\u0302"}
UPRIGHT = ("mathrm", "operatorname", "text", "mathbf", "mathbb", "mathcal")
RAISED = dict(
    zip("0123456789+-−=()abcdefghijklmnoprstuvwxyzTᵀ′", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀᵀ′", strict=True)
)
LOWERED = dict(zip("0123456789+-−=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True))


def text(latex: str) -> str:
    r"""Return a formula as one line of Unicode text. Raises ValueError for an unsupported command.

    >>> text(r"S_t = \gamma_h S_{t-1} + k_t v_t^\top, \quad o_t = \frac{1}{\sqrt D} S_t^\top q_t")
    'Sₜ = γₕ Sₜ₋₁ + kₜ vₜᵀ,    oₜ = 1/√D Sₜᵀ qₜ'
    """
    tokens = re.findall(r"\\(?:[A-Za-z]+|.)|\s+|.", latex.replace("\n", " "))
    line = re.sub(r"\s+", " ", _sequence(tokens[::-1]))
    line = re.sub(rf"(?<=[(\[{{{OPEN}]) | (?=[)\]}},;.{CLOSE}])", "", line)
    return re.sub(f" ?{WIDE} ?", "    ", line).translate({ord(OPEN): None, ord(CLOSE): None}).strip()


def inline(prose: str) -> str:
    """Return a text with each formula between dollar signs converted to Unicode.

    >>> inline(r"a step size $\\beta_t$ in $[0, 1]$")
    'a step size βₜ in [0, 1]'
    """
    return re.sub(r"\$([^$]+)\$", lambda found: text(found[1]), prose)


def _sequence(tokens: list[str], end: str = "") -> str:
    """Convert tokens up to ``end``; ``tokens`` is a stack, the next one last."""
    parts: list[str] = []
    while tokens and tokens[-1] != end:
        if tokens[-1] in ("_", "^"):
            parts.append(_script(tokens))
        else:
            parts.append(_one(tokens))
    if tokens:
        tokens.pop()
    return "".join(parts)


def _one(tokens: list[str]) -> str:
    """Convert the next symbol, group, or command with its arguments."""
    token = tokens.pop()
    if token == "{":
        return _sequence(tokens, "}")
    if token.isspace():
        return " "
    if not token.startswith("\\"):
        return token
    name = token[1:]
    if name in ("frac", "tfrac"):
        above, below = (_grouped(_argument(tokens)) for _ in range(2))
        return f"{above}/{below}"
    if name == "sqrt":
        return f"√{_grouped(_argument(tokens))}"
    if name in ACCENTS:
        return _argument(tokens) + ACCENTS[name]
    if name in UPRIGHT:
        return _argument(tokens)
    if name in NAMED:
        following = next((t for t in reversed(tokens) if not t.isspace()), "")
        return name if following in ("", "(", "_", "^", r"\left", r"\bigl", r"\Bigl") else f"{name} "
    if name in SYMBOLS:
        return SYMBOLS[name]
    raise ValueError(f"{token} is not a LaTeX command that longspan._utils.latex supports")


def _argument(tokens: list[str]) -> str:
    while tokens and tokens[-1].isspace():
        tokens.pop()
    return _one(tokens).strip()


def _script(tokens: list[str]) -> str:
    """Convert an index or exponent: to small letters if Unicode has them all, else with its sign."""
    sign = tokens.pop()
    content = re.sub(r"\s*([^\w\s])\s*", r"\1", _argument(tokens))
    small = RAISED if sign == "^" else LOWERED
    if all(letter in small for letter in content):
        return "".join(small[letter] for letter in content)
    return f"{sign}{content}" if len(content) == 1 else f"{sign}({content})"


def _grouped(content: str) -> str:
    """Put brackets around anything but one word or one bracketed expression."""
    return (
        content if re.fullmatch(r"[^\W_]*\([^()]*\)|[^\W_]\^\([^()]*\)|‖[^‖]*‖|√?[^\W_]+", content) else f"({content})"
    )
