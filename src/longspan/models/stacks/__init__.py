"""How blocks are run: one after the other, again and again, as long as each token wants, or reversibly."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Never, cast

import torch
from torch import Tensor, nn

from ..._utils import model_memory, spec
from ..._utils.aliases import refuse
from ...attention import Attention
from ...attention.build import make
from ...attention.validation import (
    Trusted,
    check_donated,
    check_record,
    check_state,
    check_supported,
    check_tokens,
    check_x,
)
from ...modules.norms import norm
from ...ops.arguments import describe
from ...ops.backends import refuse_tracing
from ...ops.isolated import Packed, Part, isolated
from ...ops.operands import check_stored
from ..config import Seq2SeqConfig, StackConfig
from . import reversible
from .block import Block, CrossState
from .plain import Plain, StackCall
from .reversible import Reversible
from .universal import Act, Universal, UniversalState

# The arguments of a call.
STACKED = ("x", "state", "mask", "segments", "prefix", "context", "context_mask", "record", "donate")
STACKS = {"plain": Plain, "universal": Universal, "act": Act, "reversible": Reversible}


class Stack(nn.Module):
    """``depth`` blocks, whose attentions are the config's specs tiled over the depth; the signature of an attention.

    >>> import torch, longspan
    >>> stack = longspan.Stack(longspan.StackConfig(dim=8, depth=3, heads=2, feedforward=16, attention="gla; softmax"))
    >>> [attention.name for attention in stack.attentions()]
    ['gla', 'softmax', 'gla']
    >>> y, state = stack(torch.randn(1, 5, 8), stack.init_state(1))
    >>> len(state)
    3

    ``y, state = stack(x, state, mask=, segments=, prefix=, record=, donate=)``: x (B,N,dim) -> y (B,N,dim); the state
    is the tuple of the layers' states. ``record`` asks every layer that takes one: it gets ``layers``, a dict for each
    layer, empty where that can tell nothing, and the sums of theirs: ``penalty``, where a mechanism has a loss of its
    own, and ``log_prob`` (B,), where one draws what it reads. ``positions`` are those of its attentions, as in
    ``longspan.build``; ``cross`` the specs of attentions to a context.

    Raises ValueError for a spec that cannot be built, for weights that would take more memory than this machine has,
    and for arguments that one of the attentions does not support.
    """

    def __init__(self, config: StackConfig, *, causal: bool = True, positions: str = "none", cross: str = ""):
        super().__init__()
        check_fits_in_memory(config, lambda few: Stack(few, causal=causal, positions=positions, cross=cross))
        specs = spec.split(config.attention)
        self.dim, self.causal, self.checkpointing, self.crosses = config.dim, causal, config.checkpointing, bool(cross)
        depth = config.depth
        own = (
            make(
                specs[i % len(specs)],
                config.dim,
                config.heads,
                causal=causal,
                layer=i,
                depth=depth,
                positions=positions,
            )
            for i in range(depth)
        )
        self.blocks = nn.ModuleList(Block(config, made, _cross(cross, config, i)) for i, made in enumerate(own))
        kinds = {name: functools.partial(kind, config.dim) for name, kind in STACKS.items()}
        self.run = spec.parse(config.stack, kinds)
        if type(self.run) not in STACKS.values():
            raise ValueError(f"{config.stack!r} names no stack; known: {', '.join(sorted(STACKS))}")
        if isinstance(self.run, Reversible):
            reversible.check(self._blocks())
        self.norm = norm(config.norm, config.dim) if config.prenorm else nn.Identity()

    def attentions(self) -> list[Attention]:
        """The attention of each block."""
        return [block.attention for block in self._blocks()]

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """The state before the first token; see ``Attention.init_state``. With cross attention, of what it reads too.

        Raises ValueError for a context that nothing reads, and without one where something does.
        """
        if self.crosses != (context is not None):
            raise ValueError(f"a context is {'needed' if self.crosses else 'read by nothing'} in this stack")
        state = self.run.start(self._blocks(), batch, capacity)
        if context is None:
            return state
        kept = [block.reads(context, context_mask) for block in self._blocks()]
        layers = state.layers if isinstance(state, UniversalState) else state
        crossed = tuple(CrossState(own, kept[i % len(kept)]) for i, own in enumerate(layers))
        return state._replace(layers=crossed) if isinstance(state, UniversalState) else crossed

    def forward(
        self,
        x: Tensor,
        state: tuple[Any, ...] | None = None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
        **unknown: Never,
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """See the class; arguments as in ``Attention.forward``, context and context_mask for its cross attentions."""
        if unknown:
            refuse("Stack", unknown, STACKED)
        if record is not None:
            check_record(record)
        given = {"mask": mask, "segments": segments, "prefix": prefix, "donate": donate or None}
        arguments = self._checked_arguments(x, state, {k: v for k, v in given.items() if v is not None})
        if state is None and self.crosses != (context is not None):
            said = "reads a context, and none came" if self.crosses else "has no cross attention to read a context"
            raise ValueError(f"this stack {said}")
        if context is not None:
            arguments |= {"context": context, "context_mask": context_mask}
        if mask is not None:
            # What a masked token holds must not go around the attentions either, by residuals into weights' gradients.
            x = x.masked_fill(~mask[..., None], 0.0)
        # Once for all layers: what one of them lets through, the outputs show. With a context each layer does it.
        isolating = segments is not None and not self.crosses
        arguments["_trusted"] = Trusted.ISOLATED if isolating else Trusted.CHECKED
        call = StackCall(arguments, record, self.checkpointing and self.training)
        if isolating:
            x, state = self._isolated(x, state, call)
        else:
            x, state = self.run(self._blocks(), x, state, call)
        x = self.norm(x)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        if record is not None:
            _fill_record(record, call)
        return x, state

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _checked_arguments(self, x: Tensor, state: Any, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that every attention gets, checked once for all of them. Raises ValueError."""
        refuse_tracing()
        check_x(self, self.dim, x)
        attentions = self.attentions()
        if given:
            for attention in attentions:
                check_supported(attention, given)
        if state is not None:
            self._check_state(state, x)
        if "donate" in given:
            check_donated(x, state, self)
        return given | check_tokens(attentions[0], x, given)

    def _isolated(
        self, x: Tensor, state: tuple[Any, ...] | None, call: StackCall
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """The blocks on packed rows, where NaN and infinity stay in the sequence that holds them."""
        blocks, mask, segments = self._blocks(), call.mask, call.arguments["segments"]
        # The state may be needed once more, so it is not given away.
        call.arguments.pop("donate", None)

        def run(tokens: Any, state: Any, carry: Any, part: Part | None) -> tuple[Tensor, Any]:
            if part is None:
                y, state = self.run(blocks, tokens[0], state, call)
                return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)), state
            own = {"segments": part.cut(segments), "_trusted": Trusted.ISOLATED}
            if mask is not None:
                own["mask"] = part.cut(mask)
            return self.run(blocks, tokens[0], state, StackCall(own, checkpointing=call.checkpointing))

        packed = Packed(run, segments, 1, lambda: self.run.start(blocks, 1, 0), causal=self.causal)
        # A loss of the layers' own has gradients of which the outputs do not tell.
        y, after = isolated(packed, [x], state, gradients=call.record is None)
        return y, after

    def _check_state(self, state: Any, x: Tensor) -> None:
        # A state of steps has the layers' states and a position.
        layers = state.layers if isinstance(state, UniversalState) else state
        blocks = self._blocks()
        count = len(blocks) * self.run.steps
        steps = isinstance(self.run, Universal)
        if isinstance(state, UniversalState) != steps or not isinstance(layers, tuple) or len(layers) != count:
            kind, named = "a UniversalState" if steps else "a tuple", isinstance(state, UniversalState)
            came = type(state).__name__ if named or not isinstance(state, tuple) else len(state)
            raise ValueError(f"the state of this stack is {kind} of {count} states, not {came}")
        if steps:
            if state.position.dtype != torch.int64 or tuple(state.position.shape) != (len(x),):
                came = describe(state.position)
                raise ValueError(f"the position of this stack's state must be int64 {(len(x),)}, not {came}")
            check_stored("the state", state.position)
        for i, layer in enumerate(layers):
            own, _ = layer if isinstance(layer, CrossState) else (layer, None)
            check_state(blocks[i % len(blocks)].attention, own, x)


