"""Encoders of transformers as encoders of longspan."""

import json
from typing import Any

import pytest
import torch

import longspan
from longspan.cli.entry import main

transformers = pytest.importorskip("transformers")

from longspan.compat.transformers import LongspanEncoder, load_encoder, to_encoder  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnop"]
VOCAB = len(WORDS)
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "type_vocab_size": 2}
ROPES = {"full_attention": {"rope_theta": 50.0}, "sliding_attention": {"rope_theta": 7.0}}
# Type -> fields of configs that differ in what is converted.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2}),
    ("roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    ("xlm-roberta", {"hidden_act": "relu"}),
    ("modernbert", {"num_hidden_layers": 4, "local_attention": 8}),
    ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "silu"}),
    ("modernbert", {"layer_types": ["sliding_attention"] * 3, "local_attention": 2, "rope_parameters": ROPES}),
]


@torch.no_grad()
def model(kind, **fields) -> Any:
    """A model with random weights, of which none is 0 or 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | fields)
    made = transformers.AutoModel.from_config(config).eval()
    for p in made.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return made


def tokenizer(words=WORDS):
    """The content of a tokenizer of letters with the special tokens of BERT, which cuts and pads as MiniLM's does."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    made.enable_truncation(8)
    made.enable_padding(length=8)
    return made.to_str()


def folder_of(path, kind, words=WORDS, modules=None, pooling=None, **fields):
    """A folder of transformers, or with ``modules`` of sentence-transformers."""
    model(kind, **fields).save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer(words), encoding="utf-8")
    if modules:
        places = {name: f"{i}_{name}" if i else "" for i, name in enumerate(modules)}
        rows = [{"type": f"sentence_transformers.models.{name}", "path": place} for name, place in places.items()]
        (path / "modules.json").write_text(json.dumps(rows))
        for name, place in places.items():
            (path / place).mkdir(exist_ok=True)
            if name == "Pooling":
                (path / place / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(("kind", "fields"), ROWS)
def test_outputs_are_the_same(kind, fields):
    other = model(kind, **fields)
    ours = to_encoder(other, pool="none")
    tokens = torch.randint(4, VOCAB, (2, 33), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 33, dtype=torch.bool)
    mask[1, 20:] = False
    # RoBERTa takes positions from the padding tokens.
    tokens[~mask] = other.config.pad_token_id
    expected = other(tokens, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(ours(tokens, mask=mask)[mask], expected[mask], rtol=1e-4, atol=1e-4)
    mean = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(to_encoder(other)(tokens, mask=mask), mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("bert", {"is_decoder": True}, "no is_decoder=True; only is_decoder=False"),
        ("bert", {"hidden_act": "silu"}, "no activation 'silu'"),
        ("modernbert", {"hidden_activation": "relu"}, "no activation 'relu'; known: gelu, silu"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}}},
            "an encoder of longspan has no rotary positions of the type 'linear'",
        ),
        ("distilbert", {"dim": 24, "n_heads": 4}, "of the type 'distilbert' cannot be encoders; known: bert, roberta"),
    ],
)
def test_what_an_encoder_does_not_have_is_refused(kind, fields, said):
    with pytest.raises(ValueError, match=said):
        to_encoder(model(kind, **fields))


