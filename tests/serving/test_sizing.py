"""The table of states and KV caches in the docs is the one that its script writes."""

import importlib.util
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def test_the_table_is_current():
    found = importlib.util.spec_from_file_location("sizing_script", TOOLS / "sizing.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.written(text) == text
    assert "| `text` | 175 kB |" in text
    with pytest.raises(ValueError, match="0 blocks"):
        module.written("no table")
