"""State adapters in a pool and a server: streams with different ones run together, each as with it alone."""

import random

import pytest
import torch
from pools import decoder, spoiled
from servers import Running

from longspan import adapt
from longspan.serving import Pool, Sampling
from longspan.serving.state_adapters import StateAdapters

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
    # The next turn continues with its own adapter, although a stream of another adapter may have the same text.
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


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("adapters"), sharp()
    for seed, name in enumerate(("formal", "brief")):
        tuned(model, seed).save(folder / f"{name}.safetensors")
    options = {"pool": {"capacity": 64, "prefix_bytes": 1 << 20}, "folder": folder / "sessions"}
    with Running(model, adapters=folder, **options) as found:
        found.folder = folder
        yield found


def drawn(running, prompt, **options):
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 0} | options
    answer = running.client.post("/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def text(adapter, prompt):
    """The text after a prompt by an adapter, token by token without a pool."""
    tokens = list(prompt.encode())
    for _ in range(6):
        outputs = adapter(adapter.model.shift(torch.tensor([[*tokens, 0]])))
        tokens.append(int(outputs[0, -1].argmax()))
    return bytes(tokens[len(prompt) :]).decode("utf-8", "replace")


def test_requests_and_sessions_name_adapters(running):
    post, prompt = running.client.post, "to be"
    expected = {name: text(tuned(running.model, seed), prompt) for seed, name in enumerate(("formal", "brief"))}
    expected[None] = text(adapt.initial_states(running.model), prompt)
    for name in (*expected, *expected):  # the second time from cached prefixes
        assert drawn(running, prompt, adapter=name) == expected[name]
    assert len({*expected.values()}) == 3
    made = post("/sessions", json={"adapter": "brief", "prompt": prompt}).json()
    assert made["adapter"] == "brief"
    fork = post("/sessions", json={"fork_from": made["id"]}).json()
    assert fork["adapter"] == "brief"
    assert drawn(running, "", session=made["id"]) == expected["brief"]
    # A rewound session is read again from the start, with its adapter.
    post(f"/sessions/{fork['id']}/edit", json={"prompt": "t"})
    assert drawn(running, prompt[1:], session=fork["id"]) == expected["brief"]


def test_adapters_are_loaded_and_dropped_while_the_server_runs(running):
    client, prompt = running.client, "other"
    session = client.post("/sessions", json={"adapter": "formal", "prompt": prompt}).json()["id"]
    assert [one["id"] for one in client.get("/adapters").json()["data"]] == ["brief", "formal"]
    assert client.delete("/adapters/formal").json() == {"id": "formal", "object": "adapter.deleted", "deleted": True}
    for body in ({"adapter": "formal", "prompt": prompt}, {"session": session, "prompt": ""}):
        answer = client.post("/completions", json=body)
        error = answer.json()["error"]
        wanted = (409, "session_other_adapter") if "session" in body else (404, "adapter_not_found")
        assert (answer.status_code, error["code"]) == wanted
    tuned(running.model, 7).save(running.folder / "formal.safetensors")
    assert client.post("/adapters", json={"name": "formal"}).json()["id"] == "formal"
    assert drawn(running, prompt, adapter="formal") == text(tuned(running.model, 7), prompt)
    assert client.post("/completions", json={"session": session, "prompt": ""}).status_code == 409
    tuned(running.model, 0).save(running.folder / "formal.safetensors")
    client.post("/adapters", json={"name": "formal"})
    assert drawn(running, "", session=session) == text(tuned(running.model, 0), prompt)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("adapters", {"name": "none"}, 404, "adapter 'none' is not in the folder of adapters"),
        ("adapters", {"name": "../formal"}, 400, "'../formal' is not the name of an adapter"),
        ("adapters", {}, 400, "None is not the name of an adapter"),
        ("adapters", {"name": "damaged"}, 400, "is not a readable state file"),
        ("adapters", {"name": "foreign"}, 400, "is an adapter of another model, which has attention='gla'"),
        ("completions", {"adapter": "none"}, 404, "adapter 'none' is not loaded"),
        ("completions", {"adapter": 3}, 400, "3 is not the name of an adapter"),
        ("completions", {"adapter": "brief", "session": "sess-" + "0" * 32}, 400, "leave adapter out"),
        ("sessions", {"adapter": "none"}, 404, "adapter 'none' is not loaded"),
        ("sessions", {"adapter": "brief", "fork_from": "sess-" + "0" * 32}, 400, "leave adapter out"),
    ],
)
def test_wrong_adapters_get_one_clear_line(running, path, body, status, message):
    (running.folder / "damaged.safetensors").write_bytes(b"no")
    adapt.initial_states(decoder("gla").double()).save(running.folder / "foreign.safetensors")
    answer = running.client.post(f"/{path}", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]


def test_folders_that_cannot_be_served_are_refused(tmp_path):
    pool = Pool(decoder("gla"), slots=1)
    with pytest.raises(ValueError, match="does not exist"):
        StateAdapters(pool, tmp_path / "none")
    with pytest.raises(ValueError, match="has no sums to train"):
        StateAdapters(Pool(decoder("local(window=4)"), slots=1), tmp_path)
    (tmp_path / "a b.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="the name of an adapter must match"):
        StateAdapters(pool, tmp_path)
