"""Time and memory by length: what is timed is a whole layer, what takes too long is left out, exponents are fitted."""

from dataclasses import replace

import pytest
import torch

from longspan import attention, ops
from longspan_lab.bench import case
from longspan_lab.experiments import scaling
from longspan_lab.experiments.experiment import Place
from support.experiments import unwatched

SMALL = scaling.Settings(specs="softmax; linear", lengths=(64, 128, 256), tokens=131, heads=2, size=3, rounds=1)


def test_batches_hold_the_same_number_of_tokens_and_one_sequence_at_least():
    settings = scaling.Settings()
    assert [settings.batch(length) for length in settings.lengths] == [16, 8, 4, 2, 1, 1, 1, 1]
    paper = scaling.EXPERIMENT.scales["paper"]
    assert [paper.batch(length) for length in paper.lengths] == [128, 64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("name", ["softmax", "linear", "linear@reference"])
def test_a_call_is_forward_and_backward_of_the_whole_layer(name):
    found = scaling.call(SMALL, name, 64)()
    torch.manual_seed(SMALL.seed)
    layer = attention.build(name.partition("@")[0], 6, 2)
    random = torch.Generator().manual_seed(SMALL.seed)
    x, upstream = (torch.randn(2, 64, 6, generator=random) for _ in range(2))
    x.requires_grad_()
    layer(x)[0].backward(upstream)
    expected = [x.grad, *(weight.grad for weight in layer.parameters())]
    assert len(found) == len(expected) == 9
    torch.testing.assert_close(list(found), expected, rtol=1e-4, atol=1e-5)


def test_a_name_with_a_backend_forces_it(monkeypatch):
    forced = []
    monkeypatch.setattr(scaling, "build", lambda *args: _Spy(forced))
    scaling.call(SMALL, "softmax@reference", 64)()
    scaling.call(SMALL, "softmax", 64)()
    assert forced == ["reference", "auto"]


class _Spy(torch.nn.Module):
    def __init__(self, seen: list):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen.append(ops.backends._backend)
        return 2 * x, None


def test_memory_is_that_of_one_call_and_sees_a_matrix_of_all_pairs():
    settings = replace(SMALL, tokens=1)
    matrix = 2 * 1024**2 * 4 / 2**20  # MB: two heads, all pairs, four bytes
    assert scaling.weighed(settings, "softmax@reference", 1024) > 2 * matrix
    assert scaling.weighed(settings, "linear", 1024) < matrix


def test_a_layer_that_fails_in_the_other_process_has_its_error_reported():
    with pytest.raises(ValueError, match=r"memory of softmax@flex at 64 tokens ended: ValueError: backend 'flex'"):
        scaling.weighed(SMALL, "softmax@flex", 64)


@pytest.fixture
def figures(monkeypatch):
    """Calls take (N / 64)^2 seconds and memory N MB; -> the lengths that were measured, and whether rehearsed."""
    seen = []

    def take(samplers, rounds, label, watch, *, warm):
        (name,) = samplers
        length = seen[-1][0]
        seen[-1] = (length, warm)
        return {name: case.Figure((length / 64) ** 2, 0.0, rounds, 1, 0, 0)}, {}

    def weighed(settings, name, length):
        seen.append((length, None))
        return float(length)

    monkeypatch.setattr(scaling.case, "take", take)
    monkeypatch.setattr(scaling, "weighed", weighed)
    monkeypatch.setattr(scaling, "call", lambda *_: lambda: None)
    return seen


def test_figures_are_those_of_one_sequence_of_the_batch(figures, tmp_path):
    row = scaling.measure(SMALL, {"spec": "linear"}, Place(tmp_path, unwatched))
    assert [(one["length"], one["batch"]) for one in row["cases"]] == [(64, 2), (128, 1), (256, 1)]
    assert [one["ms"] for one in row["cases"]] == [500, 4000, 16000]
    assert [one["mb"] for one in row["cases"]] == [32, 128, 256]
    assert row["stopped"] is None
    # Two seconds are expected for the second, eight for the third: too long for a rehearsal.
    assert figures == [(64, True), (128, True), (256, False)]


def test_what_would_take_too_long_is_left_out(figures, tmp_path):
    settings = replace(SMALL, limit=7.0)
    row = scaling.measure(settings, {"spec": "softmax"}, Place(tmp_path, unwatched))
    assert [one["length"] for one in row["cases"]] == [64, 128]
    assert row["stopped"] == {"length": 256, "reason": "about 16 s a sequence, more than the limit of 7"}
    result = {"settings": {"lengths": settings.lengths, "heads": 2, "size": 3}, "rows": [{"spec": "softmax", **row}]}
    *_, left = scaling.tables(result)
    assert left == [["left out"], ["softmax from N 256 on: about 16 s a sequence, more than the limit of 7"]]
    time, memory, *_ = scaling.tables(result)
    assert time[1] == ["softmax", "500", "4e+03", "-", ""]
    assert memory[1] == ["softmax", "32", "128", "-", ""]


def test_what_is_expected_follows_the_declared_cost(monkeypatch):
    last = [{"length": 100, "batch": 1, "ms": 1000.0, "mb": 10.0}]
    for name, seconds in (("softmax", 9), ("softmax@reference", 9), ("linear", 3)):
        assert scaling.expected(SMALL, name, last, 300) == (seconds, "")
    assert scaling.expected(SMALL, "linear", [], 300) == (0.0, "")
    monkeypatch.setattr(scaling.case, "available", lambda: 100.0)
    assert scaling.expected(SMALL, "softmax@reference", last, 300)[1] == "about 90 MB; 100 are free"
    # Without a matrix of all pairs.
    assert scaling.expected(SMALL, "softmax", last, 300)[1] == ""


def test_a_length_that_was_measured_is_not_measured_again(figures, tmp_path, monkeypatch):
    place, take = Place(tmp_path, unwatched), scaling.case.take

    def interrupted(*args, **options):
        if figures[-1][0] == 256:
            raise KeyboardInterrupt
        return take(*args, **options)

    monkeypatch.setattr(scaling.case, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scaling.measure(SMALL, {"spec": "linear"}, place)
    monkeypatch.setattr(scaling.case, "take", take)
    row = scaling.measure(SMALL, {"spec": "linear"}, place)
    assert [one["length"] for one in row["cases"]] == [64, 128, 256]
    assert [length for length, _ in figures] == [64, 128, 256, 256]
    # Another attention keeps its own.
    assert scaling.measure(SMALL, {"spec": "softmax"}, place)["cases"] == row["cases"]
    assert len(figures) == 7


def rows(power: float) -> list[dict]:
    """Cases that grow with a power of the length, except for short ones."""
    return [{"length": n, "ms": max(n, 4096) ** power, "mb": 0.0} for n in (1024, 2048, 4096, 8192, 16384)]


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_exponents_are_those_of_long_sequences(power):
    assert scaling.exponent(rows(power), "ms") == pytest.approx(power)
    assert scaling.exponent(rows(power), "mb") == 0
    assert scaling.exponent(rows(power)[:3], "ms") is None
