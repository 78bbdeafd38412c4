"""Text of a model with a tokenizer: a token's text appears once no later token can change it."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from ..data import tokenization

UNKNOWN = "\ufffd"  # what a decoder writes for bytes that form no character yet


class Tokenized:
    """Text as tokens of a tokenizer, with the methods of ``text.Bytes``.

    Args:
        content: The content of a ``tokenizer.json``.
        ends: Tokens that end a stream. They have no text.
        template: The chat template of its folder, None for none.
        forms: Words of which each text of the model begins with one; () for any text.
        special: Whether ``encode`` adds the special tokens of the tokenizer, such as a first ``<s>``, and a special
            token that a text names becomes that token. Otherwise its name is text.

    Raises:
        ImportError: The library ``tokenizers`` is not installed.
        ValueError: The content is not a tokenizer.
    """

    def __init__(
        self,
        content: str,
        *,
        ends: Iterable[int] = (),
        special: bool = False,
        template: Any = None,
        forms: tuple[str, ...] = (),
    ):
        self.template, self.forms = template, forms
        self.tokenizer = tokenization.encoder(content, special=special)
        self.ends, self.special = tuple(ends), special
        self.vocab = tokenization.vocab_of(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            UnicodeEncodeError: The text has half of a surrogate pair, which no text has.
            ValueError: The tokenizer fails, as with a regular expression that backtracks too often.
        """
        return tokenization.encode(self.tokenizer, [text], special=self.special)[0]

    def encode_more(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other tokens, as ``encode`` does, without special tokens."""
        return tokenization.encode(self.tokenizer, [text])[0]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self.tokenizer.decode([token for token in tokens if token not in self.ends])

    def name(self, token: int) -> str:
        """Return a token as text, with its leading space: `` the``, ``<s>``, or ``bytes:\\xe6`` for part of one."""
        raw = self.tokenizer.id_to_token(token)
        if raw is None:
            return f"token:{token}"
        if token in self._added:
            return raw
        if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", raw):
            return f"bytes:\\x{found[1].lower()}"
        text = self.tokenizer.decode([*self._anchor, token])[len(self.tokenizer.decode(self._anchor)) :]
        if UNKNOWN not in text:
            return text or raw
        if not set(raw) <= _BYTES.keys():
            return raw
        return "bytes:" + "".join(f"\\x{_BYTES[letter]:02x}" for letter in raw)

    def decoder(self) -> "Decoding":
        """Return a decoder of one stream."""
        return Decoding(self)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token of plain text. Decoders drop the space before the first token, so names are read after this one."""
        vocab = self.tokenizer.get_vocab(with_added_tokens=False)
        plain = sorted(number for word, number in vocab.items() if word.isascii() and word.isalpha())
        return plain[:1]

    @cached_property
    def _added(self) -> set[int]:
        return set(self.tokenizer.get_added_tokens_decoder())


class Decoding:
    """Tokens to text, one at a time. The pieces together are ``Tokenized.decode`` of all tokens.

    The exception are successive tokens of single bytes (``<0xE6>``) that are not valid UTF-8 together: their tokenizer
    has no text for any of them, but those that form a character have been passed on.
    """

    def __init__(self, codec: Tokenized):
        self._codec = codec
        # The text before these tokens is passed on; the first ``_known`` of them are passed on too, and show how the
        # later ones join on to them.
        self._tokens: list[int] = []
        self._known = 0

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if text.endswith(UNKNOWN):
            return ""
        piece = text[len(self._codec.decode(self._tokens[: self._known])) :]
        # Tokens without text would let a decoder take the next one for the first of the text.
        if piece:
            self._tokens, self._known = self._tokens[self._known :], len(self._tokens) - self._known
        return piece

    def end(self) -> str:
        """Return the text of tokens that form no character."""
        known, held = self._tokens[: self._known], self._tokens[self._known :]
        before, text = self._codec.decode(known), self._codec.decode(self._tokens)
        self._tokens, self._known = [], 0
        return text[len(before) :] if text.startswith(before) else self._codec.decode(held)


_BYTES = tokenization.byte_letters()
