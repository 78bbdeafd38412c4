"""Measurements: what is counted, what is rejected, and how steps become whole runs. Nothing here is timed."""

import subprocess
import sys

import pytest
import torch

from longspan.generation.sampling import generate
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan_lab.bench import guard, throughput


class Scripted(guard.Guard):
    """A guard that answers from a list, then always that it is quiet."""

    def __init__(self, answers):
        super().__init__()
        self.answers = list(answers)

    def quiet(self):
        return self.answers.pop(0) if self.answers else True


def decoder(attention):
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(dim=8, depth=2, heads=2, attention=attention, feedforward=8, vocab=5, length=20)
    ).eval()


def test_candidates_take_turns():
    calls = []
    timings = guard.interleave({n: lambda n=n: calls.append(n) for n in "ab"}, 3, Scripted([]))
    assert "".join(calls) == "ab" + "ababab"  # the first pair warms up
    assert [len(t.samples) for t in timings.values()] == [3, 3]


@pytest.mark.parametrize("answers", [[False], [True, False]], ids=["busy before", "busy after"])
def test_a_disturbed_sample_is_taken_again_and_counted(answers):
    calls = []
    timing = guard.interleave({"a": lambda: calls.append(1)}, 2, Scripted(answers))["a"]
    assert (len(timing.samples), timing.rejected, timing.disturbed) == (2, 1, 0)
    assert len(calls) == 1 + 2 + 1


def test_patience_ends():
    timing = guard.interleave({"a": lambda: None}, 1, Scripted([False] * 100), patience=3)["a"]
    assert (len(timing.samples), timing.rejected, timing.disturbed) == (1, 3, 1)


def test_a_guard_with_no_patience_for_copies_finds_every_moment_busy():
    assert not guard.Guard(limit=0.0).quiet()


def test_a_timing_is_a_median():
    assert guard.Timing([3.0, 1.0, 100.0]).seconds == 3.0


def test_integral_of_a_line_is_its_sum():
    at = throughput.positions(784)
    assert (len(at), at[0], at[-1]) == (9, 0, 783)
    seconds = [2.0 + 0.5 * p for p in at]
    assert throughput.integrate(at, seconds, 784) == pytest.approx(sum(2.0 + 0.5 * p for p in range(784)))


def test_short_lengths_have_fewer_positions():
    assert throughput.positions(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("attention", ["linear", "softmax", "linear; softmax"])
def test_a_state_at_a_position_is_as_large_as_a_true_one(attention):
    model = decoder(attention)
    state = throughput.state_at(model, 3, 7, 20)
    assert state.position.tolist() == [7] * 3
    with torch.no_grad():
        _, after = model(torch.zeros(3, 1, dtype=torch.long), state)
    _, true = model(torch.zeros(3, 8, dtype=torch.long), model.init_state(3))
    shapes = [[t.shape for t in layer] for layer in after.layers]
    assert shapes == [[t.shape for t in layer] for layer in true.layers]
    throughput.stepper(model, state, 7)()
    assert state.position.tolist() == [7] * 3


def test_a_recomputed_run_draws_from_the_same_model():
    model = decoder("softmax")
    assert throughput.whole(model, 5, 2) > 0
    assert throughput.whole_recomputed(model, 5, 2) > 0
    assert len(list(generate(model, max_new_tokens=5, batch=2, stream=True))) == 5


def test_every_model_is_timed_at_every_position():
    models = {"linear": decoder("linear"), "softmax_recompute": decoder("softmax")}
    ticks = []
    found = throughput.by_position(models, 5, 2, 1, lambda: ticks.append(1))
    assert {name: list(timings) for name, timings in found.items()} == {name: [0, 1, 2, 3, 4] for name in models}
    assert len(ticks) == 5


class TestMemory:
    """Each length in a separate process, since a process's peak never falls."""

    def test_the_highest_mark_rises_by_what_is_used(self):
        found = taken("x = torch.ones(64 * 2**18)")
        assert 60 <= found <= 80

    @pytest.mark.slow
    def test_generation_does_not_grow(self):
        def grown(attention: str) -> float:
            config = f"dim=128, depth=4, heads=4, feedforward=256, attention={attention!r}, positions='none'"
            model = f"m = longspan.Decoder(longspan.DecoderConfig({config})).eval()"
            first = f"{model}; f = lambda n: list(longspan.generate(m, max_new_tokens=n, batch=16, stream=True)); f(8)"
            few, many = (taken(f"f({n})", first) for n in (256, 2048))
            return many - few

        assert grown("linear") <= 4
        # Keys and values of 4 layers, in MB.
        assert grown("softmax") >= 0.8 * (2048 - 256) * 16 * 128 * 2 * 4 * 4 / 2**20


def taken(code: str, first: str = "pass") -> float:
    """MB that a process needs at its peak for some code, beyond what it needed before."""
    lines = (
        "import torch, longspan",
        "from longspan_lab.bench.worker import highest",
        first,
        "before = highest()",
        code,
        "print(highest() - before)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])
