"""The response to one chat: messages, with the reasoning of the model apart from its answer."""

from collections.abc import Sequence
from typing import Any

from .chat import Chat
from .reply import Choice, Reply, Service
from .requests import Completion
from .turns import Turn


class Thoughts:
    """Splits a text that comes in pieces into the reasoning of a model and its answer.

    Args:
        marks: What encloses the reasoning; None for a model that writes none.
        opened: Whether the first of them has been written.
    """

    def __init__(self, marks: tuple[str, str] | None, opened: bool):
        self.marks = marks or ("", "")
        self._part = "answer" if marks is None else "reasoning" if opened else "start"
        self._held, self._begun = "", False

    def add(self, text: str, end: bool = False) -> tuple[str, str]:
        """Return what of the reasoning, and of the answer, a piece adds; ``end``: it is the last one."""
        first, last = self.marks
        self._held, reasoning = self._held + text, ""
        if self._part == "start":
            stripped = self._held.lstrip()
            if stripped.startswith(first):
                self._part, self._held = "reasoning", stripped[len(first) :]
            elif first.startswith(stripped) and not end:
                return "", ""
            else:
                self._part, self._begun = "answer", True
        if self._part == "reasoning":
            reasoning, found, rest = self._held.partition(last)
            if found:
                self._part, self._held = "answer", rest
            else:
                kept = 0 if end else max(n for n in range(len(last)) if reasoning.endswith(last[:n]))
                # Spaces before the mark, and around the reasoning, are no part of it.
                shown = reasoning[: len(reasoning) - kept].rstrip()
                self._held = reasoning[len(shown) :]
                reasoning = shown
            reasoning = reasoning.rstrip() if found or end else reasoning
            if not self._begun:
                reasoning = reasoning.lstrip()
            self._begun = not found and (self._begun or bool(reasoning))
            if not found:
                return reasoning, ""
        answer, self._held = self._held, ""
        if not self._begun and self.marks[0]:
            answer = answer.lstrip()
        self._begun = self._begun or bool(answer)
        return reasoning, answer


class ChatReply(Reply):
    """The response to one chat, with its completion; see ``Reply``."""

    kind, event_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, chat: Chat, service: Service, body: Completion, turn: Turn | None, began: float):
        super().__init__(service, body, turn, began)
        self._head["id"] = f"chat{self._head['id']}"
        self.chat = chat
        self._thoughts: dict[int, Thoughts] = {}

    def _shown(self, choice: Choice, piece: dict[str, Any], event: bool) -> dict[str, Any] | None:
        new = choice.index not in self._thoughts
        thoughts = self._thoughts.setdefault(choice.index, Thoughts(self.chat.marks, self.chat.opened))
        reasoning, answer = thoughts.add(piece["text"], piece["finish_reason"] is not None)
        message: dict[str, Any] = {"role": "assistant"} if new else {}
        if reasoning or (not event and self.chat.marks):
            message["reasoning_content"] = reasoning
        if answer or not event or new:
            message["content"] = answer
        logprobs = piece["logprobs"] and {"content": self._contents(piece["logprobs"])}
        if event and not (message or logprobs or piece["finish_reason"]):
            return None
        name = "delta" if event else "message"
        return {"index": choice.index, name: message, "logprobs": logprobs, "finish_reason": piece["finish_reason"]}

    @staticmethod
    def _contents(given: dict[str, Any]) -> list[dict[str, Any]]:
        tops: Sequence[Any] = given["top_logprobs"] or [None] * len(given["tokens"])

        def one(name: str, value: float) -> dict[str, Any]:
            return {"token": name, "logprob": value, "bytes": _bytes_of(name)}

        return [
            {**one(name, value), "top_logprobs": [one(*pair) for pair in (top or {}).items()]}
            for name, value, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True)
        ]


def _bytes_of(name: str) -> list[int]:
    """Return the bytes of a token from its text, which may be that of ``bytes:\\xe6``."""
    if name.startswith("bytes:\\x"):
        return [int(part, 16) for part in name.removeprefix("bytes:\\x").split("\\x")]
    return list(name.encode("utf-8", "replace"))
