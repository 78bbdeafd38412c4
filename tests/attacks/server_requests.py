"""Requests to the server with odd heads and bodies: the status that its description says, and the right answer for 200.

Each request has at most a few odd parts: a host or an origin, a content type, two lengths, a path, fields at their
extremes, damaged JSON. The server then still serves others.
"""

import http.client
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import Case

SHORT, LONG = 40, 3000
SLOTS = 8
SMALLEST, BELOW_ONE, HUGE = 5e-324, 1 - 2.0**-53, 10**400
# field -> values that are right, and wrong ones
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt": (
        ["", "a", "河\0é", "x" * 6000, [1, 255], ["a", [3], ""], [], [[]]],
        [[-1], [256], [2**53], [HUGE], [1.0], [True], 3, {}, None, [None], "\ud800", ["a"] * (2 * SLOTS + 1), [[[]]]],
    ),
    "temperature": (
        [0, -0.0, SMALLEST, 1e-9, BELOW_ONE, 1, 100, 1e6, None],
        [-SMALLEST, 1e6 + 1e-9, 2**53, HUGE, True, "1", [1], {}],
    ),
    "top_p": ([1e-9, BELOW_ONE, 1, 0.5, None], [0, SMALLEST, 1 + 2.0**-52, 2**53, -HUGE, False, "1"]),
    "top_k": ([0, 1, 2, 256, 257, 2**31, None], [-1, 2**31 + 1, 2**53, HUGE, 1.0, True, "1"]),
    "seed": ([0, -(2**63), 2**63 - 1, 2**53 + 1, None], [2**63, -(2**63) - 1, HUGE, 0.0, False, "0"]),
    "n": ([1, 2, SLOTS, None], [0, -1, SLOTS + 1, 2**53, HUGE, 1.0, True]),
    "max_tokens": ([1, 2, 20], [-1, 21, 2**31, 2**53, HUGE, 1.5, True, "1"]),
    "logprobs": ([0, 1, 20, None], [-1, 21, 2**53, HUGE, 1.0, False]),
    "stop": ([None, [], "\n", ["a", "b", "河"], "ab" * 512], ["", [""], ["a"] * 5, "a" * 1025, "\ud800", 1, {}, [[]]]),
    "echo": ([True, False, None], [1, "true", []]),
    "user": (["", "me", None], [1, [], {}]),
    "best_of": ([None], [0, 99, 1.0, True, HUGE]),
    "presence_penalty": ([0, 0.0, -0.0, None], [SMALLEST, 2, False, "0"]),
    "frequency_penalty": ([0, 0.0, None], [-SMALLEST, 2**53, False]),
    "logit_bias": ([{}, None], [{"1": 0.5}, [], 0, False]),
    "suffix": (["", None], ["x", 0, False, []]),
    "model": (["tiny"], [None, 1, "", []]),
    "stream_options": ([None, {}, {"include_usage": True, "include_obfuscation": False}], [{"a": 1}, [], 0, True]),
    "session": ([None], [1, "", "sess-", "../x", [], {}]),
}
DAMAGES = ("cut", "twice", "unknown", "array", "nan", "bytes", "deep", "keys")


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    sys.path.append(str(Path(__file__).parents[1] / "serving"))
    from servers import Running

    from longspan.serving.guard import Access
    from longspan.serving.server import Limits

    with Running(limits=Limits(tokens=20), pool={"slots": SLOTS, "queue": SLOTS}, access=Access(hosts=())) as running:
        for i in range(count):
            yield f"{i}", lambda i=i: attack(running, random.Random(f"{seed}-{i}"))


