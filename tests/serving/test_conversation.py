"""Chats in one process, and ``longspan chat``: turns equal streams of a pool, and can be undone, branched and saved."""

import io

import pytest
import torch
from pools import decoder

from longspan import adapt
from longspan.cli import main
from longspan.models.sampling import Sampling
from longspan.serving import Pool, Sessions
from longspan.serving.conversation import Conversation
from longspan.serving.text import Bytes

GREEDY = Sampling(temperature=0.0)


def conversation(model=None, **options):
    pool = Pool(decoder().double() if model is None else model, slots=1, queue=1)
    return Conversation(pool, Bytes(), **{"max_tokens": 6, "sampling": GREEDY} | options)


def said(talk, text):
    return "".join(talk.ask(text))


def tokens_alone(talk, prompt, n):
    """The most likely n tokens after others, by the model itself."""
    model, found = talk.pool.model, [talk.pool.model.start, *prompt]
    with torch.no_grad():
        for _ in range(n):
            found.append(int(model(torch.tensor([found]))[0][0, -1].argmax()))
    return tuple(found[1 + len(prompt) :])


def test_turns_continue_each_other():
    talk = conversation()
    first, second = said(talk, "ab"), said(talk, "cd")
    tokens = talk.session.tokens
    assert tokens[:2] == (97, 98)
    assert tokens[2:8] == tokens_alone(talk, tokens[:2], 6)
    assert tokens[8:10] == (99, 100)
    assert tokens[10:] == tokens_alone(talk, tokens[:10], 6)
    assert talk.text == "ab" + first + "cd" + second


def test_undo_and_reset():
    talk = conversation()
    said(talk, "ab")
    before, answer = talk.session, said(talk, "cd")
    assert talk.undo()
    assert talk.session is before
    assert said(talk, "cd") == answer
    talk.reset()
    assert talk.text == ""
    assert not talk.undo()


def test_an_answer_that_is_stopped_keeps_what_was_drawn():
    talk = conversation(max_tokens=50)
    pieces = talk.ask("ab")
    for _ in range(3):
        next(pieces)
    pieces.close()
    kept = talk.session.tokens
    assert kept[:2] == (97, 98)
    assert 3 <= len(kept) - 2 < 50
    assert kept[2:] == tokens_alone(talk, kept[:2], len(kept) - 2)
    assert talk.pool.idle
    talk.max_tokens = 4
    said(talk, "c")
    assert talk.session.tokens[-4:] == tokens_alone(talk, (*kept, 99), 4)


def test_files_are_those_of_a_server(tmp_path):
    talk, name = conversation(), "sess-" + "1" * 32
    said(talk, "ab")
    talk.save(tmp_path / f"{name}.safetensors")
    store = Sessions(talk.pool, tmp_path)
    assert store.read(name).tokens == talk.session.tokens
    entry = store.create(talk.session)
    store.close()
    answer = said(talk, "cd")
    other = conversation(talk.pool.model)
    for found in (name, entry.id):
        other.load(tmp_path / f"{found}.safetensors")
        assert said(other, "cd") == answer


def test_a_chat_from_a_state_adapter_goes_on_with_it_alone(tmp_path):
    model = decoder().double()
    tuned = adapt.initial_states(model)
    with torch.no_grad():
        for values in tuned.parameters():
            values.normal_(0.0, 2.0, generator=torch.Generator().manual_seed(1))
    adapter = tuned.frozen("kind")
    talk, plain = conversation(model, adapter=adapter), conversation(model)
    said(talk, "ab"), said(plain, "ab")
    with torch.no_grad():
        outputs = tuned(model.shift(torch.tensor([talk.session.tokens])))
    assert outputs[0, 2:].argmax(-1).tolist() == list(talk.session.tokens[2:])
    assert talk.session.tokens != plain.session.tokens
    for one, name in ((talk, "kind"), (plain, "none")):
        one.save(tmp_path / f"{name}.safetensors")
    answer = said(talk, "cd")
    other = conversation(model, adapter=tuned.frozen("another name"))
    other.load(tmp_path / "kind.safetensors")
    assert said(other, "cd") == answer
    with pytest.raises(ValueError, match="is a session of adapter 'kind' with sha256 .*, and this chat has none"):
        plain.load(tmp_path / "kind.safetensors")
    with pytest.raises(ValueError, match="is a session without a state adapter, and this chat has another name@"):
        other.load(tmp_path / "none.safetensors")
    talk.reset()
    said(talk, "ab")
    assert talk.session.adapter == adapter.key


def test_a_failing_model_leaves_the_chat_as_it_was():
    talk = conversation()
    said(talk, "ab")
    before = talk.session
    with torch.no_grad():
        talk.pool.model.head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="the model failed: the model's outputs are not numbers"):
        said(talk, "cd")
    assert talk.session is before


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a system message requires a model with a chat template"):
        conversation(system="Be brief.")
    talk = conversation()
    said(talk, "ab")
    talk.save(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match="is a session of the model with sha256"):
        conversation(decoder(seed=5).double()).load(tmp_path / "one.safetensors")
    (tmp_path / "two.safetensors").write_bytes(b"no state")
    with pytest.raises(ValueError, match=r"two\.safetensors"):
        talk.load(tmp_path / "two.safetensors")


def test_the_command(monkeypatch, capsys, tmp_path):
    branch, file = ["/branch one", "went on"], tmp_path / "a.safetensors"
    lines = ["The prince", *branch, "/undo", *branch, "/branch", "/undo", "/undo", "/undo"]
    lines += [f"/save {file}", f"/load {file}", "/nope", "/undo now", "/save"]
    lines += ['"""', "/two", "lines", '"""', "/help", "/quit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "text", "--tokens", "5", "--temperature", "0"]) == 0
    found = capsys.readouterr().out
    answers = [line for line in found.splitlines() if "kept" not in line]
    assert "kept as one" in found
    assert "at one" in found
    assert "one: 15 tokens" in found
    assert found.count("undone") == 3
    assert "nothing to undo: the chat has no turns" in found
    assert "unknown command /nope; /help lists the commands" in found
    assert "/undo takes nothing after it" in found
    assert "/save needs a file" in found
    assert "never" not in found
    assert answers[1] == answers[4]  # the same turn after the same text


def test_the_command_refuses_a_model_without_text(capsys):
    assert main(["chat", "mnist"]) == 2
    assert "mnist has no text" in capsys.readouterr().err
