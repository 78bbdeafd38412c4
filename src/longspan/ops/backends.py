"""Backends: which form of an op serves a call, how to force one, and how to record which one ran."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

import torch

from .._utils.spec import known

BACKENDS = {
    "auto": "the fastest form for the call and its device; the mathematics is the same",
    "reference": "the definition: a readable loop, or the full matrix",
    "torch": "chunks of matrix products with bounded memory in the backward pass; any device",
    "native": "C++ kernels for the CPU",
    "triton": "Triton kernels for CUDA GPUs",
    "fla": "kernels of flash-linear-attention for CUDA GPUs, if fla-core is installed",
    "flex": "torch's FlexAttention for the GPU, with block lists from longspan",
}

Call = TypeVar("Call", bound=Callable[..., Any])

# A plain global: Dynamo guards on it and recompiles; a ContextVar would break fullgraph compilation.
_backend = "auto"


@contextlib.contextmanager
def backend(name: str) -> Generator[None, None, None]:
    """Force a backend inside a ``with`` block.

    The choice applies to the whole process, so it is not thread-safe. A call that the backend cannot serve raises
    ValueError with the reason.

    Args:
        name: ``auto``, ``reference``, ``torch``, ``native``, ``triton``, ``fla`` or ``flex``.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> import torch, longspan
        >>> attention, x = longspan.build("linear", dim=8, heads=2), torch.randn(1, 5, 8)
        >>> with longspan.backend("reference"):
        ...     plain, _ = attention(x)
        >>> torch.allclose(plain, attention(x)[0], atol=1e-6)
        True
    """
    global _backend
    old, _backend = _backend, known(name, BACKENDS, "backend")
    try:
        yield
    finally:
        _backend = old


def mark_dynamo_constant(call: Call) -> Call:
    """Mark a function whose result torch.compile may treat as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler, which adds a second to every
    start.
    """
    # The attribute by which torch's compiler recognizes such functions.
    call._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] (no type declares it)
    return call


def refuse_tracing() -> None:
    """Raise ValueError under ``torch.jit.trace``, which records sizes as constants that kernels would rely on."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] (torch documents it under this name)
        raise ValueError(
            "torch.jit.trace records the sizes of the example as constants, so that other sizes give wrong results or "
            "a crash; use torch.export or torch.compile, which check sizes"
        )


def forced_backend() -> str:
    """Return the backend that ``backend`` forces; ``auto`` for none."""
    return _backend


def is_forced() -> bool:
    """Return whether ``backend`` forces one. Raises ValueError under ``torch.jit.trace``."""
    refuse_tracing()
    return _backend != "auto"


def resolve_backend(op: str, served: tuple[str, ...] = ("reference", "torch"), prefer: str = "torch") -> str:
    """Return the backend to try for an op.

    Args:
        op: Name of the op, for error messages.
        served: The backends that have this op.
        prefer: The backend that ``auto`` selects.

    Returns:
        The forced backend, or ``prefer`` if none is forced.

    Raises:
        ValueError: the forced backend does not have this op, or ``torch.jit.trace`` is active.
    """
    refuse_tracing()
    if _backend == "auto":
        return prefer
    if _backend not in served:
        raise ValueError(
            f"backend {_backend!r} ({BACKENDS[_backend]}) does not serve {op} in this version; "
            f"choose one of: auto, {', '.join(served)}"
        )
    return _backend


def select_backend(
    op: str, served: tuple[str, ...] = ("reference", "torch"), prefer: str = "torch", why_not: str = ""
) -> str:
    """Return the backend of ``resolve_backend`` and record it for ``watch``.

    Args:
        op: Name of the op.
        served: The backends that have this op.
        prefer: The backend that ``auto`` selects.
        why_not: Why native kernels cannot serve the call; empty if they can.

    Returns:
        The name of the backend.

    Raises:
        ValueError: the forced backend does not have this op, or ``torch.jit.trace`` is active.
    """
    name = resolve_backend(op, served, prefer)
    log_backend(op, name, why_not)
    return name


def choose_backend(op: str, served: tuple[str, ...], why_not: dict[str, str], prefer: str = "") -> str:
    """Return the backend that serves a call, and record it for ``watch``.

    Args:
        op: Name of the op.
        served: The backends that have this op.
        why_not: For each backend with kernels, the fastest first, why it cannot serve the call; empty if it can.
        prefer: The backend that ``auto`` selects; empty for the first with an empty reason, or else ``torch``.

    Returns:
        The name of the backend.

    Raises:
        ValueError: the forced backend does not have this op or cannot serve the call, or ``torch.jit.trace`` is active.
    """
    prefer = prefer or next((kernels for kernels, reason in why_not.items() if not reason), "torch")
    name = resolve_backend(op, served, prefer)
    if why_not.get(name):
        raise ValueError(f"backend {name!r} cannot serve this call of {op}: {why_not[name]}")
    # Kernels for another device are no news; the reason that a user can act on is.
    reasons = {kernels: reason for kernels, reason in why_not.items() if reason and reason not in OTHER_DEVICE}
    if len(reasons) > 1:
        log_backend(op, name, "; ".join(f"{kernels}: {reason}" for kernels, reason in reasons.items()))
    else:
        log_backend(op, name, (list(reasons.values()) or list(why_not.values()) or [""])[0])
    return name


OTHER_DEVICE = ("they are for the CPU", "they are for CUDA GPUs")


class BackendUse(NamedTuple):
    """The backend that ran an op; ``why_not`` is the reason why native kernels did not, if the op has some."""

    op: str
    backend: str
    why_not: str = ""


_watch: list[BackendUse] | None = None


@contextlib.contextmanager
def watch() -> Generator[list[BackendUse], None, None]:
    """Record which backend runs which op inside a ``with`` block.

    Not thread-safe. Calls inside compiled graphs are not recorded.

    Returns:
        A context manager that yields a list of ``BackendUse``: each pair of op and backend once, in the order of calls.

    Example:
        >>> import torch, longspan
        >>> with longspan.ops.watch() as seen:
        ...     _ = longspan.build("softmax", dim=8, heads=2)(torch.randn(1, 5, 8))
        >>> [(served.op, served.backend) for served in seen]
        [('softmax attention', 'torch')]
    """
    global _watch
    before, _watch = _watch, []
    try:
        yield _watch
    finally:
        _watch = before


def log_backend(op: str, name: str, why_not: str = "") -> None:
    """Record for ``watch``, if one is active, that the backend ``name`` runs ``op``."""
    if (
        _watch is not None
        and (found := BackendUse(op, name, "" if name in ("native", "triton") else why_not)) not in _watch
    ):
        _watch.append(found)
