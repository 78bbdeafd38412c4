"""Stacks of blocks: run once, repeated with shared weights, with adaptive computation time, or reversible."""

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
from ...states.journal import Journal
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
    """Blocks of attention and feed-forward network, with the signature of an attention: ``y, state = stack(x, state)``.

    Block i uses spec i of ``config.attention``, modulo their number.

    Args:
        config: The sizes, the attentions and the kind of stack.
        causal: Build causal attentions.
        positions: Position embedding of the attentions, as in ``longspan.build``.
        cross: Specs of cross attentions to a context, one for each block, repeated over the depth; "": none.

    Raises:
        ValueError: For a spec that cannot be built, and for weights that need more memory than the machine has.

    Example:
        >>> import torch, longspan
        >>> config = longspan.StackConfig(dim=8, depth=3, heads=2, feedforward=16, attention="gla; softmax")
        >>> stack = longspan.Stack(config)
        >>> [attention.name for attention in stack.attentions()]
        ['gla', 'softmax', 'gla']
        >>> y, state = stack(torch.randn(1, 5, 8), stack.init_state(1))
        >>> len(state)
        3
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
            raise ValueError(f"{config.stack!r} is not a stack; known: {', '.join(sorted(STACKS))}")
        if isinstance(self.run, Reversible):
            reversible.check(self._blocks())
        self.norm = norm(config.norm, config.dim) if config.prenorm else nn.Identity()

    def attentions(self) -> list[Attention]:
        """Return the attention of each block."""
        return [block.attention for block in self._blocks()]

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Return the state before the first token.

        Args:
            batch: Number of rows, B.
            capacity: Number of tokens for which to allocate caches; see ``Attention.init_state``.
            context: (B,M,dim) context of the cross attentions, whose projections become part of the state.
            context_mask: (B,M) bool, True on real tokens of the context; None: all are.

        Returns:
            A tuple with one state for each layer, or a ``UniversalState``.

        Raises:
            ValueError: For a context without cross attention, and for cross attention without a context.
        """
        if self.crosses != (context is not None):
            need = "cross attention, so it needs a context" if self.crosses else "no cross attention for a context"
            raise ValueError(f"this stack has {need}")
        state = self.run.start(self._blocks(), batch, capacity)
        if context is None:
            return state
        kept = [block.cross_state(context, context_mask) for block in self._blocks()]
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
        """Run all blocks on a whole sequence, a segment of one, or a single token.

        Args:
            x: (B,N,dim) inputs.
            state: The state before these tokens. None starts a sequence and returns None.
            mask: (B,N) bool, True on real tokens.
            segments: (B,N) int64, the sequence of each token in a packed row.
            prefix: (B,) int64, the number of tokens at the start of each row that see each other.
            context: (B,M,dim) context of the cross attentions. Calls with a state leave it out.
            context_mask: (B,M) bool, True on real tokens of the context.
            record: A dict to fill. ``layers`` gets one dict per layer, empty if the attention records nothing.
                ``penalty`` and ``log_prob`` (B,) get the sums over layers, if a mechanism or the stack has them.
            donate: Allow the state to be overwritten.

        Returns:
            The outputs (B,N,dim) and the next state, or None without a state.

        Raises:
            ValueError: For arguments that one of the attentions does not support.
        """
        if unknown:
            refuse("Stack", unknown, STACKED)
        if record is not None:
            check_record(record)
        given = {"mask": mask, "segments": segments, "prefix": prefix, "donate": donate or None}
        if isinstance(state, Journal):
            return state.read(self, x, given | {"context": context, "record": record})
        arguments = self._checked_arguments(x, state, {k: v for k, v in given.items() if v is not None})
        if state is None and self.crosses != (context is not None):
            need = "needs a context, but none was given" if self.crosses else "has no cross attention for a context"
            raise ValueError(f"this stack {need}")
        if context is not None:
            arguments |= {"context": context, "context_mask": context_mask}
        if mask is not None:
            # Residual paths would carry masked values into the gradients of weights.
            x = x.masked_fill(~mask[..., None], 0.0)
        # Isolate sequences once for the whole stack. With a context, each layer does it.
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
        """Check the arguments once for all attentions. Raises ValueError."""
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
        """Run the blocks on packed rows, so that NaN and infinity stay within their sequence."""
        blocks, mask, segments = self._blocks(), call.mask, call.arguments["segments"]
        # The state may be used twice, so it is not donated.
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
        # A recorded penalty has gradients that do not come from the outputs.
        y, after = isolated(packed, [x], state, gradients=call.record is None)
        return y, after

    def _check_state(self, state: Any, x: Tensor) -> None:
        # A ``UniversalState`` holds the states of the layers and a position.
        layers = state.layers if isinstance(state, UniversalState) else state
        blocks = self._blocks()
        count = len(blocks) * self.run.steps
        steps = isinstance(self.run, Universal)
        if isinstance(state, UniversalState) != steps or not isinstance(layers, tuple) or len(layers) != count:
            kind, named = "a UniversalState" if steps else "a tuple", isinstance(state, UniversalState)
            came = type(state).__name__ if named or not isinstance(state, tuple) else len(state)
            raise ValueError(f"the state of this stack must be {kind} of {count} states, not {came}")
        if steps:
            if state.position.dtype != torch.int64 or tuple(state.position.shape) != (x.shape[0],):
                came = describe(state.position)
                raise ValueError(f"the position of this stack's state must be int64 {(len(x),)}, not {came}")
            check_stored("the state", state.position)
        for i, layer in enumerate(layers):
            own, _ = layer if isinstance(layer, CrossState) else (layer, None)
            check_state(blocks[i % len(blocks)].attention, own, x)


def kind_of(text: str) -> type:
    """Return the class of a stack from its spec. Raises ValueError for an unknown one."""
    return STACKS[spec.known(text.partition("(")[0].strip(), STACKS, "stack")]


def _cross(text: str, config: StackConfig, i: int) -> Attention | None:
    """Build the cross attention of block i. Raises ValueError for a mechanism without cross attention."""
    if not text:
        return None
    specs = spec.split(text)
    text, depth = specs[i % len(specs)], config.depth
    made = make(text, config.dim, config.heads, causal=False, layer=i, depth=depth, positions="none")
    if "context" not in made.supported_args:
        raise ValueError(f"{made.name} does not support cross attention")
    return made


def _fill_record(record: dict[str, Any], call: StackCall) -> None:
    """Fill the record from the layers and the stack, with the sums of ``penalty`` and ``log_prob``."""
    own = call.own_record if not record or "penalty" in record else {}
    record.clear()
    record["layers"] = call.layers
    record.update(own)
    for name in ("penalty", "log_prob"):
        if found := [one[name] for one in (*call.layers, own) if name in one]:
            record[name] = torch.stack(found).sum(0)


def estimate_bytes(make: Callable[[Any], nn.Module], config: StackConfig) -> int:
    """Return the size in bytes of the weights of ``make(config)``, computed from shapes alone."""
    # One block per spec is enough; the rest is multiplied.
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
    """Raise ValueError if the weights of a model need more memory than is available, before they are allocated."""
    if model_memory.allocates_on_cpu():
        what = f"weights of dim={config.dim}, feedforward={config.feedforward}, depth={config.depth}"
        model_memory.check_fits_in_memory(estimate_bytes(make, config), what)
