"""Bodies of ``/v1/completions``: what is accepted, and one clear error for what is not."""

import random
from dataclasses import dataclass
from typing import Any

from .sampler import Sampling

MOST_STOPS = 4
MOST_TOP = 20
MOST_CHOICES = 64
# Fields of OpenAI's interface that are accepted with the value that has no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None,),
    "echo": (False, None, True),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}
FIELDS = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "stop",
    "logprobs",
    "stream",
    "stream_options",
    "user",
    *NEUTRAL,
)


class Wrong(Exception):
    """A request that cannot be served: a message, the field, and a status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


@dataclass(frozen=True)
class Completion:
    """A checked body of ``/v1/completions``."""

    prompts: list[list[int]]
    max_tokens: int
    sampling: Sampling
    n: int
    stop: list[str]
    logprobs: int | None
    echo: bool
    stream: bool
    usage: bool

    def ways(self, index: int) -> list[Sampling]:
        """Return the options of each choice of a prompt; choices differ in their seed."""
        base = self.sampling
        first = base.seed + index * self.n
        return [Sampling(base.temperature, base.top_k, base.top_p, _wrapped(first + i)) for i in range(self.n)]


def _wrapped(seed: int) -> int:
    """A seed within 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def completion(body: Any, *, model: str, codec: Any, vocab: int, most: int) -> Completion:
    """Check a body.

    Args:
        body: The parsed JSON.
        model: The name of the served model.
        codec: Text to tokens, with ``encode``; None for a model without text.
        vocab: Number of tokens.
        most: The largest ``max_tokens``.

    Raises:
        Wrong: For an unknown field, and values of another type or out of range.
    """
    if not isinstance(body, dict):
        raise Wrong(f"the body must be a JSON object, not {type(body).__name__}")
    if unknown := sorted(body.keys() - set(FIELDS)):
        raise Wrong(f"unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}", unknown[0])
    for name, allowed in NEUTRAL.items():
        if name != "echo" and body.get(name) not in allowed:
            raise Wrong(f"{name}={body[name]!r} is not supported; leave it out", name)
    if body.get("model", model) != model:
        raise Wrong(
            f"model {body['model']!r} is not served here; this server has {model!r}", "model", 404, "model_not_found"
        )
    n = _integer(body, "n", 1, 1, MOST_CHOICES)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise Wrong("stream_options may have include_usage only", "stream_options")
    seed = body.get("seed")
    if seed is None:
        seed = random.SystemRandom().randrange(2**62)
    elif not _is_integer(seed) or not -(2**63) <= seed < 2**63:
        raise Wrong(f"seed={seed!r} must be a 64-bit integer", "seed")
    logprobs = body.get("logprobs")
    if logprobs is not None:
        logprobs = _integer(body, "logprobs", 0, 0, min(MOST_TOP, vocab))
    stop = body.get("stop")
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or len(stop) > MOST_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise Wrong(f"stop must be a string or up to {MOST_STOPS} of them, none empty", "stop")
    if stop and codec is None:
        raise Wrong("stop needs a model of text", "stop")
    return Completion(
        _prompts(body.get("prompt", ""), codec, vocab),
        _integer(body, "max_tokens", 16, 1, most),
        Sampling(
            _number(body, "temperature", 1.0, 0.0, 100.0),
            _integer(body, "top_k", 0, 0, 2**31),
            _number(body, "top_p", 1.0, 1e-9, 1.0),
            seed,
        ),
        n,
        stop,
        logprobs,
        _flag(body, "echo"),
        _flag(body, "stream"),
        bool(options.get("include_usage")),
    )


def _prompts(given: Any, codec: Any, vocab: int) -> list[list[int]]:
    """A text, tokens, or a list of either -> lists of tokens."""
    if isinstance(given, str) or (isinstance(given, list) and all(map(_is_integer, given))):
        given = [given]
    if not isinstance(given, list) or not given:
        raise Wrong("prompt must be a text, a list of tokens, or a list of either", "prompt")
    found = []
    for one in given:
        if isinstance(one, str):
            if codec is None:
                if one:
                    raise Wrong("this model has no text; pass the prompt as a list of tokens", "prompt")
                found.append([])
                continue
            try:
                found.append(codec.encode(one))
            except UnicodeEncodeError as error:
                raise Wrong(f"prompt is not valid Unicode: {error.reason}", "prompt") from error
        elif isinstance(one, list) and all(map(_is_integer, one)):
            if odd := [token for token in one if not 0 <= token < vocab]:
                raise Wrong(f"token {odd[0]} is not among 0 to {vocab - 1}", "prompt")
            found.append(list(one))
        else:
            raise Wrong("prompt must be a text, a list of tokens, or a list of either", "prompt")
    return found


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(body: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    value = default if value is None else value
    if not _is_integer(value) or not least <= value <= most:
        raise Wrong(f"{name}={value!r} must be an integer from {least} to {most}", name)
    return value


def _number(body: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Wrong(f"{name}={value!r} must be a number from {least:g} to {most:g}", name)
    return float(value)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, False, True) or (isinstance(value, int) and not isinstance(value, bool)):
        raise Wrong(f"{name}={value!r} must be true or false", name)
    return bool(value)
