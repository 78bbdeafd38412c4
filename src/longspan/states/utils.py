"""Functions on any state: a pytree of NamedTuples of tensors, each batch first."""

import contextlib
import hashlib
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor
from torch.utils import _pytree as pytree

from .._utils import atomic_io
from ..ops.arguments import describe
from ..ops.operands import check_stored
from .journal import Journal
from .kv_cache import FixedKeyValues, KeyValues, fixed

# Names with one meaning in every state: counters, fields of a state that keeps every token, and its axes of tokens.
COUNTERS = (".length", ".position")
PER_TOKEN = {"length", "mask"}
TOKENS = {"keys": 2, "values": 2, "mask": 1}
# Entries of a state file's header.
RESERVED = {"longspan", "tree", "sha256", "format"}

S = TypeVar("S")


def _require_ordinary(name: str, *states: Any) -> None:
    """Raise ValueError for a journal, whose inputs have no place in a file or in another state."""
    if any(isinstance(state, Journal) for state in states):
        raise ValueError(f"{name} takes no journal; pass states.settle(state), which cannot be rewound")


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a state, in the order of its fields: ``tree_leaves``, and faster where there are tuples alone."""
    found: list[Tensor] = []
    for part in state:
        if isinstance(part, Tensor):
            found.append(part)
        else:
            found += tensors(part) if isinstance(part, tuple) else pytree.tree_leaves(part)
    return found


def clone(state: S) -> S:
    """Copy a state; the copy shares no memory with ``state``.

    Args:
        state: The state of a mechanism or of a stack.

    Returns:
        A state of the same type.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.build("linear", dim=8, heads=2)
        >>> state = attention.init_state(1)
        >>> copy = longspan.states.clone(state)
        >>> copy.sums.data_ptr() == state.sums.data_ptr()
        False
    """
    check_stored("the state", *pytree.tree_leaves(state))
    return pytree.tree_map(torch.clone, state)


def detach(state: S) -> S:
    """Detach a state from the autograd graph, to train on segments of a long sequence.

    Args:
        state: The state of a mechanism or of a stack.

    Returns:
        A state of the same type with the same values.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.build("linear", dim=8, heads=2)
        >>> y, state = attention(torch.randn(1, 5, 8), attention.init_state(1))
        >>> state.sums.requires_grad, longspan.states.detach(state).sums.requires_grad
        (True, False)
    """
    return pytree.tree_map(torch.detach, state)


def select(state: S, rows: Tensor | Sequence[int]) -> S:
    """Select rows of the batch, as beam search does; the result shares no memory with ``state``.

    Args:
        state: The state of a mechanism or of a stack.
        rows: (R,) integers, in any order, repeats allowed.

    Returns:
        A state of R rows; no rows give an empty batch.

    Raises:
        IndexError: For a row that does not exist.
        ValueError: For rows that are not integers.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.build("linear", dim=8, heads=2)
        >>> state = longspan.states.select(attention.init_state(2), [1, 1, 0])
        >>> len(state.sums)
        3
    """
    check_stored("the state", *pytree.tree_leaves(state))
    index = _row_numbers(rows)
    return pytree.tree_map(lambda t: t.index_select(0, index.to(t.device)), state)


def _row_numbers(rows: Tensor | Sequence[int]) -> Tensor:
    """Return ``rows`` as int64 (R,)."""
    index = torch.as_tensor(rows)
    if not index.numel():
        index = index.long()  # an empty list becomes a float tensor
    if index.dim() > 1 or index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
        raise ValueError(f"rows must be integers (R,), not {describe(index)}")
    return index.long().reshape(-1)


def join(states: Sequence[S]) -> S:
    """Concatenate the rows of several states, so that one call continues all of them.

    KV caches and other states that keep every token may hold different numbers of tokens: shorter ones get empty slots.

    Args:
        states: States of the same mechanism or stack, at least one, each with any number of rows.

    Returns:
        A state with the rows of all, in order; it shares no memory with them.

    Raises:
        ValueError: For no states, or states of different mechanisms, sizes, dtypes or devices. ``informer`` and
            ``sinkhorn`` join only states after equally many tokens.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.build("softmax", dim=8, heads=2)
        >>> _, short = attention(torch.randn(1, 3, 8), attention.init_state(1))
        >>> _, long = attention(torch.randn(1, 7, 8), attention.init_state(1))
        >>> longspan.states.join([short, long]).length
        tensor([3, 7])
    """
    _require_ordinary("join", *states)
    states = list(states)
    if not states:
        raise ValueError("join needs at least one state")
    kinds = {_shape(state) for state in states}
    if len(kinds) > 1:
        raise ValueError(f"join needs states of one mechanism or stack, not {' and '.join(sorted(kinds))}")
    check_stored("the state", *(t for state in states for t in pytree.tree_leaves(state)))
    each = [named(state) for state in states]
    axes = {
        f"{name}.{field}": axis for name, fields in _parts(states[0]) for field, axis in _token_axes(fields).items()
    }
    leaves = [_joined(name, [leaves[name] for leaves in each], axes.get(name)) for name in each[0]]
    return pytree.tree_unflatten(leaves, pytree.tree_structure(states[0]))


def _joined(name: str, parts: list[Tensor], axis: int | None) -> Tensor:
    """Concatenate one tensor of several states, after padding ``axis`` with zeros."""
    if axis is not None:
        size = max(part.shape[axis] for part in parts)
        padded = []
        for part in parts:
            room = list(part.shape)
            room[axis] = size - room[axis]
            padded.append(torch.cat([part, part.new_zeros(room)], axis) if room[axis] else part)
        parts = padded
    facts = {(part.dtype, part.device, tuple(part.shape[1:])) for part in parts}
    if len(facts) > 1:
        found = " and ".join(f"{dtype} {(*shape,)} on {device}" for dtype, device, shape in sorted(facts, key=str))
        raise ValueError(f"{name} differs beyond the rows: {found}; join needs states of equal sizes")
    return torch.cat(parts)


def put(state: S, rows: Tensor | Sequence[int], source: S) -> S:
    """Overwrite rows of a state in place, as a pool of slots does when a new sequence takes one.

    Args:
        state: The state to change, of any mechanism or stack.
        rows: (R,) integers, the rows of ``state`` to overwrite, without repeats.
        source: A state of the same kind with R rows. A KV cache may have fewer slots than that of ``state``.

    Returns:
        ``state``, whose memory holds the new rows.

    Raises:
        IndexError: For a row that does not exist.
        ValueError: For a state of another mechanism, size, dtype or number of rows, rows that repeat or are not
            integers, or a KV cache with fewer slots than the one of ``source``; ``fix_capacity`` gives it more.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.build("linear", dim=8, heads=2)
        >>> pool = attention.init_state(4)
        >>> _, one = attention(torch.randn(1, 5, 8), attention.init_state(1))
        >>> pool = longspan.states.put(pool, [2], one)
        >>> torch.equal(pool.sums[2], one.sums[0])
        True
    """
    _require_ordinary("put", state, source)
    if _shape(state) != _shape(source):
        raise ValueError(f"put needs states of one mechanism or stack, not {_shape(state)} and {_shape(source)}")
    index = _row_numbers(rows)
    wanted = index.tolist()
    into, given = named(state), named(source)
    check_stored("the state", *into.values(), *given.values())
    count = len(next(iter(into.values()))) if into else 0
    if wanted and not -count <= min(wanted) <= max(wanted) < count:
        raise IndexError(f"rows {wanted} are not all among the {count} rows of the state")
    if len({row % count for row in wanted}) < len(wanted):
        raise ValueError(f"rows {wanted} repeat")
    axes = {f"{name}.{field}": axis for name, fields in _parts(state) for field, axis in _token_axes(fields).items()}
    # All checks come first, so that an error leaves the state as it was.
    for name, target in into.items():
        part, axis = given[name], axes.get(name)
        shape = list(part.shape)
        if axis is not None and shape[axis] <= target.shape[axis]:
            shape[axis] = target.shape[axis]
        if shape != [len(wanted), *target.shape[1:]] or part.dtype != target.dtype:
            raise ValueError(
                f"{name} is {part.dtype} {tuple(part.shape)}, which does not fit {len(wanted)} rows of {target.dtype} "
                f"{tuple(target.shape)}"
            )
    with torch.no_grad():
        for name, target in into.items():
            part, axis = given[name], axes.get(name)
            at = index.to(target.device)
            if axis is not None and part.shape[axis] < target.shape[axis]:
                part = _joined(name, [part, target[:0]], axis)
            target[at] = part
    return state


def fix_capacity(state: S, capacity: int) -> S:
    """Give the KV caches of a state a fixed number of slots.

    With such a cache, a step with one token has the same shapes and addresses each time, and it never waits for a CUDA
    device to learn the length. Each query scores all ``capacity`` slots. Other states stay as they are.

    Args:
        state: The state of a mechanism, of a stack or of a decoder.
        capacity: Number of slots, for the tokens so far and all later ones. A cache that has as many, from
            ``init_state(batch, capacity)``, keeps its memory.

    Returns:
        The state. A later call that needs more slots raises ValueError on the CPU; on a CUDA device, a step with one
        token fails with a device-side assertion.

    Raises:
        ValueError: For a capacity below the number of slots in use.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.build("softmax", dim=8, heads=2)
        >>> state = longspan.states.fix_capacity(attention.init_state(1), 20)
        >>> _, state = attention(torch.randn(1, 1, 8), state)
        >>> state.keys.shape
        torch.Size([1, 2, 20, 4])
    """
    _require_ordinary("fix_capacity", state)
    found: Any = state
    if isinstance(state, KeyValues):
        fits = isinstance(state, FixedKeyValues) and state.keys.shape[2] == capacity
        found = state if fits else fixed(state, capacity)
    elif type(state) is tuple:
        found = tuple(fix_capacity(part, capacity) for part in state)
    elif inner := {name: fix_capacity(part, capacity) for name, part in _nested(state)}:
        found = found._replace(**inner)
    return found


def grow_capacity(state: S) -> S:
    """Undo ``fix_capacity``: caches with a fixed number of slots become ordinary ones with the slots in use."""
    found: Any = state
    if isinstance(state, FixedKeyValues):
        used = int(state.length.max()) if state.length.numel() else 0
        found = KeyValues(state.keys[:, :, :used].contiguous(), state.values[:, :, :used].contiguous(), state.length)
    elif type(state) is tuple:
        found = tuple(grow_capacity(part) for part in state)
    elif inner := {name: grow_capacity(part) for name, part in _nested(state)}:
        found = found._replace(**inner)
    return found


def _nested(state: Any) -> list[tuple[str, Any]]:
    """The fields of a state that hold states of other modules: the layers of a stack, the attention of a block."""
    return [(name, getattr(state, name)) for name in ("layers", "own", "mixer") if hasattr(state, name)]


def nbytes(state: Any) -> int:
    """Return the size of all tensors of a state in bytes.

    Args:
        state: The state of a mechanism or of a stack.

    Example:
        >>> import longspan
        >>> longspan.states.nbytes(longspan.build("linear", dim=64, heads=4).init_state(1))
        4352
    """
    return sum(t.nbytes for t in pytree.tree_leaves(state))


def check_values(state: Any) -> None:
    """Raise ValueError for impossible counters: not int64, negative, or a length beyond the slots."""
    leaves = named(state)
    _refuse_meta(leaves)
    for name, leaf in leaves.items():
        plain = leaf.is_floating_point() or leaf.dtype == torch.bool
        if leaf.dtype != torch.int64 and (not plain or name.endswith(COUNTERS)):
            raise ValueError(f"{name} is {leaf.dtype}; counters must be torch.int64")
        if not plain and leaf.numel() and (least := int(leaf.min())) < 0:
            raise ValueError(f"{name} is {least}; counters must not be negative")
    for name, fields in _parts(state):
        slots = {f: fields[f].shape[axis] if fields[f].dim() > axis else 0 for f, axis in _token_axes(fields).items()}
        if len(set(slots.values())) > 1:
            raise ValueError(f"{name} has unequal numbers of tokens: {slots}")
        if slots and "length" in fields and fields["length"].numel():
            most, room = int(fields["length"].max()), min(slots.values())
            if most > room:
                raise ValueError(f"{name}.length is {most}, but there are {room} slots")


def save(state: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Write a state to one safetensors file with its sha256, atomically.

    Args:
        state: The state of a mechanism or of a stack.
        path: The file; an older one is replaced.
        metadata: Texts that the file also holds, for ``read_metadata``. The sha256 includes them.

    Raises:
        ValueError: For a state on the meta device, a name in ``metadata`` that the format uses, or a path that cannot
            be written; an older file then stays.

    Example:
        >>> import tempfile, torch, longspan
        >>> attention = longspan.build("linear", dim=8, heads=2)
        >>> _, state = attention(torch.randn(1, 5, 8), attention.init_state(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     longspan.states.save(state, f"{folder}/state.safetensors")
        ...     again = longspan.states.load(f"{folder}/state.safetensors", like=attention.init_state(1))
        >>> torch.equal(again.sums, state.sums)
        True
    """
    _require_ordinary("save", state)
    path, leaves = atomic_io.check(Path(path)), named(state)
    _refuse_meta(leaves)
    check_stored("the state", *leaves.values())
    leaves = {name: t.detach().cpu().contiguous().clone() for name, t in leaves.items()}
    own, more = {"longspan": "state", "tree": _shape(state)}, dict(metadata or {})
    if taken := sorted(more.keys() & RESERVED):
        raise ValueError(f"metadata has the entry {taken[0]!r}, which the format of the file uses; rename it")
    own["sha256"] = _digest(leaves, more)
    try:
        atomic_io.write(path, serialize(leaves, own | more))
    except OSError as error:
        raise ValueError(f"cannot write a state to {str(path)!r}: {error.strerror or error}") from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the ``metadata`` of a file that ``save`` has written; ``load`` checks its sha256.

    Raises:
        ValueError: For a file that is missing, or not the file of a state.
    """
    path = atomic_io.check(Path(path))
    # safe_open maps the file by its name, and would block on a FIFO.
    with _readable(path), atomic_io.open_regular(path), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("longspan") != "state":
        raise ValueError(f"{str(path)!r} is not a readable state file: its header has no entry longspan=state")
    return _more(metadata)


@contextlib.contextmanager
def _readable(path: Path) -> Generator[None]:
    """Errors within name the state file."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"no state file {str(path)!r}") from error
    except (SafetensorError, OSError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{str(path)!r} is not a readable state file: {reason}") from error


def _more(metadata: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in metadata.items() if name not in RESERVED}


def load(path: str | os.PathLike[str], like: S) -> S:
    """Read a state that ``save`` has written.

    Args:
        path: The file.
        like: Any state of the same mechanism or stack, such as ``attention.init_state(1)``. The number of rows may
            differ, and so may the number of tokens of a state that keeps every token.

    Returns:
        The state, on the device of ``like``.

    Raises:
        ValueError: For a file that is missing or damaged, the state of another mechanism, another size or precision
            than ``like``, and impossible counters.

    Example:
        >>> import tempfile, torch, longspan
        >>> attention = longspan.build("linear", dim=8, heads=2)
        >>> _, state = attention(torch.randn(1, 5, 8), attention.init_state(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     longspan.states.save(state, f"{folder}/state.safetensors")
        ...     again = longspan.states.load(f"{folder}/state.safetensors", like=attention.init_state(1))
        >>> torch.equal(again.sums, state.sums)
        True
    """
    _require_ordinary("load", like)
    path, wanted = atomic_io.check(Path(path)), named(like)
    _refuse_meta(wanted)
    with _readable(path):
        # In one piece: safe_open opens the file by its name again, which may be that of a newer one by then.
        with atomic_io.open_regular(path) as file:
            content = file.read()
        found = deserialize(content)
        header = 8 + int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8:header]).get("__metadata__", {})
        if metadata.get("tree") != _shape(like):
            raise ValueError(f"{str(path)!r} does not hold the state of this mechanism or stack: {sorted(wanted)}")
        leaves = {name: found[name] for name in wanted}
    if metadata.get("sha256") != (digest := _digest(leaves, _more(metadata))):
        raise ValueError(
            f"{str(path)!r} was changed or damaged since it was written: its sha256 is {digest}, not "
            f"{metadata.get('sha256')}; restore it from a copy, or compute the state again"
        )
    state = pytree.tree_unflatten(list(leaves.values()), pytree.tree_structure(like))
    try:
        check_like(state, like)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be continued: {error}") from error
    return pytree.tree_map(lambda leaf, t: leaf.to(t.device), state, like)


