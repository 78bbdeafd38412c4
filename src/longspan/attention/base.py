"""The contract that every attention keeps, and the registry that finds it by name."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, overload

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from .._utils import spec, typecheck
from .._utils.aliases import refuse
from ..ops.isolated import Packed, Part, isolated
from ..patterns import Pattern
from ..states.utils import clone
from . import validation
from .families import FAMILIES
from .validation import Trusted

REGISTRY: dict[str, type["Attention"]] = {}

# Given by the stack, never by a spec.
PLACE = ("dim", "heads", "causal", "layer", "depth")

# What a mechanism's ``attend`` may ask for, besides x and state.
ARGUMENTS = ("mask", "segments", "prefix", "context", "context_mask", "carry", "record", "donate")


S = TypeVar("S", bound=tuple[Any, ...], default=Any)
"""A mechanism's state: a NamedTuple of tensors, batch first in each."""


class Attention(nn.Module, Generic[S]):
    """``y, state = attention(x, state)``: a whole sequence, a segment or a single token, in one signature.

    >>> import torch, longspan
    >>> attention = longspan.build("linear", dim=8, heads=2)
    >>> x = torch.randn(1, 5, 8)
    >>> y, _ = attention(x)  # all at once
    >>> state = attention.init_state(1)
    >>> for token in x.split(1, dim=1):  # or one by one
    ...     last, state = attention(token, state)
    >>> torch.allclose(last, y[:, 4:], atol=1e-6)
    True

    A mechanism is one file with one final subclass: the facts below, ``__init__`` whose keyword-only options are the
    config (each kept as an attribute of the same name, and checked against its annotation whoever builds it), ``start``
    and ``attend``. Having a ``name`` registers it.

    ``attend(self, x, state, *, ...)`` names those of ``mask, segments, prefix, context, context_mask, carry, record,
    donate`` that it supports and returns ``(y, state)``, with ``carry`` ``(y, state, carry)``; it is only called with
    arguments that have been checked, and a call with an argument that it does not name has been refused. ``prefix``
    reaches it as bool (B,N), True on the tokens that see each other; see ``ops.prefix``. ``record`` reaches it only
    where there is something to tell, as a dict that has the keys ``"matrix"``, ``"penalty"``, ``"statistics"`` and
    ``"log_prob"`` where they are wanted; a mechanism that has none of the last three fills in ``matrix`` and ``mask``
    whenever it comes.
    """

    name: ClassVar[str]
    """how specs call it"""
    paper: ClassVar[str]
    """arXiv number"""
    citation: ClassVar[tuple[str, str, int]]
    """authors in BibTeX form, title, year"""
    cost: ClassVar[str]
    """time for one sequence, in N (tokens) and D (head size)"""
    family: ClassVar[str] = "others"
    """one of ``FAMILIES``, the page that tells of it"""
    equations: ClassVar[tuple[str, ...]] = ()
    """what it computes, one line of LaTeX each: typeset on the pages, in Unicode in a terminal (``notation.text``)"""
    examples: ClassVar[tuple[str, ...]] = ()
    """specs small enough that 29 tokens leave any window; default: the bare name"""
    exempt: ClassVar[dict[str, str]] = {}
    """law -> why it cannot hold; strict: a law that holds after all must not be listed"""
    directions: tuple[str, ...] = ("causal", "bidirectional")
    """the forms that exist; an instance whose options rule one out has fewer"""
    has_layer_carry: ClassVar[bool] = False
    """takes and returns ``carry``, something handed from layer to layer; see ``cut_carry``"""
    no_decay: ClassVar[tuple[str, ...]] = ()
    """its own parameters of two dimensions or more that weight decay leaves alone, such as decays, scales and learned
    positions; vectors, biases and embeddings are never decayed, see ``train.parameter_groups``"""
    penalty: ClassVar[str] = ""
    """what ``record["penalty"]``, a loss of the mechanism's own, measures, in words; "" where there is none"""
    samples: ClassVar[bool] = False
    """draws in training what it reads, and tells ``record["log_prob"]`` (B,), the log of the draws' probability"""
    statistics: ClassVar[str] = ""
    """what ``record["statistics"]``, by which ``update`` moves buffers, counts, in words; "" where there is none"""
    native_positions: ClassVar[str] = ""
    """the positions of a model, ``relative`` or ``alibi``, that it has of its own"""
    replaces: ClassVar[str] = ""
    """the mechanism in whose place it is built where a model has these positions"""
    states: ClassVar[tuple[type, ...]] = ()
    """the NamedTuples that its calls take and return; those of cross attention are also in ``contexts``"""
    contexts: ClassVar[tuple[type, ...]] = ()

    key_pattern: Pattern | None = None
    """which keys each query may see, where that is a pattern; an instance has its own"""
    max_lookahead: int | None = None
    """how far ahead a bidirectional query surely reads, where that is bounded and ``key_pattern`` is None"""
    num_prefix_tokens: int = 0
    """how many tokens, of a layer's own, ``key_pattern`` counts before those of the input"""

    apart: bool = False
    """``attend`` computes packed sequences one by one, so that no NaN or infinity of one can reach another"""
    cut_carry: Callable[[Any, Tensor, Part], Any] | None = None
    """what one packed sequence gets of a carry, of the call's segments; without it, ``apart`` must be true"""
    join_carry: Callable[[Tensor, list[Part], list[Any]], Any] | None = None
    """what all packed sequences of a call hand on, from what each hands on: the inverse of ``cut_carry``"""

    supported_args: frozenset[str] = frozenset()
    """the arguments that ``attend`` names; filled in by the class statement; an instance may take fewer"""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return
        if cls.name in REGISTRY:
            first = REGISTRY[cls.name].__qualname__
            raise ValueError(f"two attentions are named {cls.name!r}: {first}, {cls.__qualname__}")
        missing = [fact for fact in ("paper", "citation", "cost") if not hasattr(cls, fact)]
        bare = [name for name, p in inspect.signature(cls.__init__).parameters.items() if p.annotation is p.empty]
        missing += [f"an annotation of {name}, which says what a spec may set" for name in bare if name != "self"]
        if not (cls.__dict__.get("__doc__") or "").strip():
            missing.append("a docstring, whose first line is its row in the docs")
        if missing:
            raise TypeError(f"{cls.__name__} needs {', '.join(missing)}")
        cls.examples = cls.__dict__.get("examples") or (cls.name,)
        spec.known(cls.family, FAMILIES, "family of mechanisms")
        asked = list(inspect.signature(cls.attend).parameters)[3:]
        for argument in asked:
            spec.known(argument, dict.fromkeys(ARGUMENTS), f"argument of {cls.__name__}.attend")
        cls.supported_args = frozenset(asked)
        cls.__init__ = typecheck.with_checked_types(cls.__init__, cls.name)
        REGISTRY[cls.name] = cls

    def __init__(self, dim: int, heads: int, *, causal: bool = True):
        super().__init__()
        if dim < 1 or heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} is not a multiple of heads={heads}")
        direction = "causal" if causal else "bidirectional"
        if direction not in self.directions:
            more = self.has_layer_carry or self.penalty or self.samples or self.statistics
            hint = "" if causal or more else f"; {f'bidirectional({self.name})'!r} runs it in both directions"
            raise ValueError(f"{self.name} has no {direction} form; it has: {', '.join(self.directions)}{hint}")
        self.dim, self.heads, self.causal = dim, heads, causal

    @property
    def weight_like(self) -> Tensor:
        """An empty tensor with dtype and device of the weights, for ``start``: ``self.weight_like.new_zeros(...)``.

        No weight by name, since quantization or an adapter may have put another module in the place of a linear map.
        Where nothing of floating point is left it is float32 on the CPU, which is what torch's quantized maps take.
        """
        weight = validation.weight_of(self)
        if weight is None:
            return torch.empty(0, dtype=torch.float32)
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def start(self, batch: int, capacity: int) -> S:
        """The state before the first token; ``capacity`` is the number of tokens to make room for, where it grows.

        Its tensors take dtype and device from ``self.weight_like``.
        """
        # Abstract: every mechanism defines it. A bidirectional one never needs it, so it is no error to lack it.
        raise NotImplementedError(f"{type(self).__name__} defines no start")

    def attend(self, x: Tensor, state: Any) -> tuple[Any, ...]:
        """The mechanism itself; see the class."""
        # Abstract: every mechanism defines it.
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def init_carry(self, x: Tensor, mask: Tensor | None) -> Any:
        """The ``carry`` of the first layer of a stack: x (B,N,dim), mask (B,N). Only with ``has_layer_carry``."""
        raise ValueError(f"{self.name} hands nothing from layer to layer, so it has no first carry")

    def init_state(self, batch: int, capacity: int | None = None) -> S:
        """The state before the first token, for ``batch`` sequences.

        ``capacity``: tokens to make room for in a state that grows (keys and values); other states have one size.
        Raises ValueError for a bidirectional attention, which sees whole sequences only.
        """
        if not self.causal:
            raise ValueError(
                f"a bidirectional {self.name} sees whole sequences and has no recurrent state; "
                f"build it with causal=True, or call it with context= and keep the state that it returns"
            )
        if batch < 0 or (capacity or 0) < 0:
            raise ValueError(f"batch={batch} and capacity={capacity} must not be negative")
        return self.start(batch, capacity or 0)

    def init_trainable_state(self, batch: int) -> S:
        """``init_state`` for calls between which training moves the weights: it serves whatever they become."""
        return self.init_state(batch)

    def state_sizes(self) -> S:
        """A state of one row, with which those of a call are compared; what has no entries may have any number."""
        return self.start(1, 0)

    @overload
    def forward(
        self,
        x: Tensor,
        state: S | None = None,
        *,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        carry: None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
        _trusted: Trusted | None = None,
    ) -> tuple[Tensor, S | None]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        state: S | None = None,
        *,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        carry: Tensor | tuple[Any, ...],
        record: dict[str, Any] | None = None,
        donate: bool = False,
        _trusted: Trusted | None = None,
    ) -> tuple[Tensor, S | None, Any]: ...

    def forward(
        self,
        x: Tensor,
        state: S | None = None,
        *,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        carry: Any = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
        _trusted: Trusted | None = None,
        **unknown: Never,
    ) -> tuple[Any, ...]:
        """Attend over a whole sequence, a segment of one, or a single token.

        Args:
            x: (B,N,dim), in the dtype of the weights, or any floating-point dtype under autocast.
            state: what earlier calls have read, from ``init_state`` or an earlier call. None starts a sequence and
                returns None, so that training builds no state. The given state is left as it was.
            mask: (B,N) bool, True = a real token. A masked token does not exist: no key, no position, no write. Its
                output is 0, and what its x holds, NaN included, reaches no output, state or gradient.
            context: (B,M,context_dim), cross attention: every query sees every real context token, and ``causal`` has
                no effect. The returned state keeps the projected context; later calls pass that state alone.
            context_mask: (B,M) bool, True = a real context token.
            segments: (B,N) int64, packed sequences. Equal id = same sequence; ids never decrease along a row. A given
                state belongs to the first segment, the returned one to the last.
            prefix: (B,) int64, the number of real tokens at the beginning of each row that see each other in both
                directions, and the state. Tokens after them are causal.
            carry: what the layer below handed on, for a class that ``has_layer_carry``; it is then also returned.
            record: a dict to fill in. An empty one gets all that this call can record, ``matrix`` and ``mask``
                included, which costs O(N M). A dict with keys gets those alone: ``{"penalty": None}`` gets the
                mechanism's own loss, to be added to that of the task. Keys that it cannot fill are removed.
            donate: allow the call to overwrite ``state``.

        Returns:
            y (B,N,dim) and the state after the last token; with ``carry`` also the carry for the next layer.

        Raises:
            ValueError: an argument has a wrong rank, shape, dtype or value, is not supported by the mechanism, or does
                not go with another one.
        """
        # ``_trusted``: a stack has checked its arguments once for all layers. A keyword, and not a second method, since
        # ``__call__`` runs hooks, by which profilers and sharding (FSDP) see each layer.
        if unknown:
            refuse(self.name, unknown, ("x", "state", *ARGUMENTS))
        given: dict[str, Any] = {"mask": mask, "segments": segments, "prefix": prefix, "context": context}
        given |= {"context_mask": context_mask, "carry": carry, "record": record, "donate": donate or None}
        given = {name: value for name, value in given.items() if value is not None}
        if _trusted is None:
            given = validation.checked_arguments(self, x, state, given)
        if state is not None and 0 in x.shape:
            # Nothing is read. The state is a copy, since one of the two may be given away later.
            validation.fill_record({} if record is None else record, {})
            return x.clone(), state if donate else clone(state), *([] if carry is None else [carry])
        if record is not None:
            requested = validation.requested_outputs(self, given.pop("record"))
            given |= {"record": requested} if requested else {}
        # Zeros before as well as after: a weight of 0 does not hide NaN or infinity, neither in sums nor in gradients.
        absent = None if mask is None else ~mask[..., None]
        x = x if absent is None else x.masked_fill(absent, 0.0)
        packed = segments is not None and _trusted is not Trusted.ISOLATED
        y, *rest = self._attend_packed(x, state, given) if packed else self.attend(x, state, **given)
        if record is not None:
            validation.fill_record(record, requested)
        return y if absent is None else y.masked_fill(absent, 0.0), *rest

    if TYPE_CHECKING:
        # What ``nn.Module`` leaves untyped: a call takes and returns what ``forward`` does.
        __call__ = forward  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def _attend_packed(self, x: Tensor, state: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        """``attend`` with ``segments`` among the arguments: NaN and infinity stay in the sequence that holds them."""
        segments, mask, carry = given["segments"], given.get("mask"), given.get("carry")
        if self.apart or (carry is not None and self.cut_carry is None):
            return self.attend(x, state, **given)
        # The state may be needed once more, so it is not given away.
        given = {name: value for name, value in given.items() if name not in ("carry", "donate")}

        def run(tokens: Sequence[Any], state: Any, carry: Any, part: Part | None) -> tuple:
            more = {} if carry is None else {"carry": carry}
            if part is None:
                y, *rest = self.attend(tokens[0], state, **given, **more)
                return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)), *rest
            if carry is not None and self.cut_carry is not None:
                more = {"carry": self.cut_carry(carry, segments, part)}
            # Still packed, if alone: states, and what is handed on, are laid out as they are in packed rows.
            own = {name: part.cut(given[name]) for name in ("segments", "mask") if name in given}
            return self.attend(tokens[0], state, **own, **more)

        def join(parts: list[Part], handed: list[Any]) -> Any:
            return self.join_carry and self.join_carry(segments, parts, handed)

        how = Packed(run, segments, 1, lambda: self.start(1, 0), join, causal=self.causal)
        # A loss of the mechanism's own has gradients of which its outputs do not tell.
        return isolated(how, [x], state, carry, gradients="record" not in given)

    def update(self, record: dict) -> None:
        """Move the buffers that no gradient moves by ``record["statistics"]``; training does so after each step.

        Statistics are tensors, those of several calls added up. Raises ValueError for a mechanism without them.
        """
        raise ValueError(f"{self.name} has no statistics: gradients alone move what it learns")

    def project(self) -> None:
        """Move parameters back into their range, in place; training does so after each optimizer step.

        For a mechanism whose parameters have a range, such as the spans of ``adaptive_span``. No gradient depends on
        the range, so that gradients of a batch are the mean of those of its parts. Others do nothing here.
        """

    @property
    def positional(self) -> bool:
        """Whether outputs depend on the order of the keys (beyond causality)."""
        return bool(getattr(self, "rotary", 0.0)) or self.key_pattern is not None

    @property
    def spec(self) -> str:
        """The spec that builds this attention again: its name and the options that differ from their defaults."""
        changed = []
        for at, (name, p) in enumerate(own_options(type(self)).items()):
            if (value := getattr(self, name)) != p.default:
                nested = p.annotation is spec.Spec
                label = "" if nested and at == 0 else f"{name}="
                changed.append(label + (value if nested else repr(value)))
        return self.name + (f"({', '.join(changed)})" if changed else "")

    def extra_repr(self) -> str:
        return f"{self.spec}, dim={self.dim}, heads={self.heads}, causal={self.causal}"


@functools.cache
def own_options(cls: type[Attention]) -> Mapping[str, inspect.Parameter]:
    """The options of a mechanism: the keyword-only parameters of its ``__init__`` that a spec may set."""
    return {name: p for name, p in spec.options(cls.__init__).items() if name not in PLACE}
