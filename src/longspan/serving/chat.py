"""Chats: messages become a prompt by the template of a model's folder, and its answer becomes a message."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .constraint import of_schema
from .requests import (
    FIELDS,
    MOST_TOP,
    Completion,
    RequestError,
    check_names,
    check_neutral,
    completion,
    fields,
    flag,
    number,
    short,
)

MOST_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
# What models write around their reasoning; a template that writes one of these pairs has it.
MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
ANSWER = "longspan-1f6b9c"  # stands for the last answer of a session in a rendered chat
# Fields of /v1/completions that a chat does not have.
_NOT_HERE = ("prompt", "echo", "logprobs", "best_of", "suffix")

CHAT_FIELDS: dict[str, dict[str, Any]] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": MOST_MESSAGES,
        "items": {"type": "object", "properties": {"role": {"enum": list(ROLES)}}, "required": ["role"]},
        "description": "The chat so far; with a session, what is new.",
    },
    "max_completion_tokens": {**FIELDS["max_tokens"], "default": None, "description": "The same as max_tokens."},
    "logprobs": {"type": ["boolean", "null"], "default": False, "description": "Return log-probabilities."},
    "top_logprobs": {
        "type": ["integer", "null"],
        "default": None,
        "minimum": 0,
        "maximum": MOST_TOP,
        "description": "With logprobs: of how many of the most likely tokens.",
    },
    "tools": {"type": ["array", "null"], "items": {"type": "object"}, "description": "Given to the chat template."},
    "tool_choice": {"enum": [None, "auto"]},
    "chat_template_kwargs": {
        "type": ["object", "null"],
        "description": "Variables of the chat template, such as enable_thinking.",
    },
    "add_generation_prompt": {"type": ["boolean", "null"], "default": True},
    "continue_final_message": {
        "type": ["boolean", "null"],
        "default": False,
        "description": "Continue the last message instead of answering it.",
    },
    "response_format": {
        "oneOf": [
            {"type": "null"},
            {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "properties": {"schema": {"type": "object"}},
                        "required": ["schema"],
                    },
                },
                "required": ["type", "json_schema"],
            },
        ],
        "description": "Answer in JSON: any object, or one of a JSON Schema.",
    },
}


def chat_fields(*, model: str, vocab: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    """Return each field of a body of ``/v1/chat/completions`` as JSON Schema. Arguments as in ``requests.fields``."""
    known = fields(model=model, text=True, vocab=vocab, max_tokens=max_tokens)
    known = {name: schema for name, schema in known.items() if name not in _NOT_HERE}
    most = known["max_tokens"] = {**known["max_tokens"], "minimum": 1, "default": None}
    most = {**CHAT_FIELDS["max_completion_tokens"], "minimum": 1, "maximum": most["maximum"]}
    top = {**CHAT_FIELDS["top_logprobs"], "maximum": min(MOST_TOP, vocab)}
    return {**known, **CHAT_FIELDS, "max_completion_tokens": most, "top_logprobs": top}


class Template:
    """A chat template, rendered by the sandboxed code of transformers.

    Args:
        tokenizer: A tokenizer of transformers that has a chat template.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        given = tokenizer.chat_template
        text = given if isinstance(given, str) else "".join(given.values())
        self.marks = next((marks for marks in MARKS if all(mark in text for mark in marks)), None)

    @classmethod
    def of(cls, tokenizer: Any) -> "Template | None":
        """Return the template of a tokenizer; None if it has none."""
        return cls(tokenizer) if tokenizer.chat_template else None

    @classmethod
    def of_folder(cls, folder: Path) -> "Template | None":
        """Return the template of a folder of transformers; None if it has none."""
        from transformers import PreTrainedTokenizerFast

        return cls.of(PreTrainedTokenizerFast.from_pretrained(folder))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The token that ends a turn, if the tokenizer names one."""
        end = self.tokenizer.eos_token_id
        return () if end is None else (end,)

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text of messages.

        Args:
            messages: The chat.
            options: ``tools``, ``add_generation_prompt``, ``continue_final_message`` and variables of the template.

        Raises:
            RequestError: The template refuses the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # whatever a template raises is about its messages
            text = " ".join(str(error).split())[:500]
            raise RequestError(f"the chat template refuses these messages: {text}", "messages") from error

    def render_more(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text of messages that follow an answer, beginning with what ends that answer.

        Raises:
            RequestError: The template refuses the messages, or does not write the answer before them.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, found, after = self.render([*before, *messages], **options).rpartition(ANSWER)
        if not found:
            raise RequestError(
                "this chat template cannot continue a session; send all messages, without one", "session"
            )
        return after


@dataclass(frozen=True)
class Chat:
    """A checked body of ``/v1/chat/completions``."""

    completion: Completion
    marks: tuple[str, str] | None
    """what encloses the reasoning of the model"""
    opened: bool
    """whether the prompt ends with the first of them"""


def chat(body: Any, *, template: Template, model: str, codec: Any, vocab: int, max_tokens: int) -> Chat:
    """Check a body of ``/v1/chat/completions``, and render its messages.

    Args:
        body: The parsed JSON.
        template: The chat template.
        model: The name of the served model.
        codec: Text to tokens.
        vocab: Number of tokens.
        max_tokens: The largest ``max_tokens``.

    Raises:
        RequestError: For an unknown field, values of another type or out of range, and messages that the template
            refuses.
    """
    known = chat_fields(model=model, vocab=vocab, max_tokens=max_tokens)
    check_names(body, known, model)
    check_neutral(body, known)
    messages, session = _messages(body.get("messages")), body.get("session") is not None
    extends, prompts = flag(body, "continue_final_message"), body.get("add_generation_prompt")
    if not isinstance(prompts, bool | None):
        raise RequestError(f"add_generation_prompt={short(prompts)} must be true or false", "add_generation_prompt")
    if extends and (session or prompts or messages[-1]["role"] != "assistant"):
        raise RequestError(
            "continue_final_message takes a last message of the assistant, no session, and no add_generation_prompt",
            "continue_final_message",
        )
    options: dict[str, Any] = {"add_generation_prompt": prompts is not False and not extends}
    options["continue_final_message"] = extends
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if not isinstance(given := body.get(name), kind | None):
            raise RequestError(f"{name}={short(given)} must be {'a list' if kind is list else 'an object'}", name)
    if tools := body.get("tools"):
        options["tools"] = tools
    more = body.get("chat_template_kwargs") or {}
    if taken := sorted(more.keys() & {*options, "messages", "conversation", "chat_template", "tokenize", "tools"}):
        raise RequestError(f"chat_template_kwargs has {short(taken[0])}, which the server sets itself", "messages")
    options |= more
    text = template.render(messages, **options)
    tokens = _encoded(codec, text)
    passed = {name: body[name] for name in body if name in FIELDS and name not in (*_NOT_HERE, "max_tokens")}
    most = _most(body)
    passed |= {
        "prompt": tokens,
        "max_tokens": max_tokens if most is None else most,
        "logprobs": _logprobs(body, known["top_logprobs"]),
    }
    checked = completion(passed, model=model, codec=codec, vocab=vocab, max_tokens=max_tokens)
    marks = template.marks
    opened = marks is not None and text.rstrip().endswith(marks[0])
    ends = (*codec.ends, *(set(template.ends) - set(codec.ends)))
    checked = replace(checked, ends=ends, fits=most is None)
    if (schema := _schema(body.get("response_format"))) is not None:
        if extends:
            raise RequestError("response_format cannot be combined with continue_final_message", "response_format")
        after = marks[1] if marks and opened else ""
        try:
            limit = of_schema(schema, codec, vocab=vocab, ends=ends, after=after)
        except (ImportError, ValueError) as error:
            raise RequestError(f"response_format is refused: {error}", "response_format") from error
        checked = replace(checked, constraint=limit)
    if session:
        after = _encoded(codec, template.render_more(messages, **options))
        checked = replace(checked, later=tuple(after), ends_turns=True)
    return Chat(checked, marks, opened)


def _schema(given: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a ``response_format``; None for text."""
    kind = given.get("type") if isinstance(given, dict) else given
    if kind in (None, "text") and not (isinstance(given, dict) and kind is None):
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = given.get("json_schema") if isinstance(given, dict) and kind == "json_schema" else None
    if isinstance(named, dict) and isinstance(schema := named.get("schema"), dict):
        return schema
    raise RequestError(
        f"response_format={short(given)} must have the type text, json_object, or json_schema with json_schema.schema, "
        "an object",
        "response_format",
    )


