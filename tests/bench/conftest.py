"""Fixtures of several benchmarks' tests."""

import pytest

from support.bench import weigh_nothing


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Work in a separate folder; lines are as long as they like."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def weightless(monkeypatch):
    weigh_nothing(monkeypatch)