def attack(running: Any, dice: random.Random) -> str | None:
    """Send one request -> what is wrong with its answer."""
    status, head, data, body = request(dice)
    try:
        found, content = send(running.port, *head, data)
        if found != status:
            return f"status {found}, not {status}, for {head} {data[:200]!r}: {content[:300]!r}"
        if status != 200:
            error = json.loads(content)["error"]
            good = set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) < 600
            return None if good else f"the error {content[:300]!r} for {data[:200]!r}"
        if wrong := judged(running, body, content):
            return f"{wrong}, for {data[:300]!r}"
        again = send(running.port, *head, data)
        if body["seed"] is not None and choices(again[1]) != choices(content):
            return f"another answer to the same request {data[:300]!r}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}, for {head} {data[:200]!r}"
    return None


def request(dice: random.Random) -> tuple[int, tuple[str, str, dict[str, str]], bytes, dict[str, Any]]:
    """Draw a request -> its status, its head, its body, and the body's fields."""
    method, path, headers = "POST", "/v1/completions", {"Host": "localhost", "Content-Type": "application/json"}
    data, status, body = content(dice)
    # The last of these decides first.
    if dice.random() < 0.1:
        headers["Content-Type"] = dice.choice(["", "text/plain", "application/jsonx", "multipart/form-data", "json"])
        status = 415
    elif dice.random() < 0.1:
        headers["Content-Type"] = "Application/JSON ; charset=utf-8"
    if dice.random() < 0.1:
        method, path, status = dice.choice(
            [
                ("GET", "/v1/completions", 405),
                ("DELETE", "/v1/completions", 405),
                ("OPTIONS", "/v1/completions", 405),
                ("POST", "/v1/models", 405),
                ("POST", "/v1/completions/", 404),
                ("POST", "/v1//completions", 404),
                ("POST", "/v1/completions%00", 404),
                ("PATCH", "/v1/sessions", 405),
                ("GET", "/v1/sessions/x", 400),
                ("GET", "/v1/sessions/sess-" + "0" * 32, 404),
                ("DELETE", "/v1/sessions/sess-" + "0" * 32, 404),
                ("POST", "/v1/chat/completions", 400),
            ]
        )
    if dice.random() < 0.06:
        headers["Transfer-Encoding"], status = "chunked", 400
    if dice.random() < 0.1:
        name = dice.choice(["evil.example", "localhost.evil", "127.0.0.1.evil:80", "10.0.0.1", "[", "0x7f.1"])
        headers["Host"], status = name, 403
    elif dice.random() < 0.1:
        headers["Origin"], status = dice.choice(["http://evil.example", "null", "http://localhost:1", "localhost"]), 403
    elif dice.random() < 0.1:
        headers["Host"] = dice.choice(["LOCALHOST:1", "127.0.0.1", "127.0.0.9:80", "[::1]:1", "localhost."])
        headers["Origin"] = f"http://{headers['Host'].lower()}"
    return status, (method, path, headers), data, body


def content(dice: random.Random) -> tuple[bytes, int, dict[str, Any]]:
    """Draw a body, its status, and its fields."""
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "seed": dice.randrange(99)}
    names = dice.sample(sorted(FIELDS), dice.randrange(6))
    wrong, status = dice.random() < 0.4 and bool(names), 400
    body |= {name: dice.choice(FIELDS[name][0]) for name in names}
    if wrong:
        name = dice.choice(names)
        body[name] = dice.choice(FIELDS[name][1])
        status = 404 if name == "model" else 400
    elif dice.random() < 0.1:
        body |= {"max_tokens": 0, "echo": dice.random() < 0.7}
        wrong = not body["echo"]
    elif dice.random() < 0.1:
        body["best_of"] = body.get("n") or 1
    n, prompts = body.get("n") or 1, body["prompt"]
    if not wrong and isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        wrong = len(prompts) * n > 2 * SLOTS
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if dice.random() < 0.1:
        return damaged(dice, data), 400, body
    if not wrong and dice.random() < 0.3:
        body["stream"] = True
        data = json.dumps(body).encode()
    return data, status if wrong else 200, body


