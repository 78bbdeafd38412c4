"""Bodies of ``/v1/completions`` and ``/v1/sessions``: what is accepted, and one clear error for what is not."""

import json
import random
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..generation.drafting import PROMPT_LOOKUP
from ..models.sampling import OPTIONS, Sampling
from .constraint import Constraint
from .sessions import ID
from .text import retold

MOST_STOPS = 4
MOST_STOP_CHARACTERS = 1024
MOST_TOP = 20
MOST_CHOICES = 64
MOST_PROMPTS = 128
MOST_SCORES = 1 << 18  # log-probabilities of prompts in one response

ADAPTER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")  # names of adapters

_PLACES = {"type": ["integer", "null"], "default": None, "minimum": 0, "maximum": 2**53}
_ADAPTER = {"type": ["string", "null"], "pattern": f"^{ADAPTER.pattern}$"}
_ID = {"type": ["string", "null"], "pattern": f"^{ID.pattern}$"}
# Each field of a body as JSON Schema. ``completion`` checks these bounds, and ``openapi`` describes them.
FIELDS: dict[str, dict[str, Any]] = {
    "model": {"type": "string", "description": "The served model's name."},
    "prompt": {"description": "A text, a list of tokens, or a list of either."},
    "max_tokens": {
        "type": ["integer", "null"],
        "default": 16,
        "minimum": 0,
        "description": "The most tokens to draw; 0 requires echo.",
    },
    **{
        option.name: {
            "type": ["integer" if option.kind is int else "number", "null"],
            "default": option.default,
            "minimum": option.low,
            "maximum": option.high,
            "title": option.title,  # the playground offers the fields that have one
            "description": option.sentence,
        }
        for option in OPTIONS
    },
    "n": {
        "type": ["integer", "null"],
        "default": 1,
        "minimum": 1,
        "maximum": MOST_CHOICES,
        "description": "Completions of each prompt.",
    },
    "seed": {
        "type": ["integer", "null"],
        "default": None,
        "minimum": -(2**63),
        "maximum": 2**63 - 1,
        "description": "The same seed draws the same tokens. By default it is random.",
    },
    "stop": {
        "oneOf": [
            {"type": "null"},
            {"type": "string", "minLength": 1, "maxLength": MOST_STOP_CHARACTERS},
            {
                "type": "array",
                "maxItems": MOST_STOPS,
                "items": {"type": "string", "minLength": 1, "maxLength": MOST_STOP_CHARACTERS},
            },
        ],
        "description": "Strings that end a completion, which is cut before them.",
    },
    "logprobs": {
        "type": ["integer", "null"],
        "default": None,
        "minimum": 0,
        "maximum": MOST_TOP,
        "description": "Return the log-probability of each token and of this many of the most likely ones; with echo, "
        "those of the prompt too.",
    },
    "echo": {"type": ["boolean", "null"], "default": False, "description": "Return the prompt before the completion."},
    "stream": {"type": ["boolean", "null"], "default": False, "description": "Return server-sent events."},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {
            "include_usage": {"type": ["boolean", "null"], "default": False},
            "include_obfuscation": {"enum": [None, False]},
        },
        "additionalProperties": False,
    },
    "draft": {
        "oneOf": [{"type": "null"}, {"enum": ["none", PROMPT_LOOKUP]}],
        "default": "none",
        "description": "Read several tokens in one step where the text repeats itself; the completion stays the same.",
    },
    "user": {"type": ["string", "null"], "description": "The client's name for its user, which changes nothing."},
    "session": {**_ID, "description": "The session that the completion continues; it takes one prompt and n=1."},
    "adapter": {**_ADAPTER, "description": "The state adapter to start from; a session has that of its beginning."},
    # Fields of OpenAI's interface that are accepted with the values that have no effect.
    "best_of": {"type": ["integer", "null"], "description": "Accepted where it equals n."},
    "frequency_penalty": {"enum": [None, 0]},
    "logit_bias": {"enum": [None, {}]},
    "presence_penalty": {"enum": [None, 0]},
    "suffix": {"enum": [None, ""]},
}


