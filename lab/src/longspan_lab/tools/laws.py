"""Write the tables of the conformance laws and of their tolerances into the docs.

    python -m longspan_lab.tools laws

The sentences are the docstrings of the laws in ``longspan.testing``; the numbers are its constants.
"""

from longspan import testing
from longspan.testing import content, gauge, numeric, rounding

from . import DOCS

# What a mechanism needs for a law to apply -> in words.
NEEDS = {
    "causal": "a causal form",
    "bidirectional": "a bidirectional form",
    "context": "`context=`",
    "segments": "`segments=`",
    "prefix": "`prefix=`",
    "mask": "`mask=`",
    "record": "`record=`",
    "carry": "a carry",
    "stack": "any `--stack`",
    "reversible": "`--stack reversible`",
    "ponder": "`--stack act(...)`",
}


def laws() -> str:
    """A row for each law: its name, what it states, and when it applies."""
    rows = [
        f"| `{law}` | {' '.join((function.__doc__ or '').replace('``', '`').split())} | {_when(needs)} |"
        for law, (function, needs) in testing._LAWS.items()
    ]
    return "\n".join(("| check | statement | applies to mechanisms with |", "|---|---|---|", *rows))


def _when(needs: tuple[str, ...]) -> str:
    return ", ".join(NEEDS[need] for need in needs) or "anything"


def tolerances() -> str:
    """A row for each tolerance."""
    rows = {
        "float64, all checks": f"{gauge.EXACT:.0e}",
        "`oracle`: backends against the reference in float32": f"{numeric.ROUNDED:.0e}",
        "`content`: packed neighbors in float32": f"{content.SINGLE:.0e}",
        f"`adversarial`: the last of {numeric.LONG:,} tokens as a decode step, in float32": f"{numeric.LAST_STEP:.0e}",
        "`dtypes`: float32, bfloat16 and float16": "twice the error of the reference in that dtype, plus its eps",
        "`dtypes`: bfloat16 autocast": f"{numeric.AUTOCAST:g}",
        "rounding of the data (`oracle`, `dtypes`)": f"{rounding.AMPLE} times the largest change of the exact answer in"
        f" {rounding.NEIGHBORS} trials",
        "masked outputs, saved and kept states, rebuilt modules, checkpointed gradients": "0: equal to the bit",
    }
    return "\n".join(("| measurement | tolerance |", "|---|---|", *(f"| {what} | {t} |" for what, t in rows.items())))


PAGES = {
    DOCS / "explanation" / "conformance-checks.md": {"laws": laws},
    DOCS / "explanation" / "numerics.md": {"tolerances": tolerances},
}
