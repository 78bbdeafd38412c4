"""Sessions over HTTP: ``/v1/sessions``, and the turns of ``/v1/completions`` that continue one."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..adapt import FrozenStates
from ..models.sampling import Sampling
from .openapi import FILE, content, described, operation, ref
from .pool import Full, Stream
from .requests import Change, Completion, RequestError, beyond, edit, new_session, rewind, session_id
from .sessions import END, ID, OVERHEAD, Entry, Session, SessionError, Sessions, changed, continued
from .state_adapters import StateAdapters
from .text import decoded, retold
from .worker import Worker

STATUS = {
    "not_found": 404,
    "busy": 409,
    "other_model": 409,
    "other_adapter": 409,
    "damaged": 500,
    "unwritable": 500,
    "refused": 400,
    "full": 507,
}
PIECE = 1 << 18  # bytes of a file that are sent at a time
BODY = ("400", "401", "408", "413", "415", "429", "500", "503")
ONE = ("400", "401", "404", "409", "500")
NAMES = {"id": {"type": "string", "pattern": f"^{ID.pattern}$"}}

T = TypeVar("T")


class Turn:
    """One completion of a session, which is locked until ``commit`` or ``release``.

    The session changes with ``commit`` alone. A turn that ends in another way leaves the session as it was.
    """

    def __init__(self, store: Sessions, name: str, codec: Any, end: contextlib.ExitStack):
        self.store, self.name, self.codec = store, name, codec
        self.session = Session()
        self.adapter: FrozenStates | None = None
        self.prompt: list[int] = []
        self._end = end
        self._commit: asyncio.Task[Entry] | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``Pool.submit`` that continue the session."""
        session = self.session
        prompt = [*session.unread, *self.prompt]
        found = {"prompt": prompt, "state": session.state, "history": session.history, "keep_state": True}
        return found | {"adapter": self.adapter}

    async def commit(self, stream: Stream, count: int, text: str | None) -> None:
        """Save the session after the turn; a caller that is cancelled does not stop it.

        Args:
            stream: The stream of the turn, ended unless ``text`` is given.
            count: The number of its tokens that were drawn when the turn ended.
            text: The returned text, where a stop string has cut it; None for all tokens. The state has then read too
                far, so the tokens up to the cut stay pending, and the next turn reads them.

        Raises:
            SessionError: If the session cannot be saved; it is then as it was before the turn.
        """
        drawn, state = stream.tokens[:count], stream.state
        if text is not None:
            drawn, state = cut(self.codec, drawn, text), None
        after = continued(self.session, (*self.prompt, *drawn), state)

        async def save() -> Entry:
            try:
                return await asyncio.to_thread(self.store.replace, self.name, after)
            finally:
                self._end.close()

        self._commit = asyncio.create_task(save())
        self._commit.add_done_callback(lambda task: task.cancelled() or task.exception())  # there may be no caller
        await asyncio.shield(self._commit)

    def release(self) -> None:
        """Leave the session as it is, unless ``commit`` has begun."""
        if self._commit is None:
            self._end.close()


def _change(summary: str, body: str) -> dict[str, Any]:
    """The description of a request that gives a session other tokens."""
    return operation(summary, {"200": content(ref("Session"))}, *BODY, "404", "409", "507", body=ref(body), names=NAMES)


