"""Text of a stream, piece by piece: bytes that form no character yet, and stop strings, are held back."""

import codecs
from collections.abc import Sequence
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


class Decoding:
    """Bytes to text, one at a time; a character appears with its last byte."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        """Return the text of bytes that form no character."""
        return self._decoder.decode(b"", True)


def decoded(codec: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens, by a codec such as ``Bytes``."""
    decoding = codec.decoder()
    return "".join(map(decoding.add, tokens)) + decoding.end()


class Stops:
    """Cuts a text at the first of several strings, and holds back what may become one.

    Args:
        strings: The strings that end the text, which is then cut before them.
    """

    def __init__(self, strings: Sequence[str]):
        self.strings = [one for one in strings if one]
        self.stopped = False
        self._held = ""

    def add(self, text: str) -> str:
        """Return the text that is safe to pass on."""
        if self.stopped or not self.strings:
            return "" if self.stopped else text
        text = self._held + text
        found = [at for one in self.strings if (at := text.find(one)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = max((n for one in self.strings for n in range(len(one)) if n and text.endswith(one[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def end(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return "" if self.stopped else held
