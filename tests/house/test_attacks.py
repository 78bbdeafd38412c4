"""The short form of every attack: nothing gets through."""

import json
import runpy
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

import attacks
import attacks.__main__

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.full
@pytest.mark.parametrize("name", attacks.names())
def test_nothing_gets_through(name, tmp_path):
    taken = list(attacks.failures(name, 0, attacks.module(name).SHORT, tmp_path))
    said = [f"{label}: {what}" for label, what in taken if what is not None]
    assert not said, "\n".join(said)
    assert len(taken) == attacks.module(name).SHORT


def test_counts_go_into_the_page():
    """``python -m attacks --json`` and ``tools/reliability.py`` agree on what a count is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        with mock.patch.object(sys, "argv", ["attacks", "specs", "--cases", "2", "--json", str(path)]):
            assert attacks.__main__.main() == 0
        found = json.loads(path.read_text(encoding="utf-8"))
    namespace = runpy.run_path(str(DOCS.parent / "tools" / "reliability.py"))
    page = namespace["written"]((DOCS / "reference" / "guarantees.md").read_text(encoding="utf-8"), [found])
    assert "| `specs` | 2 | 0 | " in page
    assert "| `kills` | " in page, "rows of attacks that were not run stay"
    assert namespace["written"](page, [found]) == page
