"""Softmax models of transformers as decoders of longspan."""

import json
from typing import Any

import pytest
import torch

import longspan
from longspan.cli.entry import main
from longspan.models import checkpoint

transformers = pytest.importorskip("transformers")

from longspan.compat.transformers import LongspanForCausalLM, load_decoder, to_decoder  # noqa: E402

VOCAB = 40
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
# Type -> fields of configs that differ in what is converted.
CASES = {
    "llama": ({}, {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}, {"attention_bias": True, "mlp_bias": True}),
    "llama ": ({"head_dim": 8, "rope_parameters": ROPE},),
    "qwen3": ({"head_dim": 8}, {"head_dim": 6, "tie_word_embeddings": True, "bos_token_id": None}),
    "gpt2": ({}, {"n_inner": 30, "layer_norm_epsilon": 1e-2}, {"activation_function": "relu"}),
}
ROWS = [(kind.strip(), fields) for kind, rows in CASES.items() for fields in rows]


@torch.no_grad()
def model(kind, **fields) -> Any:
    """A model with random weights, of which none is 0 or 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES) | fields)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in made.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return made


@pytest.mark.parametrize(("kind", "fields"), ROWS)
def test_logits_are_the_same(kind, fields):
    other = model(kind, **fields)
    ours = to_decoder(other)
    tokens = torch.randint(VOCAB, (2, 33), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens)[0], other(tokens).logits, rtol=1e-4, atol=1e-4)
    first = other.config.bos_token_id
    tokens[:, 0] = 2 if first is None else first
    begun = torch.cat([torch.full((2, 1), ours.start), tokens[:, 1:]], 1)
    torch.testing.assert_close(ours(begun)[0], other(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_greedy_texts_are_the_same(kind):
    """By the decode engine where it supports the decoder, and token by token."""
    other = model(kind, **({"head_dim": 8} if kind == "qwen3" else {}))
    prompt = torch.tensor([[1, 7, 3, 9]])
    expected = other.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = longspan.generate(to_decoder(other), prompt[:, 1:], max_new_tokens=12, temperature=0)
    assert found.tolist() == expected[:, 4:].tolist()


def tokenizer(vocab=VOCAB):
    """The content of a tokenizer of single letters, with a first token that it adds."""
    letters = {chr(97 + i): i for i in range(vocab)}
    made = pytest.importorskip("tokenizers").Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
                "post_processor": None,
                "decoder": {"type": "Fuse"},
                "model": {"type": "WordLevel", "vocab": letters, "unk_token": "a"},
            }
        )
    )
    return made.to_str()


def folder_of(path, kind, vocab=VOCAB, **fields):
    """A folder with a model and a tokenizer."""
    model(kind, **fields).save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer(vocab), encoding="utf-8")
    return path


def test_embeddings_beyond_the_tokenizer_are_left_out(tmp_path):
    other = model("qwen3", head_dim=8)
    ours = to_decoder(other, tokenizer(30))
    tokens = torch.arange(20)[None]
    assert ours.config.vocab == 30
    torch.testing.assert_close(ours(tokens)[0], other(tokens).logits[..., :30], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="the tokenizer has 41 tokens, but the model has only 40 embeddings"):
        to_decoder(other, tokenizer(41))


def test_a_folder_becomes_a_checkpoint_and_a_model_of_transformers(tmp_path):
    ours = load_decoder(folder_of(tmp_path / "base", "llama"))
    longspan.save(ours, tmp_path / "own")
    assert longspan.load(tmp_path / "own").tokenizer == ours.tokenizer
    LongspanForCausalLM.from_longspan(ours).save_pretrained(tmp_path / "hub")
    again, tokens = load_decoder(tmp_path / "hub"), torch.arange(9)[None]
    assert again.tokenizer == ours.tokenizer
    assert torch.equal(again(tokens)[0], ours(tokens)[0])


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "the type 'linear'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'; only hidden_act='silu'"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, "has sliding_attention"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gpt2", {"activation_function": "tanh"}, "no activation 'tanh'"),
        ("llama", {"bos_token_id": None, "eos_token_id": None}, "neither bos_token_id nor eos_token_id"),
        ("mistral", {}, "of the type 'mistral' cannot be decoders; known: llama, qwen3, gpt2"),
    ],
)
def test_what_a_decoder_does_not_have_is_refused(kind, fields, said):
    other = model(kind, **fields)
    other.generation_config = None
    with pytest.raises(ValueError, match=said):
        to_decoder(other)


@pytest.mark.full
def test_linearize_and_serve_a_folder(tmp_path, capsys):
    pytest.importorskip("lightning")
    base, book = folder_of(tmp_path / "base", "llama"), tmp_path / "book.txt"
    book.write_text("abcdefghij" * 200)
    command = ["linearize", str(base), "--data", f"text:{book}", "--length", "16", "--batch", "2", "--layer-steps", "2"]
    command += ["--steps", "2", "--evaluate-examples", "4", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    place = tmp_path / "run/model"
    assert longspan.load(place).config.attention == "hedgehog(rotary=10000.0)"
    assert checkpoint.read_config(place)["run"]["length"] == 16
    capsys.readouterr()
    assert main(["generate", str(place), "--prompt", "abc", "--tokens", "3"]) == 0
    assert len(capsys.readouterr().out.strip()) >= 3
    for folder, said in (
        (folder_of(tmp_path / "more", "gpt2", vocab=41), "the tokenizer has 41 tokens"),
        (tmp_path / "none", "has no tokenizer.json"),
    ):
        if not folder.exists():
            model("gpt2").save_pretrained(folder)
        assert main(["linearize", str(folder), "--data", f"text:{book}", "--out", str(tmp_path / "other")]) == 2
        assert said in capsys.readouterr().err
    # Tokens of another tokenizer.
    other = tmp_path / "other.json"
    other.write_text(tokenizer(39))
    assert main(["tokenize", str(book), "--tokenizer", str(other), "--out", str(tmp_path / "tokens")]) == 0
    command[command.index(f"text:{book}")] = f"tokens:{tmp_path / 'tokens'}"
    command[-1] = str(tmp_path / "third")
    assert main(command) == 2
    assert "tokens of another tokenizer than the model" in capsys.readouterr().err
