"""Who may use a server: keys, web pages of other origins, names of hosts; and what the command refuses at its start."""

import contextlib
import socket

import httpx
import pytest
from pools import decoder
from servers import Running

from longspan.cli import main, serve
from longspan.serving import connection
from longspan.serving.guard import Access, Guard

PAGE, OTHER = "https://app.example", "https://evil.example"
REQUESTS = [
    *(
        ("GET", path)
        for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/models", "/v1/sessions")
    ),
    *((method, "/v1/completions") for method in ("POST", "OPTIONS", "PUT", "HEAD")),
    ("POST", "/v1/sessions"),
    *((method, "/v1/sessions/ID") for method in ("GET", "DELETE", "PATCH")),
    ("GET", "/nothing"),
]


@pytest.fixture(scope="module")
def running():
    with Running(access=Access(hosts=("Proxy.example", "fd00::1"), origins=("https://App.example",))) as found:
        yield found


def ask(running, method, path, **headers):
    """Send a request whose body, if any, would be served."""
    content = b'{"prompt": "a", "max_tokens": 1}' if method == "POST" and "completions" in path else b"{}"
    headers = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, running.url + path, content=content, headers=headers, timeout=60)


@pytest.fixture
def session(running):
    return running.client.post("/sessions", json={"prompt": "mine"}).json()["id"]


@pytest.mark.whole
@pytest.mark.parametrize(
    "header", [{"origin": OTHER}, {"origin": "null"}, {"host": "evil.example"}, {"host": "10.0.0.1"}]
)
def test_what_comes_from_elsewhere_is_refused_by_every_route(running, session, header):
    sessions = len(running.store)
    for method, path in REQUESTS:
        assert ask(running, method, path.replace("ID", session), **header).status_code == 403, (method, path)
    assert len(running.store) == sessions
    # Without the header each is served, or refused for another reason.
    for method, path in REQUESTS:
        assert ask(running, method, path.replace("ID", session)).status_code != 403, (method, path)
    assert len(running.store) == sessions  # one made, one deleted


def test_names_of_this_machine_and_given_ones_are_served(running):
    port = running.port
    for host in "localhost LOCALHOST localhost. 127.0.0.1 127.8.9.1 [::1] proxy.example [fd00::1]".split():
        for name in (host, f"{host}:{port}", f"{host}:80"):
            assert ask(running, "GET", "/healthz", host=name).status_code == 200, name
    others = "proxy.example.evil evil-proxy.example localhost.evil 127.0.0.1.evil 0.0.0.0 [fd00::2] [ :80 []:1"
    for host in others.split():
        assert ask(running, "GET", "/healthz", host=host).status_code == 403, host
    # Programs may leave the host out.
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_page_of_the_server_and_allowed_ones_may_use_it(running):
    own = f"127.0.0.1:{running.port}"
    for origin in (f"http://{own}", f"https://{own}", PAGE):
        answer = ask(running, "POST", "/v1/completions", origin=origin, host=own)
        assert answer.status_code == 200
        assert answer.headers.get("access-control-allow-origin") == (PAGE if origin == PAGE else None)
    # A page of the same host at another port is another one.
    assert ask(running, "POST", "/v1/completions", origin="http://127.0.0.1:1").status_code == 403


def test_an_allowed_page_may_ask_before_it_sends_a_key():
    with Running(access=Access(api_key="secret", origins=(PAGE,))) as running:
        wanted = {
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization, content-type",
        }
        answer = ask(running, "OPTIONS", "/v1/completions", origin=PAGE, **wanted)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        assert ask(running, "OPTIONS", "/v1/completions", origin=OTHER, **wanted).status_code == 403
        answer = ask(running, "POST", "/v1/completions", origin=PAGE)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, PAGE)
        for key, status in (("wrong", 401), ("secret", 200)):
            answer = ask(running, "POST", "/v1/completions", origin=PAGE, authorization=f"Bearer {key}")
            assert answer.status_code == status
    with Running(access=Access(hosts=("*",), origins=("*",))) as running:
        answer = ask(running, "POST", "/v1/completions", origin=OTHER, host="any.example")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key": "two words"}, "printable ASCII"),
        ({"api_key": "schlüssel"}, "printable ASCII"),
        ({"hosts": ("example.org:80",)}, "without a port"),
        ({"hosts": ("http://example.org",)}, "without a port"),
        ({"hosts": ("",)}, "without a port"),
        ({"origins": ("example.org",)}, "a scheme and a host"),
        ({"origins": ("https://example.org/path",)}, "a scheme and a host"),
    ],
)
def test_what_no_request_can_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Access(**options)


