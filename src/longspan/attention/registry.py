"""Lookup of mechanisms by name."""

from .._utils import spec
from . import plugins
from .base import REGISTRY, Attention


def list_mechanisms() -> list[str]:
    """Return the names of all registered mechanisms, including those of installed packages, sorted.

    Example:
        >>> import longspan
        >>> "gated_deltanet" in longspan.list_mechanisms()
        True
    """
    plugins.load()
    return sorted(REGISTRY)


def mechanism(name: str, kind: str = "attention") -> type[Attention]:
    """Return the class of a mechanism; an unknown name is looked up in installed packages first.

    Args:
        name: The name of the mechanism.
        kind: What the message about an unknown name calls it.

    Raises:
        ValueError: For an unknown name.
    """
    if name not in REGISTRY:
        plugins.load()
    return REGISTRY[spec.known(name, REGISTRY, kind, plugins.HINT)]


def mechanism_examples(name: str) -> tuple[str, ...]:
    """Return small specs of a mechanism, for tests and benchmarks.

    Args:
        name: The name of the mechanism.

    Returns:
        Specs, small enough that 29 tokens exceed every window.

    Raises:
        ValueError: For an unknown name.

    Example:
        >>> import longspan
        >>> longspan.mechanism_examples("local")
        ('local(window=5)', 'local(window=3, kv_heads=1, rotary=100.0)')
    """
    return mechanism(name).examples