def fields(*, model: str, text: bool, vocab: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    """Return each field of a body as JSON Schema, with the bounds of one server.

    Args:
        model: The name of the served model.
        text: Whether the model has text.
        vocab: Number of tokens.
        max_tokens: The largest ``max_tokens``.
    """
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocab - 1}}
    one = {"type": "string"} if text else {"const": ""}
    many = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS, "items": {"anyOf": [one, tokens]}}
    own: dict[str, dict[str, Any]] = {
        "model": {"const": model},
        "prompt": {"anyOf": [one, tokens, many], "default": ""},
        "max_tokens": {"maximum": max_tokens},
        "logprobs": {"maximum": min(MOST_TOP, vocab)},
    }
    if not text:
        own["stop"] = {"oneOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}
    return {name: {**schema, **own.get(name, {})} for name, schema in FIELDS.items()}


def session_fields(*, model: str, text: bool, vocab: int) -> dict[str, dict[str, Any]]:
    """Return each field of a body of ``/v1/sessions`` as JSON Schema. Arguments as in ``fields``."""
    known = fields(model=model, text=text, vocab=vocab, max_tokens=1)
    one, tokens, many = known["prompt"]["anyOf"]
    return {
        "model": known["model"],
        "prompt": {
            "description": "A text or a list of tokens that the session reads.",
            "anyOf": [one, tokens, {**many, "maxItems": 1}],
            "default": "",
        },
        "fork_from": {**_ID, "description": "The session to copy."},
        "to": {**_PLACES, "description": "With fork_from: copy this many of its first tokens. By default all."},
        "adapter": {**_ADAPTER, "description": "The state adapter of the session; a copy has that of its source."},
    }


def rewind_fields(*, model: str) -> dict[str, dict[str, Any]]:
    """Return each field of a body of ``/v1/sessions/ID/rewind`` as JSON Schema."""
    return {
        "model": {**FIELDS["model"], "const": model},
        "tokens": {**_PLACES, "description": "How many of the last tokens to undo."},
        "to": {**_PLACES, "description": "How many of the first tokens stay; pass this or tokens."},
    }


def edit_fields(*, model: str, text: bool, vocab: int) -> dict[str, dict[str, Any]]:
    """Return each field of a body of ``/v1/sessions/ID/edit`` as JSON Schema. Arguments as in ``fields``."""
    fields = session_fields(model=model, text=text, vocab=vocab)
    return {
        "model": fields["model"],
        "prompt": {**fields["prompt"], "description": "The new text of the session, or its tokens."},
        "drop": {**_PLACES, "minimum": 1, "description": "How many tokens to drop after the first keep."},
        "keep": {**_PLACES, "description": "With drop: how many of the first tokens stay. By default 0."},
    }


@dataclass(frozen=True)
class Limits:
    """What one client may use."""

    body: int = 1 << 20
    """bytes of a request"""
    tokens: int = 4096
    """the largest max_tokens"""
    slow: float = 30.0
    """seconds within which a client must send the head of a request, then its body, and read what it is sent"""
    backlog: int = 4096
    """tokens of a stream that its client has not read yet, after which it is cancelled"""
    connections: int = 1024
    """open connections"""
    state_upload: bool = False
    """whether clients may send states of sessions"""


class RequestError(Exception):
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
    session: str = ""
    """the session that the completion continues, or \"\""""
    later: tuple[int, ...] = ()
    """the prompt's tokens in a session that has others: without first special tokens"""

    draft: Literal["prompt-lookup"] | None = None
    """how tokens are drafted"""

    ends: tuple[int, ...] = ()
    """tokens that end the completion"""

    constraint: Callable[[], Constraint] | None = None
    """makes what each stream may draw; None for all tokens"""

    ends_turns: bool = False
    """whether ``later`` begins with what ends the answer before it"""

    adapter: str = ""
    """the state adapter to start from, or \"\""""

    fits: bool = False
    """whether fewer tokens are drawn where a stream has no room for max_tokens"""

    def after(self, tokens: Sequence[int]) -> list[int]:
        """Return the prompt after the tokens of a session."""
        if not tokens:
            return self.prompts[0]
        return following(tokens, self.later) if self.ends_turns else list(self.later)

    @property
    def scores(self) -> bool:
        """Whether the log-probabilities of the prompts are computed."""
        return self.echo and (self.logprobs is not None or self.max_tokens == 0)

    def samplings(self, index: int) -> list[Sampling]:
        """Return the options of each choice of a prompt; choices differ in their seed."""
        base = self.sampling
        first = base.seed + index * self.n
        return [replace(base, seed=_as_64_bits(first + i)) for i in range(self.n)]


def following(tokens: Sequence[int], more: Sequence[int]) -> list[int]:
    """Return the tokens of a next turn, without a first one that ends an answer and has been drawn already."""
    return list(more[1:] if more[:1] == tokens[-1:] else more)


def _as_64_bits(seed: int) -> int:
    """A seed within 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def completion(body: Any, *, model: str, codec: Any, vocab: int, max_tokens: int) -> Completion:
    """Check a body.

    Args:
        body: The parsed JSON.
        model: The name of the served model.
        codec: Text to tokens, with ``encode``; None for a model without text.
        vocab: Number of tokens.
        max_tokens: The largest ``max_tokens``.

    Raises:
        RequestError: For an unknown field, and values of another type or out of range.
    """
    known = fields(model=model, text=codec is not None, vocab=vocab, max_tokens=max_tokens)
    check_names(body, known, model)
    check_neutral(body, known)
    if not isinstance(body.get("user"), str | None):
        raise RequestError(f"user={short(body['user'])} must be a string", "user")
    numbers = {name: number(body, name, known[name]) for name in known if "minimum" in known[name]}
    options = {} if body.get("stream_options") is None else body["stream_options"]
    allowed = known["stream_options"]["properties"]
    if not isinstance(options, dict) or options.keys() - allowed.keys():
        raise RequestError(
            f"stream_options={short(options)} must be an object with {', '.join(allowed)} only", "stream_options"
        )
    check_neutral(options, allowed)
    if (best := body.get("best_of")) is not None and not (_is_integer(best) and best == numbers["n"]):
        raise RequestError(f"best_of={short(best)} is not supported with n={numbers['n']}; leave it out", "best_of")
    if (draft := body.get("draft")) not in (None, "none", PROMPT_LOOKUP):
        raise RequestError(f"draft={short(draft)} must be 'none' or {PROMPT_LOOKUP!r}", "draft")
    echo, seed, given = flag(body, "echo"), numbers["seed"], body.get("prompt", known["prompt"]["default"])
    prompts, session, later = _prompts(given, codec, vocab), body.get("session"), []
    if session is not None:
        if numbers["n"] != 1 or len(prompts) != 1:
            raise RequestError(
                f"a session takes one prompt and n=1, not {len(prompts)} and n={numbers['n']}", "session"
            )
        session = session_id(session, "session")
        (later,) = _prompts(given, codec, vocab, more=True)
    if (adapter := adapter_name(body.get("adapter"), "adapter")) and session is not None:
        raise RequestError("a session has the adapter of its beginning; leave adapter out", "adapter")
    if numbers["max_tokens"] == 0 and (not echo or session is not None):
        raise RequestError("max_tokens=0 must be at least 1; 0 requires echo=true and no session", "max_tokens")
    checked = Completion(
        prompts,
        numbers["max_tokens"],
        Sampling(
            **{option.name: numbers[option.name] for option in OPTIONS},
            seed=random.SystemRandom().randrange(2**62) if seed is None else seed,
        ),
        numbers["n"],
        _stops(body.get("stop"), codec),
        numbers["logprobs"],
        echo,
        flag(body, "stream"),
        flag(options, "include_usage"),
        session or "",
        tuple(later),
        PROMPT_LOOKUP if draft == PROMPT_LOOKUP else None,
        tuple(codec.ends) if codec else (),
        adapter=adapter,
    )
    count = sum(map(len, prompts)) * checked.n * (1 + (checked.logprobs or 0))
    if checked.scores and count > MOST_SCORES:
        raise RequestError(
            f"echo with logprobs would return {count} log-probabilities; the most are {MOST_SCORES}", "prompt"
        )
    return checked


@dataclass(frozen=True)
class NewSession:
    """A checked body of ``/v1/sessions``."""

    prompt: tuple[int, ...]
    later: tuple[int, ...]
    """the same prompt after other tokens: without first special tokens"""
    fork_from: str
    """the session to copy, or \"\""""
    to: int | None = None
    """the number of its tokens to copy, None for all"""
    adapter: str = ""
    """its state adapter, or \"\""""


def new_session(body: Any, *, model: str, codec: Any, vocab: int) -> NewSession:
    """Check a body of ``/v1/sessions``. Arguments and errors as in ``completion``."""
    known = session_fields(model=model, text=codec is not None, vocab=vocab)
    check_names(body, known, model)
    given, source, to = body.get("prompt", ""), body.get("fork_from"), number(body, "to", known["to"])
    if to is not None and source is None:
        raise RequestError(f"to={to} requires fork_from, the session to copy", "to")
    prompts = _prompts(given, codec, vocab)
    if len(prompts) != 1:
        raise RequestError(f"a session takes one prompt, not {len(prompts)}", "prompt")
    (later,) = _prompts(given, codec, vocab, more=True)
    adapter = adapter_name(body.get("adapter"), "adapter")
    if adapter and source is not None:
        raise RequestError("a copy has the adapter of its source; leave adapter out", "adapter")
    source = "" if source is None else session_id(source, "fork_from")
    return NewSession(tuple(prompts[0]), tuple(later), source, to, adapter)


Change = Callable[[Sequence[int]], Sequence[int]]
"""the tokens of a session -> its new tokens; raises RequestError for tokens that it does not have"""


def rewind(body: Any, *, model: str) -> Change:
    """Check a body of ``/v1/sessions/ID/rewind`` -> the change. Arguments and errors as in ``completion``."""
    known = rewind_fields(model=model)
    check_names(body, known, model)
    tokens, to = (number(body, name, known[name]) for name in ("tokens", "to"))
    if (tokens is None) == (to is None):
        raise RequestError("rewind takes either tokens, the number to undo, or to, the number that stays", "tokens")

    def change(old: Sequence[int]) -> Sequence[int]:
        if to is None:
            return old[: len(old) - beyond("tokens", tokens, len(old))]
        return old[: beyond("to", to, len(old))]

    return change


def edit(body: Any, *, model: str, codec: Any, vocab: int) -> Change:
    """Check a body of ``/v1/sessions/ID/edit`` -> the change. Arguments and errors as in ``completion``."""
    known = edit_fields(model=model, text=codec is not None, vocab=vocab)
    check_names(body, known, model)
    drop, keep, given = number(body, "drop", known["drop"]), number(body, "keep", known["keep"]), body.get("prompt")
    if (drop is None) == (given is None) or (drop is None and keep is not None):
        raise RequestError("edit takes either prompt, the new text, or drop and keep, numbers of tokens", "prompt")
    if drop is not None:
        first = keep or 0
        return lambda old: [*old[:first], *old[first + beyond("drop", drop, len(old) - first) :]]
    prompts = _prompts(given, codec, vocab)
    if len(prompts) != 1:
        raise RequestError(f"a session takes one prompt, not {len(prompts)}", "prompt")
    # A text, alone or in a list; tokens otherwise.
    text = given if isinstance(given, str) else next((one for one in given if isinstance(one, str)), None)
    if text is None or codec is None:
        return lambda old: prompts[0]

    def change(old: Sequence[int]) -> Sequence[int]:
        # The tokens of the text before the first difference stay: another encoding of it would be read again.
        kept = retold(codec, old, text)
        return prompts[0] if kept is None else kept

    return change


def beyond(name: str, count: int, length: int) -> int:
    """Return a number of tokens. Raises RequestError if there are fewer."""
    if count > length:
        raise RequestError(f"{name}={count} is more than the {max(0, length)} tokens that there are", name)
    return count


def session_id(value: Any, param: str | None = None) -> str:
    """Return an ID of a session. Raises RequestError for anything else."""
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise RequestError(
            f"{short(value)} is not the ID of a session, which is sess- and 32 digits from 0 to f", param
        )
    return value


def adapter_name(value: Any, param: str | None) -> str:
    """Return the name of an adapter, "" for null in a field that may be left out. Raises RequestError for other values.

    Args:
        value: The value.
        param: The field.
    """
    if value is None and param == "adapter":
        return ""
    if not isinstance(value, str) or not ADAPTER.fullmatch(value):
        raise RequestError(
            f"{short(value)} is not the name of an adapter: 1 to 64 letters, digits, '.', '_' and '-', the first not "
            "'.'",
            param,
        )
    return value


def check_names(body: Any, names: Iterable[str], model: str) -> None:
    """Raise RequestError for a body that is not a JSON object, has unknown fields or names another model."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {type(body).__name__}")
    names = list(names)
    if unknown := body.keys() - set(names):
        first = min(unknown)
        raise RequestError(f"unknown field {short(first)}; known are {', '.join(names)}", first)
    if body.get("model", model) != model:
        raise RequestError(
            f"model {short(body['model'])} is not served here; this server has {model!r}",
            "model",
            404,
            "model_not_found",
        )


def parsed(data: bytes | bytearray) -> Any:
    """Return the JSON of a body.

    Raises:
        RequestError: For text that is not UTF-8 or not JSON (NaN and Infinity are not), and objects that repeat a key.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise RequestError(f"the body has {short(twice)} more than once", twice)
    return content


def check_neutral(given: dict[str, Any], known: dict[str, dict[str, Any]]) -> None:
    """Raise RequestError for a value that would have an effect, of a field that has none here."""
    for name, schema in known.items():
        value = given.get(name)
        # In JSON, unlike in Python, 0 is not false.
        if "enum" in schema and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"]
        ):
            raise RequestError(f"{name}={short(value)} is not supported; leave it out", name)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def short(value: Any) -> str:
    """A value in an error message, cut to a bounded length and depth."""
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 3