def check_like(state: Any, like: Any) -> None:
    """Raise ValueError unless ``state`` is of the mechanism or stack of ``like``, after any number of tokens."""
    kinds = {pytree.tree_structure(one) for one in (state, like)}
    if len(kinds) > 1 or not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(state)):
        raise ValueError(f"it is not a {type(like).__name__} of this mechanism or stack")
    _check_fit(named(state), like)
    check_values(state)


def _check_fit(leaves: dict[str, Tensor], like: Any) -> None:
    grown = {f"{name}.{field}": axis for name, fields in _parts(like) for field, axis in _token_axes(fields).items()}
    (first, rows), *_ = ((name, leaf.shape[:1]) for name, leaf in leaves.items())
    for (name, leaf), wanted in zip(leaves.items(), named(like).values(), strict=True):
        # As in arguments.check_state, a dimension that starts at zero grows.
        free = {0, grown.get(name, 0)} | {axis for axis, size in enumerate(wanted.shape) if not size}
        fits = leaf.dim() == wanted.dim() and all(
            axis in free or leaf.shape[axis] == size for axis, size in enumerate(wanted.shape)
        )
        if not fits or leaf.dtype != wanted.dtype:
            raise ValueError(
                f"{name} is {leaf.dtype} {tuple(leaf.shape)}, but this mechanism or stack has {wanted.dtype} "
                f"{tuple(wanted.shape)}, with any number of rows"
            )
        if leaf.shape[:1] != rows:
            raise ValueError(f"{name} has {leaf.shape[0]} rows, but {first} has {rows[0]}")


