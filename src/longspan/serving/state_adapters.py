"""State adapters of a server: a folder of them, and the routes ``/v1/adapters``."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import adapt, states
from ..adapt import FrozenStates
from .openapi import content, described, operation, ref
from .pool import Pool
from .requests import ADAPTER, RequestError, adapter_name, check_names
from .sessions import SessionError

END = ".safetensors"
NAMES = {"name": {"type": "string", "pattern": f"^{ADAPTER.pattern}$"}}


class StateAdapters:
    """The state adapters of one model by name, loaded from the files ``NAME.safetensors`` of a folder.

    Args:
        pool: The pool of the model.
        folder: The folder, all of whose adapters are loaded; None for a server without adapters.

    Raises:
        ValueError: For a folder that does not exist, a model without recurrent states, and a file that is damaged, has
            an unsuitable name or belongs to another model.
    """

    def __init__(self, pool: Pool, folder: Path | None = None):
        self.model: Any = pool.model
        self.folder = folder
        self._loaded: dict[str, FrozenStates] = {}
        if folder is not None:
            if not folder.is_dir():
                raise ValueError(f"the folder of adapters {str(folder)!r} does not exist")
            adapt.initial_states(self.model)
            for path in sorted(folder.glob(f"*{END}")):
                name = path.name.removesuffix(END)
                if not ADAPTER.fullmatch(name):
                    raise ValueError(f"{str(path)!r}: the name of an adapter must match {ADAPTER.pattern}")
                self._loaded[name] = self._read(name)

    def _read(self, name: str) -> FrozenStates:
        assert self.folder is not None
        return adapt.load(self.folder / f"{name}{END}", self.model).frozen(name)

    def entries(self) -> list[dict[str, Any]]:
        """Return what is known of each adapter."""
        return [self.entry(name) for name in sorted(self._loaded)]

    def entry(self, name: str) -> dict[str, Any]:
        """Return what is known of an adapter."""
        one = self.get(name)
        assert one is not None
        return {"id": name, "object": "adapter", "sha256": one.sha256, "bytes": states.nbytes(one.state)}

    def get(self, name: str) -> FrozenStates | None:
        """Return an adapter; None for the name "".

        Raises:
            RequestError: There is none with this name.
        """
        if not name:
            return None
        if (found := self._loaded.get(name)) is None:
            raise RequestError(
                f"adapter {name!r} is not loaded; GET /v1/adapters lists those that are",
                "adapter",
                404,
                "adapter_not_found",
            )
        return found

    def key(self, name: str) -> str:
        """Return what a session keeps of its adapter; "" for none."""
        found = self.get(name)
        return "" if found is None else found.key

    def of_session(self, key: str) -> FrozenStates | None:
        """Return the adapter of a session; None for one without.

        Raises:
            SessionError: It is not loaded, or has other values.
        """
        name, _, sha256 = key.partition("@")
        found = self._loaded.get(name)
        if key and (found is None or found.key != key):
            raise SessionError(
                f"the session belongs to adapter {name!r} with sha256 {sha256}, which is not loaded", "other_adapter"
            )
        return found

    async def load(self, name: str) -> dict[str, Any]:
        """Load an adapter from its file, or read it again -> what is known of it. Streams that run are not changed.

        Raises:
            RequestError: The file is missing, damaged, or belongs to another model.
        """
        if self.folder is None:
            raise RequestError("this server has no folder of adapters; start it with --adapters DIR", "name")
        try:
            self._loaded[name] = await asyncio.to_thread(self._read, name)
        except ValueError as error:
            missing = not (self.folder / f"{name}{END}").exists()
            text = f"adapter {name!r} is not in the folder of adapters" if missing else str(error)
            status, code = (404, "adapter_not_found") if missing else (400, "adapter_refused")
            raise RequestError(text, "name", status, code) from error
        return self.entry(name)

    def drop(self, name: str) -> None:
        """Forget an adapter; its file stays, and so do the streams that run.

        Raises:
            RequestError: There is none with this name.
        """
        self.get(name)
        del self._loaded[name]


class AdapterRoutes:
    """The routes of ``/v1/adapters``.

    Args:
        store: The adapters.
        model: The model's name in requests.
        body: Returns the body of a request, parsed and checked by a function.
    """

    def __init__(
        self, store: StateAdapters, *, model: str, body: Callable[[Request, Callable[[Any], Any]], Awaitable[Any]]
    ):
        self.store, self.model, self.body = store, model, body
        self.routes = [
            Route("/v1/adapters", self.create, methods=["POST"]),
            Route("/v1/adapters", self.list, methods=["GET"]),
            Route("/v1/adapters/{name}", self.delete, methods=["DELETE"]),
        ]

    @described(
        "post",
        operation(
            "Load a state adapter from the server's folder, or read it again.",
            {"200": content(ref("Adapter"))},
            *("400", "401", "404", "408", "413", "415", "500"),
            body=ref("NewAdapter"),
        ),
    )
    async def create(self, request: Request) -> Response:
        """POST /v1/adapters."""

        def check(body: Any) -> str:
            check_names(body, ("model", "name"), self.model)
            return adapter_name(body.get("name"), "name")

        return JSONResponse(await self.store.load(await self.body(request, check)))

    @described("get", operation("List the state adapters.", {"200": content(ref("Adapters"))}, "401"))
    async def list(self, request: Request) -> Response:
        """GET /v1/adapters."""
        return JSONResponse({"object": "list", "data": self.store.entries()})

    @described(
        "delete",
        operation(
            "Drop a state adapter; its file stays.",
            {"200": content(ref("AdapterDeleted"))},
            *("400", "401", "404", "500"),
            names=NAMES,
        ),
    )
    async def delete(self, request: Request) -> Response:
        """DELETE /v1/adapters/NAME."""
        name = adapter_name(request.path_params["name"], None)
        self.store.drop(name)
        return JSONResponse({"id": name, "object": "adapter.deleted", "deleted": True})
