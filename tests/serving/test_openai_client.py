"""The client of openai against a server: sessions, streams, errors, clients that leave, bugs of other servers."""

import asyncio
import contextlib
import random
import threading

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")

import pools  # noqa: E402
from pools import Failing  # noqa: E402
from servers import Gate, Running, gated, text_of, until  # noqa: E402

from longspan.serving import reply  # noqa: E402
from longspan.serving.reply import Reply  # noqa: E402

NONE = "sess-" + "0" * 32
GREEDY = {"model": "tiny", "temperature": 0}


def decoder():
    """In float64: the tokens of a row are those of any batch."""
    return pools.decoder().double()


@pytest.fixture(scope="module")
def running():
    with Running(decoder()) as found:
        yield found


@contextlib.contextmanager
def connected(running, **options):
    """A client that does not try again."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", **{"max_retries": 0} | options) as client:
        yield client


@pytest.fixture(scope="module")
def client(running):
    with connected(running) as found:
        yield found


@contextlib.asynccontextmanager
async def concurrent(running):
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def session_of(client, **body):
    return client.post("/sessions", cast_to=object, body=body)["id"]


def content(client, session):
    return client.get(f"/sessions/{session}", cast_to=object)["tokens"]


def text(stream):
    return "".join(event.choices[0].text for event in stream)


def complete(client, prompt, session=None, **options):
    """The choice of a completion, whole or put together from its stream."""
    extra = {} if session is None else {"extra_body": {"session": session}}
    found = client.completions.create(prompt=prompt, **GREEDY | options | extra)
    if not options.get("stream"):
        return found.choices[0]
    pieces = [event.choices[0] for event in found]
    whole = pieces[-1].model_copy(deep=True)
    whole.text = "".join(piece.text for piece in pieces)
    if whole.logprobs is not None:
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            values = [getattr(piece.logprobs, name) or [] for piece in pieces]
            setattr(whole.logprobs, name, [one for some in values for one in some])
    return whole


def same(found, expected):
    """Equal choices, but for the rounding of their log-probabilities."""
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    a, b = found.logprobs, expected.logprobs
    assert a.tokens == b.tokens
    assert a.token_logprobs == pytest.approx(b.token_logprobs, abs=1e-9)
    assert a.text_offset == b.text_offset
    for first, second in zip(a.top_logprobs, b.top_logprobs, strict=True):
        assert first == pytest.approx(second, abs=1e-9)


# Sessions.


@pytest.mark.whole
@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_a_session_are_one_long_completion(running, client, stream):
    whole = complete(client, "The", max_tokens=24, logprobs=2)
    session, tokens, values, tops = session_of(client, prompt="The"), [], [], []
    for n in (7, 1, 16):
        turn = complete(client, "", session, max_tokens=n, logprobs=2, stream=stream)
        tokens += turn.logprobs.tokens
        values += turn.logprobs.token_logprobs
        tops += turn.logprobs.top_logprobs
    assert tokens == whole.logprobs.tokens
    assert values == pytest.approx(whole.logprobs.token_logprobs, abs=1e-9)
    assert [sorted(top) for top in tops] == [sorted(top) for top in whole.logprobs.top_logprobs]
    assert content(client, session) == [*b"The", *running.alone("The", 24)]


def test_what_a_session_does_not_take_is_refused(client):
    session = session_of(client, prompt="a")
    for options, param, message in (
        ({"n": 2}, "session", "one prompt and n=1, not 1 and n=2"),
        ({"prompt": ["a", "b"]}, "session", "one prompt and n=1, not 2"),
        ({"best_of": 2}, "best_of", "best_of=2 is not supported"),
        ({"extra_body": {"session": session, "fork": True}}, "fork", "unknown field 'fork'"),
        ({"extra_body": {"session": "mine"}}, "session", "'mine' is not the ID"),
    ):
        given = {"prompt": "", "extra_body": {"session": session}} | GREEDY | options
        with pytest.raises(openai.BadRequestError, match=message) as error:
            client.completions.create(**given)
        assert error.value.param == param
        assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match=f"{NONE}' does not exist") as error:
        complete(client, "a", NONE)
    assert error.value.code == "session_not_found"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        complete(client, "a", NONE, stream=True)
    assert content(client, session) == list(b"a")


def test_a_session_of_a_model_of_flash_linear_attention():
    import adapted_models

    model = adapted_models.fla("gla")
    with Running(model, codec=False) as running, connected(running) as client:
        session = session_of(client, prompt=[5, 6])
        turns = [complete(client, [7], session, max_tokens=3).tokens, complete(client, [], session).tokens]
        expected = adapted_models.generated(model, [5, 6, 7], 3)
        assert turns == [expected, adapted_models.generated(model, [5, 6, 7, *expected], 16)]
        assert content(client, session) == [5, 6, 7, *turns[0], *turns[1]]


# Streams, and clients that leave them.


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_of_a_stream_are_those_of_the_whole(client, top):
    options = {"max_tokens": 12, "logprobs": top, "temperature": 1, "seed": 5}
    whole = complete(client, "河", **options)
    assert len(whole.logprobs.tokens) == 12
    whole.logprobs.top_logprobs = whole.logprobs.top_logprobs or []
    same(complete(client, "河", stream=True, **options), whole)


def test_a_stream_is_not_held_back_on_its_way(monkeypatch):
    """No proxy may keep or pack it, and comments are sent while no token is drawn."""
    pings, pieces = [], Reply._pieces_of_one

    async def counted(self, choice):
        async with contextlib.aclosing(pieces(self, choice)) as found:
            async for some in found:
                pings.extend([()] * (not some))
                yield some

    monkeypatch.setattr(reply, "PING", 0.02)
    monkeypatch.setattr(Reply, "_pieces_of_one", counted)
    with gated(model=decoder()) as (running, gate), connected(running) as client:
        raw = client.completions.with_raw_response.create(prompt="a", max_tokens=5, stream=True, **GREEDY)
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert (raw.headers["cache-control"], raw.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert "content-encoding" not in raw.headers
        until(lambda: len(pings) >= 2)
        gate.release()
        assert text(raw.parse()) == text_of(running.alone("a", 5))


def test_a_long_prompt_does_not_stop_a_stream():
    with gated(model=decoder(), pool={"prefill": 16}) as (running, gate), connected(running) as client:
        stream = client.completions.create(prompt="a", max_tokens=4000, stream=True, logprobs=0, **GREEDY)
        gate.step()
        assert [len(next(stream).choices[0].logprobs.tokens) for _ in range(2)] == [1, 1]
        long = client.completions.create(prompt="x" * 160, max_tokens=1, stream=True, **GREEDY)
        until(lambda: running.pool.waiting == 1)
        for _ in range(11):  # pieces of 161 tokens
            assert running.pool.waiting == 1
            gate.step()
            assert len(next(stream).choices[0].logprobs.tokens) == 1
        assert running.pool.waiting == 0
        stream.close()
        long.close()


# Errors.


def test_a_full_server_raises_a_rate_limit_error():
    with gated(pool={"slots": 1, "queue": 0}) as (running, gate), connected(running) as client:
        stream = client.completions.create(prompt="a", max_tokens=9, stream=True, **GREEDY)
        until(lambda: running.pool.waiting == 1)
        gate.step()
        for options in ({}, {"stream": True}):
            with pytest.raises(openai.RateLimitError, match="try again later") as error:
                complete(client, "b", **options)
            assert error.value.response.headers["retry-after"] == "1"
            assert error.value.code == "overloaded"
        gate.release()
        assert text(stream) == text_of(running.alone("a", 9))


@pytest.mark.full
def test_a_client_tries_again_after_a_rate_limit():
    with gated(pool={"slots": 1, "queue": 0}) as (running, gate), connected(running, max_retries=9) as client:
        stream = client.completions.create(prompt="a", max_tokens=4000, stream=True, **GREEDY)
        gate.step()
        found = []
        thread = threading.Thread(target=lambda: found.append(complete(client, "b", max_tokens=4).text))
        thread.start()
        # It does not answer before the first client has left.
        until(lambda: 'status="429"' in running.client.get(f"{running.url}/metrics").text)
        stream.close()
        gate.release()
        thread.join(60)
        assert found == [text_of(running.alone("b", 4))]


def test_a_second_turn_at_a_time_raises_a_conflict_error(running, client):
    session = session_of(client, prompt="busy")
    with Gate(running) as gate:
        stream = client.completions.create(
            prompt="", max_tokens=4, stream=True, extra_body={"session": session}, **GREEDY
        )
        gate.step()
        with pytest.raises(openai.ConflictError, match="a turn that is not finished") as error:
            complete(client, "", session)
        assert error.value.code == "session_busy"
        gate.release()
        assert text(stream) == text_of(running.alone("busy", 4))
    assert content(client, session) == [*b"busy", *running.alone("busy", 4)]


def test_an_error_of_the_model_leaves_the_session(running, client, monkeypatch):
    session = session_of(client, prompt="fail")
    with monkeypatch.context() as patch:
        patch.setattr(running.pool, "model", Failing(running.model))
        with pytest.raises(openai.InternalServerError, match="broken"):
            complete(client, "", session)
        with pytest.raises(openai.APIError, match="broken"):
            complete(client, "", session, stream=True)
    assert content(client, session) == list(b"fail")
    assert complete(client, "", session, max_tokens=5).text == text_of(running.alone("fail", 5))


# What a request draws.


def test_an_answer_does_not_depend_on_the_crowd_or_the_order(running):
    options = [{}, {"temperature": 1, "seed": 7}, {"temperature": 0.7, "top_p": 0.9, "seed": -3}]
    bodies = [GREEDY | {"prompt": f"{i % 4}" * (1 + i), "max_tokens": 6} | options[i % 3] for i in range(12)]

    async def ask(order):
        async with concurrent(running) as client:

            async def one(i):
                found = await client.completions.create(**bodies[i], stream=i % 2 == 0)
                return "".join([e.choices[0].text async for e in found]) if i % 2 == 0 else found.choices[0].text

            return dict(zip(order, await asyncio.gather(*map(one, order)), strict=True))

    with connected(running) as client:
        alone = [client.completions.create(**body).choices[0].text for body in bodies]
    assert alone[0] == text_of(running.alone("0", 6))
    for seed in range(3):
        order = random.Random(seed).sample(range(12), 12)
        assert list(map(asyncio.run(ask(order)).get, range(12))) == alone


def test_known_beginnings_change_no_answer_and_are_reported():
    prompt = "the beginning"
    with Running(pool={"prefill": 4, "prefix_bytes": 1 << 24}) as running, connected(running) as client:

        def ask(given, n=5):
            found = client.completions.create(prompt=given, max_tokens=n, **GREEDY)
            assert found.choices[0].text == text_of(running.alone(given, n))
            return found.usage.prompt_tokens_details.cached_tokens

        assert ask(prompt) == 0
        # States are kept after the start token and 3, 7, 11 or all 13 of the prompt.
        assert [ask(prompt[:k] + "~") for k in (2, 3, 6, 7, 11, 12)] == [0, 3, 3, 7, 11, 11]
        # Answers and prompts that continue a known state leave it as it was.
        assert [ask(prompt, n) for n in (5, 200, 5)] == [13, 13, 13]
        assert [ask(prompt + more) for more in (" of a text", " of", "", " of a text")] == [13, 13, 13, 23]
        assert [ask(prompt[:k] + "?????") for k in (11, 7, 3)] == [11, 7, 3]