class SessionRoutes:
    """The routes of ``/v1/sessions``.

    Args:
        store: The sessions.
        adapters: The state adapters.
        worker: The thread that runs the pool.
        model: The model's name in requests.
        codec: Text to tokens and back, None for a model without text.
        body: Returns the body of a request, parsed and checked by a function.
        upload: Returns the body of a request of a type, up to a number of bytes; None if states may not be uploaded.
        accept: Raises RequestError while the server accepts no new work.
    """

    def __init__(
        self,
        store: Sessions,
        adapters: StateAdapters,
        worker: Worker,
        *,
        model: str,
        codec: Any,
        body: Callable[[Request, Callable[[Any], Any]], Awaitable[Any]],
        upload: Callable[[Request, str, int], Awaitable[bytearray]] | None,
        accept: Callable[[], None],
    ):
        self.store, self.adapters, self.worker, self.model, self.codec = store, adapters, worker, model, codec
        self.body, self.upload, self.accept = body, upload, accept
        self.routes = [
            Route("/v1/sessions", self.create, methods=["POST"]),
            Route("/v1/sessions", self.list, methods=["GET"]),
            Route("/v1/sessions/state", self.put, methods=["POST"]),
            Route("/v1/sessions/{id}/state", self.state, methods=["GET"]),
            Route("/v1/sessions/{id}", self.show, methods=["GET"]),
            Route("/v1/sessions/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/sessions/{id}/rewind", self.rewind, methods=["POST"]),
            Route("/v1/sessions/{id}/edit", self.edit, methods=["POST"]),
        ]

    @described(
        "post",
        operation(
            "Make a session.", {"200": content(ref("Session"))}, *BODY, "404", "409", "507", body=ref("NewSession")
        ),
    )
    async def create(self, request: Request) -> Response:
        """POST /v1/sessions: an empty session, one that has read a prompt, or a copy of another one."""
        vocab = self.worker.pool.vocab
        body = await self.body(request, lambda body: new_session(body, model=self.model, codec=self.codec, vocab=vocab))
        self.accept()
        with _refusing():
            session = Session(adapter=self.adapters.key(body.adapter))
            if body.fork_from:
                session = await asyncio.to_thread(self.store.read, body.fork_from)
                if body.to is not None:
                    session = changed(session, session.tokens[: beyond("to", body.to, len(session.tokens))])
            session = continued(session, body.later if session.tokens else body.prompt, None)
            with self.store.room(len(session.tokens)):
                session = await while_connected(request, self._read(session))
                entry = await asyncio.to_thread(self.store.create, session, body.fork_from)
        return JSONResponse(self._described(entry))

    @described("get", operation("List the sessions.", {"200": content(ref("Sessions"))}, "401"))
    async def list(self, request: Request) -> Response:
        """GET /v1/sessions."""
        return JSONResponse({"object": "list", "data": [self._described(entry) for entry in self.store.entries()]})

    @described("get", operation("Return a session.", {"200": content(ref("SessionContent"))}, *ONE, names=NAMES))
    async def show(self, request: Request) -> Response:
        """GET /v1/sessions/ID: the session after its last finished turn, with its tokens and its text."""
        name = session_id(request.path_params["id"])

        def content() -> tuple[Entry, Session, str | None]:
            entry, session = self.store.entry(name), self.store.read(name)
            # A turn may have been saved between the two.
            entry = self.store.measured(entry, session)
            return entry, session, None if self.codec is None else decoded(self.codec, session.tokens)

        with _refusing():
            entry, session, text = await asyncio.to_thread(content)
        return JSONResponse({**self._described(entry), "tokens": session.tokens, "text": text})

    @described(
        "get",
        operation(
            "Return the file of a session.", {"200": {"description": "the file", "content": FILE}}, *ONE, names=NAMES
        ),
    )
    async def state(self, request: Request) -> Response:
        """GET /v1/sessions/ID/state: the session after its last finished turn, as the content of a file."""
        name = session_id(request.path_params["id"])
        with _refusing():
            data = await asyncio.to_thread(self.store.packed, name)
        # In pieces, each of which a client must read in time.
        pieces = (data[i : i + PIECE] for i in range(0, len(data), PIECE))
        headers = {"content-disposition": f'attachment; filename="{name}{END}"', "content-length": str(len(data))}
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)

    @described(
        "post",
        operation(
            "Make a session from the file of one.",
            {"200": content(ref("Session"))},
            *(*BODY, "409", "411", "507"),
            file=True,
        ),
    )
    async def put(self, request: Request) -> Response:
        """POST /v1/sessions/state: a session from a file of this server, of another one, or of ``longspan chat``."""
        if self.upload is None:
            raise RequestError(
                "this server takes no states; start it with --allow-state-upload", status=403, code="upload_refused"
            )
        self.accept()
        size = request.headers.get("content-length", "")
        if not size.isdecimal():
            raise RequestError("a file needs the header content-length", status=411, code="length_required")
        with _refusing(), self.store.reserve(OVERHEAD + int(size)):
            data = await self.upload(request, "application/octet-stream", int(size))
            session = await asyncio.to_thread(self.store.unpacked, bytes(data))
            self.adapters.of_session(session.adapter)
            entry = await asyncio.to_thread(self.store.create, session)
        return JSONResponse(self._described(entry))

    @described("delete", operation("Delete a session.", {"200": content(ref("SessionDeleted"))}, *ONE, names=NAMES))
    async def delete(self, request: Request) -> Response:
        """DELETE /v1/sessions/ID."""
        name = session_id(request.path_params["id"])
        with _refusing(), self.store.lock(name):
            await asyncio.to_thread(self.store.remove, name)
        return JSONResponse({"id": name, "object": "session.deleted", "deleted": True})

    @described("post", _change("Undo the last tokens of a session.", "Rewind"))
    async def rewind(self, request: Request) -> Response:
        """POST /v1/sessions/ID/rewind."""
        name = session_id(request.path_params["id"])
        return await self._change(name, request, lambda body: rewind(body, model=self.model))

    @described("post", _change("Replace the text of a session, or drop some of its tokens.", "Edit"))
    async def edit(self, request: Request) -> Response:
        """POST /v1/sessions/ID/edit."""
        name, vocab = session_id(request.path_params["id"]), self.worker.pool.vocab
        return await self._change(
            name, request, lambda body: edit(body, model=self.model, codec=self.codec, vocab=vocab)
        )

    async def _change(self, name: str, request: Request, check: Callable[[Any], Change]) -> Response:
        """Give a session other tokens, of which the pool reads those after the longest known beginning."""
        change = await self.body(request, check)
        self.accept()
        with _refusing(), self.store.lock(name):
            session = await asyncio.to_thread(self.store.read, name)
            session = await asyncio.to_thread(lambda: changed(session, tuple(change(session.tokens))))
            with self.store.room(len(session.tokens), name):
                session = await while_connected(request, self._read(session))
                entry = await asyncio.to_thread(self.store.replace, name, session)
        return JSONResponse(self._described(entry))

    async def begin(self, request: Request, body: Completion) -> Turn | None:
        """Lock the session of a completion and read its pending tokens; None without a session.

        Raises:
            RequestError: If the session does not exist, has another turn, or belongs to another model.
        """
        if not body.session:
            return None
        with _refusing(), contextlib.ExitStack() as end:
            end.enter_context(self.store.lock(body.session))
            entry = self.store.entry(body.session)
            end.enter_context(self.store.room(entry.length + len(body.prompts[0]) + body.max_tokens, body.session))
            session = await asyncio.to_thread(self.store.read, body.session)
            session = await while_connected(request, self._read(session))
            adapter = self.adapters.of_session(session.adapter)
            turn = Turn(self.store, body.session, self.codec, end.pop_all())
            turn.session, turn.adapter = session, adapter
            turn.prompt = body.after(session.tokens)
            return turn

    async def _read(self, session: Session) -> Session:
        """Let the state read all tokens but the last."""
        pool, adapter = self.worker.pool, self.adapters.of_session(session.adapter)
        # A model without a start token has no state before its first token, which the next turn reads.
        if session.pending <= (session.state is not None or pool.model.start is None):
            return session
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def listener(stream: Stream, token: int | None) -> None:
            if token is None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(ended.set)

        try:
            # The one token that is drawn is not used: a kept state has not read it.
            (stream,) = pool.submit(
                session.unread[:-1],
                state=session.state,
                history=session.history,
                adapter=adapter,
                listener=listener,
                max_new_tokens=1,
                sampling=Sampling(temperature=0.0),
                keep_state=True,
                stop=self.codec.ends if self.codec else (),
            )
        except Full as error:
            raise RequestError(str(error), status=429, code="overloaded") from error
        except ValueError as error:
            raise RequestError(str(error), "prompt") from error
        self.worker.wake()
        try:
            await ended.wait()
        finally:
            self.worker.cancel(stream)
        if stream.state is None:
            raise RequestError(f"the model failed: {stream.error or stream.finished}", status=500, code="model_error")
        return continued(Session(session.tokens[:-1], adapter=session.adapter), session.tokens[-1:], stream.state)

    def _described(self, entry: Entry) -> dict[str, Any]:
        return {
            "id": entry.id,
            "object": "session",
            "created": entry.created,
            "model": self.model,
            "length": entry.length,
            "bytes": entry.nbytes,
            "fork_from": entry.parent or None,
            "adapter": entry.adapter.partition("@")[0] or None,
        }


def cut(codec: Any, tokens: Sequence[int], text: str) -> list[int]:
    """Return the tokens of a text that a stop string has cut.

    They are the given tokens up to the cut. Where the cut falls inside a token, the rest of the text is encoded anew.

    Args:
        codec: Text to tokens and back.
        tokens: The tokens that were drawn.
        text: A beginning of their text.
    """
    if (joined := retold(codec, tokens, text)) is not None:
        return joined
    raise SessionError(f"the text {text!r} has no tokens that end where the stop string begins", "unwritable")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled if the client hangs up.

    Raises:
        ClientDisconnect: If the client hangs up.
    """
    watcher, task = asyncio.create_task(_gone(request)), asyncio.create_task(work)
    try:
        await asyncio.wait({watcher, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        watcher.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn errors of sessions into answers."""
    try:
        yield
    except SessionError as error:
        raise refusal(error) from error


def refusal(error: SessionError) -> RequestError:
    """Return the answer for an error of a session."""
    return RequestError(str(error), "session", STATUS[error.code], f"session_{error.code}")
