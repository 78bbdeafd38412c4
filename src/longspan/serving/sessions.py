"""Sessions: texts that several requests continue, each with the state after its tokens, in memory or in a folder."""

import contextlib
import dataclasses
import hashlib
import json
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import states
from .._utils import atomic_io, locks
from ..compat.servable import ForeignModel, Servable
from ..models.decoder import Decoder, DecoderState
from ..states.utils import grow_capacity
from .pool import Pool

ID = re.compile(r"sess-[0-9a-f]{32}")
END = ".safetensors"
OVERHEAD = 4096  # bytes that are counted for each session in addition, for its file and its entry


class SessionError(ValueError):
    """A session that cannot be used, with a ``code``: not_found, busy, other_model, damaged, unwritable, full,
    refused or other_adapter.
    """

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Session:
    """The tokens of a text, and a state that has read all of them but the last ``pending``.

    There are pending tokens wherever there are tokens, since the outputs of the last one are not kept.
    """

    tokens: tuple[int, ...] = ()
    pending: int = 0
    state: DecoderState | None = None
    """one row, which has also read the start token of a model that has one; None before that"""
    adapter: str = ""
    """the state adapter from which it began, as NAME@SHA256; "" for none"""

    @property
    def unread(self) -> tuple[int, ...]:
        """The pending tokens."""
        return self.tokens[len(self.tokens) - self.pending :]

    @property
    def history(self) -> tuple[int, ...] | None:
        """The tokens that the state has read; None without a state."""
        return None if self.state is None else self.tokens[: len(self.tokens) - self.pending]


@dataclass(frozen=True)
class Entry:
    """What the list of sessions has of one."""

    id: str
    created: int
    length: int
    nbytes: int
    parent: str = ""
    """the session that this one was forked from"""
    model: str = ""
    """the digest of its model; "" for the one of the pool"""
    damage: str = ""
    """why its file cannot be read"""
    adapter: str = ""
    """its state adapter, as NAME@SHA256; "" for none"""


class _Saved(NamedTuple):
    """A session as a state of one row, for ``states.save``."""

    tokens: Tensor  # (1,N) int64
    pending: Tensor  # (1,) int64
    state: DecoderState


