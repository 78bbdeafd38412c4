"""Conformance checks of attentions, for longspan's mechanisms and for yours.

``check_attention(spec)`` runs all checks that apply. In your tests, ``parametrize`` makes one test of each::

    @longspan.testing.parametrize(["my_mechanism", "my_mechanism(window=3)"])
    def test_law(spec, law):
        longspan.testing.assert_law(law, spec)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

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
    """The result of one check."""

    law: str
    """name of the check"""
    status: str
    """``passed``, ``failed``, ``exempt`` or ``does not apply``"""
    error: float
    """largest measured error, relative to the largest expected value (at least 1)"""
    tolerance: float
    """allowed error of that measurement"""
    note: str
    """the law's statement if it passed; otherwise what differs, the exemption's reason, or why it does not apply"""
    excused: float = 0.0
    """largest error above its tolerance that magnified rounding explains; see ``longspan.testing.rounding``"""


@dataclass(frozen=True)
class Report:
    """The results of ``check_attention``; ``print(report)`` shows one line per check."""

    spec: str
    """the spec that was checked"""
    rows: tuple[Row, ...]
    """one row per check"""

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not any(row.status == "failed" for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{self.spec}"]
        for row in self.rows:
            measured = f"{row.error:8.1e} of {row.tolerance:.0e}" if row.status == "passed" and row.tolerance else ""
            excused = f" Beyond: {row.excused:.1e}, where the data's roundings are magnified." if row.excused else ""
            lines.append(f"  {row.law:<22} {row.status:<15} {measured:<18} {row.note}{excused}".rstrip())
        return "\n".join(lines)


def laws() -> tuple[str, ...]:
    """Return the names of all checks.

    Returns:
        Names, in the order of reports.
    """
    return tuple(_LAWS)


def check(law: str, spec: str, *, seed: int = 0, stack: str = "", device: torch.device | str = "cpu") -> Row:
    """Run one conformance check on a spec, or on a stack of specs.

    An exemption is a class attribute ``exempt = {law: reason}``, or one of an instance if an option causes it.
    Exemptions are strict: if the property holds after all, the check fails.

    Args:
        law: Name of the check, one of ``laws()``.
        spec: Spec of an attention, or several separated by ``;`` for a stack.
        seed: Seed of weights and inputs.
        stack: How the blocks of a stack run, as in ``DecoderConfig.stack``, such as ``universal(steps=3)``. The default
            checks a single attention alone, and several in a plain stack.
        device: Device that runs the check, such as ``cuda``. Weights and inputs are the same on every device.

    Returns:
        The result, with status ``passed``, ``failed``, ``exempt`` or ``does not apply``.

    Raises:
        ValueError: If the law, mechanism, stack or option is unknown, or the device cannot be used.
    """
    if law not in _LAWS:
        raise ValueError(f"unknown law {law!r}; known: {', '.join(_LAWS)}")
    function, needs = _LAWS[law]
    subject, gauge = Subject(spec, seed, stack, device), Gauge()
    if missing := subject.why_not(needs):
        return Row(law, "does not apply", 0.0, 0.0, missing)
    reason = subject.exempt(law)
    subject.make()  # A spec that cannot be built is the caller's error, not a broken law.
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


def check_attention(
    spec: str, *, seed: int = 0, raises: bool = True, stack: str = "", device: torch.device | str = "cpu"
) -> Report:
    """Run the conformance checks on a spec, or on a stack of specs.

    Args:
        spec: Spec of an attention, or several separated by ``;`` for a stack.
        seed: Seed of weights and inputs.
        raises: Whether a failed check raises AssertionError. Default: True.
        stack: How the blocks of a stack run, as in ``check``.
        device: Device that runs the checks, as in ``check``.

    Returns:
        A report with one row per law.

    Raises:
        AssertionError: If a law fails and ``raises`` is True. The message is the whole report.
        ValueError: If the mechanism, stack or option is unknown, or the device cannot be used.

    Example:
        >>> import longspan
        >>> longspan.check_attention("linear").ok
        True
    """
    rows = tuple(check(law, spec, seed=seed, stack=stack, device=device) for law in _LAWS)
    report = Report(Subject(spec, seed, stack, device).named, rows)
    if raises and not report.ok:
        raise AssertionError(str(report))
    return report


def applicable(spec: str, *, stack: str = "") -> tuple[str, ...]:
    """Return the names of the laws that apply to a spec.

    Args:
        spec: Spec of an attention, or several separated by ``;`` for a stack.
        stack: How the blocks of a stack run, as in ``check``.

    Returns:
        Names, in the order of ``laws()``.

    Raises:
        ValueError: If the mechanism, stack or option is unknown.

    Example:
        >>> "cross" in applicable("linear"), "cross" in applicable("gla")
        (True, False)
    """
    subject = Subject(spec, 0, stack)
    return tuple(law for law, (_, needs) in _LAWS.items() if not subject.why_not(needs))


def cases() -> list[tuple[str, str]]:
    """Return all pairs (law, spec) of registered mechanisms' examples and the laws that apply to them.

    Returns:
        Pairs for ``pytest.mark.parametrize``.
    """
    specs = [spec for name in list_mechanisms() for spec in mechanism_examples(name)]
    return [(law, spec) for spec in specs for law in applicable(spec)]


def assert_law(law: str, spec: str, *, seed: int = 0, stack: str = "", device: torch.device | str = "cpu") -> Row:
    """Run one law and raise AssertionError if it fails.

    Args:
        law: Name of the check, one of ``laws()``.
        spec: Spec of an attention, or several separated by ``;`` for a stack.
        seed: Seed of weights and inputs.
        stack: How the blocks of a stack run, as in ``check``.
        device: Device that runs the law, as in ``check``.

    Returns:
        The result; its status is not ``failed``.

    Raises:
        AssertionError: If the law fails. The message names what differs, and by how much.
        ValueError: If the law, mechanism, stack or option is unknown, or the device cannot be used.

    Example:
        >>> import longspan
        >>> longspan.testing.assert_law("causal", "linear").status
        'passed'
    """
    row = check(law, spec, seed=seed, stack=stack, device=device)
    if row.status == "failed":
        raise AssertionError(str(Report(Subject(spec, seed, stack, device).named, (row,))))
    return row


def parametrize(specs: str | Iterable[str]) -> Callable[[Any], Any]:
    """Parametrize a pytest function over specs and the laws that apply to each.

    The test function takes the arguments ``spec`` and ``law``. Most laws use 29 tokens, so choose small options, such
    as a window of 3. Import the module that registers the mechanism first, or announce it as an entry point.

    Args:
        specs: One spec or several. Each is the spec of an attention, or several separated by ``;`` for a stack.

    Returns:
        A pytest decorator with one case per spec and law.

    Raises:
        ImportError: If pytest is missing.
        ValueError: If ``specs`` is empty, or a mechanism or option is unknown; raised when tests are collected.
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
