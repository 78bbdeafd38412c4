"""Counts of calls by what has served them."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from ... import ops


@contextlib.contextmanager
def counted(calls: Counter[str], for_what: str = "") -> Iterator[None]:
    """Count what runs in a ``with`` block, once, under the backends of its operations and ``for_what``."""
    with ops.watch() as seen:
        yield
    # A watch around this one is to see them too.
    for served in seen:
        ops.log_backend(*served)
    calls[(", ".join(map(_said, seen)) or "torch") + for_what] += 1


def _said(served: ops.BackendUse) -> str:
    return f"{served.backend} ({served.op}{served.why_not and f'; not native, since {served.why_not}'})"