class Sessions:
    """The sessions of one model.

    With a folder, each session is a file that is replaced as a whole: it holds the session before a turn or after it,
    also if the process is killed. Methods may be called from any thread: a session that is read while a turn is saved
    is that before it or after it. Two changes of one session at a time are prevented by ``lock``.

    Args:
        pool: The pool that runs the model.
        folder: Where to save the sessions; it is made if it does not exist. None keeps them in memory.
        limit: Bytes of all states and tokens together. Sessions beyond it are refused; none is dropped.

    Raises:
        ValueError: For a negative limit, a folder that cannot be made or that another process uses, and a folder for
            a model whose weights are not known.
    """

    def __init__(self, pool: Pool, folder: Path | None = None, *, limit: int = 1 << 30):
        if limit < 0:
            raise ValueError(f"limit={limit} must be a number of bytes >= 0")
        self.model, self.folder, self.limit, self.vocab = pool.model, folder, limit, pool.vocab
        self._row = states.nbytes(pool.state) // pool.slots
        self._entries: dict[str, Entry] = {}
        self._kept: dict[str, Session] = {}  # without a folder
        self._reserved = 0
        self._locked: set[str] = set()
        self._guard = threading.RLock()
        self._end = contextlib.ExitStack()
        self._digest = ""
        if folder is not None:
            _described(self.model)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._end.enter_context(locks.exclusive_lock(folder / ".lock", f"the sessions in {folder}"))
            except OSError as error:
                raise ValueError(f"cannot keep sessions in {folder}: {error.strerror or error}") from error
            self._look(folder)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def digest(self) -> str:
        """The sha256 of the model's config and weights."""
        if not self._digest:
            self._digest = model_digest(self.model)
        return self._digest

    @property
    def nbytes(self) -> int:
        """Bytes of all sessions."""
        with self._guard:
            return sum(entry.nbytes for entry in self._entries.values())

    def close(self) -> None:
        """Let another process use the folder."""
        self._end.close()

    def entries(self) -> list[Entry]:
        """Return the sessions of this model, the oldest first."""
        with self._guard:
            found = [entry for entry in self._entries.values() if not entry.model and not entry.damage]
        return sorted(found, key=lambda entry: (entry.created, entry.id))

    def entry(self, name: str) -> Entry:
        """Return what is known of a session.

        Raises:
            SessionError: For an unknown ID, a session of another model, and a damaged file.
        """
        found = self._known(name)
        if found.damage:
            raise SessionError(f"session {name!r} cannot be read: {found.damage}", "damaged")
        if found.model:
            raise SessionError(
                f"session {name!r} belongs to the model with sha256 {found.model}, but this server has the model with "
                f"sha256 {self.digest}; serve that model, or delete the session",
                "other_model",
            )
        return found

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Prevent other changes of a session.

        Raises:
            SessionError: If another turn has the lock, or the session does not exist.
        """
        with self._guard:
            self._known(name)
            if name in self._locked:
                raise SessionError(f"session {name!r} has a turn that is not finished; try again after it", "busy")
            self._locked.add(name)
        try:
            yield
        finally:
            with self._guard:
                self._locked.discard(name)

    @contextlib.contextmanager
    def room(self, length: int, name: str = "") -> Iterator[None]:
        """Reserve memory for a session (a new one if ``name`` is "") that grows to ``length`` tokens.

        Raises:
            SessionError: If the limit does not allow it.
        """
        with self._guard:
            old = self._known(name).nbytes if name else 0
            more = max(0, OVERHEAD + self._row + 8 * length - old)
        with self.reserve(more, f"{length} tokens in this session bring"):
            yield

    @contextlib.contextmanager
    def reserve(self, more: int, what: str = "this file brings") -> Iterator[None]:
        """Reserve memory, for ``what`` in an error.

        Raises:
            SessionError: If the limit does not allow it.
        """
        with self._guard:
            if (needed := self.nbytes + self._reserved + more) > self.limit:
                raise SessionError(
                    f"{what} all sessions to {needed:,} bytes, but the limit is {self.limit:,}; delete some sessions",
                    "full",
                )
            self._reserved += more
        try:
            yield
        finally:
            with self._guard:
                self._reserved -= more

    def read(self, name: str) -> Session:
        """Return a session; its state must not be changed in place.

        Raises:
            SessionError: As ``entry`` does.
        """
        self.entry(name)
        if self.folder is None:
            with self._guard:
                self._known(name)
                return self._kept[name]
        path = self._path(name)
        try:
            _check_id(path, states.read_metadata(path))
            return load_session(path, self.model, self.vocab)
        except ValueError as error:
            # A turn replaces a file and never removes it, so a session without a file is deleted.
            if not path.exists():
                raise _unknown(name) from error
            raise SessionError(f"session {name!r} cannot be read: {error}", "damaged") from error

    def create(self, session: Session, parent: str = "") -> Entry:
        """Keep a new session.

        Args:
            session: Its content.
            parent: The ID of the session that it was forked from.

        Raises:
            SessionError: If its file cannot be written.
        """
        entry = Entry(f"sess-{uuid.uuid4().hex}", int(time.time()), 0, 0, parent)
        return self._put(entry, session)

    def replace(self, name: str, session: Session) -> Entry:
        """Replace a session as a whole. Arguments and errors as in ``create`` and ``entry``."""
        return self._put(self.entry(name), session)

    def packed(self, name: str) -> bytes:
        """Return a session as the content of a file. Raises SessionError as ``read`` does."""
        session = self.read(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}{END}"
            save_session(session, path, self.model, facts_of(self.measured(self.entry(name), session), self.digest))
            return path.read_bytes()

    def unpacked(self, content: bytes) -> Session:
        """Return the session in the content of a file.

        Raises:
            SessionError: The file is damaged, or that of another model.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"session{END}"
            path.write_bytes(content)
            try:
                return open_session(path, self.model, self.vocab, self.digest)
            except ValueError as error:
                raise SessionError(str(error).replace(str(path), "the file"), "refused") from error

    def measured(self, entry: Entry, session: Session) -> Entry:
        """Return an entry with the length and the bytes of this content."""
        length, size = len(session.tokens), 0
        if session.state is not None:
            size = states.nbytes(session.state)
        elif self.folder is not None:
            size = states.nbytes(self.model.init_state(1, 0))
        nbytes = OVERHEAD + 8 * length + size
        return dataclasses.replace(entry, length=length, nbytes=nbytes, adapter=session.adapter)

    def remove(self, name: str) -> None:
        """Delete a session, also a damaged one or one of another model.

        Raises:
            SessionError: If there is none, or its file cannot be deleted.
        """
        self._known(name)
        if self.folder is not None:
            try:
                self._path(name).unlink(missing_ok=True)
                atomic_io.sync(self.folder)
            except OSError as error:
                raise SessionError(
                    f"cannot delete session {name!r}: {error.strerror or error}", "unwritable"
                ) from error
        with self._guard:
            self._entries.pop(name, None)
            self._kept.pop(name, None)

    def _known(self, name: str) -> Entry:
        with self._guard:
            if (found := self._entries.get(name)) is None:
                raise _unknown(name)
            return found

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        assert ID.fullmatch(name)
        return self.folder / f"{name}{END}"

    def _put(self, entry: Entry, session: Session) -> Entry:
        entry = self.measured(entry, session)
        if self.folder is not None:
            try:
                save_session(session, self._path(entry.id), self.model, facts_of(entry, self.digest))
            except ValueError as error:
                raise SessionError(str(error), "unwritable") from error
        with self._guard:
            self._entries[entry.id] = entry
            if self.folder is None:
                self._kept[entry.id] = session
        return entry

    def _look(self, folder: Path) -> None:
        """Find the sessions that earlier processes have saved, and remove what killed ones left half written."""
        for path in sorted(folder.iterdir()):
            # The temporary name of a file is .NAME.TOKEN.tmp.
            if path.suffix == ".tmp" and ID.fullmatch(path.name[1 : 1 + len("sess-") + 32]):
                atomic_io.tidy(path.with_name(path.name[1:].rsplit(".", 2)[0]))
            name = path.name.removesuffix(END)
            if path.name != f"{name}{END}" or not ID.fullmatch(name):
                continue
            try:
                facts = states.read_metadata(path)
                _check_id(path, facts)
                model = "" if facts["model"] == self.digest else facts["model"]
                created, length, size = (int(facts[key]) for key in ("created", "length", "bytes"))
                entry = Entry(name, created, length, size, facts["parent"], model, adapter=facts.get("adapter", ""))
            except (ValueError, KeyError) as error:
                reason = str(error) if isinstance(error, ValueError) else f"{path} has no entry {error}"
                entry = Entry(name, 0, 0, path.lstat().st_size, damage=reason)
            self._entries[name] = entry


