"""Bugs that other servers had, slow and malicious clients, and clients that hang up, through a real socket.

Elsewhere: slots filled with NaN, greedy and seeded answers in a crowd (test_pool, test_server), hits of the prefix
cache in the metrics, status 429, the headers and log-probabilities of a stream (test_server).
"""

import asyncio
import contextlib
import gc
import itertools
import json
import random
import re
import socket
import threading
import time
import types

import httpx
import pytest
import torch
from pools import Failing, Wrapped, decoder
from servers import Running, Scripted, gated, scripted, text_of, until

from longspan import states
from longspan.serving import Pool, Sampling, pool, reader, reply, rows
from longspan.serving.guard import Access
from longspan.serving.requests import FIELDS, MOST_PROMPTS, MOST_STOP_CHARACTERS, RequestError, completion
from longspan.serving.server import Limits
from longspan.serving.text import Bytes

PATH = "/v1/completions"


def head(length, *lines, path=PATH, method="POST"):
    """The head of a request, as bytes."""
    start = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json", *lines]
    return "\r\n".join([*start, *([f"content-length: {length}"] if length is not None else []), "", ""]).encode()


def dial(running, data=b"", **options):
    found = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    for name, value in options.items():
        found.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    found.sendall(data)
    return found


def ask(running, **body):
    data = json.dumps(body).encode()
    return dial(running, head(len(data)) + data)


def rest(client):
    """Everything that the server sends until it closes the connection."""
    found = b""
    with client, contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 16):
            found += piece
    return found


def works(running):
    """Whether the server still serves others, with the right text."""
    answer = running.post(prompt="works", max_tokens=5, temperature=0)
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == text_of(running.alone("works", 5))


@pytest.fixture(scope="module")
def shared():
    with Running(pool={"prefix_bytes": 1 << 20}) as running:
        yield running


@pytest.fixture(scope="module")
def plain():
    """A server without a prefix cache."""
    with Running() as running:
        yield running


# Bugs of other servers.


@pytest.mark.parametrize("stream", [True, False])
def test_the_row_of_a_client_that_hangs_up_is_free_after_one_step(stream):
    with gated() as (running, gate):
        client = ask(running, prompt="a", max_tokens=4000, stream=stream, n=3)
        gate.step(5)
        assert running.pool.live == 3
        streams = list(running.pool.rows)
        client.close()
        until(lambda: all(one.cancelled for one in streams))  # without a step
        gate.step()
        assert running.pool.live == 0
        assert {one.finished for one in streams} == {"cancelled"}
        assert all(len(one.tokens) == 6 for one in streams)


def test_aborts_are_counted_once_and_only_for_clients_that_hang_up():
    with gated(pool={"slots": 2, "queue": 20}) as (running, gate):
        clients = [ask(running, prompt="a", max_tokens=4000, stream=i % 2 == 0) for i in range(2)]
        until(lambda: running.pool.waiting == 2)
        clients += [ask(running, prompt="b", max_tokens=4000, stream=i % 2 == 0, n=2) for i in range(3)]
        until(lambda: running.pool.waiting == 8)
        gate.step(3)
        for client in clients:
            client.close()
        until(lambda: running.server.worker.cancelled == 8)
        gate.release()
        until(lambda: running.pool.idle)
        for stream in (False, True):
            for more in ({}, {"stop": "\n"}, {"n": 2}):
                body = {"prompt": "c", "max_tokens": 60, "stream": stream} | more
                assert running.post(**body).status_code == 200
        full = running.post(prompt=["a"] * 13, n=2)
        assert full.status_code == 400
        until(lambda: running.pool.idle)
        assert running.metric("longspan_streams_cancelled") == 8


def test_characters_of_several_bytes_are_never_cut(plain):
    text = "河😀é-𝄞".encode()
    for cut in range(1, len(text) + 1):
        with scripted(plain, text) as running:
            pieces = running.pieces(max_tokens=cut)
            whole = running.post(max_tokens=cut).json()["choices"][0]["text"]
            expected = text[:cut].decode("utf-8", "replace")
            assert "".join(piece["text"] for piece in pieces) == whole == expected
            # Only the last piece may have what forms no character.
            assert all("\ufffd" not in piece["text"] for piece in pieces[:-1])


