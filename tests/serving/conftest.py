"""Fixtures of the tests of serving."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def restored() -> Iterator[None]:
    """Nothing of transformers stays replaced after a test."""
    yield
    from longspan.compat import transformers as on_cpu

    on_cpu.restore()