def facts_of(entry: Entry, digest: str) -> dict[str, str]:
    """Return what the file of a session says of it, for a model with this ``model_digest``."""
    numbers = {"created": str(entry.created), "length": str(entry.length), "bytes": str(entry.nbytes)}
    return {"id": entry.id, "model": digest, **numbers, "parent": entry.parent}


def save_session(session: Session, path: Path, model: Servable, facts: dict[str, str]) -> None:
    """Write a session to a file, with facts about it. Raises ValueError if the file cannot be written."""
    tokens = torch.tensor([session.tokens], dtype=torch.int64).reshape(1, -1)
    with torch.no_grad():
        state = model.init_state(1, 0) if session.state is None else session.state
    facts = {**facts, "adapter": session.adapter} if session.adapter else facts
    states.save(_Saved(tokens, torch.tensor([session.pending]), state), path, facts)


def load_session(path: Path, model: Servable, vocab: int) -> Session:
    """Read a session of a model from a file.

    Raises:
        ValueError: The file is damaged, or does not fit the model.
    """
    with torch.no_grad():
        like = _Saved(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), model.init_state(1, 0))
        found = states.load(path, like)
    tokens, pending, position = found.tokens[0].tolist(), int(found.pending), int(found.state.position)
    # The start token counts in the position, and the tokens exclude it.
    expected = (model.start is not None) + len(tokens) - pending
    fits = position == expected if position else pending == len(tokens)
    if not fits or any(not 0 <= token < vocab for token in tokens):
        raise ValueError(
            f"its state has read {position} tokens, which does not fit its {len(tokens)} tokens with {pending} pending"
        )
    adapter = states.read_metadata(path).get("adapter", "")
    return Session(tuple(tokens), pending, found.state if position else None, adapter)