def _refuse_meta(leaves: dict[str, Tensor]) -> None:
    for name, leaf in leaves.items():
        if leaf.is_meta:
            raise ValueError(f"{name} is on the meta device, where tensors have no values")


def _digest(leaves: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str:
    """The sha256 of tensors on the CPU (names, dtypes, shapes and values) and of texts, if there are any."""
    digest = hashlib.sha256()
    if metadata:
        digest.update(f"{json.dumps(metadata, sort_keys=True)}\n".encode())
    for name, leaf in leaves.items():
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        digest.update(leaf.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def named(state: Any, name: str = "state") -> dict[str, Tensor]:
    """Leaves by name, such as ``state.layers.0.sums``, in the order of the tree."""
    if isinstance(state, Tensor):
        return {name: state}
    return {n: t for field, part in _fields(state).items() for n, t in named(part, f"{name}.{field}").items()}


def _fields(state: Any) -> dict[str, Any]:
    return dict(zip(map(str, getattr(state, "_fields", range(len(state)))), state, strict=True))


def _parts(state: Any, name: str = "state") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every tuple of a state by name, with its fields."""
    if isinstance(state, Tensor):
        return
    yield name, _fields(state)
    for field, part in _fields(state).items():
        yield from _parts(part, f"{name}.{field}")


def _token_axes(fields: dict[str, Any]) -> dict[str, int]:
    """Field -> axis of tokens, for a part that keeps every token: one with their number or their mask."""
    return {field: axis for field, axis in TOKENS.items() if field in fields} if PER_TOKEN & fields.keys() else {}


def _shape(state: Any) -> str:
    """The nesting of a state as text, such as ``DecoderState(Tensor, tuple(linear.LinearState(Tensor)))``."""
    if isinstance(state, Tensor):
        return "Tensor"
    kind = type(state)
    module = "" if kind is tuple else f"{kind.__module__.rsplit('.', 1)[-1]}."
    return f"{module}{kind.__name__}({', '.join(_shape(part) for part in state)})"
