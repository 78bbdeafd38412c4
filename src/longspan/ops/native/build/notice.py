"""The line on stderr during the compilation of kernels."""

import contextlib
import os
import threading
from collections.abc import Generator

from ...._utils.progress import say

QUIET = "LONGSPAN_QUIET"  # the environment variable that disables the line
AFTER = 2.0  # seconds of silence
ABOUT = 15  # seconds that a family takes on two cores, its trial included


@contextlib.contextmanager
def shown(family: str) -> Generator[None, None, None]:
    """Print one line if the block takes longer than AFTER, unless the environment variable QUIET is set."""
    text = f"longspan: compiling CPU kernels ({family}) for this machine, once, about {ABOUT} s"
    timer = threading.Timer(AFTER, say, (text,))
    timer.daemon = True
    if os.environ.get(QUIET, "0") in ("", "0"):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
