"""The base class of all attention mechanisms, and the registry of their names."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from .._utils import spec, typecheck
from .._utils.aliases import refuse
from ..modules.init import fill
from ..ops.isolated import Packed, Part, isolated
from ..ops.native import build
from ..ops.shards import active_shards
from ..patterns import Pattern
from ..states.journal import Journal
from ..states.utils import clone
from . import validation
from .families import FAMILIES
from .validation import Trusted

REGISTRY: dict[str, type["Attention"]] = {}

# Set by the stack, never by a spec.
PLACE = ("dim", "heads", "causal", "layer", "depth")


class SequenceArguments(TypedDict, total=False):
    """Arguments of ``Attention.forward`` that most mechanisms support, and hand on: ``**given: Unpack[...]``."""

    mask: Tensor | None
    segments: Tensor | None
    record: dict[str, Any] | None
    donate: bool


class TokenArguments(TypedDict, total=False):
    """Those of a mechanism that records nothing."""

    mask: Tensor | None
    segments: Tensor | None
    donate: bool


class ContextArguments(SequenceArguments, total=False):
    """Those of a mechanism that also attends to a context."""

    context: Tensor | None
    context_mask: Tensor | None


class AllArguments(ContextArguments, total=False):
    """Those of a mechanism that also has a bidirectional prefix."""

    prefix: Tensor | None


# The keyword arguments that a mechanism's ``attend`` may have.
ARGUMENTS = (*AllArguments.__annotations__, "carry")


S = TypeVar("S", bound=tuple[Any, ...], default=Any)
"""A mechanism's state: a NamedTuple of tensors, batch first in each."""


