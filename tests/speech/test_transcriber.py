"""Transcribers: streaming is the whole file for any cut, padding is nothing, and they are kept as checkpoints."""

import pytest
import torch

from longspan.models import checkpoint
from longspan.models.transcriber import Front, Transcriber
from recordings import config, transcriber

# Every family that has a state, with positions that go on.
CAUSAL = {
    "linear": {},
    "gla": {"stride": 3, "context": 7},
    "gated_deltanet": {"stride": 1, "context": 4},
    "linear; softmax": {"positions": "sinusoidal", "stride": 2, "context": 2},
    "retention": {"positions": "none", "stride": 4, "context": 9},
}


def frames(count: int, rows: int = 2, features: int = 5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, features, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("attention", CAUSAL)
@pytest.mark.parametrize("cuts", [(1,), (2, 0, 5), (1, 13, 3), (31,)], ids=str)
def test_streaming_is_the_whole_file(attention, cuts):
    model = transcriber(attention=attention, causal=True, **CAUSAL[attention])
    x = frames(61)
    whole, tokens = model(x)
    state, found, at, turn = model.init_state(2), [], 0, 0
    while at < x.shape[1]:
        count = cuts[turn % len(cuts)]
        logits, state = model.step(x[:, at : at + count], state)
        found.append(logits)
        at, turn = at + count, turn + 1
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-5)
    assert tokens.tolist() == [61 // model.config.stride] * 2
    assert state.frames.shape[1] == model.config.context - model.config.stride + 61 % model.config.stride
    assert state.position.tolist() == tokens.tolist()


def test_a_step_leaves_its_state_as_it_was():
    model = transcriber(attention="gla", causal=True)
    _, state = model.step(frames(9), model.init_state(2))
    first, _ = model.step(frames(7, seed=1), state)
    again, _ = model.step(frames(7, seed=1), state)
    assert torch.equal(first, again)


@pytest.mark.parametrize("attention", ["linear", "softmax", "reformer(chunk=3, buckets=4, rounds=2)"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_comes_after_a_rows_end_does_not_exist(attention, causal):
    model = transcriber(attention=attention, causal=causal, positions="sinusoidal")
    x = frames(40)
    x[1, 27:] = float("nan")
    logits, tokens = model(x, torch.tensor([40, 27]))
    assert tokens.tolist() == [20, 13]
    alone, _ = model(x[1:, :27])
    torch.testing.assert_close(logits[1:, :13], alone)
    loss = model.loss(x, torch.tensor([40, 27]), [[1, 2], [3]])
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_token_reads_its_context_and_nothing_of_the_future():
    front = Front(features=3, stride=2, context=5, dim=7).double()
    x = frames(11, features=3)
    whole, left = front(x, front.start(2))
    assert whole.shape == (2, 5, 7)
    assert left.shape == (2, 3 + 1, 3)
    for i in range(5):
        moved = x.clone()
        moved[:, 2 * i + 2 :] += 1  # frames after those of token i
        moved[:, : max(2 * i - 3, 0)] -= 1  # and those before its context
        assert torch.equal(front(moved, front.start(2))[0][:, i], whole[:, i])
        for frame in range(max(2 * i - 3, 0), 2 * i + 2):
            moved = x.clone()
            moved[:, frame] += 1
            assert not torch.equal(front(moved, front.start(2))[0][:, i], whole[:, i])


def test_frames_are_measured_by_the_training():
    front = Front(features=3, stride=1, context=2, dim=4).double()
    x = 5 + 3 * frames(400, rows=1, features=3)
    front.calibrate(x[0])
    torch.testing.assert_close(front.mean, x[0].mean(0))
    torch.testing.assert_close(front.deviation, x[0].std(0))
    # Before the first frame the mean is heard, as if nothing was there.
    zeros = front.read.bias + 0 * front(x[:, :1], front.start(1))[0]
    assert torch.equal(front(front.mean.expand(1, 1, 3), front.start(1))[0], zeros)


def test_less_than_a_token_is_none():
    model = transcriber(stride=4, context=4, causal=True)
    logits, tokens = model(frames(3))
    assert (logits.shape, tokens.tolist()) == ((2, 0, 4), [0, 0])
    logits, state = model.step(frames(3), model.init_state(2))
    assert logits.shape == (2, 0, 4)
    assert model.step(frames(1), state)[0].shape == (2, 1, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_transcriber_is_a_checkpoint(tmp_path, causal):
    model = transcriber(attention="gla; linear" if causal else "linear", causal=causal, rate=0)
    checkpoint.save(model, tmp_path / "m", extra={"run": {"data": "tones"}})
    again = checkpoint.load(tmp_path / "m")
    assert type(again) is Transcriber
    assert again.config == model.config
    assert checkpoint.read_config(tmp_path / "m")["kind"] == "transcriber"
    assert torch.equal(again.front.mean, model.front.mean)
    assert torch.equal(again(frames(20))[0], model(frames(20))[0])


MISTAKES = [
    (lambda m: m(torch.randn(2, 9, 4)), r"frames must be floating-point \(B, T, 5\), not torch.float32 \(2, 9, 4\)"),
    (lambda m: m(torch.ones(2, 9, 5, dtype=torch.long)), r"frames must be .*, not torch.int64"),
    (lambda m: m(frames(9), torch.tensor([9])), r"lengths must be int64 \(2,\), not torch.int64 \(1,\)"),
    (lambda m: m(frames(9), torch.tensor([9, 10])), "lengths .* 9 to 10, .* 9 frames"),
    (lambda m: m.init_state(1), "causal=True"),
    (lambda m: m.step(frames(9), ()), "TranscriberState, not tuple"),
]


@pytest.mark.parametrize(("call", "said"), MISTAKES)
def test_mistakes_are_said(call, said):
    with pytest.raises(ValueError, match=said):
        call(transcriber())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stride": 0}, "stride=0 must be at least 1"),
        ({"features": 0}, "features=0 must be at least 1"),
        ({"context": 1}, "context=1 must be at least stride=2"),
        ({"labels": ""}, "labels='' must be"),
        ({"labels": "a b a"}, "labels='a b a'"),
        ({"rate": -1}, "rate=-1 must not be negative"),
        ({"positions": "somewhere"}, "unknown positions 'somewhere'"),
    ],
)
def test_configs_that_do_not_fit(fields, said):
    with pytest.raises(ValueError, match=said):
        config(**fields)
