"""Answers in JSON: which tokens may come next, by the library llguidance."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._utils.optional_deps import need

# One way to write each value, since small models repeat spaces where any number of them is allowed.
_WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """Which tokens a stream may draw.

    Args:
        matcher: A matcher of llguidance, before the first token.
        codec: Tokens to text.
        after: A text, such as ``</think>``, up to whose end all tokens are allowed; "" for the beginning.
    """

    def __init__(self, matcher: Any, codec: Any, after: str = ""):
        self._matcher, self._after = matcher, after
        self._decoding, self._text = codec.decoder(), ""

    def allowed(self) -> Tensor | None:
        """Return which tokens may come next, (V,) bool; None for all.

        Raises:
            RuntimeError: The schema needs more than the limits of llguidance.
        """
        if self._after:
            return None
        # One byte for each token, 0 for those that are not allowed.
        found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        if self._matcher.is_error():
            raise RuntimeError(f"the JSON schema cannot be followed: {self._matcher.get_error()}")
        return found

    def add(self, token: int) -> None:
        """Note the token that was drawn."""
        if self._after:
            self._text = self._text[-len(self._after) :] + self._decoding.add(token)
            if self._after in self._text:
                self._after = ""
        else:
            self._matcher.consume_token(token)


def of_schema(
    schema: dict[str, Any], codec: Any, *, vocab: int, ends: tuple[int, ...], after: str = ""
) -> Callable[[], Constraint]:
    """Return what makes the constraint of each stream whose text is JSON of a schema.

    Args:
        schema: The JSON Schema.
        codec: Text to tokens and back, a ``Tokenized``.
        vocab: Number of tokens of the model.
        ends: Tokens that end the text.
        after: As in ``Constraint``.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: The schema is wrong, or has a keyword that llguidance does not know.
    """
    need("response_format", "llguidance")
    import llguidance

    words = _words(codec, vocab, ends)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_WRITTEN)
    first = llguidance.LLMatcher(words, grammar, log_level=0)
    if first.is_error():
        raise ValueError(" ".join(first.get_error().split())[:300])
    return lambda: Constraint(first.deep_copy(), codec, after)


@functools.lru_cache(maxsize=4)
def _words(codec: Any, vocab: int, ends: tuple[int, ...]) -> Any:
    """Return the tokens of a codec as llguidance reads them."""
    import llguidance

    return llguidance.LLTokenizer(
        codec.tokenizer.to_str(), n_vocab=vocab, eos_token=[end for end in ends if end < codec.vocab]
    )
