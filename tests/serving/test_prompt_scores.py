"""The log-probabilities of a prompt: those of the model, in one piece or several, of the pool and of the server."""

import json

import adapted_models
import pytest
import torch
from pools import Failing, decoder
from servers import Running, events, text_of

from longspan.serving import Pool, Sampling
from longspan.serving.requests import MOST_SCORES

PROMPT = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]
pytestmark = pytest.mark.usefixtures("restored")


def scored(model, prompt):
    """The log-probabilities of a prompt (N,V) by one call of a decoder, whose start token precedes it."""
    with torch.no_grad():
        outputs, _ = model(torch.tensor([[model.start, *prompt[:-1]]]), model.init_state(1))
        return model.likelihood.log_probs(outputs)[0]


def chosen(scores, prompt):
    return scores.gather(-1, torch.tensor(prompt)[:, None])[:, 0].tolist()


@pytest.mark.parametrize(("prefill", "attention"), [(1, "softmax"), (4, "gated_deltanet"), (100, "softmax")])
def test_a_pool_scores_prompts_in_pieces_and_among_others(prefill, attention):
    model = decoder(attention, vocab=17).double()
    pool = Pool(model, slots=4, prefill=prefill, capacity=40, prefix_bytes=1 << 20)
    for _ in range(2):  # a known beginning has no scores
        prompts = [PROMPT, PROMPT[:5], [3], []]
        found = [pool.submit(one, max_new_tokens=i, top=3, score_prompt=True)[0] for i, one in enumerate(prompts)]
        (plain,) = pool.submit(PROMPT, max_new_tokens=2)
        pool.run()
        for i, (prompt, stream) in enumerate(zip(prompts, found, strict=True)):
            assert (stream.finished, len(stream.tokens)) == ("length", i)
            if not prompt:
                assert stream.prompt_log_probs == stream.prompt_top_log_probs == []
                continue
            scores = scored(model, prompt)
            assert stream.prompt_log_probs == pytest.approx(chosen(scores, prompt), abs=1e-9)
            for top, row in zip(stream.prompt_top_log_probs, scores, strict=True):
                best = row.topk(3)
                assert top == pytest.approx(
                    dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-9
                )
        assert (plain.finished, plain.prompt_log_probs) == ("length", [])


def test_scores_after_a_state_follow_it():
    model = decoder(vocab=17).double()
    pool = Pool(model, slots=2)
    (first,) = pool.submit(PROMPT[:4], max_new_tokens=1, keep_state=True)
    pool.run()
    (second,) = pool.submit(PROMPT[4:], max_new_tokens=1, state=first.state, score_prompt=True)
    pool.run()
    # The state has no output, so nothing is known about the token after it.
    assert second.prompt_log_probs[0] is None
    assert second.prompt_log_probs[1:] == pytest.approx(chosen(scored(model, PROMPT), PROMPT)[5:], abs=1e-9)


def test_nothing_is_drawn_where_the_prompt_alone_is_scored():
    pool = Pool(decoder(vocab=17), slots=2)
    seen = []
    ways = [Sampling(seed=i) for i in range(2)]
    streams = pool.submit(
        PROMPT, max_new_tokens=0, sampling=ways, score_prompt=True, listener=lambda _, token: seen.append(token)
    )
    pool.run()
    assert seen == [None, None]
    assert streams[0].prompt_log_probs == streams[1].prompt_log_probs
    assert pool.live == 0
    for options in ({}, {"score_prompt": True, "keep_state": True}):
        with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
            pool.submit(PROMPT, max_new_tokens=0, **options)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "fla gla"])
@pytest.mark.parametrize("prefill", [3, 100])
def test_models_of_others_are_scored(name, prefill):
    kind = name.removeprefix("fla ")
    model = adapted_models.fla(kind) if name.startswith("fla") else adapted_models.hybrid(kind)
    pool = Pool(model, slots=4, prefill=prefill, capacity=40)
    # Rows of several lengths at once, and one that is not scored.
    prompts = [PROMPT, PROMPT[:5], PROMPT[:5], [3]]
    found = [pool.submit(one, max_new_tokens=2, top=1, score_prompt=i != 2)[0] for i, one in enumerate(prompts)]
    pool.run()
    for i, (prompt, stream) in enumerate(zip(prompts, found, strict=True)):
        if i == 2:
            assert stream.prompt_log_probs == []
            continue
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        assert stream.prompt_log_probs[0] is None
        assert stream.prompt_log_probs[1:] == pytest.approx(chosen(scores[:-1], prompt[1:]), abs=1e-4)
        assert stream.prompt_top_log_probs[0] is None
        assert [max(top.values()) for top in stream.prompt_top_log_probs[1:]] == pytest.approx(
            scores[:-1].max(-1).values.tolist(), abs=1e-4
        )
    assert found[1].tokens == found[2].tokens


