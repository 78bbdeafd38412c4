"""This package's own subjects, and torch's, by the names that the command line knows: ``SPEC[@BACKEND][@module]``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._utils.spec import known
from longspan.attention import build
from longspan.attention.linear import Linear
from longspan.ops.backends import BACKENDS, backend
from longspan.ops.linear import linear_attention
from longspan.ops.native import build as native
from longspan.ops.native.build.openmp import threads
from longspan.ops.native.call import LARGEST, MAPS, TYPES, available

from .worker import Function, Makers, Task


@dataclass(frozen=True)
class Name:
    """A candidate's name, read."""

    spec: str
    """an attention, ``sdpa`` (F.scaled_dot_product_attention), ``kernel`` (the native token step alone)"""
    backend: str
    """one of ``ops.BACKENDS``; "" for whatever is chosen outside"""
    module: bool
    """the whole module with its projections, instead of the op on queries, keys and values"""

    @property
    def cost(self) -> str:
        """The declared cost in N and D."""
        return "N^2 D" if self.spec == "sdpa" else "N D^2" if self.spec == "kernel" else built(self.spec, 1, 1).cost


def read(text: str) -> Name:
    """Read a candidate's name. Raises ValueError for a spec, backend or suffix that is not known.

    A spec that no function serves on its own is measured as a module.
    """
    spec, *suffixes = text.split("@")
    choices = dict.fromkeys((*BACKENDS, "module"))
    for suffix in suffixes:
        known(suffix, choices, "suffix of a candidate")
    forced = [suffix for suffix in suffixes if suffix != "module"]
    if len(forced) > 1 or len(set(suffixes)) < len(suffixes):
        raise ValueError(f"candidate {text!r} names more than one backend; one is enough: SPEC@BACKEND")
    if spec in ("sdpa", "kernel"):
        if suffixes:
            raise ValueError(f"{spec} is one function, so {text!r} has a suffix too many")
        return Name(spec, "", False)
    return Name(spec, "".join(forced), "module" in suffixes or not options(spec))


def options(spec: str) -> dict[str, Any]:
    """Feature map and eps of a spec that ``linear_attention`` serves; empty for any other."""
    attention = built(spec, 8, 2)
    if not isinstance(attention, Linear) or attention.rotary:
        return {}
    return {"feature_map": attention.feature_map, "eps": attention.eps}


def built(spec: str, dim: int, heads: int) -> Any:
    """An attention with weights that are the same in every process, and in evaluation mode."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return build(spec, dim, heads).eval()


def find(text: str) -> Makers:
    """The makers of a candidate. Raises ValueError as ``read`` does."""
    name = read(text)
    makers: Makers = {"attention": lambda task: _forced(name, _attention(name, task))}
    if name.spec == "kernel":
        return {"step": _kernel}
    if not name.module and name.spec != "sdpa":
        makers["step"] = lambda task: _forced(name, _step(name, task))
    return makers


def _forced(name: Name, function: Function) -> Function:
    # Without a backend there is nothing to enter, which a step of some microseconds would feel.
    if not name.backend:
        return function

    def inside(*inputs: Tensor) -> Tensor:
        with backend(name.backend):
            return function(*inputs)

    return inside


def _attention(name: Name, task: Task) -> Function:
    if name.module:
        attention = module(name.spec, task)
        return lambda x: attention(x)[0]
    if name.spec == "sdpa":
        return lambda q, k, v: _op(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), q, k, v)
    given = options(name.spec)
    return lambda q, k, v: _op(lambda *t: linear_attention(*t, causal=True, **given), q, k, v)


def module(spec: str, task: Task) -> Any:
    """The attention of a module candidate, for a task's sizes."""
    return built(spec, task["heads"] * task["size"], task["heads"]).to(getattr(torch, task["dtype"]))


def _op(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B,N,H,D) as projections give them -> (B,N,H*D) as the output projection takes it; where it lies so, no copy."""
    return function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


def _state(task: Task) -> Tensor:
    return torch.zeros(task["batch"], task["heads"], task["size"], task["size"] + 1)


def _step(name: Name, task: Task) -> Function:
    state, given = _state(task), options(name.spec)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal state
        o, state = linear_attention(q, k, v, state=state, return_state=True, donate=True, **given)
        return o

    return step


def _kernel(task: Task) -> Function:
    state = _state(task)
    if not available("linear"):
        raise ValueError("native kernels are not available; longspan doctor reports the reason")
    if task["size"] >= LARGEST:
        raise ValueError(f"the native step serves heads of less than {LARGEST} channels, not {task['size']}")

    kernels, out = native.loaded("linear/step"), torch.empty(task["batch"], task["heads"], 1, task["size"])
    assert kernels is not None
    size, options = task["size"], (MAPS["elu"], 1e-6, TYPES[torch.float32], threads())
    sizes = (task["batch"] * task["heads"], size, size, *options)

    # Only the C function; the other candidates include the overhead of Python.
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t if t.is_contiguous() else t.contiguous() for t in (q, k, v))
        failed = kernels.longspan_linear_step(
            state.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), *sizes
        )
        assert not failed
        return out

    return step
