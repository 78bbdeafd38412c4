r"""Formulas in a terminal: the LaTeX in which mechanisms say what they compute, as a line of Unicode text.

It knows as much of LaTeX as the formulas here use; ``tests/house/test_notation.py`` holds them all to it. On the pages
the same LaTeX is typeset.
"""

# Letters that look like others are what this file is about.
# ruff: noqa: RUF001
import re

OPEN, CLOSE, WIDE = "\1\2\3"  # marks of brackets that open and close by the same sign, and of a wide space
GREEK = "alpha beta gamma delta epsilon theta kappa lambda mu nu pi rho sigma tau phi chi omega Delta Sigma Omega"
SYMBOLS = dict(zip(GREEK.split(), "αβγδεθκλμνπρστφχωΔΣΩ", strict=True)) | {
    "cdot": "·",
    "odot": " ⊙ ",
    "times": "×",
    "pm": "±",
    "sum": "∑",
    "ldots": "…",
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
    r"""A formula as one line of Unicode text. Raises ValueError for a command that is not known here.

    >>> text(r"S_t = \gamma_h S_{t-1} + k_t v_t^\top, \quad o_t = \frac{1}{\sqrt D} S_t^\top q_t")
    'Sₜ = γₕ Sₜ₋₁ + kₜ vₜᵀ,    oₜ = 1/√D Sₜᵀ qₜ'
    """
    tokens = re.findall(r"\\(?:[A-Za-z]+|.)|\s+|.", latex.replace("\n", " "))
    said = re.sub(r"\s+", " ", _sequence(tokens[::-1]))
    said = re.sub(rf"(?<=[(\[{{{OPEN}]) | (?=[)\]}},;.{CLOSE}])", "", said)
    return re.sub(f" ?{WIDE} ?", "    ", said).translate({ord(OPEN): None, ord(CLOSE): None}).strip()


def inline(prose: str) -> str:
    """A text in which formulas stand between dollar signs, with each of them in Unicode.

    >>> inline(r"a step size $\\beta_t$ in $[0, 1]$")
    'a step size βₜ in [0, 1]'
    """
    return re.sub(r"\$([^$]+)\$", lambda found: text(found[1]), prose)


def _sequence(tokens: list[str], end: str = "") -> str:
    """What stands before ``end``; ``tokens`` are read from their back."""
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
    """The next symbol, group or command with its arguments."""
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
    raise ValueError(f"{token} is no LaTeX that longspan._utils.latex knows")


def _argument(tokens: list[str]) -> str:
    while tokens and tokens[-1].isspace():
        tokens.pop()
    return _one(tokens).strip()


def _script(tokens: list[str]) -> str:
    """An index or exponent: small letters where there are any, else behind its sign."""
    sign, said = tokens.pop(), ""
    said = re.sub(r"\s*([^\w\s])\s*", r"\1", _argument(tokens))
    small = RAISED if sign == "^" else LOWERED
    if all(letter in small for letter in said):
        return "".join(small[letter] for letter in said)
    return f"{sign}{said}" if len(said) == 1 else f"{sign}({said})"


def _grouped(said: str) -> str:
    """In brackets, unless it is one word, or one with brackets of its own."""
    return said if re.fullmatch(r"[^\W_]*\([^()]*\)|[^\W_]\^\([^()]*\)|‖[^‖]*‖|√?[^\W_]+", said) else f"({said})"
