"""Generation equals its definition, token by token; the likelihood does not depend on the chunks."""

import importlib

import pytest
import torch

from longspan.generation.sampling import generate, log_likelihood, prefill
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.ops.native.call import available

PROMPT = torch.randint(0, 7, (3, 11), generator=torch.Generator().manual_seed(0))


def decoder(**fields):
    torch.manual_seed(0)
    small = {"dim": 8, "depth": 2, "heads": 2, "feedforward": 12, "vocab": 7, "length": 40}
    return Decoder(DecoderConfig(**small | fields)).double().eval()


SPECS = ["linear", "softmax", "linear; softmax(kv_heads=1)"]


def tokens(*arguments, **options):
    return generate(*arguments, **options)


@pytest.mark.parametrize("attention", SPECS)
def test_greedy_generation_is_argmax_of_recomputed_outputs(attention):
    model = decoder(attention=attention)
    found = tokens(model, PROMPT, max_new_tokens=9, temperature=0)
    sequence = PROMPT
    for _ in range(9):
        inputs = torch.cat([torch.full((3, 1), model.start), sequence], 1)
        sequence = torch.cat([sequence, model(inputs)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(found, sequence[:, 11:])


@pytest.mark.parametrize("attention", SPECS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts_equal_separate_ones(attention, side):
    model = decoder(attention=attention, positions="rotary")
    lengths = [11, 4, 0]
    mask = torch.arange(11).expand(3, -1) < torch.tensor(lengths)[:, None]
    prompt = PROMPT
    if side == "left":
        mask, prompt = mask.flip(1), prompt.flip(1)
    found = tokens(model, prompt, mask=mask, max_new_tokens=6, temperature=0)
    for row, _ in enumerate(lengths):
        alone = tokens(model, prompt[row : row + 1, mask[row]], max_new_tokens=6, temperature=0)
        assert torch.equal(found[row : row + 1], alone)


def test_seeds_repeat_and_leave_the_global_generator_alone():
    model = decoder()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = tokens(model, batch=4, max_new_tokens=9, seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, tokens(model, batch=4, max_new_tokens=9, seed=3))
    assert not torch.equal(first, tokens(model, batch=4, max_new_tokens=9, seed=4))


def test_draws_follow_the_model():
    """Frequencies of the first token over many rows against its probabilities: 5 standard deviations."""
    model, n = decoder(), 20011
    found = tokens(model, batch=n, max_new_tokens=1, seed=0).flatten()
    p = model(torch.full((1, 1), model.start))[0].softmax(-1).flatten()
    share = torch.bincount(found, minlength=7) / n
    assert ((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all()


def test_top_k_of_one_is_greedy():
    model = decoder()
    greedy = tokens(model, PROMPT, max_new_tokens=5, temperature=0)
    assert torch.equal(tokens(model, PROMPT, max_new_tokens=5, top_k=1, seed=1), greedy)
    assert torch.equal(tokens(model, PROMPT, max_new_tokens=5, top_p=1e-9, seed=1), greedy)


def test_a_stopped_row_stays_stopped_and_all_stopped_is_the_end():
    model = decoder()
    found = tokens(model, batch=5, max_new_tokens=30, seed=0, stop=3)
    assert found.shape[1] < 30
    for row in found.tolist():
        assert set(row[row.index(3) :]) == {3}


def test_streams_one_token_at_a_time():
    """The first token is there before the second is computed; 29 tokens after 11 use a table of 40 to its end."""
    stream = generate(decoder(), PROMPT, max_new_tokens=29, seed=0, stream=True)
    assert next(stream).shape == (3,)
    assert len(list(stream)) == 28


def test_no_gradients_are_recorded_and_none_are_switched_off():
    model = decoder()
    for token in generate(model, PROMPT, max_new_tokens=2, stream=True):
        assert torch.is_grad_enabled()
        assert not token.requires_grad


@pytest.mark.parametrize("attention", SPECS)
def test_score_does_not_depend_on_the_cut(attention):
    model = decoder(attention=attention)
    whole = log_likelihood(model, PROMPT)
    by_hand = model.likelihood.log_prob(model(model.shift(PROMPT))[0], PROMPT).sum(1)
    torch.testing.assert_close(whole, by_hand.detach(), atol=1e-10, rtol=0)
    for chunk in (1, 4, 11, 99):
        torch.testing.assert_close(log_likelihood(model, PROMPT, chunk=chunk), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("attention", SPECS)
def test_score_of_ragged_rows(attention):
    model = decoder(attention=attention)
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[0, 6:], mask[1, :3], mask[2, [0, 4, 5, 10]] = False, False, False
    for chunk in (0, 1, 4):
        found = log_likelihood(model, PROMPT, mask=mask, chunk=chunk)
        for row in range(3):
            alone = log_likelihood(model, PROMPT[row : row + 1, mask[row]])
            torch.testing.assert_close(found[row : row + 1], alone, atol=1e-10, rtol=0)


def test_prefill_gives_the_outputs_of_each_rows_last_token():
    model = decoder()
    mask = torch.arange(11).expand(3, -1) < torch.tensor([[11], [4], [1]])
    outputs, state = prefill(model, PROMPT, mask)
    assert state.position.tolist() == [12, 5, 2]
    expected = model(torch.cat([torch.full((1, 1), model.start), PROMPT[1:2, :4]], 1))[0][:, -1]
    torch.testing.assert_close(outputs[1:2], expected.detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (None, {"max_new_tokens": -1}, "max_new_tokens=-1 must not be negative"),
        (PROMPT, {"max_new_tokens": 30}, "11 tokens .* 30 new .* 41 positions, .* has 40"),
        (None, {"batch": 0}, "batch=0 must be at least 1"),
        (None, {"stop": 7}, "stop=7 .* 0 to 6"),
        (None, {"temperature": -1.0}, "temperature"),
        (None, {"top_k": -1}, "top_k"),
        (None, {"top_p": 0.0}, "top_p"),
        (PROMPT, {"mask": torch.ones(3, 10).bool()}, r"mask must be bool \(3, 11\)"),
        (PROMPT + 9, {}, "tokens .* 0 to"),
        # Of other types.
        ("hello", {}, r"not the text 'hello'; .*torch.tensor\(\[list\(text.encode\(\)\)\]\)"),
        ([1, 2], {}, r"prompt must be int64 \(B, N\), not list"),
        (PROMPT[0], {}, r"prompt must be int64 \(B, N\), not torch.int64 \(11,\)"),
        (PROMPT.float(), {}, r"prompt must be int64 \(B, N\), not torch.float32"),
        (PROMPT, {"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number"),
        (PROMPT, {"max_new_tokens": True}, "max_new_tokens=True must be a whole number"),
        (PROMPT, {"temperature": "hot"}, "temperature='hot' must be a number"),
        (PROMPT, {"top_k": 1.5}, "top_k=1.5 must be a whole number"),
        (PROMPT, {"stop": 1.0}, "stop=1.0 must be a whole number or None"),
        (PROMPT, {"seed": 10**30}, "seed=.* must be a whole number or None"),
        (None, {"batch": 1.5}, "batch=1.5 must be a whole number"),
    ],
)
def test_wrong_options_are_refused_at_the_call(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(decoder(), prompt, **{"max_new_tokens": 3} | options)


def test_score_refuses_a_negative_chunk():
    with pytest.raises(ValueError, match="chunk=-1 must be 0"):
        log_likelihood(decoder(), PROMPT, chunk=-1)


@pytest.mark.parametrize(("tokens", "engines"), [(8, 0), (9, 1)])
def test_the_engine_is_for_more_than_a_few_tokens(tokens, engines, monkeypatch):
    module, made = importlib.import_module("longspan.generation.sampling"), []

    class Counted(module.Engine):
        def __init__(self, model):
            made.append(1)
            super().__init__(model)

    if not available():
        pytest.skip("there is no engine without native kernels")
    monkeypatch.setattr(module, "Engine", Counted)
    model = decoder().float()
    list(generate(model, PROMPT, max_new_tokens=tokens, seed=0, stream=True))
    assert len(made) == engines
    list(generate(model.double(), PROMPT, max_new_tokens=tokens, seed=0, stream=True))
    assert len(made) == engines
