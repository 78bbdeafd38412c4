"""The laws that every attention keeps; ``check_attention(spec)`` measures all that apply. Public: certify your own.

In the tests of a package of your own, ``parametrize`` makes one test of every law that applies::

    @longspan.testing.parametrize(["my_mechanism", "my_mechanism(window=3)"])
    def test_law(spec, law):
        longspan.testing.assert_law(law, spec)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..attention import list_mechanisms, mechanism_examples
from . import blocks, content, numeric, prefix, recurrent, software, stacks
from .gauge import Broken, Gauge, Subject

# law -> (its function, the facts that a mechanism needs for it to apply)
_LAWS = {
    "causal": (recurrent.causal, ("causal",)),
    "beginning": (recurrent.beginning, ("causal",)),
    "parallel_is_recurrent": (recurrent.parallel_is_recurrent, ("causal",)),
    "state": (recurrent.state, ("causal",)),
    "padding": (recurrent.padding, ("mask",)),
    "content": (content.content, ("mask",)),
    "rows_independent": (recurrent.rows_independent, ()),
    "mixed_rows": (recurrent.mixed_rows, ("causal", "mask")),
    "packed": (recurrent.packed, ("segments",)),
    "prefix_mode": (prefix.prefix_mode, ("causal", "prefix")),
    "blocks": (blocks.blocks, ()),
    "oracle": (numeric.oracle, ()),
    "attention_matrix": (numeric.attention_matrix, ("record",)),
    "gradients": (numeric.gradients, ()),
    "additive": (numeric.additive, ()),
    "dtypes": (numeric.dtypes, ()),
    "adversarial": (numeric.adversarial, ()),
    "arguments": (software.arguments, ()),
    "rebuilds": (software.rebuilds, ()),
    "compiles": (software.compiles, ()),
    "exports": (software.exports, ("causal",)),
    "bidirectional": (software.bidirectional, ("bidirectional",)),
    "cross": (software.cross, ("context",)),
    "carry": (software.carry, ("carry",)),
    "less_memory": (stacks.less_memory, ("stack",)),
    "reversible": (stacks.reversible, ("reversible",)),
    "ponder": (stacks.ponder, ("ponder",)),
}


class Row(NamedTuple):
    """One law of a report."""

    law: str
    status: str  # passed | failed | exempt | does not apply
    error: float  # largest measured error, relative to the largest expected value (at least 1)
    tolerance: float  # allowed error of that measurement
    note: str  # what differs, why it does not apply, or what the law says
    excused: float = 0.0  # largest error beyond its tolerance that magnified roundings explain, see ``rounding``


@dataclass(frozen=True)
class Report:
    """What ``check_attention`` has measured."""

    spec: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """No law failed."""
        return not any(row.status == "failed" for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{self.spec}"]
        for row in self.rows:
            measured = f"{row.error:8.1e} of {row.tolerance:.0e}" if row.status == "passed" and row.tolerance else ""
            excused = f" Beyond: {row.excused:.1e}, where the data's roundings are magnified." if row.excused else ""
            lines.append(f"  {row.law:<22} {row.status:<15} {measured:<18} {row.note}{excused}".rstrip())
        return "\n".join(lines)


def laws() -> tuple[str, ...]:
    """The names of all laws."""
    return tuple(_LAWS)


def check(law: str, spec: str, *, seed: int = 0, stack: str = "") -> Row:
    """Measure one law for one spec, or a stack of specs separated by ``;``, with ``DecoderConfig``'s ``stack``.

    An exemption (``exempt = {law: reason}`` of a class, or of an instance whose options make it so) is strict: where
    the law holds after all, the check fails.
    Raises ValueError for an unknown law, mechanism, stack or option.
    """
    if law not in _LAWS:
        raise ValueError(f"unknown law {law!r}; known: {', '.join(_LAWS)}")
    function, needs = _LAWS[law]
    subject, gauge = Subject(spec, seed, stack), Gauge()
    if missing := subject.why_not(needs):
        return Row(law, "does not apply", 0.0, 0.0, missing)
    reason = subject.exempt(law)
    subject.make()  # what cannot even be built is the caller's error, not a broken law
    try:
        function(subject, gauge)
    except Exception as error:
        if reason:
            return Row(law, "exempt", gauge.error, gauge.tolerance, reason)
        note = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        return Row(law, "failed", gauge.error, gauge.tolerance, note)
    if reason:
        return Row(law, "failed", gauge.error, gauge.tolerance, f"holds after all; remove the exemption: {reason}")
    return Row(law, "passed", gauge.error, gauge.tolerance, (function.__doc__ or "").strip(), gauge.excused)


def check_attention(spec: str, *, seed: int = 0, raises: bool = True, stack: str = "") -> Report:
    """Measure every law for one spec, or a stack of specs separated by ``;``, with ``DecoderConfig``'s ``stack``.

    >>> import longspan
    >>> longspan.check_attention("linear").ok
    True

    Raises AssertionError with the whole report where a law fails (unless ``raises=False``), and ValueError for an
    unknown mechanism or option.
    """
    rows = tuple(check(law, spec, seed=seed, stack=stack) for law in _LAWS)
    report = Report(Subject(spec, seed, stack).named, rows)
    if raises and not report.ok:
        raise AssertionError(str(report))
    return report


def applicable(spec: str, *, stack: str = "") -> tuple[str, ...]:
    """The laws that apply to a spec, or to a stack of specs separated by ``;``.

    Raises ValueError for an unknown mechanism, stack or option.

    >>> "cross" in applicable("linear"), "cross" in applicable("gla")
    (True, False)
    """
    subject = Subject(spec, 0, stack)
    return tuple(law for law, (_, needs) in _LAWS.items() if not subject.why_not(needs))


def cases() -> list[tuple[str, str]]:
    """All pairs (law, example spec) of the registry of which the law applies, for a parametrized test."""
    specs = [spec for name in list_mechanisms() for spec in mechanism_examples(name)]
    return [(law, spec) for spec in specs for law in applicable(spec)]


def assert_law(law: str, spec: str, *, seed: int = 0, stack: str = "") -> Row:
    """Measure one law for one spec, or a stack of specs separated by ``;``, as ``check`` does.

    >>> import longspan
    >>> longspan.testing.assert_law("causal", "linear").status
    'passed'

    Raises AssertionError, with the finding, where the law fails; ValueError as ``check``.
    """
    row = check(law, spec, seed=seed, stack=stack)
    if row.status == "failed":
        raise AssertionError(str(Report(Subject(spec, seed, stack).named, (row,))))
    return row


def parametrize(specs: str | Iterable[str]) -> Callable[[Any], Any]:
    """A decorator for pytest: the test function gets ``spec`` and ``law`` for every law that applies to each spec.

    One spec, or several; each names an attention, or a stack of them separated by ``;``. The laws are measured on few
    tokens (29 mostly), so give options that are small, such as a window of 3. The module that registers the mechanism
    has to be imported before, or announced as an entry point.

    Needs pytest. Raises ValueError, while the tests are collected, for an unknown mechanism or option, and for no spec.
    """
    import pytest

    specs = [specs] if isinstance(specs, str) else list(specs)
    if not specs:
        raise ValueError("parametrize needs at least one spec, such as 'my_mechanism(window=3)'")
    pairs = [(spec, law) for spec in specs for law in applicable(spec)]
    return pytest.mark.parametrize(("spec", "law"), pairs, ids=[f"{spec}-{law}" for spec, law in pairs])


__all__ = [
    "Broken",
    "Gauge",
    "Report",
    "Row",
    "Subject",
    "applicable",
    "assert_law",
    "cases",
    "check",
    "check_attention",
    "laws",
    "parametrize",
]