def test_stop_strings_are_cut_wherever_they_fall(plain):
    text = "one two 河 three"
    for begin, end in itertools.combinations(range(0, len(text) + 1, 3), 2):
        stop = text[begin:end]
        with scripted(plain, text.encode()) as running:
            body = {"max_tokens": len(text.encode()), "stop": ["never", stop]}
            pieces = running.pieces(**body)
            found = running.post(**body).json()["choices"][0]
            assert "".join(piece["text"] for piece in pieces) == found["text"] == text[: text.index(stop)]
            assert pieces[-1]["finish_reason"] == found["finish_reason"] == "stop"


def test_choices_do_not_wait_for_each_other_to_stop():
    with gated(pool={"slots": 4}) as (running, gate):
        running.pool.model = Scripted(running.model, b"a" * 52 + b"z" + b"a" * 50)
        client = ask(running, prompt=["", "p" * 50], max_tokens=4000, stop="z")
        until(lambda: running.pool.waiting == 2)
        gate.step()
        first, second = running.pool.rows
        gate.step()
        until(lambda: second.cancelled)
        gate.step()
        assert running.pool.rows == [first]
        client.close()


def test_a_comment_keeps_a_silent_stream_open(monkeypatch):
    monkeypatch.setattr(reply, "PING", 0.05)
    with gated() as (running, _):
        client = ask(running, prompt="a", max_tokens=3, stream=True)
        found = b""
        while found.count(b": ping\n\n") < 2:
            found += client.recv(4096)
        assert b"data" not in found.partition(b"\r\n\r\n")[2]
        client.close()


def test_an_error_of_one_stream_is_not_that_of_others(monkeypatch):
    def sample(scores, rows, positions):
        if any(row.seed == 666 and place >= 2 for row, place in zip(rows, positions.tolist(), strict=True)):
            raise ValueError("the seed of the beast")
        return real(scores, rows, positions)

    real = rows.sample
    monkeypatch.setattr(rows, "sample", sample)
    with gated() as (running, gate):
        expected = text_of(running.alone("good", 9))
        assert "\xff" not in expected
        with torch.no_grad():
            running.model.embedding.tokens.weight[255] = float("nan")
        good = ask(running, prompt="good", max_tokens=9, temperature=0)
        bad = [
            ask(running, prompt=[97, 255], max_tokens=5),
            ask(running, prompt=[97, 255], max_tokens=5, stream=True, logprobs=3),
            ask(running, prompt="a", max_tokens=5, seed=666),
            ask(running, prompt="a", max_tokens=5, seed=666, stream=True),
        ]
        until(lambda: running.pool.waiting == 5)
        gate.release()
        assert json.loads(body_of(good))["choices"][0]["text"] == expected
        for client, text in zip(bad, ("not numbers", "not numbers", "beast", "beast"), strict=True):
            answer = body_of(client)
            assert text in answer
            assert "NaN" not in answer
        assert running.post(prompt=[256], max_tokens=1).status_code == 400
        assert running.pool.idle
        assert httpx.get(f"{running.url}/readyz").status_code == 200


def body_of(client):
    """The body of one answer: of a known length, or of chunks."""
    found = b""
    while not (found.endswith(b"0\r\n\r\n") or _whole(found)):
        piece = client.recv(1 << 16)
        assert piece, found
        found += piece
    client.close()
    return found.partition(b"\r\n\r\n")[2].decode()


