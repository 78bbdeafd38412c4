"""The description of the HTTP interface as OpenAPI 3.1, from the tables that requests are checked with."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from .chat import chat_fields
from .requests import edit_fields, fields, rewind_fields, session_fields

JSON = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

STATUSES = {
    "400": "The request is wrong; the message names the field.",
    "401": "The key is missing or wrong.",
    "403": "The host is not served here, a web page of this origin may not use the server, or it takes no states.",
    "404": "Not served here.",
    "405": "The path has other methods.",
    "408": "The body did not arrive in time.",
    "409": "The session has a turn that is not finished, or belongs to another model or adapter.",
    "413": "The body is too large.",
    "411": "The length of the file is missing.",
    "415": "The body has another type.",
    "429": "All slots and places in the queue are taken; try again later.",
    "500": "The model failed.",
    "503": "The server is shutting down, or the model's thread has ended.",
    "507": "The sessions would exceed their limit; delete some.",
}


def document(server: Any, free: tuple[str, ...]) -> JSON:
    """Return the OpenAPI document of a server.

    Args:
        server: A ``server.Server``. Other routes add their part by an attribute ``openapi`` of their endpoint: the
            operations of their path, such as ``{"get": operation("The sessions", {"200": ...})}``.
        free: Paths that need no key.
    """
    completion = fields(
        model=server.name, text=server.codec is not None, vocab=server.pool.vocab, max_tokens=server.limits.tokens
    )
    kind = "Text" if server.codec is not None else "Token"
    facts: JSON = {"model": server.name, "text": server.codec is not None, "vocab": server.pool.vocab}
    bodies = {
        "Completion": completion,
        "NewSession": session_fields(**facts),
        "Rewind": rewind_fields(model=server.name),
        "Edit": edit_fields(**facts),
        "NewAdapter": {"model": completion["model"], "name": {**completion["adapter"], "type": "string"}},
    }
    paths: dict[str, JSON] = {
        "/v1/completions": {"post": _posted("Continue prompts.", f"{kind}Completion", f"{kind}Event", "Completion")},
        "/v1/models": {"get": operation("List the model.", {"200": content(ref("Models"))}, "401")},
        "/healthz": {"get": operation("Whether the process answers.", {"200": content(ref("Status"))})},
        "/readyz": {
            "get": operation(
                "Whether new requests are accepted.",
                {"200": content(ref("Status")), "503": content(ref("Status"), "not ready")},
            )
        },
        "/metrics": {
            "get": operation(
                "Metrics for Prometheus.",
                {"200": {"description": "metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}},
                "401",
            )
        },
        "/openapi.json": {
            "get": operation("This description.", {"200": content({"type": "object"})}, "401"),
        },
    }
    if server.template is not None:
        bodies["Chat"] = chat_fields(model=server.name, vocab=server.pool.vocab, max_tokens=server.limits.tokens)
        paths["/v1/chat/completions"] = {"post": _posted("Answer a chat.", "ChatCompletion", "ChatEvent", "Chat")}
    for route in server.routes:
        if added := getattr(route.endpoint, "openapi", None):
            paths.setdefault(route.path, {}).update(added)
    found: JSON = {
        "openapi": "3.1.0",
        "info": {"title": "longspan serve", "version": version("longspan")},
        "paths": paths,
        "components": {"schemas": {**_SCHEMAS, **{name: _body(one) for name, one in bodies.items()}}},
    }
    if server.access.api_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        for path in free:
            for one in paths.get(path, {}).values():
                one["security"] = []
    return found


def described(method: str, one: JSON) -> Callable[[F], F]:
    """Give an endpoint its part of the document: the operation of a method, such as ``get``."""

    def described(endpoint: F) -> F:
        setattr(endpoint, "openapi", {method: one})  # noqa: B010 (functions have no such attribute for a type checker)
        return endpoint

    return described


def ref(name: str) -> JSON:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def content(schema: JSON, description: str = "ok") -> JSON:
    """Return a response of JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


FILE: JSON = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
"""The content of a file."""


def operation(
    summary: str,
    responses: JSON,
    *statuses: str,
    body: JSON | None = None,
    names: dict[str, JSON] | None = None,
    file: bool = False,
) -> JSON:
    """Return an operation of a path.

    Args:
        summary: What it does.
        responses: Its responses by status.
        statuses: Those of ``STATUSES`` that it may return, besides 403.
        body: The schema of its body, None for none.
        names: The schemas of the names in its path.
        file: Whether its body is a file.
    """
    found: JSON = {
        "summary": summary,
        "responses": {**responses, **{name: content(ref("Error"), STATUSES[name]) for name in ("403", *statuses)}},
    }
    if names:
        found["parameters"] = [{"name": n, "in": "path", "required": True, "schema": s} for n, s in names.items()]
    if body is not None or file:
        found["requestBody"] = {"required": True, "content": FILE if file else {"application/json": {"schema": body}}}
    return found


def _posted(summary: str, answer: str, event: str, body: str) -> JSON:
    """The operation that draws tokens: the schemas of its answer, of an event of its stream, and of its body."""
    whole = content(ref(answer), "the completions, or their events")
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(event)}
    whole["content"]["text/event-stream"] = {
        "schema": _object({"data": {"anyOf": [{"const": "[DONE]"}, data]}}),
    }
    statuses = ("400", "401", "404", "408", "409", "413", "415", "429", "500", "503", "507")
    return operation(summary, {"200": whole}, *statuses, body=ref(body))


