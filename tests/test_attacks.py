"""The short form of every attack: nothing gets through."""

import pytest

import attacks


@pytest.mark.parametrize("name", attacks.names())
def test_nothing_gets_through(name, tmp_path):
    taken = list(attacks.failures(name, 0, attacks.module(name).SHORT, tmp_path))
    said = [f"{label}: {what}" for label, what in taken if what is not None]
    assert not said, "\n".join(said)
    assert len(taken) == attacks.module(name).SHORT
