"""Drafts: text, outputs and draws are those without a draft, and good drafts save calls."""

import pytest
import torch

import longspan
from longspan import Decoder, DecoderConfig
from longspan.generation import drafting
from longspan.generation.native_decoder import Engine
from longspan.generation.sampling import prefill


def made(attention="gated_deltanet; softmax", seed=0, **options):
    torch.manual_seed(seed)
    config = DecoderConfig(dim=32, depth=2, heads=2, feedforward=48, vocab=9, attention=attention, **options)
    model = Decoder(config).eval()
    if reason := Engine.why_not(model):
        pytest.skip(reason)
    return model


def oracle(text):
    """Drafts the continuation of a known text; wrong from time to time."""
    calls = []

    def propose(tokens, count):
        at = tokens.shape[1]
        draft = text[:, at : at + count].clone()
        if len(calls) % 3 == 2 and draft.shape[1] > 1:
            draft[:, 1] = (draft[:, 1] + 1) % 9
        calls.append(draft.shape[1])
        return draft

    return propose


DRAFTS = {
    "prompt lookup": lambda text: "prompt-lookup",
    "a smaller model": lambda text: made("linear", 1),
    "the model itself": lambda text: made(),
    "right and wrong": oracle,
    "always wrong": lambda text: lambda tokens, count: (text[:, tokens.shape[1] :][:, :count] + 1) % 9,
    "none": lambda text: lambda tokens, count: tokens[:, :0],
}


@pytest.mark.parametrize(("temperature", "rows"), [(0.0, 3), (1.0, 1)])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_the_same_with_every_draft(draft, temperature, rows):
    model, prompt = made(), torch.tensor([[1, 2, 3, 1, 2]] * rows)
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    expected = longspan.generate(model, prompt, **options)
    given = DRAFTS[draft](torch.cat([prompt, expected], 1))
    for most in (1, 4):
        found = longspan.generate(model, prompt, draft=given, draft_tokens=most, **options)
        assert torch.equal(found, expected)
    streamed = longspan.generate(model, prompt, draft=given, stream=True, **options)
    assert torch.equal(torch.stack(list(streamed), 1), expected)


@pytest.mark.parametrize("stop", [0, 4])
def test_the_stop_token_ends_a_text_within_a_draft(stop):
    model, prompt = made(), torch.tensor([[1, 2], [3, 4]])
    options = {"max_new_tokens": 60, "seed": 3, "stop": stop}
    expected = longspan.generate(model, prompt, **options)
    text = torch.cat([prompt, expected, expected], 1)
    assert torch.equal(longspan.generate(model, prompt, draft=oracle(text), **options), expected)


def speculated(model, prompt, text, draft, most, total):
    """Read a known text through a speculation -> (outputs, the speculation, number of calls of the engine)."""
    engine, calls = Engine(model), []
    run = engine.verify, engine.__class__.__call__
    outputs, state = prefill(model, prompt, None, 8)
    found = [outputs]

    class Counted:
        def __call__(self, token, state):
            calls.append(1)
            return run[1](engine, token, state)

        def verify(self, tokens, state):
            calls.append(tokens.shape[1])
            return run[0](tokens, state)

    step = drafting.Speculation(Counted(), draft, prompt, most, total)  # pyright: ignore[reportArgumentType]
    for token in text.split(1, 1):
        y, state = step(token, state)
        found.append(y[:, 0])
    return torch.stack(found, 1), step, calls


def test_outputs_are_the_same_bits_and_good_drafts_save_calls():
    model, prompt = made(), torch.tensor([[1, 2, 3]])
    text = torch.randint(0, 9, (1, 30))
    nothing = speculated(model, prompt, text, lambda tokens, count: tokens[:, :0], 4, 31)
    whole = torch.cat([prompt, text], 1)

    def known(tokens, count):
        return whole[:, tokens.shape[1] :][:, :count]

    right = speculated(model, prompt, text, known, 4, 31)
    wrong = speculated(model, prompt, text, lambda tokens, count: (known(tokens, count) + 1) % 9, 4, 31)
    assert torch.equal(nothing[0], right[0])
    assert torch.equal(nothing[0], wrong[0])
    assert len(nothing[2]) == 30
    assert len(right[2]) == 6  # five tokens a call
    assert right[1].pace.accepted == right[1].pace.drafted == 24
    # One token, after 4 and 16 steps without a draft.
    assert wrong[1].pace.drafted == 4 + 2
    assert wrong[1].pace.accepted == 0


def test_prompt_lookup_continues_the_last_place_of_the_longest_match():
    lookup = drafting.PromptLookup()
    assert lookup(torch.tensor([[5, 1, 2, 6, 1, 2, 7, 8, 1, 2]]), 4).tolist() == [[7, 8, 1, 2]]
    assert lookup(torch.tensor([[5, 1, 2, 6, 1, 2, 7, 8, 1, 2, 6]]), 2).tolist() == [[1, 2]]
    assert lookup(torch.tensor([[5, 1, 2, 6, 1, 2, 7, 8, 1, 2, 6, 3]]), 2).shape == (1, 0)
    two = drafting.PromptLookup()
    assert two(torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]]), 2).shape == (2, 0)
    assert two(torch.tensor([[1, 2, 3, 1, 2, 3], [1, 2, 3, 4, 5, 1]]), 2).shape == (2, 0)
    assert two(torch.tensor([[1, 2, 3, 1, 2, 3, 1], [1, 2, 3, 4, 5, 1, 2]]), 2).tolist() == [[2, 3], [3, 4]]


REFUSED = {
    "a word": ("lookup", r"a draft is 'prompt-lookup', a Decoder or a function .*, not 'lookup'"),
    "other tokens": (DecoderConfig(dim=16, depth=1, heads=2, vocab=7), "the draft has 7 tokens, and the model has 9"),
    "a module": (torch.nn.Linear(2, 2), "a draft is"),
    "another shape": (lambda tokens, count: tokens[0], r"a draft must be int64 \(1, K\) with K at most"),
    "too many": (lambda tokens, count: tokens.new_zeros(1, count + 1), "K at most"),
    "a list": (lambda tokens, count: [1], "not list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_draft_is_refused(case):
    draft, message = REFUSED[case]
    draft = Decoder(draft).eval() if isinstance(draft, DecoderConfig) else draft
    with pytest.raises(ValueError, match=message):
        longspan.generate(made(), torch.tensor([[1, 2]]), max_new_tokens=20, draft=draft)


def test_models_that_cannot_undo_tokens_are_refused():
    model = Decoder(DecoderConfig(dim=16, depth=1, heads=2, vocab=9, attention="mamba")).eval()
    with pytest.raises(ValueError, match="only the decode engine can undo tokens, .*attention is a Mamba"):
        longspan.generate(model, torch.tensor([[1, 2]]), max_new_tokens=20, draft="prompt-lookup")
    with pytest.raises(ValueError, match="draft_tokens=0 must be at least 1"):
        longspan.generate(made(), max_new_tokens=20, draft="prompt-lookup", draft_tokens=0)
