"""``longspan serve FOLDER``: runs with a tokenizer, hub folders, flash-linear-attention, hybrids of transformers."""

import functools
import json

import pytest
import torch

import longspan
from longspan.cli import entry, export
from longspan.cli.serve import loaded
from longspan.compat import gguf
from longspan.data import documents, tokenization
from longspan.serving.text import Bytes
from longspan.serving.tokenized import Tokenized

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

import adapted_models
import servers

import hybrids
from fla_laws import build
from longspan.compat import transformers as on_cpu

TEXT = "The old man looked at the river for a long while. 河川の水は高く、老人は長い間見ていた。 😀"
PROMPT = "The old 河"
NEW = 24
pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 3, encoding="utf-8")
    return tokenization.train_bpe(documents.sources([str(file)]), 280)


class Running(servers.Running):
    """A server of a folder."""

    def __init__(self, folder, stop="", **pool):
        model, codec, *_ = loaded(str(folder), stop)
        super().__init__(model, codec=codec, pool={"slots": 4} | pool)

    def post(self, **body):
        return super().post(**({"prompt": PROMPT, "max_tokens": NEW, "temperature": 0} | body))

    def choice(self, **body):
        found = self.post(**body).json()
        assert "choices" in found, found
        return found["choices"][0]


def served(folder, expected, **pool):
    """Greedy texts equal the expected tokens' text, whole and in pieces, and end where a stop token is drawn.

    Args:
        folder: The folder.
        expected: The tokens after given ones: a function.
        pool: Options of the pool.
    """
    with Running(folder, **pool) as running:
        codec = running.codec
        tokens = expected(codec.encode(PROMPT))
        assert not set(tokens) & set(codec.ends)
        choice = running.choice(logprobs=2)
        assert choice["text"] == codec.decode(tokens)
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == [codec.name(token) for token in tokens]
        assert running.choice(echo=True)["text"] == PROMPT + choice["text"]
        pieces = running.pieces()
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert len(pieces) > 2
        word = codec.tokenizer.id_to_token(tokens[5])
    with Running(folder, stop=word, **pool) as running:
        choice = running.choice()
        assert choice["text"] == codec.decode(tokens[: tokens.index(tokens[5])])
        assert choice["finish_reason"] == "stop"


def generated(model):
    """What ``generate`` of transformers writes after tokens."""
    return functools.partial(adapted_models.generated, model, n=NEW)


