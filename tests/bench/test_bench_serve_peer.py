"""``longspan bench serve --peer``: what two servers are asked, how their streams are counted, and how they can fail."""

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server: pip install longspan[serve]")
pytest.importorskip("tokenizers", reason="the prompts: pip install longspan[tokens]")

import tokenizers

from longspan.cli.entry import main
from longspan_lab.bench import hybrids, serve_peer

# A server whose tokens are characters. It repeats the prompt, after FIRST seconds, with GAP seconds between tokens.
FAKE = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FIRST, GAP = 0.1, 0.02
kind = sys.argv[1]

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["stream"] and asked["temperature"] == 0
        if kind == "refuses":
            print("ValueError: no such layer", flush=True)
            self.send_error(500)
            return
        self.send_response(200)
        self.end_headers()
        self.event(error="out of memory") if kind == "breaks" else self.stream(asked["prompt"], asked["max_tokens"])

    def stream(self, prompt, most):
        drawn = most - (kind == "short" and most > 2)
        text = (prompt * most)[:drawn]
        if kind == "differs" and prompt.startswith("1"):
            text = text[::-1]
        time.sleep(FIRST)
        for letter in text:
            self.event(choices=[{"text": letter}])
            time.sleep(GAP)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": drawn}
        self.event(choices=[{"text": "", "finish_reason": "length"}], usage=usage)

    def event(self, **content):
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\\n\\n")
        self.wfile.flush()

if kind == "ends":
    sys.exit("ImportError: No module named 'fastapi'")
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"running on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""
PROMPT, TOKENS = 9, 5


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A folder with a tokenizer of characters; all servers are fakes, of the kinds that the function gets."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}', encoding="utf-8")
    letters = {chr(code): i for i, code in enumerate(range(32, 127))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))

    def use(ours="good", *peers, modules=()):
        def command(kind):
            return lambda *given: [sys.executable, "fake.py", kind]

        monkeypatch.setattr(serve_peer, "_ours", command(ours))
        ways = {f"fake {i}": command(kind) for i, kind in enumerate(peers)}
        monkeypatch.setitem(serve_peer.PEERS, "fake", serve_peer.Peer(modules, "pip install fake", ways))

    return use


def ran(*words, model="."):
    sizes = ["--prompt", str(PROMPT), "--tokens", str(TOKENS), "--rounds", "1"]
    return main(["bench", "serve", model, "--peer", "fake", *sizes, *words])


def unwatched(items, count, label):
    return items


def result():
    return json.loads(Path("bench/serve.json").read_text(encoding="utf-8"))


def test_streams_of_both_servers_are_counted(fakes, capsys):
    fakes("good", "differs")
    assert ran("--streams", "1,3") == 0
    rows = result()["rows"]
    names = [(1, "longspan"), (1, "fake 0"), (3, "longspan"), (3, "fake 0")]
    assert [(row["streams"], row["way"]) for row in rows] == names
    for row in rows:
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(row["streams"] * TOKENS)
        assert 0.1 <= row["first_p50"] <= row["first_p99"] < row["seconds"]
        assert 0.01 < row["gap_p50"] <= row["gap_p99"]
        assert row["seconds"] >= 0.1 + (TOKENS - 1) * 0.02
        assert row["peak_mb"] > 1
    assert [row["equal_texts"] for row in rows] == [1, 1, 3, 2]
    assert result()["left_out"] == []
    assert "2/3" in capsys.readouterr().out
    assert Path("bench/serve.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("refuses", "1 stream: status 500: .*; the server's log: ValueError: no such layer"),
        ("short", f"1 stream: a stream read {PROMPT} tokens and drew {TOKENS - 1}, not {PROMPT} and {TOKENS}"),
        ("breaks", "1 stream: an error in a stream: out of memory"),
        ("ends", "the server fake 1 ended with code 1: ImportError: No module named 'fastapi'"),
    ],
)
def test_a_server_that_fails_is_left_out_with_the_reason(fakes, kind, reason):
    fakes("good", "good", kind)
    options = serve_peer.Options(peer="fake", model=".", streams=(1, 2), prompt=PROMPT, tokens=TOKENS, rounds=1)
    *_, found = serve_peer.run(options, unwatched)
    assert [row["way"] for row in found["rows"]] == ["longspan", "fake 0"] * 2
    (one,) = found["left_out"]
    assert one["candidate"] == "fake 1"
    assert re.match(reason, one["reason"])


