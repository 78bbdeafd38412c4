"""Backends: which form of an op serves a call, how to force one, and how to see which one ran."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from .._utils.spec import known

BACKENDS = {
    "auto": "the fastest form for the device; chooses a kernel, never an answer",
    "reference": "the definition, a loop or a full matrix that a student can read",
    "torch": "chunked and made of matrix products, with a memory-bounded backward; any device",
    "native": "C++ kernels for the CPU",
    "flex": "torch's FlexAttention for the GPU, under our lists of blocks",
}

Call = TypeVar("Call", bound=Callable)

# A plain global: Dynamo guards on it and recompiles; a ContextVar would break fullgraph compilation.
_backend = "auto"


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend inside a ``with`` block: ``auto | reference | torch | native | flex``.

    >>> import torch, longspan
    >>> attention, x = longspan.build("linear", dim=8, heads=2), torch.randn(1, 5, 8)
    >>> with longspan.backend("reference"):
    ...     plain, _ = attention(x)
    >>> torch.allclose(plain, attention(x)[0], atol=1e-6)
    True

    A forced backend that cannot serve a call raises a ValueError with the reason. Not thread-safe: the choice holds
    for the whole process. Raises ValueError for an unknown name.
    """
    global _backend
    old, _backend = _backend, known(name, BACKENDS, "backend")
    try:
        yield
    finally:
        _backend = old


def mark_dynamo_constant(call: Call) -> Call:
    """Mark a function whose result a compiler may keep, as ``torch.compiler.assume_constant_result`` does.

    That one imports the compiler to do so, which would take a second of every start.
    """
    # The attribute by which torch's compiler knows such functions; no type declares it.
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


def refuse_tracing() -> None:
    """Raise ValueError under ``torch.jit.trace``, which would keep sizes as constants that kernels then trust."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(
            "torch.jit.trace keeps the example's sizes as constants, with which other inputs give wrong answers or a "
            "crash; use torch.export or torch.compile, which check them"
        )


def resolve_backend(op: str, served: tuple[str, ...] = ("reference", "torch"), prefer: str = "torch") -> str:
    """The backend that ``op`` is to be tried by, one of those that it is ``served`` by; ``auto`` takes ``prefer``.

    Raises ValueError where the forced one does not serve it, and under ``torch.jit.trace``.
    """
    refuse_tracing()
    if _backend == "auto":
        return prefer
    if _backend not in served:
        raise ValueError(
            f"backend {_backend!r} ({BACKENDS[_backend]}) does not serve {op} in this version; "
            f"it is served by: auto, {', '.join(served)}"
        )
    return _backend


def select_backend(
    op: str, served: tuple[str, ...] = ("reference", "torch"), prefer: str = "torch", why_not: str = ""
) -> str:
    """``resolve_backend``, and record for ``watch`` that it runs ``op``; ``why_not``: why native kernels cannot."""
    name = resolve_backend(op, served, prefer)
    log_backend(op, name, why_not)
    return name


class BackendUse(NamedTuple):
    """What one op has run by; ``why_not`` says what kept native kernels from it, where it has some."""

    op: str
    backend: str
    why_not: str = ""


_watch: list[BackendUse] | None = None


@contextlib.contextmanager
def watch() -> Iterator[list[BackendUse]]:
    """Which backend serves which op of the calls inside a ``with`` block, each once, in their order.

    >>> import torch, longspan
    >>> with longspan.ops.watch() as seen:
    ...     _ = longspan.build("softmax", dim=8, heads=2)(torch.randn(1, 5, 8))
    >>> [(served.op, served.backend) for served in seen]
    [('softmax attention', 'torch')]

    Not thread-safe, and blind inside compiled graphs.
    """
    global _watch
    before, _watch = _watch, []
    try:
        yield _watch
    finally:
        _watch = before


def log_backend(op: str, name: str, why_not: str = "") -> None:
    """Tell the ``watch``, if there is one, that the backend of this name runs ``op``."""
    if _watch is not None and (found := BackendUse(op, name, "" if name == "native" else why_not)) not in _watch:
        _watch.append(found)
