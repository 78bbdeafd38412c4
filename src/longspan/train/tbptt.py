"""States carried along a text, in truncated backpropagation through time and in evaluation."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._utils import spec
from ..attention import build
from ..models.config import DecoderConfig
from ..models.decoder import Decoder, DecoderState
from ..models.stacks.universal import UniversalState
from ..states.utils import detach, nbytes


class Carry:
    """The states of all rows between micro-batches: truncated backpropagation through time.

    Gradients stop at the beginning of a micro-batch (Williams and Peng 1990; for attention, Dai et al. 2019, section
    3.2).
    """

    def __init__(self, model: Decoder, batch: int):
        self.model, self.batch = model, batch
        self.state: DecoderState | None = None

    def begin(self, fresh: Tensor) -> DecoderState:
        """The state at the beginning of a micro-batch; rows in ``fresh`` (B,) bool get a new one."""
        if self.state is not None and not bool(fresh.any()):
            return self.state
        new = first(self.model, self.batch)
        return new if self.state is None else renewed(self.state, new, fresh)

    def end(self, state: DecoderState) -> None:
        """Store the state at the end of a micro-batch."""
        self.state = detach(state)

    def finite(self) -> bool:
        """Whether no number of the state is NaN or, where states never hold it, infinite."""
        new = pytree.tree_leaves(first(self.model, self.batch))
        own = pytree.tree_leaves(self.state)
        # Some states begin with -inf, such as running maxima.
        return not any(
            bool(leaf.isnan().any() or (leaf.isinf().any() and not start.isinf().any()))
            for leaf, start in zip(own, new, strict=True)
        )

    def leaves(self, world: int = 1) -> list[Tensor]:
        """The tensors of the state, with the rows of all ranks in the order of ``row_windows``; all ranks must call."""
        found = [leaf.contiguous() for leaf in pytree.tree_leaves(self.state)]
        if world == 1:
            return found
        every = []
        for leaf in found:
            parts = [torch.empty_like(leaf) for _ in range(world)]
            torch.distributed.all_gather(parts, leaf)
            # Row r of rank k is row k + r * world of all.
            every.append(torch.stack(parts, 1).flatten(0, 1))
        return every

    def restore(self, leaves: list[Tensor], rank: int = 0, world: int = 1) -> None:
        """Restore the result of ``leaves``. Raises ValueError for another number of tensors or of rows."""
        new = first(self.model, self.batch)
        like, tree = pytree.tree_flatten(new)
        if len(leaves) != len(like) or any(len(leaf) != self.batch * world for leaf in leaves):
            raise ValueError(
                f"the states of the checkpoint are {len(leaves)} tensors of {len(leaves[0]) if leaves else 0} rows, "
                f"but this run has {len(like)} of {self.batch * world}"
            )
        own = [leaf[rank::world].to(t.device).clone() for leaf, t in zip(leaves, like, strict=True)]
        self.state = pytree.tree_unflatten(own, tree)


def first(model: Decoder, batch: int) -> DecoderState:
    """The state before the first token, valid for any later values of the weights."""
    state, attentions = model.init_state(batch), model.stack.attentions()
    steps = isinstance(state.layers, UniversalState)
    count = len(state.layers.layers) if steps else len(state.layers)  # pyright: ignore[reportAttributeAccessIssue] (a UniversalState)
    layers = tuple(attentions[i % len(attentions)].init_trainable_state(batch) for i in range(count))
    return state._replace(layers=state.layers._replace(layers=layers) if steps else layers)  # pyright: ignore[reportAttributeAccessIssue] (a UniversalState)


def renewed(state: DecoderState, new: DecoderState, fresh: Tensor) -> DecoderState:
    """``state`` with the rows of ``new`` where ``fresh`` (B,) bool."""

    def row(old: Tensor, other: Tensor) -> Tensor:
        return torch.where(fresh.view(-1, *(1,) * (old.dim() - 1)), other.to(old.dtype), old)

    return pytree.tree_map(row, state, new) if bool(fresh.any()) else state


def check(config: DecoderConfig) -> None:
    """Raise ValueError for a model that cannot read an endless stream: learned positions, or a state that grows."""
    if config.positions == "learned":
        raise ValueError(
            f"positions='learned' has a table of {config.length}, but a stream has no end; choose none, sinusoidal or "
            "rotary positions"
        )
    for one in dict.fromkeys(spec.split(config.attention)):
        with torch.random.fork_rng(devices=[]):
            attention = build(one, config.dim, config.heads)
        _require_segments(one, attention, "a stream of documents requires")
        if _bytes(attention, 64) > _bytes(attention, 0):
            raise ValueError(
                f"the state of {one} keeps every token, but a stream has no end; choose a mechanism with a bounded "
                "state, such as transformer_xl, local or linear"
            )


def check_segments(config: DecoderConfig) -> None:
    """Raise ValueError for a model that cannot keep the documents of a window apart."""
    for one in dict.fromkeys(spec.split(config.attention)):
        with torch.random.fork_rng(devices=[]):
            _require_segments(one, build(one, config.dim, config.heads), "segments=True requires")


def _require_segments(text: str, attention: Any, who: str) -> None:
    if "segments" not in attention.supported_args:
        raise ValueError(f"{text} does not support segments=, which {who}")


def _bytes(attention: Any, capacity: int) -> int:
    return nbytes(attention.init_state(1, capacity))
