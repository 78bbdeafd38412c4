"""The decode engine: a decoder's token step without Python between its layers."""

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import ops
from ..models.decoder import Decoder, DecoderState
from ..models.embedding import Embedding, TiedHead, check_tokens
from ..models.stacks import Stack
from ..models.stacks.block import Block
from ..models.stacks.gates import Add
from ..models.stacks.plain import Plain
from ..modules.feedforward import FeedForward
from ..modules.positions import Sinusoidal
from ..modules.quantized import Quantized, QuantizedEmbedding, QuantizedLinear
from ..modules.sinusoidal import sinusoid
from ..ops.native import decode
from ..ops.native.call import FORMATS, available
from ..ops.operands import check_stored, in_memory, mark_overwritten, overlap, stored
from ..states import kv_cache
from ..states.counters import check_counts
from ..states.kv_cache import FixedKeyValues, KeyValues
from . import native_mixers
from .native_mixers import MIXERS, Layout, Row


class Known(NamedTuple):
    """A state that a call has returned, with the addresses of its tensors."""

    state: DecoderState
    addresses: ctypes.Array  # of the layers' states, in the form that the kernel reads
    places: list[tuple[int, int]]  # address and size in bytes of each tensor's storage


@dataclass(frozen=True, eq=False)
class DraftState:
    """The state after ``Engine.verify``, of whose tokens ``states.rewind`` can undo any number."""

    state: DecoderState  # sums and recent inputs from before these tokens, counters from after them
    journal: decode.Journal
    engine: "Engine"

    def rewindable(self) -> int:
        """See ``states.rewindable``."""
        return int(self.journal.kept.min())

    def rewound(self, counts: Tensor) -> "DraftState":
        """See ``states.rewind``."""
        kept = self.journal.kept - counts
        return DraftState(_moved(self.state, -counts), self.journal._replace(kept=kept), self.engine)

    def settled(self) -> DecoderState:
        """See ``states.settle``."""
        return self.engine.settled(self)