def kind_of(text: str) -> type:
    """The class that runs the blocks, from its spec. Raises ValueError for an unknown one."""
    return STACKS[spec.known(text.partition("(")[0].strip(), STACKS, "stack")]


def _cross(text: str, config: StackConfig, i: int) -> Attention | None:
    """The cross attention of block i. Raises ValueError for a mechanism that has none."""
    if not text:
        return None
    specs = spec.split(text)
    text, depth = specs[i % len(specs)], config.depth
    made = make(text, config.dim, config.heads, causal=False, layer=i, depth=depth, positions="none")
    if "context" not in made.supported_args:
        raise ValueError(f"{made.name} reads no context, so it cannot be a cross attention")
    return made


def _fill_record(record: dict[str, Any], call: StackCall) -> None:
    """Fill in what the layers and the stack have recorded; the sum of all penalties is one."""
    own = call.own_record if not record or "penalty" in record else {}
    record.clear()
    record["layers"] = call.layers
    record.update(own)
    for name in ("penalty", "log_prob"):
        if found := [one[name] for one in (*call.layers, own) if name in one]:
            record[name] = torch.stack(found).sum(0)


def estimate_bytes(make: Callable[[Any], nn.Module], config: StackConfig) -> int:
    """Bytes of the weights of a model, ``make(config)``, of which nothing is built but shapes."""
    # One round of the specs shows what all of them take.
    counts = {"stack": (config.depth, len(spec.split(config.attention)))}
    changes = {}
    if isinstance(config, Seq2SeqConfig):
        counts["stack"] = (config.depth, max(len(spec.split(s)) for s in (config.attention, config.cross_attention)))
        counts["encoder"] = (config.encoder_depth or config.depth, len(spec.split(config.encoder_attention)))
        changes["encoder_depth"] = min(counts["encoder"])
    model: Any = model_memory.shapes(lambda: make(replace(config, depth=min(counts["stack"]), **changes)))
    total = model_memory.nbytes(model)
    for name, (depth, count) in counts.items():
        few = min(depth, count)
        total += model_memory.nbytes(getattr(model, name, model).blocks) * (depth - few) // few
    return total


def check_fits_in_memory(config: StackConfig, make: Callable[[Any], nn.Module]) -> None:
    """Raise ValueError where a model's weights would take more memory than there is, before any of it is taken."""
    if model_memory.allocates_on_cpu():
        what = f"weights of dim={config.dim}, feedforward={config.feedforward}, depth={config.depth}"
        model_memory.check_fits_in_memory(estimate_bytes(make, config), what)
