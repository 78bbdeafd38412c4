"""Mechanisms on the Triton kernels equal their reference, with masks, segments, prefixes and states."""

import pytest
import torch

import longspan
from longspan import testing
from longspan.testing import numeric
from longspan.testing.gauge import DIM, HEADS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def refusal(spec):
    """Why the kernels do not serve a mechanism in float32; empty if they do."""
    attention, x = longspan.build(spec, DIM, HEADS).to(DEVICE), torch.randn(1, 5, DIM, device=DEVICE)
    try:
        with longspan.backend("triton"):
            attention(x)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["linear", "retention", "deltanet(convolution=0)", "gated_deltanet(convolution=0)"])
def test_the_oracle_holds_on_the_kernels(spec, monkeypatch):
    if "not written yet" in (reason := refusal(spec)):
        pytest.skip(reason)
    assert not reason
    monkeypatch.setattr(numeric, "compared", lambda device: ["triton"])
    row = testing.check("oracle", spec, device=DEVICE)
    assert row.status == "passed", row.note
    assert row.tolerance == numeric.ROUNDED  # something was compared; float64 is not served
