"""Decoding on a CUDA device: no waits and no uploads in a step, and graphs whose tokens are those of the plain step.

The waits are counted on the fake device of ``fake.py``, in a process of its own.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longspan
from gpu import fake
from longspan.attention.base import REGISTRY
from longspan.generation import static_step
from longspan.models.config import DecoderConfig, Seq2SeqConfig
from longspan.models.decoder import Decoder
from longspan.models.seq2seq import Seq2Seq
from longspan.states import fix_capacity

SIZES = {"dim": 24, "depth": 1, "heads": 2, "feedforward": 12, "vocab": 7}
# These decode by sums or windows, or with a cache of fixed capacity.
NEEDED = (
    "linear performer rfa retention gla ssd deltanet gated_deltanet kda softmax local infini average fast_weights"
).split()
KINDS = [
    {"attention": "linear", "positions": "learned"},
    {"attention": "softmax", "positions": "sinusoidal"},
    {"attention": "softmax", "stack": "universal(steps=2)"},
    {"attention": "softmax", "stack": "act(steps=2)"},
    {"attention": "linear; softmax", "depth": 2, "stack": "reversible"},
    {"attention": "gla", "tied": True},
]
CROSS = [name for name, cls in sorted(REGISTRY.items()) if cls.contexts and name in static_step.CAPTURABLE]


def examples():
    """The causal examples of all mechanisms of this library."""
    listed = [spec for name in longspan.list_mechanisms() for spec in longspan.mechanism_examples(name)]
    return [spec for spec in listed if "causal" in REGISTRY[spec.partition("(")[0]].directions]


def capturable():
    """The fields of the decoders whose step can be captured."""
    fields = [{"attention": spec} for spec in examples()] + KINDS
    return [one for one in fields if not static_step.why_not_capturable(Decoder(DecoderConfig(**SIZES | one)))]


def steps(fields):
    """Count two decode steps of each decoder on the fake device, as JSON."""
    found, built = {}, []
    for one in fields:
        kind, config = (Seq2Seq, Seq2SeqConfig) if "cross_attention" in one else (Decoder, DecoderConfig)
        built.append(kind(config(**SIZES | one)).eval())
    with fake.accelerator() as count:
        for one, model in zip(fields, built, strict=True):
            fake.moved(model, count.mode)
            token = torch.zeros(2, 1, dtype=torch.int64, device=fake.DEVICE)
            with torch.no_grad():
                if isinstance(model, Seq2Seq):
                    state, step = model.init_state(token.expand(-1, 5), capacity=9), model.step
                else:
                    state, step = model.init_state(2, 9), model
                state = fix_capacity(state, 9)
                # The first step makes tables that later ones read.
                costs, made = fake.counted(count, lambda: step(token, state, donate=True))  # noqa: B023
                if made is not None:
                    costs, _ = fake.counted(count, lambda: step(token, made[1], donate=True))  # noqa: B023
            # The lists of the counts go on with the next model.
            found[json.dumps(one)] = copy.deepcopy(costs)
    return found


def measured(fields):
    tests, source = Path(__file__).parents[1], Path(fake.SOURCE).parent
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(fields)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (source, tests)))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_fake = pytest.mark.skipif(not fake.available(), reason="the fake device needs torch 2.13")


def check_no_waits(fields):
    for one, costs in measured(fields).items():
        assert (costs["error"], costs["syncs"], costs["uploads"]) == ("", [], []), one
        assert costs["launches"] > 0


@needs_fake
def test_steps_do_not_wait():
    check_no_waits([{"attention": spec} for spec in ("softmax", "retention")] + KINDS[:1])


@needs_fake
@pytest.mark.full
def test_capturable_steps_do_not_wait():
    """All mechanisms and stacks whose step is captured, and all cross attentions."""
    fields = capturable()
    assert set(NEEDED) <= {one["attention"].partition("(")[0] for one in fields}
    check_no_waits(fields + [{"attention": "gla", "cross_attention": name} for name in CROSS])


def test_needed_mechanisms_can_be_captured():
    assert set(NEEDED) <= static_step.CAPTURABLE
    assert static_step.CAPTURABLE <= REGISTRY.keys()


@torch.no_grad()
def test_adaptive_span_may_read_all_keys_of_the_state(monkeypatch):
    """As on CUDA, where the step does not read the spans: keys beyond them have no weight."""
    torch.manual_seed(0)
    attention = longspan.build("adaptive_span(span=7, ramp=3, initial=2.5)", 16, 2).double().eval()
    x = torch.randn(2, 20, 16).double()
    expected, _ = attention(x)
    monkeypatch.setattr(type(attention), "_keys_read", lambda self, x, state: state.keys.shape[2])
    state = attention.init_trainable_state(2)
    assert state.keys.shape[2] > attention.keys_seen()
    for i in range(20):
        found, state = attention(x[:, i : i + 1], state, donate=True)
        torch.testing.assert_close(found[:, 0], expected[:, i], atol=1e-12, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", [*NEEDED, "gla; softmax; local(window=3)"])
def test_graphs_draw_the_tokens_of_the_plain_step(spec):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SIZES | {"depth": 3}, attention=spec)).double().cuda().eval()
    for rows in (1, 3):
        prompt = torch.randint(0, 7, (rows, 6), device="cuda")
        for options in ({"temperature": 0}, {"seed": 1}, {"seed": 2, "stop": 3}):
            found = longspan.generate(model, prompt, max_new_tokens=40, cuda_graph=True, **options)
            plain = longspan.generate(model, prompt, max_new_tokens=40, cuda_graph=False, **options)
            assert torch.equal(found, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_token_steps_do_not_wait_on_cuda():
    """What the fake device counts, as CUDA sees it."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SIZES | {"depth": 3}, attention="gla; softmax; retention")).cuda().eval()
    token = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        _, state = model(token, fix_capacity(model.init_state(2, 9), 9), donate=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(token, state, donate=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    print(json.dumps(steps(json.loads(sys.argv[1]))))
