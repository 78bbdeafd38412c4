"""The server through a real socket: completions, streams, limits, clients that hang up."""

import json
import os
import random
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from pools import decoder
from servers import Running, events, gated, text_of, until

from longspan.cli import main
from longspan.serving.server import Limits
from longspan.serving.text import Stops


@pytest.fixture(scope="module")
def running():
    with Running() as found:
        yield found


def test_greedy_completions_are_those_of_the_model(running):
    found = running.post(prompt="hello", max_tokens=12, temperature=0).json()
    (choice,) = found["choices"]
    assert choice["text"] == text_of(running.alone("hello", 12))
    assert choice["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == 5
    assert found["usage"]["completion_tokens"] == 12
    assert found["object"] == "text_completion"


@pytest.mark.parametrize("top", [0, 3])
def test_a_stream_has_the_text_and_logprobs_of_the_whole_answer(running, top):
    options = {"prompt": "河", "max_tokens": 12, "logprobs": top, "seed": 5}
    whole = running.post(**options).json()["choices"][0]
    with httpx.stream("POST", f"{running.url}/v1/completions", json=options | {"stream": True}, timeout=60) as answer:
        # No proxy may keep or pack it.
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert "content-encoding" not in answer.headers
        pieces = [event["choices"][0] for event in events(answer.iter_lines())]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]
    for name, values in whole["logprobs"].items():
        found = [value for piece in pieces for value in piece["logprobs"][name] or []]
        assert found == [pytest.approx(value) for value in values or []]


def test_a_full_server_says_when_to_try_again():
    with gated(pool={"slots": 1, "queue": 0}) as (running, gate):
        body = {"prompt": "a", "max_tokens": 9, "temperature": 0, "stream": True}
        with running.client.stream("POST", "/completions", json=body) as first:
            gate.step()
            for stream in (False, True):
                answer = running.post(**body | {"stream": stream})
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
                assert answer.json()["error"]["code"] == "overloaded"
            gate.release()
            text = "".join(event["choices"][0]["text"] for event in events(first.iter_lines()))
        assert text == text_of(running.alone("a", 9))


def test_the_client_of_openai_understands_the_answers(running):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    found = client.completions.create(model="tiny", prompt="ab", max_tokens=6, n=2, seed=1, logprobs=3)
    assert len(found.choices) == 2
    assert found.choices[0].text != found.choices[1].text
    logprobs = found.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    assert all(
        len(top) == 3 and max(top.values()) >= value
        for top, value in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    events = list(
        client.completions.create(
            model="tiny", prompt="ab", max_tokens=6, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )
    assert events[-1].usage.completion_tokens == 6
    assert "".join(event.choices[0].text for event in events[:-1]) == found.choices[0].text
    with pytest.raises(openai.BadRequestError, match="max_tokens=0"):
        client.completions.create(model="tiny", prompt="ab", max_tokens=0)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="ab")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])


def test_stop_strings_do_not_depend_on_the_pieces():
    """The first string that is whole ends the text; of those that end there, the longest."""
    draw = random.Random(0)

    def some(most):
        return "".join(draw.choices("ab", k=draw.randrange(1, most)))

    for _ in range(2000):
        strings, text = [some(7) for _ in range(draw.randrange(1, 5))], some(30)
        ends = [(end, -len(one)) for one in strings for end in range(len(text) + 1) if text[:end].endswith(one)]
        expected = text[: sum(min(ends))] if ends else text
        stops, found = Stops(strings), []
        while text:
            size = draw.randrange(1, 6)
            found.append(stops.add(text[:size]))
            text = text[size:]
        assert "".join(found) + stops.end() == expected
        assert stops.stopped == bool(ends)


def test_known_beginnings_are_counted():
    with Running(pool={"prefix_bytes": 1 << 20}) as running:
        answers = [running.post(prompt="the beginning", max_tokens=5, temperature=0).json() for _ in range(3)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert running.metric("longspan_prefix_hits") == 2
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 13, 13]


def test_drafts_change_no_text_and_are_reported():
    with Running() as running:
        body = {"prompt": "abcabc" * 4, "max_tokens": 40, "temperature": 0, "logprobs": 1}
        plain, drafted = (running.post(**body, draft=draft).json() for draft in ("none", "prompt-lookup"))
        assert drafted["choices"] == plain["choices"]
        usage = drafted["usage"]
        details = usage["completion_tokens_details"]
        assert plain["usage"]["draft_tokens"] == plain["usage"]["accepted_draft_tokens"] == 0
        assert usage["draft_tokens"] >= usage["accepted_draft_tokens"] == details["accepted_prediction_tokens"]
        assert usage["draft_tokens"] == sum(details.values()) > 0
        assert usage["completion_tokens"] == 40
        error = running.post(**body, draft="x").json()["error"]
        assert (error["param"], "draft='x' must be 'none' or 'prompt-lookup'" in error["message"]) == ("draft", True)
        running.pool.draft_tokens = 0
        error = running.post(**body, draft="prompt-lookup").json()["error"]
        assert (error["param"], "draft_tokens=0" in error["message"]) == ("draft", True)


def test_a_client_that_reads_nothing_is_dropped():
    with Running(limits=Limits(slow=0.5, tokens=100000, backlog=100000)) as running:
        body = json.dumps({"prompt": "a", "max_tokens": 100000, "stream": True, "n": 8, "logprobs": 20}).encode()
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: running.pool.tokens_drawn)
            until(lambda: running.pool.idle)


def test_a_model_without_text_takes_and_gives_tokens():
    with Running(decoder(vocab=17), codec=False) as running:
        found = running.post(prompt=[1, 2, 3], max_tokens=4, temperature=0).json()["choices"][0]
        assert found["tokens"] == running.alone([1, 2, 3], 4)
        assert "no text" in running.post(prompt="abc").json()["error"]["message"]
        echoed = running.post(prompt=[1, 2, 3], max_tokens=4, temperature=0, echo=True).json()["choices"][0]
        assert echoed["tokens"] == [1, 2, 3, *found["tokens"]]


@pytest.mark.full
def test_the_command_serves_and_ends_on_sigterm():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "longspan", "serve", "text", "--port", "0", "--slots", "4"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = server.stdout.readline()
        assert "4 slots of 175,112 bytes" in line
        url = line.split(" at ")[1].split(",")[0]
        with httpx.stream(
            "POST", f"{url}/completions", json={"prompt": "a", "max_tokens": 60, "stream": True}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2:][0] == "data: [DONE]"
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()


def test_the_command_refuses_what_is_no_decoder(capsys):
    assert main(["serve", "digits-speech", "--port", "0"]) == 2
    assert "digits-speech" in capsys.readouterr().err
