"""Sessions of models of transformers, of flash-linear-attention and of any servable model, and their tokenizers."""

import contextlib

import pytest
import torch

import longspan
from longspan.data import tokenization
from longspan.serving import Pool, Session, SessionError, Sessions
from longspan.serving.sessions import model_digest
from longspan.serving.text import decoded
from longspan.serving.tokenized import Tokenized

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from adapted_models import fla, generated, hybrid  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

import hybrids  # noqa: E402
from fla_laws import build  # noqa: E402
from longspan.serving.server import Server  # noqa: E402
from longspan.serving.turns import cut  # noqa: E402

END = tokenization.END
LETTERS = "abcdefghij"
pytestmark = pytest.mark.usefixtures("restored")


@contextlib.contextmanager
def serving(model, folder=None, codec=None):
    pool = Pool(model, slots=2, capacity=60, prefill=3)
    server = Server(pool, name="tiny", codec=codec, sessions=Sessions(pool, folder))
    try:
        with TestClient(server.app) as client:
            yield client
    finally:
        server.close()


def post(client, path, **body):
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def turn(client, session, prompt, n):
    options = {"session": session, "prompt": prompt, "max_tokens": n, "temperature": 0}
    return post(client, "completions", **options)["choices"][0]


def continues(model, folder):
    """Turns continue one text, each in a server of its own if there is a folder, and forks part."""
    whole, session, client = [5, 6, 7, 8], "", None
    with contextlib.ExitStack() as end:
        for given, n in (([], 4), ([9, 10], 1), ([], 1), ([11], 3)):
            if client is None or folder is not None:
                end.close()
                client = end.enter_context(serving(model, folder))
            session = session or post(client, "sessions", prompt=whole)["id"]
            drawn = generated(model, [*whole, *given], n)
            assert turn(client, session, given, n)["tokens"] == drawn
            whole += [*given, *drawn]
            assert client.get(f"/v1/sessions/{session}").json()["tokens"] == whole
        assert client is not None
        fork = post(client, "sessions", fork_from=session, prompt=[3])["id"]
        turn(client, session, [], 2)
        assert turn(client, fork, [], 4)["tokens"] == generated(model, [*whole, 3], 4)
        # Without a start token, the first token of a session is read with the first turn.
        for first in ([], [4]):
            begun = post(client, "sessions", prompt=first)["id"]
            assert client.get(f"/v1/sessions/{begun}").json()["tokens"] == first
            assert turn(client, begun, [7], 3)["tokens"] == generated(model, [*first, 7], 3)
        empty = post(client, "sessions")["id"]
        answer = client.post("/v1/completions", json={"session": empty})
        assert answer.status_code == 400
        assert "no start token" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["qwen3_5", "rwkv"])
def test_sessions_of_hybrids_in_memory(kind):
    continues(hybrid(kind), None)


@pytest.mark.full
@pytest.mark.parametrize("kind", hybrids.KINDS)
def test_sessions_of_every_hybrid(kind, tmp_path):
    continues(hybrid(kind), tmp_path)


@pytest.mark.parametrize(("name", "in_folder"), [("gated_deltanet", True), ("hybrid", False), ("rwkv7", True)])
def test_sessions_of_flash_linear_attention(name, in_folder, tmp_path):
    continues(fla(name), tmp_path if in_folder else None)


def test_the_digest_has_the_weights_and_what_the_config_computes(tmp_path):
    one, other = fla("gated_deltanet"), fla("gated_deltanet")
    digest = model_digest(Pool(one, slots=1).model)
    one.save_pretrained(tmp_path)
    assert model_digest(Pool(type(one).from_pretrained(tmp_path).eval(), slots=1).model) == digest
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert model_digest(Pool(other, slots=1).model) != digest
    one.config.norm_eps = 0.5
    assert model_digest(Pool(one, slots=1).model) != digest


