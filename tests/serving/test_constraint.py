"""Constraints of streams: allowed tokens alone are drawn, also of drafts, and other streams stay as they are."""

import json

import pytest
import torch
from pools import alone, decoder, spoiled

from longspan.data import documents, tokenization
from longspan.serving import Pool, Sampling
from longspan.serving.constraint import of_schema
from longspan.serving.tokenized import Tokenized


class Odd:
    """Only tokens with the parity of the place are allowed."""

    def __init__(self):
        self.seen = []

    def allowed(self):
        return torch.arange(256) % 2 == len(self.seen) % 2

    def add(self, token):
        self.seen.append(token)


def expected(model, prompt, n):
    """The most likely allowed tokens after a prompt, read token by token."""
    found = [model.start, *prompt]
    with torch.no_grad():
        for i in range(n):
            outputs = model(torch.tensor([found]))[0][0, -1]
            found.append(int(outputs.masked_fill(torch.arange(256) % 2 != i % 2, -torch.inf).argmax()))
    return found[1 + len(prompt) :]


@pytest.mark.parametrize("draft", [None, "prompt-lookup"])
def test_streams_draw_allowed_tokens_and_others_any(draft):
    model = decoder()
    pool = spoiled(Pool(model, slots=4))
    options = {"max_new_tokens": 9, "sampling": [Sampling(temperature=0), Sampling(seed=5)]}
    limited = pool.submit([1, 2, 1, 2], **options, draft=draft, constraint=Odd)
    (free,) = pool.submit([1, 2, 1, 2], max_new_tokens=9, sampling=Sampling(temperature=0))
    pool.run()
    assert free.tokens == alone(model, [1, 2, 1, 2], 9)
    assert limited[0].tokens == expected(model, [1, 2, 1, 2], 9)
    for stream in limited:
        assert [token % 2 for token in stream.tokens] == [i % 2 for i in range(9)]
        assert stream.constraint.seen == stream.tokens
    # Log-probabilities stay those of the model.
    with torch.no_grad():
        outputs = model(torch.tensor([[model.start, 1, 2, 1, 2]]))[0][0, -1]
    assert limited[0].log_probs[0] == pytest.approx(float(outputs.log_softmax(-1)[limited[0].tokens[0]]), abs=1e-5)


def test_a_constraint_that_fails_ends_its_stream_alone():
    class Failing(Odd):
        def allowed(self):
            if len(self.seen) == 2:
                raise RuntimeError("too complex")
            return None

    model = decoder()
    pool = Pool(model, slots=2)
    (broken,) = pool.submit([1], max_new_tokens=5, constraint=Failing)
    (whole,) = pool.submit([1], max_new_tokens=5, sampling=Sampling(temperature=0))
    pool.run()
    assert (broken.finished, len(broken.tokens)) == ("error", 2)
    assert "too complex" in broken.error
    assert whole.tokens == alone(model, [1], 5)


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    pytest.importorskip("llguidance")
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("words") / "text.txt"
    path.write_text('{"name": "a boat", "lamps": [1, 2, 3]} ' * 3 + "the old man thinks </think>", encoding="utf-8")
    content = tokenization.train_bpe(documents.sources([str(path)]), 300)
    return Tokenized(content, ends=(290,))


SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["color", "count", "tags"],
    "additionalProperties": False,
}


def drawn(make, seed, vocab=310):
    """Tokens that a constraint allows, drawn at random until the last one ends the text."""
    limit, tokens, generator = make(), [], torch.Generator().manual_seed(seed)
    while not tokens or tokens[-1] != 290:
        mask = limit.allowed()
        chances = torch.ones(vocab) if mask is None else mask.float()
        assert len(chances) == vocab
        token = int(torch.multinomial(chances, 1, generator=generator)) if mask is not None else len(tokens)
        tokens.append(token)
        limit.add(token)
        assert len(tokens) < 400
    return tokens[:-1]


def test_texts_are_json_of_the_schema(codec):
    jsonschema = pytest.importorskip("jsonschema")
    make, found = of_schema(SCHEMA, codec, vocab=310, ends=(290,)), set()
    for seed in range(20):
        text = codec.decode(drawn(make, seed))
        jsonschema.validate(json.loads(text), SCHEMA)
        assert json.dumps(json.loads(text)) == text  # one way to write it
        found.add(text)
    assert len(found) > 10


def test_reasoning_comes_before(codec):
    limit = of_schema({"type": "object"}, codec, vocab=310, ends=(290,), after="</think>")()
    for token in codec.encode_more("the old man thinks </think>"):
        assert limit.allowed() is None
        limit.add(token)
    allowed = [token for token, may in enumerate(limit.allowed().tolist()) if may]
    assert {codec.decode([token])[0] for token in allowed} == {"{"}


def test_wrong_schemas_are_refused(codec):
    for schema, message in (({"type": "objekt"}, "Invalid type: objekt"), ({"unevaluatedItems": 3}, "Unimplemented")):
        with pytest.raises(ValueError, match=message):
            of_schema(schema, codec, vocab=310, ends=(290,))
