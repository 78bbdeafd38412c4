"""Text of a model with a tokenizer: the pieces of a stream are the text of its tokens."""

import random

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from longspan.compat.gguf import tokenizer as gguf_tokenizer
from longspan.serving.text import Words
from longspan.serving.tokenized import Tokenized

TEXT = """The river was high and the old man looked at it for a long while, then he looked at it again.
河川の水は高く、老人はそれを長い間見ていた。Ürümqi, Øystein, naïve, 😀😁🤖, façade. It isn't what he'd wanted, is it?
"""
END = "<|endoftext|>"
UNKNOWN = "\ufffd"


def test_a_prompt_at_which_the_library_panics_is_an_error_of_the_prompt():
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    codec = Tokenized(made.to_str())
    with pytest.raises(ValueError, match="the tokenizer failed"):
        codec.encode("a" * 40 + "b")
    assert codec.decode(codec.encode("ab")) == "ab"


@pytest.mark.parametrize("special", [False, True])
def test_the_name_of_a_special_token_in_a_prompt_is_text_unless_asked_for(special):
    codec = Tokenized(byte_level().to_str(), special=special)
    text = f"they end by {END} and go on"
    tokens = codec.encode(text)
    assert (codec.tokenizer.token_to_id(END) in tokens) == special
    assert codec.encode_more(text) == tokens
    assert codec.tokenizer.decode(tokens, skip_special_tokens=False) == text


def byte_level():
    """Byte-level BPE with few merges, so that most characters beyond ASCII take several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    options = {"vocab_size": 290, "special_tokens": [END], "show_progress": False}
    made.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return made


def metaspace():
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=160, special_tokens=["<unk>", END], show_progress=False)
    )
    return made


def byte_fallback():
    """Metaspace with a token for each byte, for characters beyond the vocabulary, and one leading space cut off."""
    vocab = {"<unk>": 0, END: 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    vocab |= {word: 258 + i for i, word in enumerate(["▁", *"abcdefghijklmnopqrstuvwxyzT,.'?"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens([END])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def word_piece():
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=True)
    made.train_from_iterator(
        [TEXT] * 3, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", END], show_progress=False)
    )
    return made


MADE = {made.__name__: made() for made in (byte_level, metaspace, byte_fallback, word_piece)}


def codec(kind, **options):
    made = MADE[kind]
    return Tokenized(made.to_str(), ends=[made.token_to_id(END)], **options)


def pieces(one, tokens):
    decoder = one.decoder()
    return [*map(decoder.add, tokens), decoder.end()]


@pytest.mark.parametrize("kind", MADE)
def test_pieces_are_the_text(kind):
    one = codec(kind)
    tokens = one.encode(TEXT)
    assert "".join(pieces(one, tokens)) == MADE[kind].decode(tokens)
    # Tokens of single bytes must not be cut inside of a character; see ``Decoding``.
    for cut in () if kind == "byte_fallback" else range(0, len(tokens), 3):
        part = tokens[cut : cut + 9]
        assert "".join(pieces(one, part)) == MADE[kind].decode(part)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_piece"])
def test_pieces_of_any_tokens_are_their_text(kind):
    """Also with bytes that form no character, spaces in a row, special tokens and characters cut in two."""
    one, chosen = codec(kind), random.Random(0)
    for _ in range(300):
        tokens = [chosen.randrange(one.vocab) for _ in range(chosen.randrange(12))]
        assert "".join(pieces(one, tokens)) == MADE[kind].decode(tokens), tokens


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_appears_with_its_last_token(kind):
    one = codec(kind)
    tokens = one.encode("a河😀b")
    found = pieces(one, tokens)
    assert "".join(found) == "a河😀b"
    assert UNKNOWN not in "".join(found)
    assert "" in found[:-1]
    # A stream that ends inside of a character.
    first, last = one.encode("a"), [token for token in one.encode("河") if one.name(token).startswith("bytes:")][:-1]
    *given, end = pieces(one, [*first, *last])
    assert "".join(given) == "a"
    assert given[len(first) :] == [""] * len(last)
    assert set(end) == {UNKNOWN}


def test_bytes_that_form_no_character_do_not_stop_the_text():
    one = codec("byte_level")
    (start, *_), letters = one.encode("河"), one.encode("ab")
    assert "".join(pieces(one, [start, *letters])[:-1]) == UNKNOWN + "ab"


@pytest.mark.parametrize("kind", ["metaspace", "byte_fallback", "word_piece"])
def test_spaces_between_words_are_kept(kind):
    one = codec(kind)
    end = one.ends[0]
    tokens = [token for word in ("he", "looked", "at") for token in one.encode(word)]
    assert "".join(pieces(one, tokens)) == "he looked at"
    # An end between two words has no text, and the space after it is that of the second word.
    assert "".join(pieces(one, [*one.encode("he"), end, *one.encode("at")])) == "he at"


@pytest.mark.parametrize("kind", MADE)
def test_names_tell_tokens_apart(kind):
    one = codec(kind)
    names = [one.name(token) for token in range(one.vocab)]
    assert len(set(names)) == one.vocab
    assert names[one.ends[0]] == END
    assert all(UNKNOWN not in name for name in names)
    assert one.name(one.vocab) == f"token:{one.vocab}"


def test_names_have_the_leading_space():
    for kind in ("metaspace", "word_piece", "byte_level"):
        one = codec(kind)
        assert " the" in [one.name(token) for token in one.encode("for the it")]


def test_names_of_bytes():
    for kind in ("byte_level", "byte_fallback"):
        one = codec(kind)
        found = [one.name(token) for token in one.encode("😂")][-4:]
        assert "".join(name.removeprefix("bytes:") for name in found) == "\\xf0\\x9f\\x98\\x82"


def test_special_tokens_are_added_on_request():
    from tokenizers import processors

    made = byte_level()
    end = made.token_to_id(END)
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
    assert Tokenized(made.to_str()).encode("ab") == Tokenized(made.to_str(), special=True).encode("ab")[1:]
    assert Tokenized(made.to_str(), special=True).encode("ab")[0] == end


def test_texts_are_read_whole():
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=50)
    one = Tokenized(made.to_str())
    assert one.decode(one.encode(TEXT)) == TEXT


def test_what_is_no_text_is_refused():
    with pytest.raises(UnicodeEncodeError):
        codec("byte_level").encode("\ud800")
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenized("{}")


def test_words_are_the_longest_that_a_text_begins_with():
    written = ["<s>", *(repr(bytes([byte]))[2:-1] for byte in range(256)), "th", r"\xe6\xb2", "[PAD258]"]
    data = {"tokenizer.ggml.tokens": written, "tokenizer.ggml.token_type": [3] + [1] * 258 + [5]}
    read = gguf_tokenizer.read_words(data)
    assert read == [b"", *(bytes([byte]) for byte in range(256)), b"th", b"\xe6\xb2", b""]
    with pytest.raises(ValueError, match="damaged"):
        gguf_tokenizer.read_words(data | {"tokenizer.ggml.tokens": [*written[:-1], "é"]})
    listed = [b"", *(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", "河".encode(), b"\xe6\xb2", b""]
    codec = Words(listed, (0,))
    found = codec.encode("the  then河 😀")
    assert found[:5] == [258, 33, 259, 111, 260]
    decoding = codec.decoder()
    assert "".join(map(decoding.add, [0, *found, 262])) + decoding.end() == "the  then河 😀"
    assert [codec.name(token) for token in (259, 261, 262)] == [" the", "bytes:\\xe6\\xb2", "token:262"]
    with pytest.raises(ValueError, match="byte 0x78"):
        Words([b"a"]).encode("ax")