MEAN, FIRST = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, {"pooling_mode_cls_token": True}
SENTENCES = ("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(("modules", "pooling"), [(None, None), (SENTENCES, MEAN), (SENTENCES[:2], FIRST)])
def test_embeddings_are_those_of_the_modules(tmp_path, modules, pooling):
    ours, other = load_encoder(folder_of(tmp_path, "bert", modules=modules, pooling=pooling)), model("bert")
    texts = ["abc", "ponmlkjihgfedcba" * 2, "c"]
    found, raw = ours.embed(texts), ours.embed(texts, batch=1, normalize=False)
    for text, one, plain in zip(texts, found, raw, strict=True):
        tokens = torch.tensor([[2, *(WORDS.index(letter) for letter in text), 3]])
        hidden = other(tokens).last_hidden_state[0]
        expected = hidden[0] if pooling == FIRST else hidden.mean(0)
        torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one, expected / expected.norm(), rtol=1e-4, atol=1e-4)
    # The end of a text is cut, and the last special token stays.
    torch.testing.assert_close(ours.embed(["abcdefg"], length=5), ours.embed(["abc"]))
    assert ours.embed([]).shape == (0, 24)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modules": (*SENTENCES, "Dense"), "pooling": MEAN}, "has the module Dense, which an encoder"),
        (
            {"modules": SENTENCES, "pooling": {"pooling_mode_max_tokens": True}},
            "has the pooling pooling_mode_max_tokens",
        ),
        ({"modules": SENTENCES[:1]}, "has no module Pooling"),
        ({"words": [*WORDS, "q"]}, "the tokenizer has 21 tokens, but the model has only 20 embeddings"),
    ],
)
def test_folders_that_are_refused(tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        load_encoder(folder_of(tmp_path, "bert", **given))


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_folder_of_sentence_transformers(tmp_path, kind):
    """The outputs of tokens by AutoModel, and modules that load_encoder reads as the folder's author wrote them."""
    ours = load_encoder(folder_of(tmp_path / "base", kind, modules=SENTENCES, pooling=FIRST))
    expected = ours.embed(["abc", "ponmlkjihgfedcba"], normalize=False, length=8)
    LongspanEncoder.from_longspan(ours).save_pretrained(tmp_path / "out")
    texts = ["abc", "ponmlkjihgfedcba"]
    batch = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(
        texts, padding=True, truncation=True, max_length=8, return_tensors="pt"
    )
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert type(loaded) is LongspanEncoder
    hidden = loaded.eval()(**batch).last_hidden_state
    torch.testing.assert_close(hidden[:, 0], expected, rtol=1e-4, atol=1e-4)
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    assert [one["type"].rpartition(".")[2] for one in modules] == list(SENTENCES)
    pooling = json.loads((tmp_path / "out/1_Pooling/config.json").read_text())
    assert pooling == {
        "word_embedding_dimension": 24,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
    }
    longspan.save(ours, tmp_path / "own")
    assert torch.equal(LongspanEncoder.from_longspan(tmp_path / "own").encoder.embed(texts), ours.embed(texts))
    with pytest.raises(ValueError, match="vocab > 0 and outputs=0, not vocab=0"):
        LongspanEncoder.from_longspan(longspan.Encoder(longspan.EncoderConfig(dim=8, depth=1, heads=2)))


def test_linearize_modernbert(tmp_path, capsys):
    """Local layers stay as they are, global ones become others, and the result reads texts beyond the model's."""
    pytest.importorskip("lightning")
    fields = {"num_hidden_layers": 4, "local_attention": 8}
    base, text = (
        folder_of(tmp_path / "base", "modernbert", modules=SENTENCES, pooling=MEAN, **fields),
        tmp_path / "t.txt",
    )
    text.write_text("abcdefghijklmnop" * 200)
    command = ["linearize", str(base), "--data", f"text:{text}", "--length", "32", "--batch", "2", "--layer-steps", "2"]
    command += ["--steps", "2", "--evaluate-examples", "4", "--keep-layers", "3", "--out", str(tmp_path / "run")]
    assert main([*command, "--attention", "hedgehog(window=8)"]) == 0
    window = "local(window=5, rotary=10000.0)"
    student = longspan.load(tmp_path / "run/model")
    assert student.config.attention == (
        f"hedgehog(rotary=160000.0, window=8); {window}; {window}; softmax(rotary=160000.0)"
    )
    LongspanEncoder.from_longspan(student).save_pretrained(tmp_path / "out")
    tokens = torch.tensor([[2, *range(4, 20), 3]])
    again = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()(tokens).last_hidden_state.mean(1)
    torch.testing.assert_close(again, student(tokens), rtol=1e-4, atol=1e-4)
    assert student.embed(["abcdefgh" * 10]).shape == (1, 24)


def test_linearize_a_folder(tmp_path, capsys):
    pytest.importorskip("lightning")
    base, text = folder_of(tmp_path / "base", "bert", modules=SENTENCES, pooling=MEAN), tmp_path / "text.txt"
    text.write_text("abcdefghijklmnop" * 200)
    command = ["linearize", str(base), "--data", f"text:{text}", "--length", "32", "--batch", "2", "--layer-steps", "2"]
    command += ["--steps", "2", "--evaluate-examples", "4", "--positions", "100", "--out", str(tmp_path / "run")]
    assert main([*command, "--attention", "hedgehog(window=8); softmax"]) == 0
    said = capsys.readouterr()
    assert "| embeddings |" in said.out
    assert "validation cosine" in said.err
    student = longspan.load(tmp_path / "run/model")
    assert student.config.attention == "hedgehog(window=8); softmax"
    assert student.embed(["abcdefgh" * 10]).shape == (1, 24)
    # A checkpoint is a teacher, too, and its tokenizer must be that of the tokens.
    again = ["linearize", str(tmp_path / "run/model"), *command[2:-1]]
    assert main([*again, str(tmp_path / "more"), "--keep-layers", "0", "--attention", "linear"]) == 2
    assert "layer 0 cannot be kept; the softmax layers are 1" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text(tokenizer(WORDS[:-1]))
    assert main(["tokenize", str(text), "--tokenizer", str(other), "--out", str(tmp_path / "tokens")]) == 0
    command[3] = f"tokens:{tmp_path / 'tokens'}"
    model("distilbert", dim=24, n_heads=4).save_pretrained(tmp_path / "odd")
    for words, wrong in (
        (command, "tokens of another tokenizer than the model"),
        ([command[0], str(tmp_path / "odd"), *command[2:]], "model_type 'distilbert', which cannot be a decoder or an"),
    ):
        assert main([*words[:-1], str(tmp_path / "third")]) == 2
        assert wrong in capsys.readouterr().err
