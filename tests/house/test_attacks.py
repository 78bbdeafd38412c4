"""The short form of every attack must find no failure."""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

import attacks
import attacks.__main__
from longspan_lab.tools import reliability

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "mutants")) for name in attacks.names()]
)
def test_short_attacks_find_nothing(name, tmp_path):
    taken = list(attacks.failures(name, 0, attacks.module(name).SHORT, tmp_path))
    found = [f"{label}: {what}" for label, what in taken if what is not None]
    assert not found, "\n".join(found)
    assert len(taken) == attacks.module(name).SHORT


def test_counts_go_into_the_page():
    """The tool reads what ``python -m attacks --json`` writes, and keeps rows of other attacks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        with mock.patch.object(sys, "argv", ["attacks", "specs", "--cases", "2", "--json", str(path)]):
            assert attacks.__main__.main() == 0
        found = json.loads(path.read_text(encoding="utf-8"))
    before = (DOCS / "reference" / "guarantees.md").read_text(encoding="utf-8")
    page = reliability.update(before, [found])
    rows, kept = (dict((row["attack"], row) for row, _ in reliability.existing_rows(text)) for text in (page, before))
    assert (rows["specs"]["cases"], rows["specs"]["failures"]) == (2, 0)
    assert {name: row for name, row in rows.items() if name != "specs"} == {
        name: row for name, row in kept.items() if name != "specs"
    }
    assert reliability.update(page, [found]) == page