def decoder(tokenizer, vocab, data):
    """A decoder whose greedy texts do not repeat one token."""
    torch.manual_seed(3)
    config = {"vocab": vocab, "dim": 16, "heads": 2, "depth": 2, "attention": "gated_deltanet", "positions": "none"}
    model = longspan.Decoder(longspan.DecoderConfig(**config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
        model.head.bias.zero_()
    model.tokenizer = tokenizer
    return model, {"run": {"data": data, "length": 64}}


def test_a_run_with_a_tokenizer(tokenizer, tmp_path):
    from longspan.models import checkpoint

    vocab = tokenization.vocab_of(tokenization.parsed(tokenizer))
    model, extra = decoder(tokenizer, vocab, "tokens:somewhere")
    checkpoint.save(model, tmp_path / "run", extra=extra)

    def tokens(given):
        return longspan.generate(model, torch.tensor([given]), max_new_tokens=NEW, temperature=0)[0].tolist()

    served(tmp_path / "run", tokens)
    # The same model on the hub, which has a start token beside those of the decoder.
    model.tokenizer = tokenizer
    on_cpu.LongspanForCausalLM.from_longspan(model).save_pretrained(tmp_path / "hub")
    served(tmp_path / "hub", tokens)


def test_folders_of_ours_without_a_tokenizer(tmp_path):
    for data, vocab, kind in (("text:a", 256, Bytes), ("digits", 17, type(None))):
        model, _ = decoder("", vocab, data)
        made = on_cpu.LongspanForCausalLM(on_cpu.LongspanConfig.of(model.config, {"data": data}), model)
        made.save_pretrained(tmp_path / data[:4])
        assert isinstance(loaded(str(tmp_path / data[:4]), "")[1], kind)
        with pytest.raises(ValueError, match=r"requires a model with a tokenizer.*no tokenizer\.json"):
            loaded(str(tmp_path / data[:4]), "x")


def test_a_model_of_fla(tokenizer, tmp_path):
    vocab = tokenization.vocab_of(tokenization.parsed(tokenizer))
    # Three numbers without a token, as in vocabularies that are padded to a multiple.
    options = {"vocab_size": vocab + 3, "num_heads": 2, "attn": {"layers": [1], "num_heads": 4}}
    model = build("gla", **options, eos_token_id=[vocab, vocab + 1])
    with torch.no_grad():
        model.lm_head.weight[vocab:] = 0
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    assert loaded(str(tmp_path), "")[1].ends == (vocab, vocab + 1)
    served(tmp_path, generated(model), capacity=60)


@pytest.mark.parametrize("kind", ["mamba2", "jamba", "qwen3_5"])
def test_a_hybrid_of_transformers(kind, tokenizer, tmp_path):
    adapted_models.in_pools(kind)
    vocab = tokenization.vocab_of(tokenization.parsed(tokenizer))
    model = hybrids.model(kind, vocab_size=vocab)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    on_cpu.accelerate(model)
    served(tmp_path, generated(model), capacity=60)
    assert loaded(str(tmp_path), "")[1].ends == (tokenization.parsed(tokenizer).token_to_id(tokenization.END),)


def test_a_gguf_file(tokenizer, tmp_path):
    adapted_models.in_pools("mamba2")
    vocab = tokenization.vocab_of(tokenization.parsed(tokenizer))
    hybrids.model("mamba2", vocab_size=vocab + 3).save_pretrained(tmp_path / "hub")
    tokenization.write_files(tmp_path / "hub", tokenizer)
    (tmp_path / "hub" / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    file = tmp_path / "model.gguf"
    assert entry.main(["export", str(tmp_path / "hub"), str(file), "--gguf", "--weights", "q8_0"]) == 0
    served(file, generated(longspan.load(file)), capacity=60)
    # One of transformers, with the template.
    found = gguf.load_tokenizer(file)
    assert found.apply_chat_template([{"content": TEXT}], tokenize=False) == f"{TEXT}!"
    assert found(TEXT).input_ids == tokenization.parsed(tokenizer).encode(TEXT).ids
    for options, why in ((("--weights", "q8_0"), "--gguf"), (("--gguf", "--weights", "q3"), "q4_0")):
        with pytest.raises(ValueError, match=why):
            export.run(export.parser().read([str(tmp_path / "hub"), str(tmp_path / "x"), *options]))


def test_special_tokens_of_a_folder_are_added(tokenizer, tmp_path):
    from tokenizers import processors

    made = tokenization.parsed(tokenizer)
    end = made.token_to_id(tokenization.END)
    made.post_processor = processors.TemplateProcessing(
        single=f"{tokenization.END} $A", special_tokens=[(tokenization.END, end)]
    )
    build("gla", vocab_size=made.get_vocab_size(), num_heads=2).save_pretrained(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    codec = loaded(str(tmp_path), "")[1]
    assert isinstance(codec, Tokenized)
    assert codec.encode("ab")[0] == end


def test_what_is_not_served_says_why(tokenizer, tmp_path):
    def folder(name, **config):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return str(tmp_path / name)

    for kind, why in (
        ("llama", "not one with recurrent layers"),
        ("cyclic_flow_attention", "rotating slots"),
        ("zaya", "no kernel"),
        ("glm5_next", "indexer"),
        ("mamba2", "has no tokenizer.json"),
    ):
        with pytest.raises(ValueError, match=rf"{kind}.*{why}"):
            loaded(folder(kind, model_type=kind), "")
    with pytest.raises(ValueError, match="holds no|no checkpoint|config"):
        loaded(folder("empty"), "")
    build("gla", vocab_size=300, num_heads=2).save_pretrained(tmp_path / "gla")
    (tmp_path / "gla" / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    with pytest.raises(ValueError, match="no token 'nope'"):
        loaded(str(tmp_path / "gla"), "nope")
