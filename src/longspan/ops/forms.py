"""The forms of an operation, in a table by backend, and the choice of the one that serves a call.

The operands of a family are one NamedTuple, which all of its forms take. It names the operands that have tokens,
``TOKENS``, their axis ``AXIS``, the operand in whose shape the output is, ``OUTPUT``, what it computes, ``op``, and
whether the call is one token after a state, ``token``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .backends import choose_backend, is_forced, log_backend, resolve_backend
from .custom_ops import Kernel
from .operands import exporting, in_onnx, transformed
from .shards import active_shards

Result = tuple[Tensor, Tensor]  # the output and the state after it


class Form(NamedTuple):
    """One form of an operation."""

    attend: Callable[[Any], Result]
    """computes whole sequences"""
    why_not: Callable[[Any], str] | None = None
    """for kernels: why they cannot serve a call; empty if they can"""
    step: Callable[[Any, bool], Result | None] | None = None
    """computes one token, and may overwrite the state if the flag is set; kernels return None for other operands"""


class Forms(NamedTuple):
    """The forms of one family of operations."""

    table: Mapping[str, Form]
    """by backend: kernels in the order of preference, then ``torch`` and ``reference``"""
    exported: Callable[[Any], Result]
    """the operation that stands for all of them in an exported program"""
    onnx: Callable[[Any], Result] | None = None
    """writes the call into a graph of ONNX; None writes what ``exported`` does"""
    sharded: str = ""
    """the method of ``shards.Shards`` that serves a call in sequence parallelism; empty without one"""
    masked: Callable[[Callable[[Any], Result], Any], Result] | None = None
    """computes a call with masked tokens by calls without; None if the forms take a mask"""
    prefers_step: bool = False
    """whether the step in torch is faster for one token than whole sequences by kernels"""

    @property
    def served(self) -> tuple[str, ...]:
        """The names of the backends."""
        return tuple(self.table)[::-1]


def serve(forms: Forms, r: Any, donate: bool = False, declined: bool = False) -> Result:
    """Compute a call by its fastest form.

    Args:
        forms: The forms of the family.
        r: The operands, checked.
        donate: Allows the call to overwrite the state.
        declined: Whether ``step`` has declined the call.

    Raises:
        ValueError: a forced backend cannot serve the call.
    """
    if forms.sharded and (shards := active_shards()) is not None:
        return getattr(shards, forms.sharded)(partial(serve, forms), r)
    if forms.masked is not None and r.mask is not None:
        return forms.masked(partial(serve, forms), r)
    if forms.onnx is not None and in_onnx():
        return forms.onnx(r)
    if exporting():
        return forms.exported(r)
    table = forms.table
    if r.token and r.mask is None and not declined:
        name, single = kernel_step(forms, r)
        if single is not None and (result := single(r, donate)) is not None:
            log_backend(r.op, name)
            return result
    r = resolved(r)
    why_not = {name: form.why_not(r) for name, form in table.items() if form.why_not is not None}
    single = table["torch"].step if r.token else None
    name = choose_backend(r.op, forms.served, why_not, prefer="torch" if r.token and forms.prefers_step else "")
    if single is not None and name == "torch" and getattr(r, r.OUTPUT).numel():
        # A single token belongs to the segment of the state.
        result = single(r, donate and not transformed())
        assert result is not None
        return result
    attend = table[name].attend
    return attend.apply(*attend.arguments(r)) if isinstance(attend, Kernel) else attend(r)


def step(forms: Forms, r: Any, donate: bool) -> Result | None:
    """Return the step of the kernels for the device if they serve the call, else None."""
    name, single = kernel_step(forms, r)
    if single is None or (result := single(r, donate)) is None:
        return None
    log_backend(r.op, name)
    return result


def kernel_step(forms: Forms, r: Any) -> tuple[str, Callable[[Any, bool], Result | None] | None]:
    """Return the backend whose kernels step on the device of the operands, and its step; None without kernels."""
    cuda = "triton" in forms.table and getattr(r, r.OUTPUT).is_cuda
    name = "triton" if cuda else "native"
    # Names are made only where they are needed: this runs once per token and layer.
    name = name if not is_forced() else resolve_backend(r.op, forms.served, name)
    form = forms.table[name]
    return name, form.step if form.why_not is not None else None


def resolved(r: Any) -> Any:
    """Return the operands without lazily negated views."""
    return type(r)(*(t.resolve_neg() if isinstance(t, Tensor) else t for t in r))
