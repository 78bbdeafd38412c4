"""Donated states of the step of the gated recurrence in Triton, its builds, and which calls Triton serves."""

import pytest
import torch
from ahead import LIMITS, compiled_all, request

import longspan
from longspan.ops import triton
from ops.families import DEVICE, FAMILIES, cast


def test_donate_overwrites_the_state():
    """A part of a larger tensor, all of which stays where it is."""
    family = FAMILIES["delta-head"]
    given = family.operands(1, (17, 33), dtype=torch.float32)
    before = given["state"].clone()
    expected = family.run("triton", given)
    assert torch.equal(given["state"], before)
    large = torch.full((*before.shape[:3], 40), 7.0, device=DEVICE)
    given["state"] = state = large[..., :33].copy_(before)
    version = state._version
    found = family.run("triton", given, donate=True)
    assert found[1] is state
    assert state._version > version
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert bool((large[..., 33:] == 7.0).all())


def test_tensors_on_the_cpu_do_not_choose_triton():
    with longspan.ops.watch() as seen:
        FAMILIES["linear"].run("auto", cast(FAMILIES["linear"].operands(8), torch.float32))
    assert DEVICE == "cuda" or "triton" not in [use.backend for use in seen]


def test_an_older_triton_serves_no_call(monkeypatch):
    monkeypatch.setattr(triton, "_installed", lambda: (3, 2))
    assert triton.missing() == "they need Triton 3.3, which torch 2.7 brings, not 3.2"


@pytest.mark.full
def test_builds_fit_a_gpu():
    """In one pass: no registers spill for heads of up to 256 channels."""
    strides = *(("s_b", "s_h", 1) for _ in "qkvg"), ("s_b", "s_h"), ("s_b", "s_h", "s_d", 1)
    tuples = {"strides": strides, "sizes": ("H", "R", "D", "E")}
    pointers = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | dict.fromkeys(("state", "decay", "beta"), "*fp32")
    requests = [
        request(
            "longspan.ops.triton.gated_step:step_kernel",
            pointers | {"after": "*fp32"},
            {"CHANNELS": True, "NORMALIZE": True, "DONATE": True, "BD": size, "BE": 2048 // size},
            tuples=tuples,
            floats=["scale"],
            multiples=("s_b", "s_h", "s_d", "D", "E"),
            capability=capability,
            num_warps=4,
        )
        for size in (64, 256)
        for capability in (80, 90)
    ]
    for build in compiled_all(requests):
        assert build.stack == 0
        assert build.shared <= LIMITS[80]
        assert ".v4" in build.ptx  # the state is read and written in wide accesses
