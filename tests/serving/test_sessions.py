"""Sessions over HTTP: turns continue one text, forks part, and what does not finish changes nothing."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading

import httpx
import pools
import pytest
import servers
import torch
from pools import Failing
from servers import Gate, events, text_of, until
from torch.utils import _pytree as pytree

import longspan
from longspan import states
from longspan._utils import atomic_io
from longspan.serving import Pool, Session, SessionError, Sessions, sessions
from longspan.serving.server import Limits
from longspan.serving.sessions import continued, model_digest
from longspan.serving.text import Bytes
from longspan.serving.turns import cut

NONE = "sess-" + "0" * 32
LONG = 1_000_000  # tokens, more than a test draws


def decoder(*args, **options):
    """In float64: turns then draw exactly what one completion does."""
    return pools.decoder(*args, **options).double()


class Running(servers.Running):
    """A server with sessions, whose streams of ``LONG`` tokens end with their clients only."""

    def __init__(self, model=None, **options):
        options = {"limits": Limits(tokens=LONG)} | options
        super().__init__(decoder() if model is None else model, **options)

    def create(self, **body):
        answer = self.client.post("/sessions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def turn(self, session, prompt="", max_tokens=8, **options):
        body = {"session": session, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | options
        answer = self.client.post("/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def show(self, session):
        return self.client.get(f"/sessions/{session}").json()

    def tokens(self, session):
        return self.show(session)["tokens"]

    def streamed(self, **body):
        """A turn that draws until its client leaves."""
        body = {"max_tokens": LONG, "temperature": 0, "stream": True} | body
        return self.client.stream("POST", "/completions", json=body)


@pytest.fixture(scope="module")
def running():
    with Running() as found:
        yield found


@pytest.fixture(scope="module", params=["memory", "folder"])
def kept(request, tmp_path_factory):
    """A server for each place of sessions."""
    with Running(folder=tmp_path_factory.mktemp("kept") if request.param == "folder" else None) as found:
        yield found


@pytest.mark.parametrize(
    ("attention", "place"),
    [("gated_deltanet", "folder"), ("softmax", "memory"), ("mamba", "memory"), ("gla; local(window=3)", "folder")],
)
def test_turns_continue_one_text(attention, place, tmp_path):
    folder = tmp_path if place == "folder" else None
    with Running(decoder(attention), folder=folder, pool={"capacity": 64, "prefill": 3}) as running:
        session, whole = running.create(prompt="hello"), list(b"hello")
        assert running.tokens(session) == whole
        for prompt, n in (("", 5), ("more", 1), ("", 1), ("x", 6)):
            drawn = running.alone([*whole, *prompt.encode()], n)
            assert running.turn(session, prompt, n) == text_of(drawn)
            whole += [*prompt.encode(), *drawn]
            found = running.show(session)
            assert found["tokens"] == whole
            assert found["text"] == text_of(whole)
            assert found["length"] == len(whole)
        assert running.store.read(session).pending == 1
        check_state(running, session)


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    """A server that keeps states of what its sessions have read and drawn."""
    options = {"prefill": 8, "prefix_bytes": 1 << 24, "checkpoint_every": 8, "capacity": 200}
    with Running(decoder("gated_deltanet; softmax"), pool=options, folder=tmp_path_factory.mktemp("at")) as found:
        yield found


def change(running, session, what, **body):
    """Rewind or edit a session -> the tokens that were read for it."""
    before = running.pool.tokens_read
    answer = running.client.post(f"/sessions/{session}/{what}", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["length"] == len(running.tokens(session))
    return running.pool.tokens_read - before


def check_state(running, session):
    """A session's state is that of its tokens, and of no others."""
    kept = running.store.read(session)
    _, expected = running.model(torch.tensor([[256, *kept.tokens[:-1]]]), running.model.init_state(1))
    for a, b in zip(pytree.tree_leaves(kept.state), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


LETTERS = "abcdefghijklmnopqrstuvwxyz" * 2


@pytest.mark.parametrize("cached", [True, False])
def test_a_session_is_rewound_to_any_token(cached, request):
    running = request.getfixturevalue("checkpointed" if cached else "running")
    session = running.create(prompt=LETTERS)
    running.turn(session, "", 30)
    whole = running.tokens(session)
    for body, length in (({"tokens": 0}, 82), ({"tokens": 7}, 75), ({"to": 41}, 41), ({"to": 1}, 1), ({"to": 0}, 0)):
        read = change(running, session, "rewind", **body)
        assert read < 8 or not cached
        assert running.tokens(session) == whole[:length]
        if length > 1:
            check_state(running, session)
        # The next turn draws as if the rest had never been read.
        fork = running.create(fork_from=session)
        assert running.turn(fork, "", 3) == text_of(running.alone(whole[:length], 3))
    assert running.turn(session, "new") == text_of(running.alone(b"new", 8))


def test_a_session_is_forked_at_any_token(checkpointed):
    session = checkpointed.create(prompt=LETTERS)
    before = checkpointed.pool.tokens_read
    fork = checkpointed.create(fork_from=session, to=30, prompt="!?")
    assert checkpointed.pool.tokens_read - before <= 8 + 2
    assert checkpointed.tokens(fork) == [*LETTERS[:30].encode(), *b"!?"]
    assert checkpointed.turn(fork, "", 3) == text_of(checkpointed.alone(LETTERS[:30] + "!?", 3))
    assert checkpointed.tokens(session) == list(LETTERS.encode())


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_session_is_edited_from_where_its_texts_part(checkpointed, as_tokens):
    session = checkpointed.create(prompt="é" + LETTERS)
    for place, word in ((44, "Q"), (20, "ü"), (0, "ê"), (53, " and more")):
        edited = ("é" + LETTERS)[:place] + word + ("é" + LETTERS)[place + 1 :]
        parting = len(("é" + LETTERS)[:place].encode())
        read = change(checkpointed, session, "edit", prompt=list(edited.encode()) if as_tokens else edited)
        assert read <= len(edited.encode()) - parting + 8
        assert checkpointed.tokens(session) == list(edited.encode())
        check_state(checkpointed, session)
        change(checkpointed, session, "edit", prompt="é" + LETTERS)


def test_the_oldest_tokens_are_dropped_after_those_that_stay(checkpointed):
    session, system = checkpointed.create(prompt="You are a parrot. "), len("You are a parrot. ")
    for _ in range(3):
        checkpointed.turn(session, "Say: hello! ", 20)
    whole = checkpointed.tokens(session)
    read = change(checkpointed, session, "edit", keep=system, drop=32)
    rest = [*whole[:system], *whole[system + 32 :]]
    assert checkpointed.tokens(session) == rest
    assert read <= len(rest) - system + 8
    check_state(checkpointed, session)
    assert checkpointed.turn(session, "", 3) == text_of(checkpointed.alone(rest, 3))


def test_the_answer_to_an_impossible_change_names_the_number(checkpointed):
    session = checkpointed.create(prompt="abc")
    for what, body, message in (
        ("rewind", {"tokens": 4}, "tokens=4 is more than the 3 tokens"),
        ("rewind", {"to": 4}, "to=4 is more than the 3 tokens"),
        ("edit", {"keep": 2, "drop": 2}, "drop=2 is more than the 1 tokens"),
        ("edit", {"keep": 9, "drop": 1}, "drop=1 is more than the 0 tokens"),
    ):
        answer = checkpointed.client.post(f"/sessions/{session}/{what}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, message.split("=")[0])
        assert message in answer.json()["error"]["message"]
    assert checkpointed.client.post("/sessions", json={"fork_from": session, "to": 4}).status_code == 400
    assert checkpointed.tokens(session) == list(b"abc")


def test_forks_part(kept):
    first = kept.create(prompt="once upon")
    kept.turn(first, " a", 4)
    before = kept.tokens(first)
    same, other = kept.create(fork_from=first), kept.create(fork_from=first, prompt=", but")
    assert kept.show(same)["fork_from"] == first
    kept.turn(first, "!!!", 6)
    assert kept.tokens(same) == before
    assert kept.tokens(other) == before + list(b", but")
    for session in (same, other):
        whole = kept.tokens(session)
        assert kept.turn(session, "", 6) == text_of(kept.alone(whole, 6))
    assert kept.client.delete(f"/sessions/{first}").json() == {
        "id": first,
        "object": "session.deleted",
        "deleted": True,
    }
    assert kept.client.get(f"/sessions/{first}").status_code == 404
    assert kept.tokens(same)[: len(before)] == before
    listed = [one["id"] for one in kept.client.get("/sessions").json()["data"]]
    assert {same, other} <= set(listed)
    assert first not in listed


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_session_too(kept, stream):
    session, whole = kept.create(prompt="stop"), list(b"stop")
    for prompt in ("", "again", "and again"):
        drawn = kept.alone([*whole, *prompt.encode()], 30)
        text = text_of(drawn)
        stop = text[9:12]
        expected = text[: text.index(stop)]
        body = {"session": session, "prompt": prompt, "max_tokens": 30, "temperature": 0, "stop": stop}
        if stream:
            with kept.client.stream("POST", "/completions", json=body | {"stream": True}) as answer:
                found = "".join(event["choices"][0]["text"] for event in events(answer.iter_lines()))
        else:
            found = kept.turn(**body)
        assert found == expected
        whole += list(prompt.encode())
        while text_of(drawn) != expected:
            drawn.pop()
        whole += drawn
        assert kept.tokens(session) == whole
        # Each turn leaves no more pending than it has added.
        assert kept.store.read(session).pending <= 1 + len(prompt) + len(drawn) + 4 * (prompt == "")
    assert kept.turn(session, "", 5) == text_of(kept.alone(whole, 5))
    assert kept.store.read(session).pending == 1


def test_a_stop_at_the_first_token_leaves_the_prompt(kept):
    session = kept.create()
    stop = text_of(kept.alone(b"ab", 4))[:1]
    assert kept.turn(session, "ab", stop=stop) == ""
    assert kept.tokens(session) == list(b"ab")
    assert kept.turn(session, "") == text_of(kept.alone(b"ab", 8))
    empty = kept.create()
    assert kept.turn(empty, "", stop=text_of(kept.alone([], 4))[:1]) == ""
    assert kept.tokens(empty) == []
    assert kept.turn(empty) == text_of(kept.alone([], 8))


def test_a_stop_string_that_ends_with_the_last_token_cuts_the_session_too(kept):
    whole = kept.alone(b"last", 12)
    for n in range(1, 12):
        text = text_of(whole[:n])
        session = kept.create(prompt="last")
        assert kept.turn(session, "", n, stop=text[-1]) == text[: text.index(text[-1])]
        check_cut(kept, session, b"last", text[: text.index(text[-1])])


def test_an_unfinished_character_may_be_the_stop_string(kept):
    # Its replacement character is known after the last token, when the state has read too far.
    prompt = next(bytes([i]) for i in range(128) if 0xC2 <= kept.alone([i], 1)[0] <= 0xF4)
    session = kept.create(prompt=prompt.decode())
    assert kept.turn(session, "", 1, stop="\ufffd") == ""
    check_cut(kept, session, prompt, "")


def check_cut(kept, session, prompt, text):
    found = kept.store.read(session)
    assert text_of(found.tokens) == prompt.decode() + text
    assert int(found.state.position) == 1 + len(found.tokens) - found.pending
    assert kept.turn(session, "", 3) == text_of(kept.alone(found.tokens, 3))


def test_a_cut_text_has_its_tokens_for_all_bytes():
    generator = random.Random(0)
    parts = [bytes([i]) for i in range(256)] + ["河".encode(), "😀".encode(), b"\xf0\x9f\x98", b"\xe0\x80", b"abc"]
    for _ in range(300):
        tokens = list(b"".join(generator.choices(parts, k=generator.randrange(8))))
        text = text_of(tokens)
        for end in range(len(text) + 1):
            found = cut(Bytes(), tokens, text[:end])
            assert found == tokens[: len(found)]
            assert text_of(found) == text[:end]


class Pairs:
    """A codec whose tokens are two letters, or one of a rest."""

    def encode_more(self, text):
        return [text[i : i + 2] for i in range(0, len(text), 2)]

    def decoder(self):
        return self

    def add(self, token):
        return token

    def end(self):
        return ""


def test_a_cut_inside_a_token_encodes_the_rest():
    assert cut(Pairs(), ["ab", "cd", "ef"], "abc") == ["ab", "c"]
    assert cut(Pairs(), ["ab", "cd", "ef"], "abcd") == ["ab", "cd"]
    assert cut(Pairs(), ["ab"], "") == []


def test_a_client_that_hangs_up_rolls_the_session_back(kept):
    session = kept.create(prompt="roll")
    kept.turn(session, "", 3)
    before = kept.tokens(session)
    state = states.clone(kept.store.read(session).state)
    for stop in (None, ["never there"]):
        with kept.streamed(session=session, prompt=" on", stop=stop) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert kept.tokens(session) == before
        until(lambda: kept.pool.idle)
        assert kept.tokens(session) == before
    after = kept.store.read(session).state
    assert all(torch.equal(a, b) for a, b in zip(*map(pytree.tree_leaves, (state, after)), strict=True))
    assert kept.turn(session) == text_of(kept.alone(before, 8))


def test_a_turn_at_a_time(kept):
    session = kept.create(prompt="busy")
    with Gate(kept) as gate, kept.streamed(session=session) as answer:
        gate.step()
        lines = answer.iter_lines()
        next(lines)
        with httpx.Client(timeout=60, base_url=f"{kept.url}/v1") as other:
            refused = other.post("/completions", json={"session": session})
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "session_busy"
            assert other.delete(f"/sessions/{session}").status_code == 409
            assert other.post(f"/sessions/{session}/rewind", json={"tokens": 1}).status_code == 409
            fork = other.post("/sessions", json={"fork_from": session}).json()["id"]
            assert other.get(f"/sessions/{fork}").json()["tokens"] == list(b"busy")
    until(lambda: kept.pool.idle)
    until(lambda: kept.client.post("/completions", json={"session": session, "max_tokens": 1}).status_code == 200)


def test_many_turns_at_once_leave_whole_sessions(kept):
    names = [kept.create(prompt=f"{i}") for i in range(3)]
    counts = dict.fromkeys(names, 0)

    def work(seed):
        generator = random.Random(seed)
        with httpx.Client(timeout=60, base_url=f"{kept.url}/v1") as client:
            for _ in range(8):
                session, hang_up = generator.choice(names), generator.random() < 0.4
                body = {"session": session, "max_tokens": LONG if hang_up else 3, "temperature": 0, "stream": hang_up}
                if hang_up:
                    with client.stream("POST", "/completions", json=body) as answer:
                        next(answer.iter_lines())
                elif client.post("/completions", json=body).status_code == 200:
                    counts[session] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: kept.pool.idle)
    assert sum(counts.values()) > 0
    for i, session in enumerate(names):
        n = 3 * counts[session]
        assert kept.tokens(session) == [*f"{i}".encode(), *(kept.alone(f"{i}".encode(), n) if n else [])]


def test_an_error_rolls_the_session_back(monkeypatch, tmp_path):
    with Running(folder=tmp_path) as running:
        session = running.create(prompt="fail")
        before = running.tokens(session)
        works = running.pool.model
        running.pool.model = Failing(works)
        answer = running.client.post("/completions", json={"session": session})
        assert answer.status_code == 500
        assert "broken" in answer.json()["error"]["message"]
        assert running.client.post("/sessions", json={"prompt": "abc"}).status_code == 500
        assert running.client.post(f"/sessions/{session}/rewind", json={"tokens": 1}).status_code == 500
        running.pool.model = works
        assert running.tokens(session) == before
        assert len(running.store) == 1

        def refuse(*_):
            raise ValueError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(states, "save", refuse)
            answer = running.client.post("/completions", json={"session": session})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "session_unwritable"
            with running.streamed(session=session, max_tokens=3) as answer:
                events = [line for line in answer.iter_lines() if line.startswith("data: ")]
            assert "the disk is full" in "".join(events)
            assert '"finish_reason": "length"' not in "".join(events)
        assert running.tokens(session) == before
        assert running.turn(session) == text_of(running.alone(before, 8))


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/sessions", {"foo": 1}, 400, "unknown field 'foo'"),
        ("/sessions", {"prompt": ["a", "b"]}, 400, "one prompt, not 2"),
        ("/sessions", {"prompt": [256]}, 400, "token 256"),
        ("/sessions", {"model": "other"}, 404, "not served here"),
        ("/sessions", {"fork_from": "../secret"}, 400, "not the ID of a session"),
        ("/sessions", {"fork_from": NONE}, 404, f"session '{NONE}' does not exist"),
        ("/sessions", [], 400, "must be a JSON object"),
        ("/sessions", {"to": 3}, 400, "to=3 requires fork_from"),
        (f"/sessions/{NONE}/rewind", {"tokens": 1}, 404, f"session '{NONE}' does not exist"),
        (f"/sessions/{NONE}/rewind", {}, 400, "either tokens, the number to undo, or to"),
        (f"/sessions/{NONE}/rewind", {"tokens": 1, "to": 1}, 400, "either tokens"),
        (f"/sessions/{NONE}/rewind", {"to": -1}, 400, "to=-1 must be an integer from 0"),
        (f"/sessions/{NONE}/rewind", {"tokens": 1.5}, 400, "tokens=1.5 must be an integer"),
        ("/sessions/x/rewind", {"tokens": 1}, 400, "'x' is not the ID"),
        (f"/sessions/{NONE}/edit", {}, 400, "either prompt, the new text, or drop"),
        (f"/sessions/{NONE}/edit", {"prompt": "", "drop": 1}, 400, "either prompt"),
        (f"/sessions/{NONE}/edit", {"keep": 1}, 400, "either prompt"),
        (f"/sessions/{NONE}/edit", {"prompt": ["a", "b"]}, 400, "one prompt, not 2"),
        (f"/sessions/{NONE}/edit", {"prompt": []}, 404, "does not exist"),
        (f"/sessions/{NONE}/edit", {"drop": 0}, 400, "drop=0 must be an integer from 1"),
        ("/completions", {"session": 3}, 400, "3 is not the ID"),
        ("/completions", {"session": ""}, 400, "'' is not the ID"),
        ("/completions", {"session": NONE + "\n"}, 400, "is not the ID"),
        ("/completions", {"session": NONE}, 404, f"session '{NONE}' does not exist"),
        ("/completions", {"session": NONE, "stream": True}, 404, f"session '{NONE}' does not exist"),
        ("/completions", {"session": NONE, "n": 2}, 400, "n=2"),
        ("/completions", {"session": NONE, "prompt": ["a", "b"]}, 400, "one prompt and n=1, not 2"),
    ],
)
def test_bad_bodies_are_refused(running, path, body, status, message):
    answer = running.client.post(path, json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fx", "x" * 500, NONE[:-1], NONE.upper(), "%00", "sess-" + "g" * 32])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_id_leads_out_of_the_folder(running, method, name):
    answer = running.client.request(method, f"/sessions/{name}")
    assert answer.status_code in (400, 404, 405)
    assert "error" in answer.json()
    assert running.client.request(method, f"/sessions/{NONE}").status_code == 404


def test_sessions_beyond_the_limit_are_refused_and_none_is_dropped(tmp_path):
    for folder in (None, tmp_path):
        with Running(limit=30_000, folder=folder) as running:
            made = []
            for _ in range(10):
                if (answer := running.client.post("/sessions", json={"prompt": "a" * 20})).status_code != 200:
                    break
                made.append(answer.json())
            assert answer.status_code == 507
            assert "delete some sessions" in answer.json()["error"]["message"]
            assert 1 < len(made) < 8
            assert sum(one["bytes"] for one in made) == running.store.nbytes <= 30_000
            assert running.store._reserved == 0
            first = made[0]["id"]
            long = running.client.post("/completions", json={"session": first, "max_tokens": 4000})
            assert long.status_code == 507
            assert running.tokens(first) == list(b"a" * 20)
            assert running.client.delete(f"/sessions/{first}").status_code == 200
            assert running.client.post("/sessions", json={"prompt": "b"}).status_code == 200


def test_a_model_without_text_has_sessions_of_tokens():
    with Running(decoder(vocab=17), codec=False) as running:
        session = running.create(prompt=[1, 2, 3])
        found = running.client.post("/completions", json={"session": session, "max_tokens": 4, "temperature": 0}).json()
        assert found["choices"][0]["tokens"] == running.alone([1, 2, 3], 4)
        assert running.show(session)["text"] is None
        assert running.tokens(session) == [1, 2, 3, *running.alone([1, 2, 3], 4)]


def test_the_capacity_bounds_a_session(tmp_path):
    for capacity in (20, 40, 20):
        with Running(decoder("softmax"), folder=tmp_path, pool={"capacity": capacity}) as running:
            if not len(running.store):
                running.create(prompt="capacity")
            session = running.store.entries()[0].id
            answer = running.client.post("/completions", json={"session": session, "max_tokens": 20})
            assert (answer.status_code == 200) == (capacity == 40)
            if capacity == 20:
                assert "capacity has 20" in answer.json()["error"]["message"]
    assert len(list(tmp_path.glob("sess-*"))) == 1


@pytest.mark.parametrize("attention", ["gated_deltanet", "softmax"])
def test_another_server_continues_saved_sessions(attention, tmp_path):
    turns = [{"prompt": " a"}, {"stop": "e"}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6}]
    found = []
    for restarts in (False, True):
        running = Running(decoder(attention), folder=tmp_path / str(restarts), pool={"capacity": 64})
        session, texts = running.create(prompt="saved"), []
        for options in turns:
            if restarts:
                running.__exit__()
                running = Running(decoder(attention), folder=tmp_path / str(restarts), pool={"capacity": 64})
            texts.append(running.turn(session, **options))
        found.append((texts, running.tokens(session)))
        running.__exit__()
    assert found[0] == found[1]