class Plain:
    """A servable model whose weights are not known."""

    def __init__(self):
        torch.manual_seed(0)
        config = longspan.DecoderConfig(vocab=20, positions="none", dim=16, heads=2, depth=1, attention="gla")
        self._own = longspan.Decoder(config).eval()
        self.training, self.device, self.start = False, self._own.device, self._own.start
        self.likelihood = self._own.likelihood

    def init_state(self, batch, capacity=None):
        return self._own.init_state(batch, capacity)

    def __call__(self, tokens, state, *, mask=None, donate=False):
        return self._own(tokens, state, mask=mask, donate=donate)


def test_other_models_have_sessions_in_memory_only(tmp_path):
    with serving(Plain()) as client:
        session = post(client, "sessions", prompt=[1, 2])["id"]
        assert len(turn(client, session, [3], 4)["tokens"]) == 4
    with pytest.raises(ValueError, match="Plain cannot be saved in a folder.*in memory"):
        Sessions(Pool(Plain(), slots=1), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def codec(**options):
    """Letters as tokens, a merged one, and END as the first token of a text."""
    vocab = {END: 0} | {letter: i + 1 for i, letter in enumerate(LETTERS)} | {"cd": 11}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("c", "d")]))
    made.add_special_tokens([END])
    made.decoder = tokenizers.decoders.Fuse()
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return Tokenized(made.to_str(), special=True, **options)


def test_special_tokens_begin_a_session_and_no_turn():
    model = build("gla", vocab_size=12, num_heads=2)
    with serving(model, codec=codec()) as client:
        empty, begun = post(client, "sessions")["id"], post(client, "sessions", prompt="ab")["id"]
        assert client.get(f"/v1/sessions/{empty}").json()["tokens"] == [0]
        for session, first in ((empty, [0]), (begun, [0, 1, 2])):
            drawn = generated(model, [*first, 3, 5], 4)
            assert turn(client, session, "ce", 4)["text"] == decoded(codec(), drawn)
            assert client.get(f"/v1/sessions/{session}").json()["tokens"] == [*first, 3, 5, *drawn]
        fork = post(client, "sessions", fork_from=begun, prompt="a")["id"]
        assert client.get(f"/v1/sessions/{fork}").json()["tokens"] == [0, 1, 2, 3, 5, *drawn, 1]


def test_a_token_that_ends_a_stream_stays_in_the_session():
    model = build("gla", vocab_size=12, num_heads=2)
    whole = generated(model, [1, 2], 5)
    found = codec(ends=[whole[2]])
    at = whole.index(whole[2])
    with serving(model, codec=found) as client:
        session = post(client, "sessions", prompt=[1, 2])["id"]
        choice = turn(client, session, [], 5)
        assert choice["finish_reason"] == "stop"
        assert client.get(f"/v1/sessions/{session}").json()["tokens"] == [1, 2, *whole[: at + 1]]


def test_a_cut_of_a_tokenizer_joins_on():
    one = codec()
    assert cut(one, [1, 11, 5], "ac") == [1, 3]
    assert cut(one, [1, 11, 5], "acd") == [1, 11]
    with pytest.raises(SessionError, match="has no tokens"):
        cut(one, [1, 11], "az")


def test_a_metaspace_before_the_rest_of_a_cut():
    vocab = {"▁": 0, "a": 1, "b": 2, "▁ab": 3, "ab": 4, "▁a": 5}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁a", "b"), ("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    one = Tokenized(made.to_str())
    assert decoded(one, [3, 4]) == "abab"
    assert decoded(one, cut(one, [3, 4], "aba")) == "aba"


def test_a_session_without_a_state_has_all_tokens_pending(tmp_path):
    pool = Pool(fla("gated_deltanet"), slots=1)
    with contextlib.closing(Sessions(pool, tmp_path)) as store:
        name = store.create(Session((1,), 1)).id
        assert store.read(name) == Session((1,), 1)
        odd = store.create(Session((1, 2), 1)).id
        with pytest.raises(SessionError, match="does not fit its 2 tokens"):
            store.read(odd)
