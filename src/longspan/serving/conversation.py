"""A chat with one model in this process: turns that can be undone, branched and saved."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from .. import states
from ..adapt import FrozenStates
from ..models.sampling import Sampling
from .chat import Template
from .pool import Pool
from .requests import following
from .sessions import Entry, Session, continued, facts_of, model_digest, open_session, save_session
from .text import decoded


class Conversation:
    """Turns of a user and a model. With a chat template each text is a message; without one the text is continued.

    Args:
        pool: The pool of the model, with a free slot.
        codec: Text to tokens and back, such as ``text.Bytes``.
        system: A first message of the system; requires a template.
        max_tokens: The most tokens of an answer.
        sampling: How tokens are drawn; each turn adds 1 to the seed.
        draft: How tokens are drafted, None for not at all.
        adapter: The state adapter from which the chat starts.

    Raises:
        ValueError: For a system message without a template, and drafts that the model does not support.
    """

    def __init__(
        self,
        pool: Pool,
        codec: Any,
        *,
        system: str = "",
        max_tokens: int = 512,
        sampling: Sampling | None = None,
        draft: Literal["prompt-lookup"] | None = None,
        adapter: FrozenStates | None = None,
    ):
        self.pool, self.codec, self.system, self.max_tokens = pool, codec, system, max_tokens
        self.draft: Literal["prompt-lookup"] | None = draft
        self.template: Template | None = getattr(codec, "template", None)
        self.sampling, self.adapter = sampling or Sampling(), adapter
        self.reset()
        if system and self.template is None:
            raise ValueError("a system message requires a model with a chat template")
        if draft and (reason := pool.why_not_draft()):
            raise ValueError(reason)

    @property
    def text(self) -> str:
        """The text so far, without special tokens."""
        return decoded(self.codec, self.session.tokens)

    def ask(self, text: str) -> Iterator[str]:
        """Yield the pieces of the answer to a text. A caller that stops early keeps what was drawn.

        Raises:
            ValueError: The text cannot be encoded, or does not fit into the state.
            RequestError: The template refuses it.
            RuntimeError: The model fails; the turn is then undone.
        """
        before, prompt = self.session, self._prompt(text)
        ends = (*self.codec.ends, *(self.template.ends if self.template else ()))
        unread = (*before.unread, *prompt)
        room = self.pool.room(len(before.tokens) + len(prompt))
        (stream,) = self.pool.submit(
            unread,
            state=before.state,
            history=before.history,
            adapter=self.adapter,
            keep_state=True,
            max_new_tokens=int(max(1, min(self.max_tokens, room))),
            sampling=replace(self.sampling, seed=self.sampling.seed + len(self.turns)),
            stop=ends,
            draft=self.draft,
        )
        decoding, given = self.codec.decoder(), 0
        try:
            while stream.finished is None or given < len(stream.tokens):
                if given == len(stream.tokens):
                    self.pool.step()
                    continue
                given += 1
                if piece := decoding.add(stream.tokens[given - 1]):
                    yield piece
            if rest := decoding.end():
                yield rest
        finally:
            if stream.finished is None:
                self.pool.cancel(stream)
                self.pool.run()
            if stream.finished != "error":
                drawn = tuple(stream.tokens[:given])
                # The state of a stream that was cancelled has read too far; the next turn reads these tokens.
                self.turns.append(before)
                whole = stream.state if given == len(stream.tokens) else None
                self.session = continued(before, (*prompt, *drawn), whole)
        if stream.finished == "error":
            raise RuntimeError(f"the model failed: {stream.error}")

    def _prompt(self, text: str) -> tuple[int, ...]:
        tokens, message = self.session.tokens, {"role": "user", "content": text}
        if self.template is None:
            return tuple(self.codec.encode_more(text) if tokens else self.codec.encode(text))
        if not tokens:
            first = [{"role": "system", "content": self.system}] if self.system else []
            return tuple(self.codec.encode_more(self.template.render([*first, message], add_generation_prompt=True)))
        more = self.codec.encode_more(self.template.render_more([message], add_generation_prompt=True))
        return tuple(following(tokens, tuple(more)))

    def undo(self) -> bool:
        """Go back to before the last turn -> whether there was one."""
        if self.turns:
            self.session = self.turns.pop()
            return True
        return False

    def reset(self) -> None:
        """Begin anew."""
        self.session, self.turns = Session(adapter=self.adapter.key if self.adapter else ""), list[Session]()

    def save(self, path: Path) -> None:
        """Write the session to a file. In the folder of a server's sessions, as ID.safetensors, it is one of these.

        Raises:
            ValueError: The file cannot be written.
        """
        named = path.name.removesuffix(".safetensors")
        name = named if named.startswith("sess-") else f"sess-{uuid.uuid4().hex}"
        size = 0 if self.session.state is None else states.nbytes(self.session.state)
        entry = Entry(name, int(time.time()), len(self.session.tokens), size)
        save_session(self.session, path, self.pool.model, facts_of(entry, model_digest(self.pool.model)))

    def load(self, path: Path) -> None:
        """Go on with a session from a file, such as one of a server.

        Raises:
            ValueError: The file is damaged, belongs to another model, or began from another state adapter.
        """
        session = open_session(path, self.pool.model, self.pool.vocab, model_digest(self.pool.model))
        # The name of a file may differ from that in a server.
        name, _, began = session.adapter.partition("@")
        if began != (self.adapter.sha256 if self.adapter else ""):
            own = self.adapter.key if self.adapter else "none"
            how = f"of adapter {name!r} with sha256 {began}" if began else "without a state adapter"
            raise ValueError(f"{str(path)!r} is a session {how}, and this chat has {own}")
        self.turns.append(self.session)
        self.session = session
