"""What can be done with any state: a pytree of NamedTuples of tensors, batch first in every one."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

S = TypeVar("S")


def clone(state: S) -> S:
    """A copy that shares no memory with ``state``.

    >>> import torch, longspan
    >>> attention = longspan.build("linear", dim=8, heads=2)
    >>> state = attention.init_state(1)
    >>> copy = longspan.clone(state)
    >>> copy.sums.data_ptr() == state.sums.data_ptr()
    False
    """
    return pytree.tree_map(torch.clone, state)


def detach(state: S) -> S:
    """The same values, cut off from the graph that made them: for training over segments of a long sequence.

    >>> import torch, longspan
    >>> attention = longspan.build("linear", dim=8, heads=2)
    >>> y, state = attention(torch.randn(1, 5, 8), attention.init_state(1))
    >>> state.sums.requires_grad, longspan.detach(state).sums.requires_grad
    (True, False)
    """
    return pytree.tree_map(torch.detach, state)


def select(state: S, rows: Tensor | Sequence[int]) -> S:
    """The given rows of the batch, in the given order, repeats allowed (beam search). Shares no memory with ``state``.

    >>> import torch, longspan
    >>> attention = longspan.build("linear", dim=8, heads=2)
    >>> state = longspan.select(attention.init_state(2), [1, 1, 0])
    >>> len(state.sums)
    3

    ``rows`` (R,) integers. Raises IndexError for a row that does not exist.
    """
    return pytree.tree_map(lambda t: t.index_select(0, torch.as_tensor(rows, device=t.device)), state)


def nbytes(state: Any) -> int:
    """Bytes of all tensors in ``state``.

    >>> import longspan
    >>> longspan.nbytes(longspan.build("linear", dim=64, heads=4).init_state(1))
    4352
    """
    return sum(t.nbytes for t in pytree.tree_leaves(state))


def save_state(path: str | os.PathLike, state: Any) -> None:
    """Write ``state`` to one safetensors file, whole or not at all (a temporary name, synced, renamed).

    >>> import tempfile, torch, longspan
    >>> attention = longspan.build("linear", dim=8, heads=2)
    >>> _, state = attention(torch.randn(1, 5, 8), attention.init_state(1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     longspan.save_state(f"{folder}/state.safetensors", state)
    ...     again = longspan.load_state(f"{folder}/state.safetensors", like=attention.init_state(1))
    >>> torch.equal(again.sums, state.sums)
    True
    """
    path = Path(path)
    leaves = {name: t.detach().contiguous().clone() for name, t in _named(state).items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(leaves, temporary, metadata={"longspan": "state", "tree": _shape(state)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write a state to {str(path)!r}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_state(path: str | os.PathLike, like: S) -> S:
    """Read a state written by ``save_state``; ``like`` is any state of the same mechanism or stack, e.g. a fresh one.

    >>> import tempfile, torch, longspan
    >>> attention = longspan.build("linear", dim=8, heads=2)
    >>> _, state = attention(torch.randn(1, 5, 8), attention.init_state(1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     longspan.save_state(f"{folder}/state.safetensors", state)
    ...     again = longspan.load_state(f"{folder}/state.safetensors", like=attention.init_state(1))
    >>> torch.equal(again.sums, state.sums)
    True

    The tensors take the device of ``like``. Raises ValueError where the file is missing or damaged, or holds the state
    of something else.
    """
    names = _named(like)
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("tree") != _shape(like):
                raise ValueError(f"{str(path)!r} does not hold the state of this mechanism or stack: {sorted(names)}")
            leaves = [file.get_tensor(name).to(t.device) for name, t in names.items()]
    except FileNotFoundError as error:
        raise ValueError(f"no state file {str(path)!r}") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is not a readable state file: {error}") from error
    return pytree.tree_unflatten(leaves, pytree.tree_structure(like))


def _named(state: Any, name: str = "state") -> dict[str, Tensor]:
    """Leaves by name, e.g. ``state.layers.0.sums``."""
    if isinstance(state, Tensor):
        return {name: state}
    fields = getattr(state, "_fields", range(len(state)))
    return {n: t for f, part in zip(fields, state, strict=True) for n, t in _named(part, f"{name}.{f}").items()}


def _shape(state: Any) -> str:
    """The nesting of a state in words, e.g. ``DecoderState(Tensor, tuple(linear.State(Tensor)))``."""
    if isinstance(state, Tensor):
        return "Tensor"
    kind = type(state)
    module = "" if kind is tuple else f"{kind.__module__.rsplit('.', 1)[-1]}."
    return f"{module}{kind.__name__}({', '.join(_shape(part) for part in state)})"