def open_session(path: Path, model: Servable, vocab: int, digest: str) -> Session:
    """Read a session from a file that anyone may have written.

    Args:
        path: The file.
        model: The model.
        vocab: The number of its tokens.
        digest: Its ``model_digest``.

    Raises:
        ValueError: The file is damaged, or that of another model.
    """
    if (found := states.read_metadata(path).get("model")) != digest:
        raise ValueError(
            f"{str(path)!r} is a session of the model with sha256 {found}, and this model has the sha256 {digest}"
            if found
            else f"{str(path)!r} is not a session: it names no model"
        )
    return load_session(path, model, vocab)


def _unknown(name: str) -> SessionError:
    return SessionError(f"session {name!r} does not exist; POST /v1/sessions makes one", "not_found")


def _check_id(path: Path, facts: dict[str, str]) -> None:
    """Raise ValueError if a file is that of another session. Files without an ID are older, and get one by a turn."""
    name = path.name.removesuffix(END)
    if (found := facts.get("id", name)) != name:
        raise ValueError(f"{str(path)!r} is the file of session {found!r}: rename it to {found}{END}")


def continued(session: Session, tokens: tuple[int, ...], state: DecoderState | None) -> Session:
    """Return a session after more tokens.

    Args:
        session: The session before.
        tokens: What follows its tokens.
        state: The state that has read all tokens but the last; None leaves them pending.
    """
    whole = session.tokens + tokens
    if state is None:
        return Session(whole, session.pending + len(tokens), session.state, session.adapter)
    return Session(whole, 1, grow_capacity(state), session.adapter)


def changed(session: Session, tokens: tuple[int, ...]) -> Session:
    """Return a session with other tokens. Its state stays if they begin with all that it has read, and go on."""
    read = len(session.tokens) - session.pending
    if session.state is not None and len(tokens) > read and tokens[:read] == session.tokens[:read]:
        return Session(tokens, len(tokens) - read, session.state, session.adapter)
    return Session(tokens, len(tokens), adapter=session.adapter)


def model_digest(model: Any) -> str:
    """Return the sha256 of a model's config and weights, the same on every device.

    Args:
        model: The model of a pool: a ``Decoder``, or an adapter for models of transformers.

    Raises:
        ValueError: For a model of another kind.
    """
    config, weights = _described(model)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(weights.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _described(model: Any) -> tuple[dict[str, Any], Any]:
    """A model's config, and the module with its weights."""
    if isinstance(model, ForeignModel):
        return model.facts, model.model
    if isinstance(model, Decoder):
        return dataclasses.asdict(model.config), model
    raise ValueError(
        f"sessions of a {type(model).__name__} cannot be saved in a folder, because its config and weights are not "
        f"known; keep them in memory"
    )
