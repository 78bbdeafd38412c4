"""A measuring process that reads and writes JSON lines, for other libraries and for all memory figures.

It requires only torch, not this package, so that it also runs in the environment of another library::

    python -I worker.py subjects.py

``subjects.py`` defines ``SUBJECTS``, a dict from names to ``Makers``, and ``about()``, a dict of versions. Requests and
replies are JSON objects, one per line, on stdin and stdout. The ``do`` of a request is ``about``, ``answer``,
``prepare``, ``run``, ``release`` or ``memory``; a failed request has a reply with ``error``. Between requests the
process waits on stdin and computes nothing.
"""

import contextlib
import ctypes
import importlib
import json
import os
import platform
import resource
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

Task = dict[str, Any]
Function = Callable[..., Tensor]
Call = Callable[[], object]


class Makers(TypedDict, total=False):
    """Functions of a subject, by task. B batch, N tokens, H heads, D head size."""

    attention: Callable[[Task], Function]
    """task -> f(q, k, v), each (B,N,H,D) as projections give them, or f(x), (B,N,H*D) -> (B,N,H*D), causal"""
    step: Callable[[Task], Function]
    """task -> f(q, k, v), each (B,H,1,D) -> (B,H,1,D): one more token on a private state that starts empty"""
    model: Callable[[Task, dict[str, Tensor] | None], Callable[[], Function]]
    """task, weights -> begin() -> f(tokens (B,1)) -> (B,vocab): one more token of a whole decoder, from the start"""
    train: Callable[[Task], Call]
    """task -> f(): one training step of a whole model, of N tokens"""


def inputs(task: Task, length: int | None = None) -> list[Tensor]:
    """Random inputs of an attention or step task: q, k, v (B,N,H,D), or x (B,N,H*D) for a whole module."""
    batch, heads, size = task["batch"], task["heads"], task["size"]
    tokens = task["length"] if length is None else length
    shape = (batch, tokens, heads * size) if task.get("module") else (batch, tokens, heads, size)
    return [torch.randn(shape, dtype=getattr(torch, task["dtype"])) for _ in range(1 if task.get("module") else 3)]


def attention_call(function: Function, task: Task) -> Call:
    """One forward, or one forward and backward, of an attention task; its inputs are made now."""
    given = inputs(task)
    if not task["backward"]:

        @torch.no_grad()
        def forward() -> object:
            return function(*given)

        return forward
    upstream = torch.randn_like(given[0].flatten(2))
    for tensor in given:
        tensor.requires_grad_()
    return lambda: torch.autograd.grad(function(*given), given, upstream)


def step_call(function: Function, task: Task) -> Call:
    """One more token of a step task."""
    # No gradients are needed and no mode is entered, which would cost time in each call.
    return partial(function, *(tensor.transpose(1, 2).contiguous() for tensor in inputs(task, 1)))


def model_call(begin: Callable[[], Function], task: Task) -> Call:
    """One more token of a decoder, or a whole sequence of ``task["tokens"]`` with sampling, for the whole batch."""
    if task.get("tokens"):
        return lambda: sequence(begin(), task)
    tokens, step = torch.zeros(task["batch"], 1, dtype=torch.long), begin()

    @torch.no_grad()
    def one() -> object:
        return step(tokens)

    return one


@torch.no_grad()
def sequence(step: Function, task: Task) -> None:
    """Generate: the start token first, then what was drawn."""
    token = torch.full((task["batch"],), task["vocab"])
    for _ in range(task["tokens"]):
        outputs = step(token[:, None])
        # An exact sample of softmax(outputs): the first of competing exponential clocks.
        race = torch.empty_like(outputs).exponential_().clamp_(min=torch.finfo(outputs.dtype).tiny)
        token = (outputs - race.log_()).argmax(-1)


def call(makers: Makers, task: Task) -> Call:
    """The timed call of a task. Raises ValueError for a task that the subject does not support."""
    match task["what"], makers:
        case "attention", {"attention": make}:
            return attention_call(make(task), task)
        case "step", {"step": make}:
            return step_call(make(task), task)
        case "model", {"model": make}:
            return model_call(make(task, None), task)
        case "train", {"train": make}:
            return make(task)
    raise ValueError(f"the subject does not support {task['what']}")


