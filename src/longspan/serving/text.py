"""Text of a stream, piece by piece: bytes that form no character yet, and stop strings, are held back."""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


class Bytes:
    """Text as UTF-8 bytes: the tokens of a model of bytes."""

    vocab = 256
    ends: tuple[int, ...] = ()
    """tokens that end a stream"""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def encode_more(self, text: str) -> list[int]:
        """Return the bytes of a text that follows other tokens: the same."""
        return self.encode(text)

    def name(self, token: int) -> str:
        """Return a token as text: the character of an ASCII byte, or ``bytes:\\xe6``."""
        return chr(token) if token < 128 else f"bytes:\\x{token:02x}"

    def decoder(self) -> "Decoding":
        """Return a decoder of one stream."""
        return Decoding()


class Words(Bytes):
    """Text as byte strings of a list: each token is the longest one that the rest of the text begins with.

    It is the tokenizer of RWKV's World models.

    Args:
        words: The bytes of each token, none of tokens without text.
        ends: Tokens that end a stream.
    """

    def __init__(self, words: Sequence[bytes], ends: tuple[int, ...] = ()):
        self.words, self.ends, self.vocab = words, ends, len(words)
        self.numbers = {word: number for number, word in enumerate(words) if word}
        self._longest = max(map(len, self.numbers), default=0)
        self._texts = [b"" if token in ends else word for token, word in enumerate(words)]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises ValueError for a byte without a token."""
        data, at, found = text.encode(), 0, []
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self.numbers), 0)
            if not size:
                raise ValueError(f"the tokenizer has no token for the byte 0x{data[at]:02x}")
            found.append(self.numbers[data[at : at + size]])
            at += size
        return found

    def name(self, token: int) -> str:
        """Return a token as text, or ``bytes:\\xe6`` for a part of a character."""
        word = self.words[token]
        try:
            return word.decode() or f"token:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in word)

    def decoder(self) -> "Decoding":
        """Return a decoder of one stream."""
        return Decoding(self._texts)


class Decoding:
    """Bytes to text, one token at a time; a character appears with its last byte.

    Args:
        words: The bytes of each token; by default token b is byte b.
    """

    def __init__(self, words: Sequence[bytes] = tuple(bytes([byte]) for byte in range(256))):
        self._words = words
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        return self._decoder.decode(self._words[token])

    def end(self) -> str:
        """Return the text of bytes that form no character."""
        return self._decoder.decode(b"", True)


def decoded(codec: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens, by a codec such as ``Bytes``."""
    decoding = codec.decoder()
    return "".join(map(decoding.add, tokens)) + decoding.end()


def retold(codec: Any, tokens: Sequence[int], text: str) -> list[int] | None:
    """Return the tokens of a text that begins like that of other tokens.

    They are the given tokens up to where the texts part. The rest of the text, or of a token, is encoded anew.

    Args:
        codec: Text to tokens and back.
        tokens: Tokens.
        text: The text.

    Returns:
        The tokens; None if no tokens of the text begin like the given ones.
    """
    decoding, length, whole = codec.decoder(), 0, 0
    for count, token in enumerate(tokens, 1):
        piece = decoding.add(token)
        if not text.startswith(piece, length):
            break
        length, whole = length + len(piece), count
    # Bytes of the character after the cut may be among them; alone they would be a replacement character.
    while not text.startswith(known := decoded(codec, tokens[:whole])):
        whole -= 1
    # Some tokenizers write a space before each text, so fewer tokens are kept where the rest does not join on.
    for kept in (*range(whole, max(0, whole - 8), -1), 0):
        known = decoded(codec, tokens[:kept])
        joined = [*tokens[:kept], *codec.encode_more(text[len(known) :])]
        if text.startswith(known) and decoded(codec, joined) == text:
            return joined
    return None


class Stops:
    """Cuts a text at the first of several strings, and holds back what may become one.

    The first string is the one that ends first, and of those the longest. Each character is compared once with each
    string, up to a constant factor (Knuth, Morris and Pratt 1977), however the text comes in pieces.

    Args:
        strings: The strings that end the text, which is then cut before them.
    """

    def __init__(self, strings: Sequence[str]):
        self.strings = [(one, _borders(one)) for one in strings if one]
        self.stopped = False
        self._matched = [0] * len(self.strings)  # characters of each string that the text ends with
        self._held = ""

    def add(self, text: str) -> str:
        """Return the text that is safe to pass on."""
        if self.stopped or not self.strings:
            return "" if self.stopped else text
        ends = [self._advance(i, text) for i in range(len(self.strings))]
        text = self._held + text
        found = [(end, -len(one)) for end, (one, _) in zip(ends, self.strings, strict=True) if end is not None]
        if found:
            end, length = min(found)
            self.stopped, held, self._held = True, len(self._held), ""
            return text[: held + end + length]
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep]

    def end(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _advance(self, i: int, text: str) -> int | None:
        """Compare a string with the text -> the place where the text has it whole, None if it has not."""
        (string, borders), matched = self.strings[i], self._matched[i]
        for place, character in enumerate(text, 1):
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            matched += string[matched] == character
            if matched == len(string):
                return place
        self._matched[i] = matched
        return None


@lru_cache(maxsize=256)
def _borders(string: str) -> tuple[int, ...]:
    """Return for each beginning of a string the length of its longest end that is a beginning too."""
    found, length = [0], 0
    for character in string[1:]:
        while length and string[length] != character:
            length = found[length - 1]
        length += string[length] == character
        found.append(length)
    return tuple(found)
