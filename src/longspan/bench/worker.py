"""What is measured, run in a process of its own that answers JSON lines: other libraries, and every memory figure.

Stands alone: it needs torch and nothing of this package, so that it also runs in an environment that holds another
library::

    python -I worker.py subjects.py

``subjects.py`` defines ``SUBJECTS``, name -> makers of the tasks that it serves (see ``Makers``), and ``about()``, name
-> version of what they are made of. Requests and answers are one JSON object a line on stdin and stdout; a request has
a ``do`` of ``about | answer | prepare | run | release | memory``, and an answer with ``error`` says what went wrong.
Between requests the process waits on stdin and computes nothing.
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
    """How one subject does the tasks that it can do. B batch, N tokens, H heads, D head size."""

    attention: Callable[[Task], Function]
    """task -> f(q, k, v), each (B,N,H,D) as projections give them, or f(x), (B,N,H*D) -> (B,N,H*D), causal"""
    step: Callable[[Task], Function]
    """task -> f(q, k, v), each (B,H,1,D) -> (B,H,1,D): one more token on a state of its own that starts empty"""
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
    # Nothing here needs gradients, so nothing is recorded and there is no mode to enter, which a call would feel.
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
        # An exact draw from softmax(outputs): the first of as many exponential clocks to ring.
        race = torch.empty_like(outputs).exponential_().clamp_(min=torch.finfo(outputs.dtype).tiny)
        token = (outputs - race.log_()).argmax(-1)


def call(makers: Makers, task: Task) -> Call:
    """What is timed for a task. Raises ValueError for a task that the subject does not know."""
    match task["what"], makers:
        case "attention", {"attention": make}:
            return attention_call(make(task), task)
        case "step", {"step": make}:
            return step_call(make(task), task)
        case "model", {"model": make}:
            return model_call(make(task, None), task)
        case "train", {"train": make}:
            return make(task)
    raise ValueError(f"it has no {task['what']}")


def answer(makers: Makers, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a subject makes of given numbers, at the task's own shape. See the functions below."""
    match task["what"], makers:
        case "attention", {"attention": make}:
            return attention_answer(make(task), task, given)
        case "step", {"step": make}:
            return step_answer(make(task), task, given)
        case "model", {"model": make}:
            return model_answer(make, task, given)
    raise ValueError(f"it has no {task['what']}")


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
    # Not from getrusage on Linux: there a child begins with its parent's peak.
    with contextlib.suppress(OSError):
        return status("VmHWM")
    unit = 1024 if sys.platform == "darwin" else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / unit


def peak(makers: Makers, task: Task) -> float:
    """MB that one call of an attention or train task takes at its peak, beyond its inputs and the weights."""
    # A short call first loads whatever is loaded once.
    call(makers, task | {"length": min(task["length"], 64)})()
    # What that call has freed would otherwise be used again, uncounted.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    measured = call(makers, task)
    # The highest mark falls back to what is resident now.
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    before = status("VmRSS")
    measured()
    return status("VmHWM") - before


def forked(function: Callable[[], float]) -> float:
    """Run in a child of this process, which has computed nothing yet. Raises Told where the child fails."""
    # A first backward imports this, for more than a second; done here, it is done once.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        reply: dict[str, Any] = {"error": "it ended early"}
        try:
            reply = {"value": function()}
        except BaseException as error:
            reply = {"error": told(error)}
        finally:
            os.write(write, json.dumps(reply).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    _, code = os.waitpid(child, 0)
    if not data:
        ended = os.waitstatus_to_exitcode(code)
        raise Told(f"its process ended with code {ended}" + (": killed, perhaps for want of memory" * (ended == -9)))
    reply = json.loads(data)
    if "error" in reply:
        raise Told(reply["error"])
    return reply["value"]


class Told(Exception):
    """An error of another process, in its words."""


def told(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, Told) else f"{type(error).__name__}: {text}"


class Worker:
    """Does what requests ask for; ``find`` gives the makers of a subject by its name, ``about`` versions by name."""

    def __init__(self, find: Callable[[str], Makers], about: Callable[[], dict[str, str]]):
        self.find, self.about = find, about
        self.run: Call | None = None

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises whatever the subject raises."""
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
            # Whatever a subject raises is its answer, and the next request may go well.
            except Exception as error:
                reply = {"error": told(error)}
            answer_line(json.dumps(reply))


@contextlib.contextmanager
def answers() -> Iterator[Callable[[str], None]]:
    """A function that writes lines to stdout, while whatever else is printed, by C code too, goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)

        def write(line: str) -> None:
            stdout.write(line + "\n")
            stdout.flush()

        yield write


if __name__ == "__main__":
    subjects = runpy.run_path(sys.argv[1])
    serve(subjects["SUBJECTS"].__getitem__, subjects["about"])
