"""The backends in ``show`` are those that the ops chose in calls that ran."""

import re

import pytest
import torch

import longspan
from longspan import ops
from longspan.cli import dispatch, entry
from longspan.ops.native import build
from longspan.ops.native.call import available

needs_kernels = pytest.mark.skipif(not available(), reason="no native kernels here")


def names(call):
    return [(one["op"], one["backend"]) for one in call]


def served(spec, causal=True):
    return {kind: names(call) for kind, call in dispatch.probe_backends(spec, 16, 2, causal=causal)["calls"].items()}


PATTERN, SOFTMAX, WRITTEN = "attention under a pattern", "softmax attention", "attention from written-out scores"
MIXED = [("the causal convolution", "native"), ("the delta rule", "native")]
BY_ENGINE = [("the decode engine", "native")]


@needs_kernels
@pytest.mark.parametrize(
    ("spec", "whole", "steps"),
    [
        ("local(window=64)", [(PATTERN, "native")], [(SOFTMAX, "torch")]),
        ("performer", [("decay attention", "native")], [("decay attention", "native")]),
        ("talking_heads", [(WRITTEN, "torch")], [(WRITTEN, "torch")]),
        # A period of 16 has classes, and nothing else is left for the kernels.
        ("sparse(pattern='strided(16)')", [(PATTERN, "torch")], [(SOFTMAX, "torch")]),
        ("adaptive_span", [(PATTERN, "torch")], [(PATTERN, "torch")]),
    ],
)
def test_the_ops_say_what_serves(spec, whole, steps):
    assert served(spec) == {"whole sequences": whole, "steps": steps}


@needs_kernels
@pytest.mark.parametrize(
    ("spec", "ops"),
    [
        ("linear", [("linear attention", "native")]),
        ("deltanet", MIXED),
        ("deltanet(convolution=0)", [("the delta rule", "native")]),
    ],
)
def test_a_decoder_of_what_the_engine_serves_is_listed_too(spec, ops):
    assert served(spec) == {"whole sequences": ops, "steps": ops, "a decoder's steps": BY_ENGINE}


def test_a_bidirectional_one_has_no_steps():
    assert served("linear", causal=False) == {"whole sequences": [("linear attention", "torch")]}
    assert served("performer", causal=False) == {"whole sequences": [("a sum over all keys", "torch")]}
    (one,) = dispatch.probe_backends("linear", 16, 2, causal=False)["calls"]["whole sequences"]
    assert one["why_not"] == "they are for causal attention"


def test_a_forced_backend_is_reported():
    with longspan.backend("reference"):
        assert served("local") == {"whole sequences": [(PATTERN, "reference")], "steps": [(SOFTMAX, "reference")]}
        assert ("linear attention", "reference") in served("linear")["steps"]


def test_what_calls_no_op_runs_on_torch(monkeypatch):
    attention = longspan.build("softmax", 8, 2)
    monkeypatch.setattr(type(attention), "attend", lambda self, x, state: (x, state))
    assert names(dispatch._ops(attention, torch.zeros(1, 3, 8))) == [("PyTorch operations", "torch")]


def test_without_a_compiler_torch_serves_and_it_is_said_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "_found", {})
    monkeypatch.setattr(build.prebuilt, "FOLDER", tmp_path / "none")
    assert entry.main(["show", "local(window=64)", "--dim", "16", "--heads", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "whole sequences on cpu: torch (attention under a pattern; " in said
    assert "the kernels could not be compiled" in said
    assert re.search("native kernels: [^:]*: .*CXX='no-such-compiler'", said)


def test_a_device_that_is_not_there_is_not_asked(capsys):
    absent = "xpu" if torch.cuda.is_available() else "cuda"
    found = dispatch.probe_backends("linear", 16, 2, causal=True, device=absent)
    assert (found["calls"], found["reason"]) == ({}, f"this machine has no {absent}")
    assert entry.main(["show", "linear", "--dim", "16", "--heads", "2", "--device", absent]) == 0
    assert re.search(rf"backend .* {absent}\n", capsys.readouterr().out)
    with pytest.raises(ValueError, match="device='oven'"):
        dispatch.probe_backends("linear", 16, 2, causal=True, device="oven")


def test_a_watch_ends_with_its_block_and_hides_none_around_it():
    attention, x = longspan.build("softmax", 8, 2), torch.zeros(1, 3, 8)
    with ops.watch() as around:
        with ops.watch() as within:
            attention(x)
            attention(x)
        assert (len(within), len(around)) == (1, 0)
        attention(x)
    attention(x)
    assert around == within == [ops.BackendUse(SOFTMAX, "torch")]


def test_a_step_that_a_kernel_refuses_is_not_listed():
    attention = longspan.build("linear", 8, 2).double()
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    with torch.no_grad():
        found = dispatch._ops(attention, x, attention.init_state(1))
    assert {one["backend"] for one in found} == {"torch"}


def test_asking_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    dispatch.probe_backends("softmax(dropout=0.5)", 16, 2, causal=True)
    assert torch.equal(torch.get_rng_state(), before)