def test_an_error_of_one_prompt_is_not_that_of_others():
    model = decoder(vocab=17)
    with torch.no_grad():
        model.embedding.tokens.weight[16] = float("nan")
    pool = Pool(model, slots=4)
    (bad,) = pool.submit([1, 16, 2], max_new_tokens=0, score_prompt=True)
    (good,) = pool.submit(PROMPT, max_new_tokens=0, score_prompt=True)
    pool.run()
    assert (bad.finished, good.finished) == ("error", "length")
    assert "not numbers" in bad.error
    assert good.prompt_log_probs == pytest.approx(chosen(scored(model, PROMPT), PROMPT), abs=1e-4)


# The server.


@pytest.fixture(scope="module")
def running():
    with Running(decoder().double(), pool={"prefill": 4, "prefix_bytes": 1 << 20}) as found:
        yield found


@pytest.mark.parametrize(
    ("stream", "drawn", "top"), [(False, 0, 2), (False, 5, 0), (True, 0, 0), (True, 1, 2), (True, 5, 2)]
)
def test_an_echo_has_the_log_probabilities_of_the_prompt(running, stream, drawn, top):
    prompts = ["scored", "a", "河!"]
    body = {"prompt": prompts, "max_tokens": drawn, "logprobs": top, "echo": True, "temperature": 0, "n": 2}
    answer = running.post(**body, stream=stream)
    assert answer.status_code == 200, answer.text
    if stream:
        choices = {i: {"text": "", "logprobs": {}} for i in range(6)}
        for event in events(answer.text.splitlines()):
            (piece,) = event["choices"]
            choice = choices[piece["index"]]
            choice["text"] += piece["text"]
            for name, values in piece["logprobs"].items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + (values or [])
    else:
        choices = {choice["index"]: choice for choice in answer.json()["choices"]}
    for i, choice in choices.items():
        prompt = [*prompts[i // 2].encode()]
        tokens = prompt + running.alone(prompt, drawn) if drawn else prompt
        expected = chosen(scored(running.model, tokens), tokens)
        assert choice["text"] == text_of(tokens)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-6)
        for name in ("tokens", "text_offset", *(["top_logprobs"] if top else [])):
            assert len(choice["logprobs"][name]) == len(tokens)
        if top:
            # What evaluation harnesses compare to know whether a continuation is the most likely one.
            best = scored(running.model, tokens).max(-1).values.tolist()
            found = [max(one.values()) for one in choice["logprobs"]["top_logprobs"]]
            assert found == pytest.approx(best, abs=1e-6)


def test_an_echo_in_a_session_scores_its_own_prompt(running):
    session = running.client.post("/sessions", json={"prompt": "first "}).json()["id"]
    body = {"session": session, "prompt": "second", "max_tokens": 2, "echo": True, "logprobs": 0, "temperature": 0}
    choice = running.post(**body).json()["choices"][0]
    tokens = [*b"first second", *running.alone("first second", 2)]
    assert choice["text"] == text_of(tokens[6:])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        chosen(scored(running.model, tokens), tokens)[6:], abs=1e-6
    )
    answer = running.post(**body | {"max_tokens": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_a_model_without_text_scores_tokens():
    with Running(decoder(vocab=17).double(), codec=False) as running:
        choice = running.post(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
        assert choice["tokens"] == PROMPT
        assert choice["logprobs"]["tokens"] == list(map(str, PROMPT))
        expected = chosen(scored(running.model, PROMPT), PROMPT)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-6)
        # Without logprobs, an echo of no more tokens is the prompt.
        assert running.post(prompt=PROMPT, max_tokens=0, echo=True).json()["choices"][0]["tokens"] == PROMPT


def test_the_number_of_scores_in_an_answer_is_bounded(running):
    body = {"prompt": "x" * (MOST_SCORES // 4 + 1), "max_tokens": 1, "echo": True, "logprobs": 1, "n": 2}
    answer = running.post(**body)
    assert answer.status_code == 400
    assert f"the most are {MOST_SCORES}" in answer.json()["error"]["message"]


def test_an_error_while_a_prompt_is_scored_is_that_of_the_model(running, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(running.pool, "model", Failing(running.model))
        body = {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = running.post(**body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_error")
        lines = running.post(**body, stream=True).text.splitlines()
        assert json.loads(lines[0].removeprefix("data: "))["error"]["code"] == "model_error"