class Attention(nn.Module, Generic[S]):
    """``y, state = attention(x, state)``: the base class of all attention mechanisms.

    One signature serves a whole sequence, a part of one, and a single token.

    >>> import torch, longspan
    >>> attention = longspan.build("linear", dim=8, heads=2)
    >>> x = torch.randn(1, 5, 8)
    >>> y, _ = attention(x)  # the whole sequence
    >>> state = attention.init_state(1)
    >>> for token in x.split(1, dim=1):  # or token by token
    ...     last, state = attention(token, state)
    >>> torch.allclose(last, y[:, 4:], atol=1e-6)
    True

    A mechanism is one file with one final subclass. A subclass with a ``name`` is registered. It defines:

    * the class attributes below;
    * ``__init__``. Its keyword-only options are the config. Each option is stored as an attribute of the same name and
      checked against its annotation;
    * ``start(self, batch, capacity)``, which returns the state before the first token;
    * ``attend(self, x, state, *, ...)``, which computes the output.

    ``attend`` names the arguments that it supports: any of ``mask``, ``segments``, ``prefix``, ``context``,
    ``context_mask``, ``carry``, ``record`` and ``donate``; or ``**given: Unpack[...]`` of a TypedDict of them, such as
    ``SequenceArguments``, if it only hands them on. It returns ``(y, state)``, or ``(y, state, carry)`` if it
    gets a ``carry``. ``forward`` checks all arguments and rejects those that ``attend`` does not name. Two arguments
    differ from those of ``forward``:

    * ``prefix`` is bool (B,N), True on the tokens that see each other; see ``ops.prefix``;
    * ``record`` is a dict with one key per requested output: ``"matrix"``, ``"penalty"``, ``"statistics"`` or
      ``"log_prob"``. A mechanism without the last three fills in ``matrix`` and ``mask`` whenever it gets a dict.
    """

    name: ClassVar[str]
    """the name in specs"""
    paper: ClassVar[str]
    """arXiv number"""
    citation: ClassVar[tuple[str, str, int]]
    """authors in BibTeX form, title, year"""
    cost: ClassVar[str]
    """time for one sequence, in N (tokens) and D (head dimension)"""
    family: ClassVar[str] = "others"
    """a key of ``FAMILIES``: the page that describes the mechanism"""
    equations: ClassVar[tuple[str, ...]] = ()
    """the definition, one line of LaTeX each: typeset in the documentation, Unicode in a terminal"""
    examples: ClassVar[tuple[str, ...]] = ()
    """specs for tests, with windows shorter than 29 tokens; default: the name without options"""
    exempt: Mapping[str, str] = {}
    """conformance checks that cannot hold, each with the reason; a check that passes must not be listed"""
    directions: tuple[str, ...] = ("causal", "bidirectional")
    """the supported forms; an instance has fewer if its options rule one out"""
    has_layer_carry: ClassVar[bool] = False
    """whether calls take and return ``carry``, a value passed from layer to layer; see ``cut_carry``"""
    no_decay: ClassVar[tuple[str, ...]] = ()
    """parameters of at least two dimensions without weight decay, such as decays, scales and learned positions.
    Vectors, biases and embeddings have no weight decay in any case; see ``train.parameter_groups``"""
    penalty: ClassVar[str] = ""
    """description of ``record["penalty"]``, an auxiliary loss; "" if there is none"""
    samples: ClassVar[bool] = False
    """whether training samples what a query reads; ``record["log_prob"]`` (B,) is the log probability of the samples"""
    statistics: ClassVar[str] = ""
    """description of ``record["statistics"]``, from which ``update`` moves buffers; "" if there are none"""
    native_positions: ClassVar[str] = ""
    """the model positions that the mechanism computes itself: ``relative`` or ``alibi``; "" for none"""
    replaces: ClassVar[str] = ""
    """the mechanism that this one replaces in a model with these positions"""
    kernels: ClassVar[tuple[str, ...]] = ()
    """the families of CPU kernels that a call uses if there are several: their first call compiles them in parallel"""
    parallel_by: ClassVar[str] = ""
    """what a call sees of other shards of its row: ``sums`` (of all, by one exchange), ``tokens`` (the last or all, if
    the call has no state), or ``""``: the state is handed from shard to shard. A subclass does not inherit it"""
    joinable: ClassVar[bool] = True
    """whether states after different numbers of tokens can be rows of one state, as in a pool of streams"""
    learned_state: ClassVar[tuple[str, ...]] = ()
    """the fields of the state whose initial values ``longspan.adapt`` trains: sums and the last inputs of convolutions,
    no tokens that are kept and no counters"""
    states: tuple[type, ...] = ()
    """the NamedTuples that self-attention takes and returns as state"""
    contexts: ClassVar[tuple[type, ...]] = ()
    """the NamedTuples that cross attention takes and returns as state"""

    key_pattern: Pattern | None = None
    """the keys that each query may see, if a pattern describes them; set by an instance"""
    max_lookahead: int | None = None
    """upper bound of the look-ahead of a bidirectional query without a ``key_pattern``; None: no bound"""
    num_prefix_tokens: int = 0
    """the number of learned tokens that ``key_pattern`` counts before the tokens of the input"""

    apart: bool = False
    """whether ``attend`` computes packed sequences separately, so that NaN and infinity stay in their sequence"""
    cut_carry: Callable[[Any, Tensor, Part], Any] | None = None
    """cut the part of one packed sequence out of a carry: (carry, segments, part); None requires ``apart``"""
    join_carry: Callable[[Tensor, list[Part], list[Any]], Any] | None = None
    """join the carries of all packed sequences: (segments, parts, carries); the inverse of ``cut_carry``"""

    supported_args: frozenset[str] = frozenset()
    """the arguments that ``attend`` names, set when the class is defined; an instance may support fewer"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return
        if cls.name in REGISTRY:
            first = REGISTRY[cls.name].__qualname__
            raise ValueError(f"two attentions are named {cls.name!r}: {first}, {cls.__qualname__}")
        missing = [fact for fact in ("paper", "citation", "cost") if not hasattr(cls, fact)]
        bare = [name for name, p in inspect.signature(cls.__init__).parameters.items() if p.annotation is p.empty]
        missing += [f"an annotation of {name}, for the values that a spec may set" for name in bare if name != "self"]
        if not (cls.__dict__.get("__doc__") or "").strip():
            missing.append("a docstring, whose first line is its row in the documentation")
        if missing:
            raise TypeError(f"{cls.__name__} needs {', '.join(missing)}")
        cls.parallel_by = cls.__dict__.get("parallel_by", "")
        cls.examples = cls.__dict__.get("examples") or (cls.name,)
        spec.known(cls.family, FAMILIES, "family of mechanisms")
        supported = _supported(cls.attend)
        for argument in supported:
            spec.known(argument, dict.fromkeys(ARGUMENTS), f"argument of {cls.__name__}.attend")
        cls.supported_args = frozenset(supported)
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
        build.expect(*self.kernels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights and buffers as a new module does, for example after ``to_empty`` on the meta device.

        All processes of a sharded module must call it; they keep their parts of the first one's numbers.
        """
        names = dict.fromkeys(("dim", "heads", *spec.options(type(self).__init__)))
        with torch.device("cpu"):
            new = type(self)(**{name: getattr(self, name) for name in names}).state_dict(keep_vars=True)
        for name, own in self.state_dict(keep_vars=True).items():
            # An attention that is an option is the same module in both, and draws its own.
            if own is not new[name]:
                fill(own, new[name])

    @property
    def weight_like(self) -> Tensor:
        """An empty tensor in the dtype and on the device of the weights.

        ``start`` creates states from it: ``self.weight_like.new_zeros(...)``. It is float32 on the CPU if no weight has
        a floating-point dtype, as torch's quantized layers require.
        """
        # Looked up in all modules: quantization or an adapter may have replaced any linear layer.
        weight = validation.weight_of(self)
        if weight is None:
            return torch.empty(0, dtype=torch.float32)
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def start(self, batch: int, capacity: int) -> S:
        """Return the state before the first token. Each mechanism with a state defines it.

        Args:
            batch: the number of sequences.
            capacity: the number of tokens to allocate in a state that grows.

        Returns:
            The state, in dtype and on device of ``self.weight_like``.
        """
        # Not an abstract method: a bidirectional mechanism needs no state.
        raise NotImplementedError(f"{type(self).__name__} defines no start")

    def attend(self, x: Tensor, state: Any) -> tuple[Any, ...]:
        """Compute the mechanism on checked arguments. Each mechanism defines it; see the class."""
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def init_carry(self, x: Tensor, mask: Tensor | None) -> Any:
        """Return the ``carry`` that the first layer of a stack takes.

        Args:
            x: (B,N,dim) the input of the layer.
            mask: (B,N) bool, True on real tokens.

        Raises:
            ValueError: for a mechanism without ``has_layer_carry``.
        """
        raise ValueError(f"{self.name} has no carry: it passes no value from layer to layer")

    def init_state(self, batch: int, capacity: int | None = None) -> S:
        """Return the state before the first token.

        Args:
            batch: the number of sequences.
            capacity: the number of tokens to allocate in a state that grows (keys and values); other states ignore it.

        Returns:
            The state, a NamedTuple of tensors, batch first.

        Raises:
            ValueError: for a bidirectional attention, which has no recurrent state, and for negative numbers.
        """
        if not self.causal:
            raise ValueError(
                f"a bidirectional {self.name} reads whole sequences and has no recurrent state; "
                f"build it with causal=True, or call it with context= and keep the returned state"
            )
        if batch < 0 or (capacity or 0) < 0:
            raise ValueError(f"batch={batch} and capacity={capacity} must not be negative")
        return self.start(batch, capacity or 0)

    def init_trainable_state(self, batch: int) -> S:
        """Return ``init_state`` in a size that stays valid while training changes the weights."""
        return self.init_state(batch)

    def state_sizes(self) -> S:
        """Return a state of one row, for checks of shapes; an axis of size 0 stands for any size."""
        return self.start(1, 0)

    @overload
    def forward(
        self, x: Tensor, state: S | None = None, *, carry: None = None, **options: Unpack[AllArguments]
    ) -> tuple[Tensor, S | None]: ...

    @overload
    def forward(
        self, x: Tensor, state: S | None = None, *, carry: Tensor | tuple[Any, ...], **options: Unpack[AllArguments]
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
        # ``_trusted``: a stack has checked its arguments once for all layers. It is a keyword and not a second method,
        # since ``__call__`` runs the hooks of profilers and sharding (FSDP).
        if unknown:
            refuse(self.name, unknown, ("x", "state", *ARGUMENTS))
        given: dict[str, Any] = {"mask": mask, "segments": segments, "prefix": prefix, "context": context}
        given |= {"context_mask": context_mask, "carry": carry, "record": record, "donate": donate or None}
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(state, Journal):
            return state.read(self, x, given)
        if _trusted is None:
            given = validation.checked_arguments(self, x, state, given)
        # In a process that shards no tensors, or in a graph, there is nothing to look up.
        if not torch.compiler.is_compiling() and "torch.distributed.tensor" in sys.modules:
            validation.refuse_parts(self)
        if state is not None and 0 in x.shape:
            # Without tokens the state stays the same. It is copied, since a later call may donate one of the two.
            validation.fill_record({} if record is None else record, {})
            return x.clone(), state if donate else clone(state), *([] if carry is None else [carry])
        requested: dict[str, Any] = {}
        if record is not None:
            requested = validation.requested_outputs(self, given.pop("record"))
            given |= {"record": requested} if requested else {}
        # Masked tokens are zeroed before and after: a weight of 0 would let NaN and infinity into sums and gradients.
        absent = None if mask is None else ~mask[..., None]
        x = x if absent is None else x.masked_fill(absent, 0.0)
        packed = segments is not None and _trusted is not Trusted.ISOLATED
        if (shards := active_shards()) is not None:
            run = (
                functools.partial(self._attend_packed, given=given)
                if packed
                else functools.partial(self.attend, **given)
            )
            y, *rest = shards.attend(self, run, x, state)
        else:
            y, *rest = self._attend_packed(x, state, given) if packed else self.attend(x, state, **given)
        if record is not None:
            validation.fill_record(record, requested)
        return y if absent is None else y.masked_fill(absent, 0.0), *rest

    if TYPE_CHECKING:
        # ``nn.Module`` leaves ``__call__`` untyped. It has the signature of ``forward``.
        __call__ = forward  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride] see above

    def _attend_packed(self, x: Tensor, state: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        """``attend`` with segments, such that NaN and infinity stay in their packed sequence."""
        segments, mask, carry = given["segments"], given.get("mask"), given.get("carry")
        if self.apart or (carry is not None and self.cut_carry is None):
            return self.attend(x, state, **given)
        # The state may be read again, so it is not donated.
        given = {name: value for name, value in given.items() if name not in ("carry", "donate")}

        def run(tokens: Sequence[Any], state: Any, carry: Any, part: Part | None) -> tuple[Any, ...]:
            more = {} if carry is None else {"carry": carry}
            if part is None:
                y, *rest = self.attend(tokens[0], state, **given, **more)
                return (y if mask is None else y.masked_fill(~mask[..., None], 0.0)), *rest
            if carry is not None and self.cut_carry is not None:
                more = {"carry": self.cut_carry(carry, segments, part)}
            # A single sequence keeps its segments, so that states and carries have the layout of packed rows.
            own = {name: part.cut(given[name]) for name in ("segments", "mask") if name in given}
            return self.attend(tokens[0], state, **own, **more)

        def join(parts: list[Part], carries: list[Any]) -> Any:
            return self.join_carry and self.join_carry(segments, parts, carries)

        how = Packed(run, segments, 1, lambda: self.start(1, 0), join, causal=self.causal)
        # An auxiliary loss has gradients that do not flow through the outputs.
        return isolated(how, [x], state, carry, gradients="record" not in given)

    def update(self, record: dict[str, Any]) -> None:
        """Update the buffers that are learned without gradients. Training calls it after each step.

        Args:
            record: its ``"statistics"`` are tensors, summed over the calls of the step.

        Raises:
            ValueError: for a mechanism without ``statistics``.
        """
        raise ValueError(f"{self.name} has no statistics: gradients alone move what it learns")

    def project(self) -> None:
        """Clamp parameters to their range, in place. Training calls it after each optimizer step.

        It has an effect on mechanisms with bounded parameters, such as the spans of ``adaptive_span``. Gradients ignore
        the range, so that the gradient of a batch is the mean over its parts.
        """

    @property
    def positional(self) -> bool:
        """Whether outputs depend on the order of the keys, apart from causality."""
        return bool(getattr(self, "rotary", 0.0)) or self.key_pattern is not None

    @property
    def spec(self) -> str:
        """The spec that rebuilds this attention: its name, and the options that differ from their defaults."""
        changed = []
        for at, (name, p) in enumerate(own_options(type(self)).items()):
            if (value := getattr(self, name)) != p.default:
                nested = p.annotation is spec.Spec
                label = "" if nested and at == 0 else f"{name}="
                changed.append(label + (value if nested else repr(value)))
        return self.name + (f"({', '.join(changed)})" if changed else "")

    def extra_repr(self) -> str:
        """Return the spec, dim, heads and causal, for ``repr``."""
        return f"{self.spec}, dim={self.dim}, heads={self.heads}, causal={self.causal}"


def _supported(attend: Callable[..., Any]) -> list[str]:
    """Return the keyword arguments that ``attend`` names, by itself or by the TypedDict of ``**given``."""
    found = []
    for name, p in list(inspect.signature(attend).parameters.items())[3:]:
        found += get_args(p.annotation)[0].__annotations__ if p.kind is p.VAR_KEYWORD else [name]
    return found


@functools.cache
def own_options(cls: type[Attention]) -> Mapping[str, inspect.Parameter]:
    """Return the options of a mechanism: the keyword-only parameters of ``__init__`` that a spec may set."""
    return {name: p for name, p in spec.options(cls.__init__).items() if name not in PLACE}
