"""The registry that finds mechanisms by name."""

from .._utils import spec
from . import plugins
from .base import REGISTRY, Attention


def list_mechanisms() -> list[str]:
    """The registered mechanisms, sorted; those of installed packages, which announce them, are among them.

    >>> import longspan
    >>> "gated_deltanet" in longspan.list_mechanisms()
    True
    """
    plugins.load()
    return sorted(REGISTRY)


def mechanism(name: str, kind: str = "attention") -> type[Attention]:
    """The class of a mechanism; a name that is not known is looked for in other packages first, see ``plugins``.

    Raises ValueError for one that nobody knows.
    """
    if name not in REGISTRY:
        plugins.load()
    return REGISTRY[spec.known(name, REGISTRY, kind, plugins.HINT)]


def mechanism_examples(name: str) -> tuple[str, ...]:
    """Small specs of a mechanism, for tests and benchmarks. Raises ValueError for an unknown one.

    >>> import longspan
    >>> longspan.mechanism_examples("local")
    ('local(window=5)', 'local(window=3, kv_heads=1, rotary=100.0)')
    """
    return mechanism(name).examples