def answer(makers: Makers, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a subject for given inputs, at the shape of the task. See the functions below."""
    match task["what"], makers:
        case "attention", {"attention": make}:
            return attention_answer(make(task), task, given)
        case "step", {"step": make}:
            return step_answer(make(task), task, given)
        case "model", {"model": make}:
            return model_answer(make, task, given)
    raise ValueError(f"the subject does not support {task['what']}")


def attention_answer(function: Function, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """``input0`` ... (B,P,...) are the first P tokens, random ones follow -> ``output`` (B,P,H*D) of those.

    With backward also ``grad0`` ... for the upstream gradient ``upstream`` (B,P,H*D) on the first P outputs and zero on
    the others, and ``beyond``: the largest gradient of a token after them, which causality makes zero.
    """
    whole = inputs(task)
    prefix = given["input0"].shape[1]
    for i, tensor in enumerate(whole):
        tensor[:, :prefix] = given[f"input{i}"]
    if not task["backward"]:
        with torch.no_grad():
            return {"output": function(*whole)[:, :prefix].clone()}
    for tensor in whole:
        tensor.requires_grad_()
    output = function(*whole)
    upstream = torch.zeros_like(output)
    upstream[:, :prefix] = given["upstream"]
    grads = torch.autograd.grad(output, whole, upstream)
    found = {f"grad{i}": grad[:, :prefix].clone() for i, grad in enumerate(grads)}
    after = [grad[:, prefix:].abs().max() for grad in grads if grad.shape[1] > prefix]
    found["beyond"] = torch.stack(after).max() if after else torch.zeros(())
    return found | {"output": output.detach()[:, :prefix].clone()}


@torch.no_grad()
def step_answer(function: Function, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """``input0`` ... (b,P,H,D), the first b rows of the batch, P tokens one after the other -> ``output`` (b,P,H,D)."""
    rows, tokens = given["input0"].shape[:2]
    whole = inputs(task, tokens)
    for i, tensor in enumerate(whole):
        tensor[:rows] = given[f"input{i}"]
    heads = [tensor.transpose(1, 2) for tensor in whole]
    steps = [function(*(tensor[:, :, t : t + 1] for tensor in heads))[:rows].clone() for t in range(tokens)]
    return {"output": torch.cat(steps, 2).transpose(1, 2)}


@torch.no_grad()
def model_answer(make: Any, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tokens`` (b,P) for the first b rows; the other entries are the decoder's weights -> ``output`` (b,P,vocab)."""
    tokens = given["tokens"]
    step = make(task, {name: tensor for name, tensor in given.items() if name != "tokens"})()
    whole = torch.zeros(task["batch"], tokens.shape[1], dtype=torch.long)
    whole[: len(tokens)] = tokens
    steps = [step(whole[:, t : t + 1])[: len(tokens)].clone() for t in range(tokens.shape[1])]
    return {"output": torch.stack(steps, 1)}


def timed(run: Call, repeat: int = 1) -> float:
    """Seconds of one call, the mean of ``repeat`` calls in a row."""
    begin = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - begin) / repeat


def status(entry: str) -> float:
    """``VmRSS`` (resident now) or ``VmHWM`` (at most so far) of this process, in MB. Raises OSError without /proc."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(f"{entry}:"))


def highest() -> float:
    """Largest resident memory of this process so far, in MB, on any system."""
    # Not from getrusage on Linux, where a child starts with the peak of its parent.
    with contextlib.suppress(OSError):
        return status("VmHWM")
    unit = 1024 if sys.platform == "darwin" else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / unit


def peak(makers: Makers, task: Task) -> float:
    """Peak memory of one call of an attention or train task in MB, without inputs and weights."""
    # A short call first, for one-time allocations.
    call(makers, task | {"length": min(task["length"], 64)})()
    # Return freed memory to the system, which would otherwise be reused uncounted.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    measured = call(makers, task)
    # Reset the high-water mark to the resident memory.
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    before = status("VmRSS")
    measured()
    return status("VmHWM") - before


def forked(function: Callable[[], float]) -> float:
    """Run a function in a fresh child of this process. Raises RemoteError if the child fails."""
    # The first backward imports this for more than a second; import it once, in the parent.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        reply: dict[str, Any] = {"error": "the process ended early"}
        try:
            reply = {"value": function()}
        except BaseException as error:
            reply = {"error": one_line(error)}
        finally:
            os.write(write, json.dumps(reply).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    _, code = os.waitpid(child, 0)
    if not data:
        ended = os.waitstatus_to_exitcode(code)
        raise RemoteError(f"its process ended with code {ended}" + (": killed, perhaps out of memory" * (ended == -9)))
    reply = json.loads(data)
    if "error" in reply:
        raise RemoteError(reply["error"])
    return reply["value"]


class RemoteError(Exception):
    """An error of another process, with its message."""


def one_line(error: BaseException) -> str:
    """Format an error on one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, RemoteError) else f"{type(error).__name__}: {text}"


class Worker:
    """Execute requests; ``find`` returns the makers of a subject by name, ``about`` versions by name."""

    def __init__(self, find: Callable[[str], Makers], about: Callable[[], dict[str, str]]):
        self.find, self.about = find, about
        self.run: Call | None = None

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute one request. Raises the errors of the subject."""
        do = request.pop("do")
        if do == "about":
            return {"python": platform.python_version(), "torch": torch.__version__, **self.about()}
        if do == "release":
            self.run = None
            return {}
        if do == "run":
            assert self.run is not None
            return {"seconds": timed(self.run, request["repeat"])}
        makers, task = self.find(request["subject"]), request["task"]
        if do == "memory":
            return {"mb": forked(lambda: limited(task["threads"], lambda: peak(makers, task)))}
        torch.set_num_threads(task["threads"])
        if do == "prepare":
            self.run = call(makers, task)
            return {}
        assert do == "answer", do
        given = torch.load(request["given"], weights_only=True)
        torch.save(answer(makers, task, given), request["found"])
        return {}


def limited(threads: int, function: Callable[[], float]) -> float:
    """Run with a number of threads."""
    torch.set_num_threads(threads)
    return function()


def serve(find: Callable[[str], Makers], about: Callable[[], dict[str, str]] = dict) -> None:
    """Answer the requests on stdin until it ends."""
    worker = Worker(find, about)
    with answers() as answer_line:
        for line in sys.stdin:
            try:
                reply = worker.reply(json.loads(line))
            # An error of a subject is its reply; later requests may succeed.
            except Exception as error:
                reply = {"error": one_line(error)}
            answer_line(json.dumps(reply))


@contextlib.contextmanager
def answers() -> Iterator[Callable[[str], None]]:
    """A function that writes lines to stdout, while all other output, also of C code, goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)

        def write(line: str) -> None:
            stdout.write(line + "\n")
            stdout.flush()

        yield write


if __name__ == "__main__":
    subjects = runpy.run_path(sys.argv[1])
    serve(subjects["SUBJECTS"].__getitem__, subjects["about"])