def test_a_session_of_another_model_names_both(tmp_path):
    with Running(folder=tmp_path) as running:
        session, own = running.create(prompt="mine"), running.store.digest
    other = decoder(seed=1)
    assert model_digest(decoder()) == own != model_digest(other)
    assert own != model_digest(decoder("gla"))
    with Running(other, folder=tmp_path) as running:
        for answer in (
            running.client.post("/completions", json={"session": session}),
            running.client.post("/sessions", json={"fork_from": session}),
            running.client.get(f"/sessions/{session}"),
        ):
            assert answer.status_code == 409
            message = answer.json()["error"]["message"]
            assert own in message
            assert model_digest(other) in message
        assert running.client.get("/sessions").json()["data"] == []
    with Running(folder=tmp_path) as running:
        assert running.tokens(session) == list(b"mine")


def store(folder, model=None):
    return Sessions(Pool(decoder() if model is None else model, slots=1), folder)


def test_a_damaged_file_is_refused_and_can_be_deleted(tmp_path):
    with contextlib.closing(store(tmp_path)) as found:
        whole, cut_off = (found.create(Session((1, 2), 2)).id for _ in range(2))
    content = bytearray((tmp_path / f"{whole}.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / f"{whole}.safetensors").write_bytes(content)
    (tmp_path / f"{cut_off}.safetensors").write_bytes(content[:100])
    (tmp_path / f"{NONE}.safetensors").write_bytes(b"")
    with contextlib.closing(store(tmp_path)) as found:
        for name in (whole, cut_off, NONE):
            with pytest.raises(SessionError, match=rf"{name}' cannot be read: .*{name}"):
                found.read(name)
            found.remove(name)
        assert len(found) == 0
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_session_that_is_read_while_a_turn_is_saved_is_before_or_after_it(tmp_path, monkeypatch):
    """In every moment of a save: before the file is replaced, and between that and the new entry."""
    with contextlib.closing(store(tmp_path)) as found:
        name = found.create(Session((1, 2), 2)).id
        save, read = states.save, []

        def saved(*args):
            read.append(found.read(name).tokens)
            save(*args)
            read.append(found.read(name).tokens)

        monkeypatch.setattr(states, "save", saved)
        for tokens in ((1, 2, 3), (1, 2, 3, 4)):
            found.replace(name, Session(tokens, len(tokens)))
            read.append(found.read(name).tokens)
        assert read == [(1, 2), *[(1, 2, 3)] * 3, *[(1, 2, 3, 4)] * 2]


def test_a_session_has_the_length_of_its_tokens_while_a_turn_is_saved(tmp_path, monkeypatch):
    with Running(folder=tmp_path) as running:
        session = running.create(prompt="length")
        entry = running.store.entry(session)
        running.turn(session, "", 3)
        monkeypatch.setattr(running.store, "entry", lambda name: entry)  # as it was before the turn
        found = running.show(session)
        assert found["length"] == len(found["tokens"]) == 9
        assert found["bytes"] == entry.nbytes + 3 * 8


@pytest.mark.parametrize("by", ["remove", "hand"])
def test_a_session_that_is_read_while_it_is_deleted_does_not_exist(by, tmp_path, monkeypatch):
    with Running(folder=tmp_path) as running:
        session, codes = running.create(prompt="gone"), []

        def ask(*_):
            answers = [
                running.client.get(f"/sessions/{session}"),
                running.client.post("/sessions", json={"fork_from": session}),
                running.client.post("/completions", json={"session": session, "max_tokens": 1}),
            ]
            codes.extend(answer.status_code for answer in answers)

        if by == "hand":
            (tmp_path / f"{session}.safetensors").unlink()
            ask()
            assert codes == [404] * 3
        else:
            # The file is gone, and its entry is not; nor is its lock, which this call to the store does not take.
            monkeypatch.setattr(atomic_io, "sync", ask)
            running.store.remove(session)
            assert codes == [404] * 3
            ask()
            assert codes == [404] * 6


def test_swapped_files_are_refused(tmp_path):
    """By the server that runs, and by the next one; a file without an ID is older and is read."""
    with contextlib.closing(store(tmp_path)) as found:
        one, other = found.create(Session((1, 2), 2)).id, found.create(Session((3, 4, 5), 3)).id
        files = [tmp_path / f"{name}.safetensors" for name in (one, other)]
        contents = [path.read_bytes() for path in files]
        for path, content in zip(files, reversed(contents), strict=True):
            path.write_bytes(content)
        for name in (one, other):
            with pytest.raises(SessionError, match="is the file of session") as error:
                found.read(name)
            assert error.value.code == "damaged"
    with contextlib.closing(store(tmp_path)) as found:
        assert found.entries() == []
        with pytest.raises(SessionError, match=f"{one}.*is the file of session '{other}'.*rename it to {other}"):
            found.read(one)
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
    with contextlib.closing(store(tmp_path)) as found:
        assert [found.read(name).tokens for name in (one, other)] == [(1, 2), (3, 4, 5)]
        facts = states.read_metadata(files[0])
        assert facts.pop("id") == one
        kept = sessions._Saved(torch.tensor([[1, 2]]), torch.tensor([2]), found.model.init_state(1, 0))
        states.save(kept, files[0], facts)
    with contextlib.closing(store(tmp_path)) as found:
        assert found.read(one).tokens == (1, 2)
        found.replace(one, Session((1, 2, 3), 3))
        assert states.read_metadata(files[0])["id"] == one


def test_half_written_files_are_removed(tmp_path):
    with contextlib.closing(store(tmp_path)) as found:
        name = found.create(Session((1, 2), 2)).id
    for base in (name, NONE):
        (tmp_path / f".{base}.safetensors.{'0' * 16}.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    with contextlib.closing(store(tmp_path)) as found:
        assert [entry.id for entry in found.entries()] == [name]
        assert found.read(name) == Session((1, 2), 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.txt", f"{name}.safetensors"]


def test_a_folder_has_one_server(tmp_path):
    with contextlib.closing(store(tmp_path)), pytest.raises(ValueError, match="another process is writing"):
        store(tmp_path)
    store(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot keep sessions in"):
        store(tmp_path / "file")


def test_pending_tokens_of_a_session():
    state = decoder().init_state(1)
    one = continued(Session(), (1, 2), None)
    assert (one.tokens, one.pending, one.unread) == ((1, 2), 2, (1, 2))
    two = continued(one, (3,), state)
    assert (two.tokens, two.pending, two.unread, two.state) == ((1, 2, 3), 1, (3,), state)
    three = continued(two, (4, 5), None)
    assert (three.tokens, three.pending, three.unread, three.state) == ((1, 2, 3, 4, 5), 3, (3, 4, 5), state)


class Process:
    """``longspan serve`` as a process."""

    def __init__(self, checkpoint, folder):
        command = [sys.executable, "-m", "longspan", "serve", str(checkpoint), "--port", "0", "--sessions", str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--slots", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        line = self.process.stdout.readline()
        assert " at " in line, self.process.stderr.read()
        self.client = httpx.Client(timeout=60, base_url=line.split(" at ")[1].split(",")[0])

    def kill(self):
        self.client.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.communicate()


@pytest.fixture
def checkpoint(tmp_path):
    longspan.save(decoder().float(), tmp_path / "model", extra={"run": {"data": "text", "length": 0}})
    return tmp_path / "model"


def test_a_kill_while_sessions_are_written_leaves_whole_ones(checkpoint, tmp_path):
    generator = random.Random(0)
    model = longspan.load(checkpoint)
    for _ in range(2):
        server = Process(checkpoint, tmp_path / "sessions")
        names = [server.client.post("/sessions", json={"prompt": "abc"}).json()["id"] for _ in range(3)]

        turns = []

        def work(name, server=server, turns=turns):
            url = str(server.client.base_url)
            with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=60, base_url=url) as client:
                while True:
                    client.post("/completions", json={"session": name, "max_tokens": 1, "temperature": 0})
                    turns.append(name)

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        several = generator.randrange(6, 60)
        until(lambda turns=turns, several=several: len(turns) >= several)
        server.kill()
        for thread in threads:
            thread.join()
        with contextlib.closing(store(tmp_path / "sessions", model)) as found:
            lengths = [len(found.read(entry.id).tokens) for entry in found.entries()]
            assert len(lengths) == len(found)
            assert max(lengths) > 4
            for entry in found.entries():
                session = found.read(entry.id)
                assert int(session.state.position) == len(session.tokens)
        assert not list((tmp_path / "sessions").glob("*.tmp"))


FILE = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def uploading():
    options = {"pool": {"capacity": 64}, "limits": Limits(tokens=LONG, state_upload=True)}
    with Running(decoder("gated_deltanet; softmax"), **options) as found:
        yield found


def test_a_session_goes_on_from_its_file(uploading, tmp_path):
    session = uploading.create(prompt="hello")
    uploading.turn(session, max_tokens=5)
    file = uploading.client.get(f"/sessions/{session}/state")
    assert file.headers["content-disposition"].endswith(f'"{session}.safetensors"')
    answer = uploading.client.post("/sessions/state", content=file.content, headers=FILE)
    assert answer.status_code == 200, answer.text
    copy = answer.json()["id"]
    assert copy != session
    assert uploading.tokens(copy) == uploading.tokens(session)
    same(uploading.store.read(copy), uploading.store.read(session))
    assert uploading.turn(copy, "more") == uploading.turn(session, "more")
    # The same file is a session of a folder, and of the chat in a terminal.
    path = tmp_path / f"{session}.safetensors"
    path.write_bytes(file.content)
    model = uploading.model
    same(sessions.open_session(path, model, 256, model_digest(model)), sessions.load_session(path, model, 256))


def same(one, other):
    assert one.tokens == other.tokens
    assert one.pending == other.pending
    for a, b in zip(pytree.tree_leaves(one.state), pytree.tree_leaves(other.state), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "headers", "status", "says"),
    [
        (lambda data: data, {"content-type": "application/json"}, 415, "send application/octet-stream"),
        (lambda data: data[:-1], FILE, 400, "the file"),
        (lambda data: b"", FILE, 400, "the file"),
        (lambda data: bytes([*data[:-9], data[-9] ^ 1, *data[-8:]]), FILE, 400, "the file"),
        (lambda data: data.replace(b'"model":"', b'"model":"0'), FILE, 400, "the file"),
        (lambda data: iter([data]), FILE, 411, "content-length"),
    ],
    ids=["type", "cut", "empty", "bit", "model", "no length"],
)
def test_a_wrong_file_is_refused(uploading, change, headers, status, says):
    data = uploading.client.get(f"/sessions/{uploading.create(prompt='x')}/state").content
    answer = uploading.client.post("/sessions/state", content=change(data), headers=headers)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text


def test_files_that_do_not_fit_are_refused(running):
    data = running.client.get(f"/sessions/{running.create(prompt='x')}/state").content
    answer = running.client.post("/sessions/state", content=data, headers=FILE)
    assert answer.status_code == 403
    assert "--allow-state-upload" in answer.json()["error"]["message"]
    with Running(limits=Limits(state_upload=True), limit=len(data)) as small:
        assert small.client.post("/sessions/state", content=data, headers=FILE).status_code == 507
        assert not small.store.entries()
    with Running(decoder("linear"), limits=Limits(state_upload=True)) as other:
        answer = other.client.post("/sessions/state", content=data, headers=FILE)
        assert answer.status_code == 400
        assert "is a session of the model with sha256" in answer.json()["error"]["message"]