def test_a_body_has_one_length(running):
    """A proxy may believe one length and the server the other; then the rest is another client's request."""
    inner = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    start = b"POST /v1/completions HTTP/1.%d\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunked = b"transfer-encoding: chunked\r\n"
    for version, lines in (
        (1, chunked + b"content-length: 5\r\n"),
        (1, b"content-length: 5\r\n" + chunked),
        (0, chunked),
    ):
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as client:
            client.sendall(start % version + lines + b"\r\n0\r\n\r\n" + inner)
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := client.recv(4096):
                    found += piece
        assert found.startswith(b"HTTP/1.1 400")
        assert found.count(b"\r\ndate:") == 1


# The command.


@pytest.fixture
def unloaded(monkeypatch):
    """The command, which must end before it loads a model."""

    def load(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(serve, "loaded", load)


@pytest.mark.parametrize(
    "options",
    [
        ["--host", "256.1.1.1"],
        ["--host", ""],
        ["--host", "a..b"],
        ["--host", "192.0.2.1"],  # an address of no machine
        ["--api-key", ""],
        ["--api-key", "two words"],
        ["--max-tokens", "0"],
        ["--slots", "0"],
        ["--allow-origin", "example.org"],
        ["--allow-host", "http://example.org"],
        ["--port", "taken"],
    ],
    ids=" ".join,
)
def test_the_command_refuses_before_it_loads_a_model(unloaded, capsys, options):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if word == "taken" else word for word in options]
        assert main(["serve", "text", *([] if "--port" in words else ["--port", "0"]), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("longspan: error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says", "status"),
    [
        ([], False, 403),
        (["--allow-host", "x.example"], False, 200),
        (["--host", "localhost"], False, 403),
        (["--host", "0.0.0.0"], True, 200),
        (["--host", "0.0.0.0", "--api-key", "k"], False, 200),
        (["--host", "0.0.0.0", "--allow-host", "other.example"], True, 403),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_command_says_that_others_can_reach_it(monkeypatch, capsys, options, says, status):
    uvicorn = pytest.importorskip("uvicorn")
    seen = []
    monkeypatch.setattr(serve, "loaded", lambda *_: serve.Loaded(decoder(), None, ()))
    monkeypatch.setattr(serve, "_on_signals", lambda *_: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda http, sockets: seen.append(http.config.app))
    main(["serve", "text", "--port", "0", *options])
    said = capsys.readouterr().err
    assert ("--api-key" in said and said.count("\n") == 1) if says else not said
    (app,) = seen
    assert isinstance(app, Guard)
    scope = {"headers": [(b"host", b"x.example:8000")], "http_version": "1.1"}
    assert (403 if app.access.complaint(scope) else 200) == status


def test_connections_and_their_backlog_fit_into_the_limit_of_files(monkeypatch):
    resource = pytest.importorskip("resource")
    for soft, hard in ((64, 64), (256, 256), (1024, 1024), (1024, 4096), (1024, 1 << 20), (1 << 20, 1 << 20)):
        limit = [soft]
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit, hard=hard: (limit[0], hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, new, limit=limit: limit.__setitem__(0, new[0]))
        found = connection.affordable(1216)
        assert 1 <= found.connections <= 1216
        assert 1 <= found.backlog <= connection.BACKLOG
        assert soft <= limit[0] <= hard
        if soft >= 256:
            assert found.connections + connection.ROUNDS * found.backlog + connection.SPARE < limit[0]
        if hard >= 1 << 20:
            assert found == (1216, connection.BACKLOG)


def test_all_addresses_of_a_host_get_one_port():
    sockets = connection.bound("localhost", 0)
    assert len({one.getsockname()[1] for one in sockets}) == 1
    for one in sockets:
        one.close()
