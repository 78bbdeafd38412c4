"""State adapters in a pool: streams with different ones run together, and each is that of a pool with it alone."""

import random

import pytest
import torch
from pools import decoder, spoiled

from longspan import adapt
from longspan.serving import Pool, Sampling

PROMPTS = [list(text.encode()) for text in ("the same beginning", "the same beginning and more", "other")]
SAMPLING = Sampling(temperature=0)


def sharp(attention="gated_deltanet; softmax"):
    """A model in float64 whose states decide what is most likely."""
    model = decoder(attention).double().requires_grad_(False)
    for weight in model.parameters():
        weight.mul_(4.0)
    return model


def tuned(model, seed):
    """An adapter with random values."""
    found, generator = adapt.initial_states(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in found.parameters():
            values.copy_(torch.randn(values.shape, generator=generator, dtype=torch.float64))
    return found


def likely(adapter, prompt, drawn):
    """Whether each drawn token is the most likely one after those before it, read in one call with the adapter."""
    whole = torch.tensor([[*prompt, *drawn]])
    outputs = adapter(adapter.model.shift(whole))
    return outputs[0, len(prompt) :].argmax(-1).tolist() == list(drawn)


def test_streams_with_different_adapters_are_those_of_each_alone():
    model, draw = sharp(), random.Random(0)
    adapters = [adapt.initial_states(model), *(tuned(model, seed) for seed in range(3))]
    frozen = [None, *(one.frozen() for one in adapters[1:])]
    pool = spoiled(Pool(model, slots=4, capacity=64, prefix_bytes=1 << 20, prefill=8))
    jobs = [(which, prompt) for which in range(4) for prompt in PROMPTS] * 2
    draw.shuffle(jobs)
    streams = []
    for which, prompt in jobs:
        options = {"adapter": frozen[which], "keep_state": True}
        streams += pool.submit(prompt, max_new_tokens=6, sampling=SAMPLING, **options)
        pool.step()
    pool.run()
    for (which, prompt), stream in zip(jobs, streams, strict=True):
        assert likely(adapters[which], prompt, stream.tokens), (which, bytes(prompt), stream.error)
    assert any(stream.cached for stream in streams)
    assert len({tuple(s.tokens) for s, (_, prompt) in zip(streams, jobs, strict=True) if prompt is PROMPTS[0]}) > 2
    # A next turn keeps states of its own adapter alone, where a text of another one may be the same.
    for (which, prompt), stream in zip(jobs[:6], streams, strict=False):
        read = [*prompt, *stream.tokens[:-1]]
        more = {"state": stream.state, "history": read, "adapter": frozen[which]}
        (turn,) = pool.submit(stream.tokens[-1:], max_new_tokens=3, sampling=SAMPLING, **more)
        (again,) = pool.submit([*read, stream.tokens[-1]], max_new_tokens=3, sampling=SAMPLING, adapter=frozen[0])
        pool.run()
        assert likely(adapters[which], [*read, stream.tokens[-1]], turn.tokens)
        assert likely(adapters[0], [*read, stream.tokens[-1]], again.tokens)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (lambda: "formal", "adapter must be InitialStates.frozen"),
        (lambda: adapt.initial_states(decoder("gla")).frozen(), "adapter does not fit this model"),
    ],
)
def test_other_adapters_are_refused(adapter, message):
    with pytest.raises(ValueError, match=message):
        Pool(decoder(), slots=1).submit([1], max_new_tokens=1, adapter=adapter())
