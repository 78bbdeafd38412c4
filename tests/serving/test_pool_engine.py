"""A pool on the decode engine: the tokens of the modules, in the pool's own tensors."""

import pytest
import torch
from pools import alone, spoiled
from torch.utils import _pytree as pytree

import longspan
from longspan import backend
from longspan.generation.native_decoder import Engine
from longspan.serving import Pool, Sampling

GREEDY = Sampling(temperature=0.0)


def model(spec: str) -> longspan.Decoder:
    torch.manual_seed(0)
    config = longspan.DecoderConfig(vocab=37, length=64, dim=32, heads=2, depth=2, attention=spec, positions="none")
    own = longspan.Decoder(config).eval()
    if reason := Engine.why_not(own):
        pytest.skip(reason)
    return own


@pytest.fixture
def calls(monkeypatch):
    """The batch of each step of the engine."""
    found, real = [], Engine.__call__

    def counted(self, tokens, state):
        found.append(len(tokens))
        return real(self, tokens, state)

    monkeypatch.setattr(Engine, "__call__", counted)
    return found


@pytest.mark.parametrize("spec", ["gated_deltanet", "retention; softmax", "gla; linear"])
def test_streams_that_come_and_go_draw_the_tokens_of_the_modules(spec, calls):
    own = model(spec)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randint(0, 37, (n,), generator=generator).tolist() for n in (0, 3, 9, 1, 5, 2, 7)]
    crowd = spoiled(Pool(own, slots=3, capacity=30, prefill=4))
    before = [t.data_ptr() for t in pytree.tree_leaves(crowd.state)]
    streams = [crowd.submit(p, max_new_tokens=4 + 2 * i, sampling=GREEDY)[0] for i, p in enumerate(given)]
    crowd.run()
    assert set(calls) == {1, 2, 3}
    assert [t.data_ptr() for t in pytree.tree_leaves(crowd.state)] == before
    with backend("torch"):
        for i, prompt in enumerate(given):
            assert streams[i].tokens == alone(own, prompt, 4 + 2 * i)


def test_a_state_kept_goes_on(calls):
    own, tokens = model("gated_deltanet"), []
    crowd = Pool(own, slots=2)
    (whole,) = crowd.submit([1, 2, 3], max_new_tokens=9, sampling=GREEDY)
    (first,) = crowd.submit([1, 2, 3], max_new_tokens=4, sampling=GREEDY, keep_state=True)
    crowd.run()
    (rest,) = crowd.submit(first.tokens[-1:], state=first.state, max_new_tokens=5, sampling=GREEDY)
    crowd.run()
    tokens = [*first.tokens, *rest.tokens]
    assert tokens == whole.tokens
    assert calls


def test_another_backend_or_model_runs_the_modules(calls):
    own = model("gated_deltanet")
    crowd = Pool(own, slots=2)
    (stream,) = crowd.submit([1, 2], max_new_tokens=9, sampling=GREEDY)
    crowd.step()
    crowd.step()
    assert len(calls) == 2
    with backend("torch"):
        crowd.step()
    crowd.step()
    assert len(calls) == 3
    other = longspan.Decoder(own.config).eval()
    other.load_state_dict(own.state_dict())
    crowd.model = other
    crowd.run()
    assert len(calls) == 3
    with backend("torch"):
        assert stream.tokens == alone(own, [1, 2], 9)