def _whole(answer):
    first, _, body = answer.partition(b"\r\n\r\n")
    lengths = [line for line in first.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(lengths) and len(body) == int(lengths[0].split(b":")[1])


class Choosy(Wrapped):
    """A model that rejects the token 1."""

    def __call__(self, tokens, *args, **options):
        if (tokens == 1).any():
            raise RuntimeError("a bad token")
        return super().__call__(tokens, *args, **options)


def test_prompts_that_the_model_rejects_do_not_fail_those_read_with_them():
    crowd = Pool(decoder(), slots=4)
    crowd.model = Choosy(crowd.model)
    (bad,) = crowd.submit([1], max_new_tokens=3)
    (good,) = crowd.submit([2], max_new_tokens=3, sampling=Sampling(temperature=0))
    crowd.run()
    assert (bad.finished, good.finished) == ("error", "length")
    assert "a bad token" in bad.error
    with pytest.raises(RuntimeError, match="ended after 0 tokens"):
        list(crowd.stream([1], max_new_tokens=3))


def test_waiting_prompts_outlive_a_failed_step():
    with gated(pool={"slots": 1}) as (running, gate):
        first = ask(running, prompt="a", max_tokens=9)
        until(lambda: running.pool.waiting == 1)
        second = ask(running, prompt="good", max_tokens=4, temperature=0)
        until(lambda: running.pool.waiting == 2)
        gate.step()
        running.pool.model = Failing(running.model)
        gate.step()
        running.pool.model = running.model
        gate.release()
        assert "RuntimeError: broken" in body_of(first)
        assert json.loads(body_of(second))["choices"][0]["text"] == text_of(running.alone("good", 4))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_streams_do_not_wait_for_a_thread_that_has_ended():
    with gated() as (running, gate):

        def ends():
            raise SystemExit

        clients = [ask(running, prompt="a", max_tokens=9, stream=stream) for stream in (True, False)]
        until(lambda: running.pool.waiting == 2)
        gate._step = ends
        gate.release()
        assert all("thread has ended" in body_of(client) for client in clients)
        assert httpx.get(f"{running.url}/readyz").status_code == 503
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert running.post(prompt="a").json()["error"]["code"] == "model_error"
        assert running.pool.idle


def test_states_of_waiting_prompts_are_made_when_they_are_read():
    crowd = Pool(decoder(attention="softmax"), slots=2, capacity=50)
    for _ in range(20):
        crowd.submit([1], max_new_tokens=3)
    assert all(job.state is None for job in crowd._reader.waiting)


def test_long_prompts_in_the_cache_take_no_more_memory_than_it_has():
    crowd = Pool(decoder(), slots=1, prefill=64, prefix_bytes=1 << 20)
    crowd.submit([1] * 5000, max_new_tokens=1)
    crowd.run()
    assert len(crowd.prefixes) > 20
    assert sum(len(node.tokens) for node in crowd.prefixes._kept) <= 5001  # each token once


# Clients that hang up.


def _disconnect(running, generator, i):
    """Send a request, and hang up at a random stage."""
    stage = ("head", "body", "queued", "mid", "end")[i % 5]
    body = {"prompt": "p" * generator.randrange(1, 400), "max_tokens": generator.randrange(1, 30)}
    body |= {"stream": generator.random() < 0.5, "n": generator.randrange(1, 4)}
    data = json.dumps(body).encode()
    whole = head(len(data)) + data
    if stage == "head":
        whole = whole[: generator.randrange(1, len(whole) - len(data))]
    elif stage == "body":
        whole = whole[: -generator.randrange(1, len(data))]
    client = dial(running, whole)
    if generator.random() < 0.5:  # a reset in place of an end
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if stage == "mid":
        client.recv(generator.randrange(1, 2000))
    elif stage == "end":
        client.settimeout(5)
        with contextlib.suppress(TimeoutError):
            client.recv(1 << 16)
            time.sleep(generator.random() * 0.01)
    client.close()


def _hang_up(running, count, seed):
    def run(k):
        generator = random.Random(4 * seed + k)
        for i in range(k, count, 4):
            _disconnect(running, generator, i)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running.settle()


def _leftovers(running):
    """Objects that a request needs and that should have gone with it."""
    gc.collect()
    return len(_objects(pool.Stream, reader.Prompt, reply.Reply, reply.Choice, asyncio.Queue, asyncio.Task))


def _objects(*kinds):
    return [one for one in gc.get_objects() if type(one) in kinds]


def test_disconnects_at_every_stage_leave_nothing(hang_ups=60):
    with Running(pool={"slots": 4, "queue": 8, "prefill": 64, "prefix_bytes": 1 << 18}) as running:
        before = _leftovers(running)
        _hang_up(running, hang_ups, seed=0)
        assert running.pool.live == running.pool.waiting == 0
        assert running.metric("longspan_live_streams") == running.metric("longspan_waiting_streams") == 0
        until(lambda: _leftovers(running) <= before + 2)
        assert works(running)


@pytest.mark.slow
def test_a_thousand_disconnects_leave_memory_flat():
    psutil = pytest.importorskip("psutil")
    with Running(pool={"slots": 4, "queue": 8, "prefill": 64, "prefix_bytes": 1 << 18}) as running:
        _hang_up(running, 300, seed=1)  # allocators and caches fill
        before, size = _leftovers(running), psutil.Process().memory_info().rss
        for seed in range(2, 6):
            _hang_up(running, 250, seed)
        assert running.pool.live == running.pool.waiting == 0
        until(lambda: _leftovers(running) <= before + 2)
        assert psutil.Process().memory_info().rss - size < 16 << 20
        assert works(running)


# Slow and malicious clients.


@pytest.fixture(scope="module")
def strict():
    """A server that is quick to drop clients."""
    with Running(limits=Limits(slow=0.4, body=1 << 16, connections=30, backlog=50)) as running:
        yield running


def drip(client, data, wait=0.05):
    """Send byte after byte until the server closes the connection -> what it sent."""
    found = b""
    client.settimeout(wait)
    with client, contextlib.suppress(ConnectionError):
        for i in range(len(data)):
            client.sendall(data[i : i + 1])
            with contextlib.suppress(TimeoutError):
                if not (piece := client.recv(4096)):
                    return found
                found += piece
        raise AssertionError("the server did not close the connection")
    return found


@pytest.mark.whole
@pytest.mark.parametrize("case", ["nothing", "head", "second head", "body"])
def test_slow_senders_are_dropped(strict, case):
    if case == "nothing":
        assert rest(dial(strict)) == b""
    elif case == "head":
        assert drip(dial(strict), head(5) * 9) == b""
    elif case == "second head":
        client = dial(strict, head(None, path="/healthz", method="GET"))
        until(lambda: b"ok" in client.recv(4096))
        assert drip(client, head(5) * 9) == b""
    else:
        answer = drip(dial(strict, head(1000)), b" " * 1000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 0.4 seconds" in answer
    assert works(strict)
    until(lambda: not strict.http.server_state.tasks)


def test_bodies_without_an_end_are_cut(strict):
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    for framing, piece in (("transfer-encoding: chunked", chunk), ("content-length: 999999999999", b" " * 4096)):
        client = dial(strict, head(None, framing))
        with client, contextlib.suppress(ConnectionError):
            for _ in range(2000):  # 8 MB, of which 128 kB are read
                client.sendall(piece)
            client.recv(1 << 16)
            raise AssertionError("the server read it all")
    assert works(strict)


def test_a_body_beyond_the_limit_is_answered(strict):
    answer = strict.send(b" " * 70000)
    assert answer.status_code == 413
    assert "65536 bytes" in answer.json()["error"]["message"]


def test_heads_without_an_end_are_refused(strict):
    client = dial(strict)
    with contextlib.suppress(ConnectionError):
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20000)))
    assert rest(client)[:12] in (b"HTTP/1.1 400", b"")
    assert rest(dial(strict, b"\x16\x03\x01 nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")
    assert works(strict)


def test_connections_are_limited():
    with gated(limits=Limits(slow=0.4, connections=30), pool={"queue": 30}) as (running, gate):
        # A connection stays while its request is not answered.
        clients = [ask(running, prompt="a", max_tokens=1) for _ in range(30)]
        until(lambda: running.pool.waiting == 30)
        assert len(running.http.server_state.connections) == 30
        answer = rest(dial(running, head(None, path="/healthz", method="GET")))
        assert answer.startswith(b"HTTP/1.1 503") or answer == b""
        if answer:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "busy"
        gate.release()
        # Each is answered, and then dropped without another byte.
        for client in clients:
            assert _whole(rest(client))
        assert works(running)


def test_a_reader_of_one_byte_at_a_time_has_bounded_memory():
    limits = Limits(slow=1, tokens=10**6, backlog=50)
    with gated(limits=limits, pool={"slots": 2}) as (running, gate):
        running.http.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        data = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": True, "logprobs": 20}).encode()
        client = dial(running, b"", SO_RCVBUF=4096)
        client.sendall(head(len(data)) + data)
        gate.step()
        (stream,) = running.pool.rows
        deepest = 0
        queues = _objects(asyncio.Queue)
        gate.release()

        def ended():
            nonlocal deepest
            with contextlib.suppress(OSError):
                client.recv(1)
            deepest = max(deepest, *(queue.qsize() for queue in queues))
            return stream.finished == "cancelled"

        until(ended)
        assert deepest <= limits.backlog + 1
        until(lambda: not running.http.server_state.connections)  # though the client is still there
        assert works(running)
        client.close()


def test_a_stream_that_was_cancelled_for_its_backlog_has_no_gap():
    """Its text is a beginning of what the model says, and its finish_reason says that it is cut."""
    with gated(limits=Limits(backlog=20)) as (running, gate):
        pieces = cut_for_backlog(running, gate, prompt="a")
        assert pieces[-1]["finish_reason"] == "cancelled"
        assert "".join(piece["text"] for piece in pieces) == text_of(running.alone("a", 20))


def test_a_turn_that_was_cancelled_for_its_backlog_leaves_its_session():
    with gated(limits=Limits(backlog=20)) as (running, gate):
        session = running.client.post("/sessions", json={}).json()["id"]
        assert cut_for_backlog(running, gate, prompt="a", session=session)[-1]["finish_reason"] == "cancelled"
        assert running.client.get(f"/sessions/{session}").json()["tokens"] == []
        body = {"session": session, "prompt": "a", "max_tokens": 4, "temperature": 0}
        assert running.client.post("/completions", json=body).json()["choices"][0]["text"] == text_of(
            running.alone("a", 4)
        )


@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_turn_that_cannot_be_saved_sends_its_text_and_one_error(monkeypatch, tmp_path, held):
    """Also the text that was held back, since a stop string might begin in it, and pieces that are sent together."""
    with gated(folder=tmp_path) as (running, gate):
        gate.open = True
        session = running.client.post("/sessions", json={"prompt": "full"}).json()["id"]
        text = text_of(running.alone("full", 31))  # the first step draws two
        stop = text[len(text) - held :] + "never" if held else "never"

        def refuse(*_):
            raise ValueError("the disk is full")

        gate.open = False
        monkeypatch.setattr(states, "save", refuse)
        found = drawn_at_once(running, gate, max_tokens=31, session=session, prompt="", stop=stop)
        *pieces, last = found
        assert last["error"]["code"] == "session_unwritable"
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
        assert {piece["choices"][0]["finish_reason"] for piece in pieces} == {None}
        assert running.client.get(f"/sessions/{session}").json()["text"] == "full"


def cut_for_backlog(running, gate, **body):
    """The pieces of a stream for which the model draws 30 tokens while the event loop stands still."""
    return [event["choices"][0] for event in drawn_at_once(running, gate, max_tokens=100, **body)]


def drawn_at_once(running, gate, **body):
    """The events of a stream for which the model draws 30 tokens while the event loop stands still."""
    client = ask(running, temperature=0, stream=True, **body)
    until(lambda: running.pool.waiting == 1)
    entered, leave = threading.Event(), threading.Event()

    async def hold():
        entered.set()
        leave.wait(30)

    held = asyncio.run_coroutine_threadsafe(hold(), _loop_of(running))
    entered.wait(30)
    gate.step(30)
    leave.set()
    held.result(30)
    gate.release()
    return [json.loads(line[6:]) for line in body_of(client).splitlines() if line.startswith("data: {")]


def _loop_of(running):
    """The server's event loop."""
    return running.http.servers[0].get_loop()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 4000 + b"}", 400, "max_tokens=1000"),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 9000 + b"}", 400, "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "NaN is not a number of JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature=inf"),
        (b'{"prompt": "a", "stream": 1.0}', 400, "stream=1.0"),
        (b'{"prompt": "a", "presence_penalty": false}', 400, "presence_penalty=False"),
        (b'{"prompt": "a", "stop": {}}', 400, "stop must be"),
        (b'{"prompt": "a", "stop": ["a", "b", "c", "d", "e", "f", "g", "h", "i"]}', 400, "stop must be"),
        (b'{"prompt": 3}', 400, "prompt must be"),
        (b'{"prompt": "\\ud800"}', 400, "not valid Unicode"),
        (b'{"prompt": "a", "logit_bias": {"3": 1}}', 400, "logit_bias"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"prompt": "a", "stop": "\\ud800"}', 400, "stop is not valid Unicode"),
        (b'{"prompt": "a", "stop": "' + b"s" * 60000 + b'"}', 400, "string of 60000 characters"),
        (b'{"prompt": "a", "stream_options": {"include_usage": 3}}', 400, "include_usage=3"),
        (b'{"prompt": "a", "user": [1]}', 400, "user=[1]"),
        (b'{"prompt": "a", "prompt": "b"}', 400, "'prompt' more than once"),
        (b'{"\\ud800": 1}', 400, "unknown field '\\ud800'"),
        (b'{"' + b"x" * 60000 + b'": 1}', 400, "unknown field 'xxx"),
        (b'{"logit_bias": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "logit_bias=[[["),
        (b'{"a":' * 9000, 400, "not valid JSON"),
        (b'{"prompt": "\xff"}', 400, "not valid UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), 400, "not valid UTF-8"),
        (b"\xef\xbb\xbf{}", 400, "not valid JSON"),
        (b'{"prompt": [' + b'"",' * 9000 + b'""]}', 400, "9001 prompts"),
        (b'{"prompt": [' + b'"",' * 16 + b'""]}', 400, "17 streams do not fit into 8 slots and a queue of 8"),
        (b'{"best_of": 2}', 400, "best_of=2"),
        (b'{"n": 2, "best_of": 1}', 400, "best_of=1 is not supported with n=2"),
        (b'{"best_of": true}', 400, "best_of=True"),
        (b'{"stream_options": {"include_obfuscation": true}}', 400, "include_obfuscation=True"),
        (b'{"stream_options": {"include_obfuscation": 0.0}}', 400, "include_obfuscation=0.0"),
        (b"", 400, "not valid JSON"),
    ],
    ids=lambda value: str(value[:30]) if isinstance(value, bytes) else None,
)
def test_malicious_bodies_are_refused(strict, body, status, message):
    answer = strict.send(body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    assert len(error["param"] or "") <= 100


def test_many_keys_are_refused_at_once(shared):
    """In time that does not grow with their square: there are 100,000 in 1 MiB."""
    keys = ",".join(f'"{i:x}":0' for i in range(100_000))
    answer = shared.send(f'{{{keys},"1869f":0}}'.encode())
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body has '1869f' more than once")
    assert shared.send(f"{{{keys}}}".encode()).status_code == 400


@pytest.mark.parametrize("stage", ["read", "echo"])
def test_long_prompts_are_read_beside_the_event_loop(monkeypatch, stage):
    """Their text becomes tokens, and tokens become text, while others are answered."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(Bytes):
        def encode(self, text):
            if stage == "read" and len(text) > 5000:
                entered.set()
                leave.wait(60)
            return super().encode(text)

        def decoder(self):
            if stage == "echo" and not entered.is_set() and threading.current_thread().name.startswith("longspan"):
                entered.set()
                leave.wait(60)
            return super().decoder()

    with Running(codec=Slow()) as running:
        client = ask(running, prompt="x" * 6000, max_tokens=1, echo=True)
        assert entered.wait(60)
        assert works(running)
        leave.set()
        assert json.loads(body_of(client))["choices"][0]["text"].startswith("x" * 6000)


def test_values_of_openai_that_change_nothing_are_accepted(shared):
    plain = shared.post(prompt="a", max_tokens=5, temperature=0, seed=1).json()["choices"]
    neutral = {"best_of": 1, "n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "suffix": None}
    neutral |= {"user": "me", "stop": None, "stream": None, "stream_options": {"include_obfuscation": False}}
    assert shared.post(prompt="a", max_tokens=5, temperature=-0.0, seed=1, **neutral).json()["choices"] == plain
    assert shared.post(prompt="a", max_tokens=5, n=2, best_of=2).status_code == 200


SMALLEST, EPSILON = 5e-324, 2.0**-53
EXTREMES = {
    "temperature": [0, -0.0, -SMALLEST, 1 - EPSILON, 1e6, 1e6 + 1e-9, 2**53, 10**400, 1e300],
    "top_p": [0, -0.0, SMALLEST, 1e-9, 1 - EPSILON, 1, 1 + 2 * EPSILON, 2**53, 10**400],
    "top_k": [0, -1, 1, 2**31, 2**31 + 1, 2**53, 2**63, 10**400, 1.0, -0.0],
    "seed": [0, -(2**63), 2**63 - 1, 2**63, 2**53 + 1, -(2**63) - 1, 10**400, 1.0, -0.0],
    "n": [0, -1, 1, 8, 2**53, 2**63, 10**400, 1.0],
    "max_tokens": [0, -1, 1, 2**31, 2**53, 2**63, 10**400, 1.0],
    "logprobs": [0, -1, 20, 21, 2**53, 2**63, 10**400, 1.0],
}


@pytest.mark.whole
@pytest.mark.parametrize("name", EXTREMES)
def test_numbers_at_their_extremes(shared, name):
    """Those within the bounds of the description draw what they say, others are refused by name."""
    schema = FIELDS[name]
    kinds = (int,) if "integer" in schema["type"] else (int, float)
    whole = shared.post(prompt="a", max_tokens=4, temperature=0).json()["choices"][0]["text"]
    for value in EXTREMES[name]:
        body = {"prompt": "a", "max_tokens": 4, "seed": 3} | {name: value}
        answer = shared.post(**body)
        most = Limits().tokens if name == "max_tokens" else schema["maximum"]
        least = 1 if name == "max_tokens" else schema["minimum"]
        if type(value) in kinds and least <= value <= most:
            assert answer.status_code == 200, (value, answer.text)
            assert shared.post(**body).json()["choices"] == answer.json()["choices"]
            # The most likely token alone is left.
            if (name, value) in (("temperature", 0), ("top_p", 1e-9), ("top_k", 1)):
                assert answer.json()["choices"][0]["text"] == whole
        else:
            assert answer.status_code == 400, value
            assert answer.json()["error"]["message"].startswith(f"{name}=")
            assert answer.json()["error"]["param"] == name


def test_tokens_at_their_extremes(shared):
    for token in (-1, 256, 2**31, 2**53, 2**63, -(2**63), 10**400, 1.0, True, None):
        answer = shared.post(prompt=[97, token])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"


def test_every_depth_of_a_body_is_refused(strict):
    """Where parsing just succeeds, the message about it does too."""
    for depth in range(900, 1000, 3):
        body = b'{"logit_bias": ' + b"[" * depth + b"]" * depth + b"}"
        answer = strict.send(body)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_other_types_of_content_are_refused(shared, kind):
    """A page of another origin may send these without asking."""
    answer = shared.send(b'{"prompt": "a"}', kind)
    assert answer.status_code == 415
    assert kind in answer.json()["error"]["message"]
    assert shared.send(b'{"max_tokens": 1}', "application/json; charset=utf-8").status_code == 200


def test_hosts_that_are_none_change_nothing(shared):
    for host in ("[", "x/y?z", "", "a" * 5000):
        for path, status in (("/nothing", b"404"), ("/healthz/", b"404"), ("/healthz", b"200")):
            request = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
            answer = rest(dial(shared, request))
            assert answer.split()[1] in (status, b"400"), (host, path)
            assert b"location:" not in answer


def test_methods_that_are_not_allowed_name_those_that_are(shared):
    answer = httpx.get(shared.url + PATH)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "not_found"


def test_pipelined_requests_are_answered_in_order(shared):
    bodies = [
        json.dumps({"prompt": f"{i}", "max_tokens": 3, "temperature": 0, "echo": True}).encode() for i in range(4)
    ]
    last = head(len(bodies[-1]), "connection: close") + bodies[-1]
    answer = rest(dial(shared, b"".join(head(len(body)) + body for body in bodies[:-1]) + last))
    texts = [json.loads(line)["choices"][0]["text"] for line in re.findall(rb'^{"id".*}', answer, re.MULTILINE)]
    assert texts == [f"{i}{text_of(shared.alone(str(i), 3))}" for i in range(4)]


def test_an_upgrade_to_websockets_is_answered_as_http(shared):
    request = head(None, "connection: upgrade", "upgrade: websocket", path="/healthz", method="GET")
    client = dial(shared, request)
    assert client.recv(4096).startswith(b"HTTP/1.1 200")
    client.close()


def test_offsets_of_tokens_are_places_in_the_text(shared):
    found = shared.post(prompt="a河b", max_tokens=3, temperature=0, echo=True, logprobs=0).json()["choices"][0]
    assert found["text"] == "a河b" + text_of(shared.alone("a河b", 3))
    # The character of three bytes appears with the last of them.
    assert found["logprobs"]["text_offset"][:6] == [0, 1, 1, 1, 2, 3]
    assert found["logprobs"]["tokens"][:2] == ["a", "bytes:\\xe6"]
    assert len(found["logprobs"]["tokens"]) == 8


def test_impossible_tokens_have_a_number(plain):
    with scripted(plain, b"ab") as running:
        found = running.post(max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [0.0, 0.0]
    assert min(found["top_logprobs"][0].values()) == -9999.0


def test_an_error_of_the_server_has_the_form_of_others(monkeypatch):
    def broken(*args, **options):
        raise KeyError("a bug")

    with Running() as running:
        monkeypatch.setattr("longspan.serving.server.completion", broken)
        answer = running.post(prompt="a")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "a bug" not in answer.text
        monkeypatch.setattr("longspan.serving.server.completion", completion)
        assert works(running)


# The description of the interface.


def test_the_description_has_the_bounds_that_are_checked(shared):
    document = httpx.get(f"{shared.url}/openapi.json").json()
    known = document["components"]["schemas"]["Completion"]["properties"]
    options = {"model": "tiny", "codec": Bytes(), "vocab": 256, "max_tokens": Limits().tokens}

    def accepts(**body):
        try:
            completion(body, **options)
        except RequestError:
            return False
        return True

    checked = 0
    for name, schema in known.items():
        if "minimum" in schema:
            step = 1 if "integer" in schema["type"] else 1e-10
            for bound, outside in ((schema["minimum"], -step), (schema["maximum"], max(step, 1e-6))):
                # No token may be drawn where the prompt is returned.
                assert accepts(**{name: bound, "echo": True})
                assert not accepts(**{name: bound + outside, "echo": True})
            checked += 1
        if "enum" in schema:
            assert all(accepts(**{name: value}) for value in schema["enum"])
            assert not accepts(**{name: "other"})
    assert checked == 7
    assert accepts(stop="s" * MOST_STOP_CHARACTERS)
    assert accepts(prompt=[""] * MOST_PROMPTS)
    assert not accepts(prompt=[""] * (MOST_PROMPTS + 1))
    unknown = shared.post(foo=1).json()["error"]["message"]
    assert unknown.endswith(", ".join(known))


def test_the_description_names_every_route():
    class Endpoint:
        def __init__(self):
            self.openapi = {"get": {"summary": "More.", "responses": {"200": {"description": "ok"}}}}

    with Running(access=Access(api_key="secret")) as running:
        key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{running.url}/openapi.json").status_code == 401
        document = httpx.get(f"{running.url}/openapi.json", headers=key).json()
        routes = {route.path for route in running.server.routes} - {"/v1/chat/completions", "/"}
        assert set(document["paths"]) == routes
        assert document["security"] == [{"key": []}]
        assert document["paths"]["/healthz"]["get"]["security"] == []
        more = Endpoint()
        running.server.routes.append(types.SimpleNamespace(path="/more", endpoint=more))
        document = httpx.get(f"{running.url}/openapi.json", headers=key).json()
        assert document["paths"]["/more"] == more.openapi


@pytest.mark.parametrize("text", [True, False])
def test_events_have_the_form_of_the_description(text):
    jsonschema = pytest.importorskip("jsonschema")
    with Running(decoder(vocab=256 if text else 17), codec=text) as running:
        document = httpx.get(f"{running.url}/openapi.json").json()
        name = "TextEvent" if text else "TokenEvent"
        schema = {**document, "$ref": f"#/components/schemas/{name}"}
        options = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
        for more in ({}, {"logprobs": 0}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}):
            lines = running.post(**options, **more).text.splitlines()
            found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert len(found) > 3
            for event in found:
                jsonschema.validate(event, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found[0], "choices": [{"index": -1}]}, schema)


def _conforms(running, examples):
    hypothesis = pytest.importorskip("hypothesis")
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    checks = schemathesis.checks.CHECKS
    chosen = [
        checks.get_one(name)
        for name in """not_a_server_error status_code_conformance content_type_conformance response_headers_conformance
        response_schema_conformance negative_data_rejection unsupported_method""".split()
    ]
    statuses = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            # Any bytes may be a file.
            checked = any(body.media_type == "application/json" for body in operation.body)
            if mode is schemathesis.GenerationMode.NEGATIVE and not checked:
                continue
            strategy = operation.as_strategy(generation_mode=mode)

            @hypothesis.settings(
                max_examples=examples,
                database=None,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=strategy)
            def check(case):
                answer = case.call(timeout=60)
                statuses.add(answer.status_code)
                case.validate_response(answer, checks=chosen)

            check()
    until(lambda: running.pool.idle)
    return statuses


@pytest.fixture(scope="module")
def described():
    with Running(limits=Limits(tokens=20), pool={"slots": 8, "queue": 200}) as running:
        yield running


def test_answers_have_the_form_of_the_description(described):
    assert {200, 400} <= _conforms(described, 6)
    assert works(described)


@pytest.mark.slow
def test_many_answers_have_the_form_of_the_description(described):
    assert {200, 400} <= _conforms(described, 60)
    with Running(decoder(vocab=17), codec=False, limits=Limits(tokens=20)) as running:
        assert {200, 400} <= _conforms(running, 20)