class Engine:
    """The native decode step: ``engine(tokens, state)`` computes ``decoder(tokens, state, donate=True)`` faster.

    ``outputs, state = engine(tokens, state)`` maps tokens (B,1) int64 to outputs (B,1,likelihood.size) in the decoder's
    dtype and overwrites the state. The state is the decoder's, so you can switch between both at any token. Sums, norms
    and activations are float32, also for bfloat16 weights.

    The engine keeps a copy of the weights, which later training does not change, and the last state of each thread.
    Threads may share an engine: calls with different states are independent.

    Args:
        model: A decoder on the CPU, in float32 or bfloat16, whose layers are ``linear``, ``softmax``, ``retention``,
            ``gla``, ``ssd``, ``deltanet``, ``gated_deltanet`` or ``kda``; see ``why_not``.

    Raises:
        ValueError: For a decoder that is not supported. A call raises it for tokens and positions out of range and for
            a state of another decoder or with impossible counters; states are checked when they are new to the engine.
    """

    def __init__(self, model: Decoder):
        if reason := self.why_not(model):
            raise ValueError(f"the decode engine does not support this decoder: {reason}")
        config, self.model = model.config, model
        parts: Any = model  # torch types its modules as Tensor | Module
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.weights = decode.Weights(self.dtype)
        self.sinusoidal = parts.embedding.positions if isinstance(parts.embedding.positions, Sinusoidal) else None
        self.layouts: list[Layout] = []
        self.rows: list[Row] = []  # the stages, which live as long as their addresses
        branches = [branch for block in parts.stack.blocks for branch in self._branches(block)]
        self.branches = (decode.Branch * len(branches))(*branches)
        self.tokens: nn.Module = parts.embedding.tokens
        if isinstance(self.tokens, QuantizedEmbedding):
            tokens = native_mixers.quantized_map(self.weights, self.tokens)
        else:
            tokens = self.weights.table(parts.embedding.tokens.weight)
            # The copy in self.weights, which training does not change.
            self.tokens = nn.Embedding.from_pretrained(self.weights.kept[-1])
        learned = config.positions == "learned"
        table = self.weights.table(parts.embedding.table.weight).weight if learned else None
        final = self._norm(parts.stack.norm) if config.prenorm else decode.Norm()
        self.outputs = config.vocab if config.tied else parts.head.weight.shape[0]
        if config.tied and isinstance(self.tokens, QuantizedEmbedding):
            head = native_mixers.quantized_map(self.weights, self.tokens, outputs=self.outputs)
        elif config.tied:
            head = self.weights.linear([parts.embedding.tokens.weight[:-1]], [None])
        else:
            head = native_mixers.linear_map(self.weights, parts.head)
        self.local = threading.local()  # ``last``: the state of this thread's last call
        self.plan = decode.Model(
            ctypes.addressof(self.branches),
            table,
            decode.Norm(),
            final,
            tokens,
            head,
            len(branches),
            config.dim,
            config.vocab + 1,
            config.length,
            decode.TYPES[self.dtype],
            0,
            1.0,
            1.0,
        )
        self.weights.settle()

    @staticmethod
    def why_not(model: Decoder) -> str:
        """Return why the engine does not support a decoder, "" if it does. Compiles the kernels on first use."""
        if ops.resolve_backend("a decoder's step", ("reference", "torch", "native"), "native") != "native":
            return "another backend is forced"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        kinds = {p.dtype for p in model.parameters()}
        if any(p.device.type != "cpu" for p in model.parameters()) or len(kinds) > 1 or not kinds <= set(decode.TYPES):
            return "the weights must be on the CPU, all float32 or all bfloat16"
        if model.training and (model.config.dropout or any(getattr(a, "dropout", 0) for a in model.stack.attentions())):
            return "dropout is active; call model.eval()"
        pairs = {id(pair) for module in model.modules() for pair in native_mixers.low_rank(module)}
        for name, module in model.named_modules():
            if odd := _odd(name, module, id(module) in pairs):
                return odd
        return "" if available("decode/step") else "the native kernels could not be compiled"

    @torch.no_grad()
    def __call__(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """See the class."""
        state, addresses, _ = self._known(state)
        batch = len(state.position)
        if tokens.shape != (batch, 1) or tokens.dtype != torch.int64 or not tokens.is_cpu:
            came = f"{tokens.dtype} {tuple(tokens.shape)} on {tokens.device}"
            raise ValueError(f"tokens must be int64 {(batch, 1)} on the CPU, not {came}")
        self.local.last, embedded = None, None
        if self.sinusoidal:
            check_tokens(tokens, self.model.start, None)
            embedded = self._embedded(tokens, state.position)
        given = None if self.sinusoidal else tokens.contiguous()
        # The kernel's output, independent of torch's default dtype and device.
        out = torch.empty(batch, 1, self.outputs, dtype=torch.float32, device="cpu")
        code = decode.step(self.plan, addresses, given, state.position, embedded, out)
        if code == decode.NO_ROOM:
            state = state._replace(layers=tuple(map(_with_room, state.layers)))
            addresses = _addresses(state)
            code = decode.step(self.plan, addresses, given, state.position, embedded, out)
        if code != decode.FINE:
            self._explain(code, tokens, state)
        mark_overwritten(*(t for layer in state.layers for t in layer))
        state = _advance(state, addresses)
        self.local.last = Known(state, addresses, _places(state))
        return (out if self.dtype == torch.float32 else out.to(self.dtype)), state

    @torch.no_grad()
    def verify(self, tokens: Tensor, state: DecoderState | DraftState) -> tuple[Tensor, DraftState]:
        """Read several tokens of each sequence, any of which can be undone, with the bits of one call for each.

        Each weight is read once for all tokens, which makes a draft of several tokens cheaper than the calls it saves.

        Args:
            tokens: (B,K) int64.
            state: A decoder's state, or what this method returned. It is overwritten.

        Returns:
            The outputs (B,K,likelihood.size), and the next state. ``states.rewind(state, tokens=...)`` undoes the last
            ones, and ``states.settle(state)`` returns the decoder's state.

        Raises:
            ValueError: As a call does.
        """
        if isinstance(state, DraftState) and state.engine is not self:
            raise ValueError("the state is that of another engine; settle it first")
        if isinstance(state, DraftState):
            (plain, journal), room = (state.state, state.journal), max(state.journal.room, tokens.shape[-1])
            addresses = _addresses(plain)
        else:
            plain, addresses, _ = self._known(state)
            journal, room = None, tokens.shape[-1]
        batch = len(plain.position)
        if tokens.dim() != 2 or len(tokens) != batch or tokens.dtype != torch.int64 or not tokens.is_cpu:
            came = f"{tokens.dtype} {tuple(tokens.shape)} on {tokens.device}"
            raise ValueError(f"tokens must be int64 ({batch}, K) on the CPU, not {came}")
        journal = self._journal(batch, room, journal)
        self.local.last, embedded, given = None, None, tokens.contiguous()
        if self.sinusoidal:
            check_tokens(tokens, self.model.start, None)
            embedded, given = self._embedded(tokens, plain.position), None
        out = torch.empty(batch, tokens.shape[1], self.outputs, dtype=torch.float32, device="cpu")
        code = decode.step(self.plan, addresses, given, plain.position, embedded, out, journal)
        if code == decode.NO_ROOM:
            plain = plain._replace(layers=tuple(_with_room(layer, tokens.shape[1]) for layer in plain.layers))
            code = decode.step(self.plan, _addresses(plain), given, plain.position, embedded, out, journal)
        if code != decode.FINE:
            self._explain(code, tokens, plain)
        mark_overwritten(*(t for layer in plain.layers for t in layer))
        kept = torch.full_like(journal.kept, tokens.shape[1])
        after = DraftState(_moved(plain, tokens.shape[1]), journal._replace(kept=kept), self)
        return (out if self.dtype == torch.float32 else out.to(self.dtype)), after

    def settled(self, draft: DraftState) -> DecoderState:
        """Return the state after the tokens of a draft that remain, which are applied to it."""
        state, addresses = draft.state, _addresses(draft.state)
        nothing = torch.empty(len(state.position), 0, self.outputs, dtype=torch.float32, device="cpu")
        code = decode.step(self.plan, addresses, None, state.position, None, nothing, draft.journal)
        assert code == decode.FINE
        mark_overwritten(*(t for layer in state.layers for t in layer))
        self.local.last = Known(state, addresses, _places(state))
        return state

    def _known(self, state: DecoderState) -> Known:
        """Check a state, make its tensors contiguous, and return it with their addresses."""
        # Nearly always, the state of a call is the one that the last call of this thread returned.
        last: Known | None = getattr(self.local, "last", None)
        if last is not None and state is last.state and _places(state) == last.places:
            return last
        self._check(state)
        state = self._own(state)
        return Known(state, _addresses(state), [])

    def _journal(self, batch: int, room: int, before: decode.Journal | None) -> decode.Journal:
        """A journal for ``room`` tokens with the entries of the one before."""
        if before is not None and before.room >= room:
            return before
        layers = []
        for i, branch in enumerate(self.branches):
            reads = i % 2 == 0 and not issubclass(self.layouts[i // 2].kind, KeyValues)
            entries = torch.zeros(batch, room, 2, branch.width, dtype=torch.float32, device="cpu") if reads else None
            if before is not None and entries is not None and (old := before.layers[i]) is not None:
                entries[:, : old.shape[1]] = old
            layers.append(entries)
        return decode.Journal(tuple(layers), torch.zeros(batch, dtype=torch.long) if before is None else before.kept)

    def _own(self, state: DecoderState) -> DecoderState:
        """The state with contiguous tensors, none of which share memory."""
        state = DecoderState(state.position.contiguous(), tuple(map(_whole, state.layers)))
        if overlap(*(t for layer in state.layers for t in layer if t.is_floating_point())):
            raise ValueError("the engine overwrites the state, parts of which share memory; pass a clone of it")
        return state

    def _explain(self, code: int, tokens: Tensor, state: DecoderState) -> None:
        """Raise ValueError for what the kernel has refused, with the reason that the decoder gives."""
        # The kernel has not changed the state, but the caller may have since the last call.
        _check_counters(state)
        check_tokens(tokens, self.model.start, None)
        self.model.embedding(tokens, state.position)
        raise AssertionError(f"the kernel returned code {code} for a call that the decoder accepts")

    def _embedded(self, tokens: Tensor, position: Tensor) -> Tensor:
        """(B,K,dim) float32, the output of ``Embedding`` in eval mode, from the copy of the weights."""
        x = self.tokens(tokens)
        kind = self.sinusoidal
        assert kind is not None
        at = position[:, None] + torch.arange(tokens.shape[1])
        x = x + sinusoid(at, x.shape[-1], x.dtype, layout=kind.layout, base=kind.base)
        return x.float().contiguous()

    def _check(self, state: Any) -> None:
        """Raise ValueError for a state that the kernel, which has no checks, must not read."""
        layouts = self.layouts
        fits = isinstance(state, DecoderState) and isinstance(state.layers, tuple) and len(state.layers) == len(layouts)
        fits = fits and isinstance(state.position, Tensor) and state.position.dim() == 1
        for given, layout in zip(state.layers, layouts, strict=False) if fits else ():
            fits &= isinstance(given, layout.kind) and len(given) == len(layout.parts)
            for t, (dtype, shape) in zip(given, layout.parts, strict=False) if fits else ():
                fits &= _is(t, dtype, len(state.position), *shape)
            fits = fits and (not isinstance(given, KeyValues) or given.keys.shape == given.values.shape)
        if not fits or not _is(state.position, torch.int64, len(state.position)):
            if isinstance(state, DecoderState):
                check_stored("the state", *pytree.tree_leaves(state))
            raise ValueError("the state does not fit this decoder; pass one from its init_state or its calls")
        _check_counters(state)

    def _branches(self, block: Any) -> tuple[decode.Branch, decode.Branch]:
        """Return the mixer and the feed-forward network of a block, which has norms before or after them."""
        attention, forward = block.attention, block.feedforward
        mixer, network = Row(self.weights), Row(self.weights)
        self.rows += [mixer, network]
        mixed, layout = MIXERS[type(attention)](attention, mixer)
        mixer.wait()
        self.layouts.append(layout)
        gated = forward.activation in GATED
        (inner,) = network.project(forward.expand, activation="identity" if gated else forward.activation)
        network.wait()
        if gated:
            width = forward.contract.in_features
            network.gate(forward.activation, inner, inner + width, width)
            network.wait()
            inner += width
        norms = [(self._norm(norm), decode.Norm()) for norm in (block.norm1, block.norm2)]
        norms = norms if self.model.config.prenorm else [(none, norm) for norm, none in norms]
        return mixer.branch(attention.out, mixed, *norms[0]), network.branch(forward.contract, inner, *norms[1])

    def _norm(self, norm: Any) -> decode.Norm:
        return self.weights.norm(norm.weight, getattr(norm, "bias", None), norm.eps)


GATED = ("geglu", "swiglu")  # activations of networks with a gate
# Modules whose weights the engine reads; it would ignore others, such as an adapter in place of a linear map.
PLAIN = (
    Decoder,
    Embedding,
    TiedHead,
    Stack,
    Plain,
    Block,
    Add,
    FeedForward,
    *MIXERS,
    *native_mixers.PARTS,
    nn.Linear,
    QuantizedLinear,
    nn.Embedding,
    QuantizedEmbedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Dropout,
    nn.Identity,
    nn.ModuleList,
)


def _odd(name: str, module: nn.Module, known: bool) -> str:
    """Return why the engine does not support a module, "" if it does; ``known``: whatever its type."""
    if type(module) not in PLAIN and not known:
        return f"{name} is a {type(module).__name__}" if name else f"it is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return f"{name or 'it'} has hooks or a replaced forward"
    if isinstance(module, Quantized) and module.format not in FORMATS:
        return f"{name} has weights in the format {module.format}"
    if isinstance(module, FeedForward) and module.activation not in decode.ACTIVATIONS:
        return f"{name} has activation={module.activation!r}"
    return native_mixers.why_not(name, module) if type(module) in MIXERS else ""


def _is(t: Any, dtype: torch.dtype, *shape: int) -> bool:
    """Whether ``t`` is a tensor of this dtype and shape, -1 for any size, with values in CPU memory."""
    fits = isinstance(t, Tensor) and in_memory(t) and t.is_cpu and t.dtype == dtype and t.dim() == len(shape)
    fits = fits and all(size in (-1, found) for size, found in zip(shape, t.shape, strict=True))
    return fits and stored(t)


def _check_counters(state: DecoderState) -> None:
    """Raise ValueError for negative counters, and for a length beyond the slots of a cache."""
    check_counts("position", state.position)
    for layer in state.layers:
        if isinstance(layer, KeyValues):
            check_counts("length", layer.length, layer.keys.shape[2])
        elif layer[-1].dtype == torch.int64:
            check_counts("position", layer[-1])


def _whole(layer: Any) -> Any:
    """The state with contiguous tensors, as it nearly always is."""
    return type(layer)(*(t.resolve_neg().contiguous() for t in layer))


def _addresses(state: DecoderState) -> ctypes.Array:
    """The addresses of the states of all branches, for the kernel; a layer is a mixer and a network without a state."""
    found = (decode.State * (2 * len(state.layers)))()
    for i, layer in enumerate(state.layers):
        found[2 * i] = _address(layer)
    return found


def _places(state: DecoderState) -> list[tuple[int, int]]:
    """Address and size of each tensor's storage; they change if a tensor is freed or replaced."""
    tensors = {id(t): t for t in (state.position, *(t for layer in state.layers for t in layer))}
    return [(t.data_ptr(), t.untyped_storage().nbytes()) for t in tensors.values()]


def _address(layer: Any) -> decode.State:
    numbers = [t.data_ptr() for t in layer if t.is_floating_point()]
    second = numbers[1] if len(numbers) > 1 else None
    counter = layer[-1].data_ptr() if layer[-1].dtype == torch.int64 else None
    capacity = layer.keys.shape[2] if isinstance(layer, KeyValues) else 0
    return decode.State(numbers[0], second, counter, None, None, capacity)


def _with_room(layer: Any, tokens: int = 1) -> Any:
    if not isinstance(layer, KeyValues):
        return layer
    used, slots = int(layer.length.max()), layer.keys.shape[2]
    if isinstance(layer, FixedKeyValues) and used + tokens > slots:
        raise ValueError(f"all {slots} slots of the cache of fixed capacity are in use; fix a larger capacity")
    return kv_cache.with_room(layer, used + tokens)


def _advance(state: DecoderState, addresses: ctypes.Array) -> DecoderState:
    """The state one token later, with ``addresses`` updated."""
    state = _moved(state, 1)
    for i, layer in enumerate(state.layers):
        if layer[-1].dtype == torch.int64:
            addresses[2 * i].position = layer[-1].data_ptr()
    return state


def _moved(state: DecoderState, by: int | Tensor) -> DecoderState:
    """The state with other counters, by a number or (B,). Layers that share a counter share the next one."""
    counts: dict[int, Tensor] = {}

    def later(count: Tensor) -> Tensor:
        if id(count) not in counts:
            counts[id(count)] = count + by
        return counts[id(count)]

    layers = (type(a)(*a[:-1], later(a[-1])) if a[-1].dtype == torch.int64 else a for a in state.layers)
    return DecoderState(later(state.position), tuple(layers))
