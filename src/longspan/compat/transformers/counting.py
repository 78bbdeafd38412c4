"""Count calls by the backends that computed them."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from ... import ops


@contextlib.contextmanager
def counted(calls: Counter[str], for_what: str = "") -> Iterator[None]:
    """Count a ``with`` block as one call, under the backends of its operations followed by ``for_what``."""
    with ops.watch() as seen:
        yield
    # An outer watch must see them too.
    for use in seen:
        ops.log_backend(*use)
    calls[(", ".join(map(_label, seen)) or "torch") + for_what] += 1


def _label(use: ops.BackendUse) -> str:
    return f"{use.backend} ({use.op}{use.why_not and f'; not native, since {use.why_not}'})"