def damaged(dice: random.Random, data: bytes) -> bytes:
    """A body that is not JSON of known fields."""
    match dice.choice(DAMAGES):
        case "cut":
            return data[: dice.randrange(len(data))]
        case "twice":
            return data[:-1] + b', "prompt": "b"}'
        case "unknown":
            return data[:-1] + b', "fork": null}'
        case "array":
            return b"[" + data + b"]"
        case "nan":
            return data[:-1] + dice.choice([b', "top_p": NaN}', b', "top_p": -Infinity}', b', "top_p": 1e999}'])
        case "bytes":
            return data[:-1] + b', "user": "' + bytes([dice.randrange(128, 256)]) + b'"}'
        case "deep":
            return b'{"user": ' + b"[" * dice.choice([900, 50_000]) + b"1}"
        case _:
            return b"{" + b",".join(b'"%x":0' % i for i in range(20_000)) + b',"0":1}'


def send(port: int, method: str, path: str, headers: dict[str, str], data: bytes) -> tuple[int, bytes]:
    """Send a request in its own connection -> its status and body."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.putrequest(method, path, skip_host=True)
        for name, value in headers.items():
            if value:
                client.putheader(name, value)
        client.putheader("Content-Length", str(len(data)))
        try:
            client.endheaders(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if "Transfer-Encoding" in headers else data)
        except ConnectionError:  # it was refused before it was read, and the answer says why
            pass
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def pieces(content: bytes) -> list[dict[str, Any]]:
    """The choices of an answer, or of the events of a stream."""
    if not content.startswith(b"data:"):
        return json.loads(content)["choices"]
    lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        raise ValueError(f"the stream ends with {lines[-1]}")
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def choices(content: bytes) -> dict[int, dict[str, Any]]:
    """The choices of an answer, put together."""
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces(content):
        one = found.setdefault(piece["index"], {"text": "", "values": [], "tops": [], "end": None})
        one["text"] += piece["text"]
        one["end"] = one["end"] or piece["finish_reason"]
        if piece["logprobs"] is not None:
            one["values"] += piece["logprobs"]["token_logprobs"] or []
            one["tops"] += piece["logprobs"]["top_logprobs"] or []
    for one in found.values():  # the last digits depend on the other rows of a step
        one["values"] = [round(value, 2) for value in one["values"]]
        one["tops"] = [sorted(round(value, 2) for value in top.values()) for top in one["tops"]]
    return found


def judged(running: Any, body: dict[str, Any], content: bytes) -> str | None:
    """What is wrong with an answer."""
    found, given = choices(content), body["prompt"]
    alone = isinstance(given, str) or all(isinstance(one, int) for one in given)
    prompts = [list(one.encode()) if isinstance(one, str) else one for one in ([given] if alone else given)]
    n, echo, top = body.get("n") or 1, bool(body.get("echo")), body.get("logprobs")
    if sorted(found) != list(range(n * len(prompts))):
        return f"the choices {sorted(found)}"
    greedy = body.get("temperature") in (0, SMALLEST, 1e-9) or body.get("top_k") == 1 or body.get("top_p") == 1e-9
    for i, one in found.items():
        prompt = prompts[i // n]
        start = bytes(prompt).decode("utf-8", "replace") if echo else ""
        if one["end"] not in ("stop", "length") or not one["text"].startswith(start):
            return f"the choice {one}"
        if body["max_tokens"] == 0 and one["text"] != start:
            return f"more than the prompt: {one['text'][:100]!r}"
        if greedy and body["max_tokens"] and not body.get("stop"):
            drawn = running.alone(prompt, body["max_tokens"])
            if one["text"] != start + bytes(drawn).decode("utf-8", "replace"):
                return f"not the most likely text {bytes(drawn)!r}: {one['text'][-20:]!r}"
        if top is not None:
            least = len(prompt) * echo
            if not least <= len(one["values"]) <= least + body["max_tokens"]:
                return f"{len(one['values'])} log-probabilities"
            if any(value > 0 for value in one["values"]) or any(len(row) > top for row in one["tops"]):
                return f"the log-probabilities {one['values'][:9]}, {one['tops'][:3]}"
    return None