def _encoded(codec: Any, text: str) -> list[int]:
    try:
        return codec.encode_more(text)
    except ValueError as error:  # half of a surrogate pair is one too
        raise RequestError(f"the messages cannot be encoded: {error}", "messages") from error


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages, with their texts as strings."""
    if not isinstance(given, list) or not given or len(given) > MOST_MESSAGES:
        raise RequestError(f"messages must be a list of 1 to {MOST_MESSAGES} messages", "messages")
    found = []
    for index, one in enumerate(given):
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            raise RequestError(f"message {index} must be an object with a role, one of {', '.join(ROLES)}", "messages")
        content = one.get("content")
        if isinstance(content, list):
            if not all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
            ):
                raise RequestError(
                    f"message {index} has parts that are not text, which this model does not read", "messages"
                )
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) and not (content is None and one["role"] == "assistant"):
            raise RequestError(f"message {index} must have a content, a text or a list of texts", "messages")
        # Templates know the older name of the role.
        role = "system" if one["role"] == "developer" else one["role"]
        found.append({**one, "role": role, "content": content})
    return found


def _most(body: dict[str, Any]) -> int | None:
    """Return the most tokens to draw; None for all that fit."""
    named = {name: body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    if len(named) == 2:
        raise RequestError("pass either max_tokens or max_completion_tokens", "max_tokens")
    for name, value in named.items():
        if value == 0:
            raise RequestError(f"{name}=0 must be at least 1", name)
        return value
    return None


def _logprobs(body: dict[str, Any], schema: dict[str, Any]) -> int | None:
    """Return of how many likely tokens the log-probabilities are returned; None for none at all."""
    top = number(body, "top_logprobs", schema)
    if not flag(body, "logprobs"):
        if top is not None:
            raise RequestError("top_logprobs requires logprobs=true", "top_logprobs")
        return None
    return 0 if top is None else top