def _stops(given: Any, codec: Any) -> list[str]:
    stop = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stop, list) or len(stop) > MOST_STOPS or not all(isinstance(one, str) and one for one in stop):
        raise RequestError(f"stop must be a string or up to {MOST_STOPS} of them, none empty", "stop")
    if longest := max((len(one) for one in stop if len(one) > MOST_STOP_CHARACTERS), default=0):
        raise RequestError(f"stop has a string of {longest} characters; the most are {MOST_STOP_CHARACTERS}", "stop")
    if stop and codec is None:
        raise RequestError("stop needs a model of text", "stop")
    for one in stop:
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"stop is not valid Unicode: {error.reason}", "stop") from error
    return stop


def _prompts(given: Any, codec: Any, vocab: int, more: bool = False) -> list[list[int]]:
    """A text, tokens, or a list of either -> lists of tokens; ``more`` for texts that follow other tokens."""
    if isinstance(given, str) or (isinstance(given, list) and all(map(_is_integer, given))):
        given = [given]
    if not isinstance(given, list) or not given:
        raise RequestError("prompt must be a text, a list of tokens, or a list of either", "prompt")
    if len(given) > MOST_PROMPTS:
        raise RequestError(f"prompt has {len(given)} prompts; the most are {MOST_PROMPTS}", "prompt")
    prompts = []
    for one in given:
        if isinstance(one, str):
            if codec is None:
                if one:
                    raise RequestError("this model has no text; pass the prompt as a list of tokens", "prompt")
                prompts.append([])
                continue
            try:
                prompts.append(codec.encode_more(one) if more else codec.encode(one))
            except UnicodeEncodeError as error:
                raise RequestError(f"prompt is not valid Unicode: {error.reason}", "prompt") from error
            except ValueError as error:
                raise RequestError(f"prompt cannot be encoded: {error}", "prompt") from error
        elif isinstance(one, list) and all(map(_is_integer, one)):
            if odd := [token for token in one if not 0 <= token < vocab]:
                raise RequestError(f"token {short(odd[0])} is not among 0 to {vocab - 1}", "prompt")
            prompts.append(list(one))
        else:
            raise RequestError("prompt must be a text, a list of tokens, or a list of either", "prompt")
    return prompts


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(body: dict[str, Any], name: str, schema: dict[str, Any]) -> Any:
    """A number of a body within the bounds of its schema, or its default."""
    value = body.get(name)
    if value is None:
        return schema["default"]
    least, most, whole = schema["minimum"], schema["maximum"], "integer" in schema["type"]
    good = _is_integer(value) or (isinstance(value, float) and not whole)
    if not good or not least <= value <= most:
        kind = "an integer" if whole else "a number"
        raise RequestError(f"{name}={short(value)} must be {kind} from {least} to {most}", name)
    return value if whole else float(value)


def flag(body: dict[str, Any], name: str) -> bool:
    """A flag of a body; null is false."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(f"{name}={short(value)} must be true or false", name)
    return bool(value)
