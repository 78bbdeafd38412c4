"""A pool on the decode engine: the tokens of the modules, in the pool's own tensors, and with drafts the same bits."""

import random

import pytest
import torch
from pools import alone, decoder, spoiled
from torch.utils import _pytree as pytree

import longspan
from longspan import backend, states
from longspan.generation.drafting import Lookup
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


WAYS = (GREEDY, Sampling(temperature=0.8, seed=5), Sampling(top_k=5, seed=7))
PROMPTS = [[i, i + 1, i + 2, i + 1] for i in range(8)]


def answered(own, draft=None, slots=3, **options):
    """The streams of all prompts, every third one without drafts, in fewer rows than streams; and the pool."""
    # With pieces of one prompt each, no prompt is read with others.
    crowd = spoiled(Pool(own, slots=slots, queue=9, capacity=40, prefill=5, prefix_bytes=1 << 24, **options))
    streams = []
    for i, prompt in enumerate(PROMPTS):
        given = {"max_new_tokens": 9 + 3 * i, "sampling": WAYS[i % 3], "stop": [3 * i], "keep_state": True}
        streams += crowd.submit(prompt, **given, draft=None if i % 3 == 2 else draft)
    crowd.run()
    assert {stream.error for stream in streams} == {""}
    return streams, crowd


def written(monkeypatch, draft):
    """Let drafts come from a function of a text's prompt, the number of tokens drawn and a count."""
    monkeypatch.setattr(Lookup, "draft", lambda self, n: draft(tuple(self.tokens[1:5]), len(self.tokens) - 5, n))


def facts(stream):
    assert stream.state is not None
    return stream.tokens, stream.log_probs, stream.finished


def same(a, b):
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("spec", ["gated_deltanet", "retention; softmax", "gla; linear"])
def test_drafts_change_no_bit(spec, slots, monkeypatch):
    """Drafts that are right, wrong, partly right or empty, in a batch with streams that have no drafts."""
    own, dice = model(spec), random.Random(0)
    expected, plain = answered(own, slots=slots)
    text = {stream.prompt: stream.tokens for stream in expected}

    def draft(prompt, drawn, count):
        right = text[prompt][drawn : drawn + dice.randrange(count + 1)]
        return [token if dice.random() < 0.8 else (token + 1) % 37 for token in right]

    written(monkeypatch, draft)
    found, crowd = answered(own, "prompt-lookup", slots)
    for one, other in zip(found, expected, strict=True):
        assert facts(one) == facts(other)
        assert same(*map(states.utils.grow_capacity, (one.state, other.state)))
        # What is cached is the state of exactly these tokens, not the one before the last draft was undone.
        path = [37, *one.prompt, *one.tokens[:-1]]
        kept, known = crowd.prefixes.find(path), plain.prefixes.find(path)
        assert kept[0] == known[0] == len(path)
        assert same(kept[1:], known[1:])
    drafted, accepted = (
        sum(getattr(stream, name) for stream in found) for name in ("draft_tokens", "accepted_draft_tokens")
    )
    assert 0 < accepted < drafted
    assert sum(stream.draft_tokens for stream in found[2::3]) == 0


@pytest.mark.parametrize("right", [True, False])
def test_the_number_of_drafted_tokens_follows_the_accepted_ones(right, monkeypatch, calls):
    own, read, real = model("gated_deltanet"), [], Engine.verify
    plain = Pool(own, slots=1)
    (whole,) = plain.submit([1, 2, 3, 4], max_new_tokens=100, sampling=GREEDY)
    plain.run()

    def counted(self, tokens, state):
        read.append(tokens.shape[1])
        return real(self, tokens, state)

    monkeypatch.setattr(Engine, "verify", counted)
    written(monkeypatch, lambda _, drawn, n: [(token + (not right)) % 37 for token in whole.tokens[drawn : drawn + n]])
    crowd = Pool(own, slots=1, draft_tokens=4)
    (stream,) = crowd.submit([1, 2, 3, 4], max_new_tokens=100, sampling=GREEDY, draft="prompt-lookup")
    crowd.run()
    assert stream.tokens == whole.tokens
    assert crowd.tokens_drawn == 100
    read = [n for n in read if n]  # without the calls that settle
    if right:
        assert read[:-1] == [5] * (len(read) - 1)
        assert len(read) == 20
    else:
        assert len(read) <= 7


def test_a_text_that_repeats_itself_takes_fewer_steps(calls):
    own = model("gla; linear")
    crowd = Pool(own, slots=2)
    ways = [GREEDY, Sampling(temperature=0.01, seed=1)]
    streams = crowd.submit([1, 2, 3, 1, 2], max_new_tokens=60, sampling=ways, draft="prompt-lookup")
    others = crowd.submit([1, 2, 3, 1, 2], max_new_tokens=60, sampling=ways)
    crowd.run()
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in others]
    assert all(stream.accepted_draft_tokens > 10 for stream in streams)
    assert others[0].draft_tokens == 0


def test_drafts_stay_within_the_places_and_the_columns(monkeypatch):
    own, widths, real = model("softmax; linear"), [], Engine.verify
    written(monkeypatch, lambda prompt, drawn, count: [1] * count)

    def counted(self, tokens, state):
        widths.append(tuple(tokens.shape))
        return real(self, tokens, state)

    monkeypatch.setattr(Engine, "verify", counted)
    for slots in (2, 10, 11):
        crowd = Pool(own, slots=slots, capacity=20, draft_tokens=16)
        ways = [Sampling(seed=i) for i in range(slots)]
        plain = Pool(own, slots=slots, capacity=20)
        found = crowd.submit([1, 2, 3, 4], max_new_tokens=16, sampling=ways, draft="prompt-lookup")
        expected = plain.submit([1, 2, 3, 4], max_new_tokens=16, sampling=ways)
        crowd.run()
        plain.run()
        assert [stream.tokens for stream in found] == [stream.tokens for stream in expected]
        assert all(rows * width <= 32 for rows, width in widths)
        assert bool(widths) == (slots < 11)
        widths.clear()
    # In a batch with a longer draft, the padding of the short one would exceed the capacity.
    texts = []
    for draft in ("prompt-lookup", None):
        crowd = Pool(own, slots=2, capacity=20, draft_tokens=16)
        prompts = (([1] * 14, 6), ([2], 19))
        found = [crowd.submit(prompt, max_new_tokens=n, sampling=GREEDY, draft=draft)[0] for prompt, n in prompts]
        crowd.run()
        texts.append([(stream.tokens, stream.finished) for stream in found])
    assert texts[0] == texts[1]


def test_drafts_need_a_model_that_the_engine_supports():
    own = model("gated_deltanet")
    with pytest.raises(ValueError, match="draft is not possible with this model: only the decode engine .*Mamba"):
        Pool(decoder("mamba"), slots=1).submit([1], max_new_tokens=1, draft="prompt-lookup")
    with pytest.raises(ValueError, match="draft_tokens=0"):
        Pool(own, slots=1, draft_tokens=0).submit([1], max_new_tokens=1, draft="prompt-lookup")
    with pytest.raises(ValueError, match="draft='x' must be 'prompt-lookup' or None"):
        Pool(own, slots=1).submit([1], max_new_tokens=1, draft="x")
