"""The laws of the operations with a state, on the Triton kernels: interpreted without a GPU."""

import importlib

import pytest

from longspan.ops.gated import chunks
from longspan.ops.triton import tiles
from ops.families import DEVICE
from ops.laws import collected

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted
FORMS = ("triton",)
globals().update(collected(FORMS))


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch):
    """A few chunks then have several spans. A GPU gets the sizes of real calls."""
    if DEVICE == "cpu":
        monkeypatch.setattr(importlib.import_module("longspan.ops.triton.decay"), "SPAN", 64)
        monkeypatch.setattr(chunks, "SPAN", 64 * 4)
        monkeypatch.setattr(tiles, "SHORTEST", 32)
        monkeypatch.setattr(tiles, "TILES", dict.fromkeys(tiles.TILES, tiles.Tile(16, 16, 4, 2)))