def _body(properties: dict[str, JSON]) -> JSON:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _object(required: dict[str, JSON], **options: JSON) -> JSON:
    return {"type": "object", "properties": {**required, **options}, "required": list(required)}


def _response(choice: JSON, usage: bool = True, kind: str = "text_completion") -> JSON:
    required: dict[str, JSON] = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": choice},
    }
    return _object({**required, "usage": ref("Usage")}) if usage else _object(required, usage=ref("Usage"))


def _event(choice: dict[str, JSON], kind: str = "text_completion") -> JSON:
    """An event: a piece of one choice, the usage, or an error."""
    piece = _object({**choice, "finish_reason": {"enum": [None, *choice["finish_reason"]["enum"]]}})
    return {"anyOf": [_response(piece, usage=False, kind=kind), ref("Error")]}


_COUNT: JSON = {"type": "integer", "minimum": 0}
_LOGPROBS: JSON = {
    "oneOf": [
        {"type": "null"},
        _object(
            {
                "tokens": {"type": ["array", "null"], "items": {"type": "string"}},
                "token_logprobs": {"type": ["array", "null"], "items": {"type": ["number", "null"]}},
                "top_logprobs": {"type": ["array", "null"], "items": {"type": ["object", "null"]}},
                "text_offset": {"type": ["array", "null"], "items": _COUNT},
            }
        ),
    ]
}
_CHOICE: dict[str, JSON] = {
    "index": _COUNT,
    "text": {"type": "string"},
    "finish_reason": {"enum": ["stop", "length", "cancelled"]},
    "logprobs": _LOGPROBS,
}
_TOKENS: dict[str, JSON] = {**_CHOICE, "tokens": {"type": "array", "items": _COUNT}}
_TEXTS: dict[str, JSON] = {"role": {"const": "assistant"}, "reasoning_content": {"type": "string"}}
_TOKEN: dict[str, JSON] = {
    "token": {"type": "string"},
    "logprob": {"type": "number"},
    "bytes": {"type": "array", "items": _COUNT},
}
_ANSWER: dict[str, JSON] = {
    "index": _COUNT,
    "finish_reason": _CHOICE["finish_reason"],
    "logprobs": {
        "oneOf": [
            {"type": "null"},
            _object(
                {
                    "content": {
                        "type": "array",
                        "items": _object({**_TOKEN, "top_logprobs": {"type": "array", "items": _object(_TOKEN)}}),
                    }
                }
            ),
        ]
    },
}
_ADAPTER: dict[str, JSON] = {
    "id": {"type": "string"},
    "object": {"const": "adapter"},
    "sha256": {"type": "string"},
    "bytes": _COUNT,
}
_SESSION: dict[str, JSON] = {
    "id": {"type": "string"},
    "object": {"const": "session"},
    "created": _COUNT,
    "model": {"type": "string"},
    "length": _COUNT,
    "bytes": _COUNT,
    "fork_from": {"type": ["string", "null"]},
    "adapter": {"type": ["string", "null"]},
}
_SCHEMAS: dict[str, JSON] = {
    "Adapter": _object(_ADAPTER),
    "AdapterDeleted": _object(
        {"id": {"type": "string"}, "object": {"const": "adapter.deleted"}, "deleted": {"const": True}}
    ),
    "Adapters": _object({"object": {"const": "list"}, "data": {"type": "array", "items": ref("Adapter")}}),
    "ChatCompletion": _response(
        _object({**_ANSWER, "message": _object({"content": {"type": "string"}}, **_TEXTS)}), kind="chat.completion"
    ),
    "ChatEvent": _event(
        {**_ANSWER, "delta": _object({}, **_TEXTS, content={"type": "string"})}, kind="chat.completion.chunk"
    ),
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string"},
                    "type": {"enum": ["invalid_request_error", "server_error"]},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            )
        }
    ),
    "Models": _object(
        {
            "object": {"const": "list"},
            "data": {
                "type": "array",
                "items": _object({"id": {"type": "string"}, "object": {"const": "model"}, "created": _COUNT}),
            },
        }
    ),
    "Session": _object(_SESSION),
    "SessionContent": _object(
        {**_SESSION, "tokens": {"type": "array", "items": _COUNT}, "text": {"type": ["string", "null"]}}
    ),
    "SessionDeleted": _object(
        {"id": {"type": "string"}, "object": {"const": "session.deleted"}, "deleted": {"const": True}}
    ),
    "Sessions": _object({"object": {"const": "list"}, "data": {"type": "array", "items": ref("Session")}}),
    "Status": _object({"status": {"type": "string"}}),
    "TextCompletion": _response(_object(_CHOICE)),
    "TextEvent": _event(_CHOICE),
    "TokenCompletion": _response(_object(_TOKENS)),
    "TokenEvent": _event(_TOKENS),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object(
                {"accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT}
            ),
            "draft_tokens": _COUNT,
            "accepted_draft_tokens": _COUNT,
        }
    ),
}
