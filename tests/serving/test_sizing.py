"""The table of states and KV caches in the docs is the one that its script writes."""

import pytest

from longspan_lab.tools import sizing


def test_the_table_is_current():
    text = sizing.PAGE.read_text(encoding="utf-8")
    assert sizing.written(text) == text
    assert "| `text` | 175 kB |" in text
    with pytest.raises(ValueError, match="0 blocks"):
        sizing.written("no table")