def test_a_peer_that_does_not_start_is_an_error(fakes, capsys):
    fakes("good", "ends")
    assert ran("--streams", "1") == 2
    error = capsys.readouterr().err
    assert "the server fake 0 ended with code 1: ImportError: No module named 'fastapi'; pip install fake" in error


def test_a_missing_package_is_an_error_before_anything_is_measured(fakes, capsys):
    fakes("ends", "ends", modules=("json", "no_such_package"))
    assert ran() == 2
    assert "missing for --peer fake: no_such_package; pip install fake" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "model", "part"),
    [
        (["--no-http"], ".", "pass one of them"),
        (["--peer", "vllm"], ".", "unknown peer 'vllm'; known: fake, transformers"),
        ([], "mamba9", "unknown model 'mamba9' (did you mean 'mamba'?)"),
    ],
)
def test_wrong_options(fakes, capsys, words, model, part):
    fakes("good", "good")
    assert ran(*words, model=model) == 2
    assert part in capsys.readouterr().err


def test_the_median_load_is_reported(fakes, monkeypatch):
    fakes("good", "good")
    loads = [[5.0, 6.0], [0.5, 1.0], [2.0, 3.0]]

    def asked(server, prompts, tokens):
        times = loads.pop(0) if tokens == TOKENS else [0.0]
        return 0.0, [serve_peer.Answer(times, "ab", PROMPT, 2)]

    monkeypatch.setattr(serve_peer, "_asked", asked)
    options = serve_peer.Options(peer="fake", tokens=TOKENS, rounds=3)
    row, texts = serve_peer.measured("fake", [sys.executable, "fake.py", "good"], [serve_peer.Prompt("x", 1)], options)
    assert (row["seconds"], row["first_p50"], row["gap_p50"]) == (3.0, 2.0, 1.0)
    assert row["tokens_per_second"] == pytest.approx(2 / 3)
    assert texts == ["ab"]


def test_prompts_differ_and_have_the_tokens(fakes):
    found = serve_peer.prompts(".", 20, PROMPT)
    assert len({one.text for one in found}) == 20
    assert {one.tokens for one in found} == {PROMPT}


@pytest.fixture
def small(monkeypatch):
    pytest.importorskip("transformers")
    made = hybrids.model
    monkeypatch.setattr(hybrids, "model", lambda name, dtype, small: made(name, dtype, small=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "qwen3.5"])
def test_the_server_on_a_folder_that_is_made(small, monkeypatch, tmp_path, name):
    """Compared with itself, since a second installation may be missing."""
    monkeypatch.chdir(tmp_path)
    ways = {"itself": lambda folder: serve_peer._ours(folder, serve_peer.prompts(folder, 2, PROMPT), options)}
    monkeypatch.setitem(serve_peer.PEERS, "fake", serve_peer.Peer((), "", ways))
    options = serve_peer.Options(peer="fake", model=name, streams=(2,), prompt=PROMPT, tokens=TOKENS, rounds=1)
    *_, found = serve_peer.run(options, unwatched)
    assert [(row["way"], row["equal_texts"]) for row in found["rows"]] == [("longspan", 2), ("itself", 2)]


@pytest.mark.slow
def test_transformers_serves_the_same_texts(small, monkeypatch, tmp_path):
    for name in ("fastapi", "openai"):
        pytest.importorskip(name, reason='the peer: pip install "transformers[serving]"')
    monkeypatch.chdir(tmp_path)
    options = serve_peer.Options(model="mamba2", streams=(2,), prompt=PROMPT, tokens=TOKENS, rounds=1)
    *_, found = serve_peer.run(options, unwatched)
    rows = {row["way"]: row for row in found["rows"]}
    assert rows["transformers"]["equal_texts"] == 2
    for row in rows.values():
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(2 * TOKENS)
