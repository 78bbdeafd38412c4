"""What pools and state adapters need of a model, for those of transformers and of flash-linear-attention too.

The state of such a model is a ``DecoderState``, as that of a decoder: rows in the first dimension of every tensor, and
KV caches with a length for each row. So the pool's slots, prefix cache and saved states work for it too.
"""

import copy
import inspect
import sys
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .. import states
from ..models.decoder import Decoder, DecoderState
from ..models.likelihood import Categorical, Likelihood
from ..models.seq2seq import Seq2Seq
from ..ops.arguments import check_mask
from ..states import kv_cache
from ..states.kv_cache import KeyValues

# Entries of a config that no output depends on: where the model was loaded from, and what its weights tell.
UNCOMPUTED = ("_name_or_path", "architectures", "dtype", "transformers_version")
# Fields of states that have no initial value to train, by the type of the model; in all, counters and KV caches.
FIXED = {
    "": ("keys", "values", "length", "position"),
    # Sums are relative to a total, or belong to a span, that does not exist before the first token.
    "lightnet": ("sums", "total"),
    "log_linear_mamba2": ("sums", "count"),
    "rwkv": ("sums.2", "sums.3", "sums.4"),
    # The last token is read together with the next one, at an angle.
    "mamba3": ("key", "value", "angle"),
    # A norm removes what the sum of the keys divides by, and exponents scale both sums.
    "xlstm": ("sums.1", "sums.2"),
    # Its first token clears them.
    "recurrent_gemma": ("sums.0",),
}


@runtime_checkable
class Servable(Protocol):
    """What a pool needs of a model. ``longspan.Decoder`` has it."""

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    @property
    def start(self) -> int | None:
        """The token before the first one of a sequence; None if sequences begin with their first token."""
        ...

    @property
    def likelihood(self) -> Likelihood:
        """The distribution of the next token; its ``levels`` is the number of tokens."""
        ...

    def init_state(self, batch: int, capacity: int | None = None) -> DecoderState:
        """Return the state before the first token.

        Args:
            batch: Number of rows.
            capacity: Slots of KV caches.
        """
        ...

    def __call__(
        self, tokens: Tensor, state: DecoderState, *, mask: Tensor | None = None, donate: bool = False
    ) -> tuple[Tensor, Any]:
        """Read tokens after a state.

        Args:
            tokens: (B,N) int64.
            state: The state before them.
            mask: (B,N) bool, True on real tokens, which come before the others of their row.
            donate: Allow the state to be overwritten.

        Returns:
            Outputs (B,N,size), of which a pool reads those of each row's last real token, and those of all tokens for
            ``score_prompt``; and the next ``DecoderState``.
        """
        ...


def servable(model: Any) -> Servable:
    """Return a model as pools and state adapters need it.

    Args:
        model: A ``Decoder``, a ``LongspanForCausalLM``, a model of ``longspan.compat.fla.load``, one of transformers
            under ``longspan.compat.transformers.accelerate()``, or any ``Servable``.

    Raises:
        ValueError: The model is of another kind, or has states that cannot be mapped to rows; the message says why.
    """
    if isinstance(model, Decoder):
        return model
    # The modules of other models are loaded if there is such a model.
    hub = sys.modules.get("longspan.compat.transformers.causal_lm")
    if hub is not None and isinstance(model, hub.LongspanForCausalLM):
        return model.decoder
    fla = sys.modules.get("longspan.compat.fla.models.causal_lm")
    if fla is not None and isinstance(model, fla.FlaForCausalLM):
        return FlaModel(model)
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return TransformersModel(model)
    if isinstance(model, Servable) and not isinstance(model, Seq2Seq):
        return model
    raise ValueError(
        f"the model must be a Decoder, a LongspanForCausalLM, a causal language model of flash-linear-attention or "
        f"transformers, or a longspan.serving.Servable, not {type(model).__name__}"
    )


def with_all_outputs(model: Servable) -> Servable:
    """Return the model, so that it returns the outputs of all tokens that it reads, not of the last ones alone."""
    return model.with_all_outputs() if isinstance(model, TransformersModel) else model


class ForeignModel:
    """A model of another library, without a start token."""

    model: Any
    likelihood: Likelihood
    start = None

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    def init_state(self, batch: int, capacity: int | None = None) -> DecoderState:
        """Return the state before the first token; see ``Servable``."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The type of the model, such as ``mamba2``."""
        return self.model.config.model_type

    @property
    def facts(self) -> dict[str, Any]:
        """The entries of its config on which its outputs depend."""
        return {name: value for name, value in self.model.config.to_dict().items() if name not in UNCOMPUTED}

    def learns(self, field: str) -> bool:
        """Return whether a field of a layer's state, such as ``0.sums.0``, has an initial value to train."""
        fixed = (*FIXED[""], *FIXED.get(self.kind, ()))
        return not f".{field}".endswith(tuple(f".{name}" for name in fixed))

    def read(
        self, tokens: Tensor, state: DecoderState, *, mask: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Read whole sequences after a state before their first token, with gradients.

        Args:
            tokens: (B,N) int64.
            state: The state before them.
            mask: (B,N) bool, True on real tokens; padding may be anywhere.
            targets: (B,N) int64. The result is then the log-probability of each in nats.

        Returns:
            Outputs (B,N,size), or log-probabilities (B,N).

        Raises:
            ValueError: For a mask or targets of another type or shape.
        """
        if targets is not None:
            self.likelihood.check_targets(targets, tuple(tokens.shape))
        if mask is not None:
            check_mask("mask", mask, tuple(tokens.shape))
            # Real tokens first: what comes after them changes none of their outputs.
            order = (~mask).int().argsort(dim=1, stable=True)
            given = None if targets is None else targets.gather(1, order)
            found = self.read(tokens.gather(1, order), state, targets=given)
            return found[torch.arange(len(tokens))[:, None], order.argsort(1)]
        outputs = self._outputs(tokens, state)
        if targets is not None:
            from .transformers.lazy_logits import cross_entropy

            return -cross_entropy(outputs, targets, reduction="none")
        return getattr(outputs, "tensor", outputs)  # of lazy logits

    def _outputs(self, tokens: Tensor, state: DecoderState) -> Any:
        """Return the logits, which may be lazy."""
        raise NotImplementedError


class FlaModel(ForeignModel):
    """A model of ``longspan.compat.fla.load`` for a pool. Its layers have states of ours.

    Args:
        model: The model.
    """

    def __init__(self, model: Any):
        self.model = model
        self.likelihood = Categorical(model.config.vocab_size)

    def init_state(self, batch: int, capacity: int | None = None) -> DecoderState:
        """Return the state before the first token."""
        layers = tuple(self.model.model.start(batch))
        position = torch.zeros(batch, dtype=torch.long, device=self.device)
        return DecoderState(position, _with_slots(layers, capacity or 0))

    def __call__(
        self, tokens: Tensor, state: DecoderState, *, mask: Tensor | None = None, donate: bool = False
    ) -> tuple[Tensor, DecoderState]:
        """Read tokens after a state; see ``Servable``."""
        from .fla.models.mixer import Call
        from .transformers import branches, decoding

        if donate and mask is None and tokens.shape[1] == 1 and not torch.is_grad_enabled():
            kind = self.model.config.model_type
            found = decoding.advanced(self.model, tokens, state.layers) if kind in branches.SERVED else ""
            if not isinstance(found, str):
                return found[0], DecoderState(state.position + 1, tuple(found[1]))
        body = self.model.model
        hidden, layers = body(body.embeddings(tokens), list(state.layers), Call(mask, None, donate))
        count = tokens.shape[1] if mask is None else mask.sum(1)
        return self.model.lm_head(hidden), DecoderState(state.position + count, tuple(layers))

    def _outputs(self, tokens: Tensor, state: DecoderState) -> Any:
        return self(tokens, state)[0]


def _with_slots(layers: Any, capacity: int) -> Any:
    """Return the states of layers with KV caches of this capacity."""
    if isinstance(layers, KeyValues):
        slots = [t.new_zeros(*t.shape[:2], capacity, *t.shape[3:]) for t in (layers.keys, layers.values)]
        return layers._replace(keys=slots[0], values=slots[1])
    if isinstance(layers, Tensor):
        return layers
    parts = [_with_slots(part, capacity) for part in layers]
    return type(layers)._make(parts) if hasattr(layers, "_make") else tuple(parts)


def _rows_like(t: Tensor, batch: int) -> Tensor:
    """Return rows (B,...) of ``t`` (1,...), with dimensions in memory in its order: steps of some kernels need it."""
    order = [0, *sorted(range(1, t.ndim), key=lambda i: -t.stride(i))]
    sizes = [batch, *(t.shape[i] for i in order[1:])]
    return t.new_empty(sizes).permute([order.index(i) for i in range(t.ndim)]).copy_(t)


class Recurrent(NamedTuple):
    """The states that a layer of transformers keeps in a cache, besides keys and values."""

    conv: tuple[Tensor, ...]  # the last inputs of each short convolution, (B,...)
    sums: tuple[Tensor, ...]  # recurrent states, (B,...)


class TransformersModel(ForeignModel):
    """A model of transformers for a pool, under ``longspan.compat.transformers.accelerate()``.

    Decode steps advance all rows in one call, as ``generate`` does with left padding. Recurrent layers of transformers
    read padding, so only rows with equally many tokens are read in one call.

    Args:
        model: A causal language model on the CPU, of a type that ``accelerate`` supports.

    Raises:
        ValueError: The model is not accelerated, or keeps states that cannot be mapped to rows.
    """

    def __init__(self, model: Any):
        self.model = model
        if reason := why_not(model):
            raise ValueError(f"a pool cannot serve {type(model).__name__}: {reason}")
        given = inspect.signature(model.forward).parameters
        self._named = {name for name in ("position_ids", "attention_mask", "logits_to_keep") if name in given}
        self._last = 1  # outputs that are computed; 0 for all
        self._cache = "state" if "state" in given else "cache"
        kind = model.config.model_type
        self._mapping: _Mapping = {"rwkv": _Rwkv, "xlstm": _Xlstm, "minimax": _MiniMax}.get(kind, _Dynamic)(model)
        # One token shows the sizes of all states.
        training = model.training
        model.eval()
        with torch.no_grad():
            cache = self._mapping.fresh()
            outputs, cache = self._forward(torch.zeros(1, 1, dtype=torch.long), cache, torch.zeros(1, 1), None)
            layers = self._mapping.layers(cache)
        model.train(training)
        if odd := self._mapping.odd(cache):
            raise ValueError(f"a pool cannot serve {type(model).__name__}: {odd}")
        self.likelihood = Categorical(outputs.shape[-1])
        self._layers = _with_slots(self._mapping.begin(pytree.tree_map(torch.zeros_like, layers)), 0)
        self.attends = any(isinstance(part, KeyValues) for part in _caches(self._layers))

    def init_state(self, batch: int, capacity: int | None = None) -> DecoderState:
        """Return the state before the first token."""
        rows = pytree.tree_map(lambda t: _rows_like(t, batch), self._layers)
        return DecoderState(torch.zeros(batch, dtype=torch.long), _with_slots(rows, capacity or 0))

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, state: DecoderState, *, mask: Tensor | None = None, donate: bool = False
    ) -> tuple[Tensor, DecoderState]:
        """Read tokens after a state; see ``Servable``. All outputs of a row are those of its last real token."""
        batch, n = tokens.shape
        if n == 1 and mask is None and bool((state.position > 0).all()):
            return self._step(tokens, state, donate)
        counts = [n] * batch if mask is None else mask.sum(1).tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (count, before) in enumerate(zip(counts, state.position.tolist(), strict=True)):
            groups.setdefault((count, before), []).append(row)
        if len(groups) == 1:
            outputs, after = self._equal(tokens[:, : counts[0]], state if donate else states.clone(state))
            return _widened(outputs, n), after
        found = [self._equal(tokens[rows, :count], states.select(state, rows)) for (count, _), rows in groups.items()]
        back = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
        outputs = torch.cat([_widened(one, n) for one, _ in found])[back]
        return outputs, states.select(states.join([after for _, after in found]), back)

    def with_all_outputs(self) -> "TransformersModel":
        """Return the same model, which returns the outputs of all tokens that it reads."""
        found = copy.copy(self)
        found._last = 0
        return found

    def _equal(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read the tokens (B,N) of rows at the same position -> the outputs of the last or of all, the state."""
        before, n = int(state.position[0]), tokens.shape[1]
        places = torch.arange(before, before + n).expand(len(tokens), -1)
        outputs, cache = self._forward(tokens, self._mapping.cache(state.layers, state.position), places, None)
        layers = _extended(state.layers, self._mapping.layers(cache), state.position, n)
        return outputs, DecoderState(state.position + n, layers)

    def _step(self, tokens: Tensor, state: DecoderState, donate: bool) -> tuple[Tensor, DecoderState]:
        """Read one token (B,1) for each of several rows."""
        state = state if donate else states.clone(state)
        lengths = state.position
        if (found := self._mapping.step(tokens, state)) is not None:
            return found
        mask = None
        if self.attends and bool((lengths != lengths[0]).any()):
            # Rows end at the same place, after padding.
            longest = int(lengths.max())
            mask = (torch.arange(longest + 1) >= (longest - lengths)[:, None]).long()
        cache = self._mapping.cache(state.layers, lengths)
        outputs, cache = self._forward(tokens, cache, lengths[:, None], mask)
        layers = _extended(state.layers, self._mapping.layers(cache), lengths, 1)
        return outputs, DecoderState(lengths + 1, layers)

    def _outputs(self, tokens: Tensor, state: DecoderState) -> Any:
        places, cache = torch.arange(tokens.shape[1]), self._mapping.cache(state.layers, state.position)
        return self.with_all_outputs()._forward(tokens, cache, places.expand(len(tokens), -1), None)[0]

    def _forward(self, tokens: Tensor, cache: Any, places: Tensor, mask: Tensor | None) -> tuple[Any, Any]:
        """Call the model -> the outputs (B,N,size) of the last token or of all, and the cache."""
        given = {"position_ids": places.long(), "attention_mask": mask, "logits_to_keep": self._last}
        options = {name: value for name, value in given.items() if name in self._named}
        found = self.model(tokens, use_cache=True, **{self._cache: cache}, **options)
        logits = found.logits[:, -self._last :] if self._last else found.logits
        return logits, found.get(self._cache) if cache is None else cache


def _widened(outputs: Tensor, n: int) -> Tensor:
    """Return outputs (B,N,size) for ``n`` tokens: those of the last one for each, or all and zeros after them."""
    if outputs.shape[1] == 1:
        return outputs.expand(-1, n, -1)
    return F.pad(outputs, (0, 0, 0, n - outputs.shape[1]))


def why_not(model: Any) -> str:
    """Return why a model of transformers cannot be served before its cache is looked at; "" if it can."""
    from .transformers import record

    kind = type(model).__module__.rpartition(".")[2].removeprefix("modeling_")
    if reason := why_not_type(kind):
        return reason
    if not hasattr(model, "lm_head") and not hasattr(model, "head"):
        return "it has no output layer; load it with AutoModelForCausalLM"
    if model.device.type != "cpu":
        return f"it is on {model.device.type}, where accelerate() does not apply; move it to the CPU"
    if not any(one.model == kind and one.active for one in record.replaced):
        return (
            "its original code may forget its state when a prompt is read in pieces; call "
            "longspan.compat.transformers.accelerate(model) first"
        )
    return ""


def why_not_type(kind: str) -> str:
    """Return why models of transformers of a type, such as ``mamba2``, cannot be served; "" if they can."""
    from .transformers import models, record

    if kind in models.UNSERVED:
        return models.UNSERVED[kind]
    if kind not in models.MODELS:
        return (
            f"the model type {kind} is not one with recurrent layers that longspan knows; a model that only keeps a KV "
            f"cache belongs on an engine for those"
        )
    if models.MODELS[kind].leaks:
        return "its layers with an indexer keep a KV cache that cannot be aligned by rows"
    return "its cache is mapped from transformers 5.24 on" if record.version() < (5, 24) else ""


def _caches(layers: Any) -> list[Any]:
    """Return the parts of states of layers that are KV caches."""
    if isinstance(layers, KeyValues):
        return [layers]
    return [] if isinstance(layers, Tensor) else [found for part in layers for found in _caches(part)]


def _aligned(kv: KeyValues, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (B,H,L,D) of which every row ends at the last place; others repeat the first token."""
    longest = int(lengths.max())
    if bool((lengths == longest).all()):
        return kv.keys[:, :, :longest], kv.values[:, :, :longest]
    at = (torch.arange(longest) - (longest - lengths)[:, None]).clamp(min=0)[:, None, :, None]
    return tuple(t.gather(2, at.expand(-1, t.shape[1], -1, t.shape[3])) for t in (kv.keys, kv.values))  # pyright: ignore[reportReturnType] (two of them)


def _extended(before: Any, after: Any, lengths: Tensor, n: int) -> Any:
    """Return the states of layers after ``n`` more tokens of each row; new keys and values go into free slots.

    Args:
        before: The states before them, whose KV caches are overwritten.
        after: The states that the model has returned, whose keys and values end with the new ones.
        lengths: (B,) int64, the tokens in ``before``.
        n: Number of new tokens.
    """
    if isinstance(before, KeyValues):
        kept = min(n, after.keys.shape[2])  # a window keeps fewer than it has read
        slots = lengths[:, None] + torch.arange(n - kept, n)
        rows = torch.arange(len(lengths))[:, None]
        if (room := int(lengths.max()) + n - before.keys.shape[2]) > 0:
            pad = (0, 0, 0, room)
            keys, values = (nn.functional.pad(t, pad) for t in (before.keys, before.values))
            before = before._replace(keys=keys, values=values)
        for target, new in ((before.keys, after.keys), (before.values, after.values)):
            target[rows, :, slots] = new[:, :, new.shape[2] - kept :].transpose(1, 2)
        return before._replace(length=lengths + n)
    if isinstance(before, Recurrent):
        return after
    return tuple(_extended(one, other, lengths, n) for one, other in zip(before, after, strict=True))


class _Mapping:
    """Maps a cache of transformers to the states of layers, and back."""

    def __init__(self, model: Any):
        self.model = model

    def fresh(self) -> Any:
        """Return a cache before the first token; None lets the model make it."""
        return None

    def layers(self, cache: Any) -> tuple:
        """Return the states of all layers."""
        raise NotImplementedError

    def begin(self, layers: tuple) -> tuple:
        """Return the states of all layers before the first token, from zeros."""
        return layers

    def cache(self, layers: tuple, lengths: Tensor) -> Any:
        """Return a cache with these states, after (B,) tokens."""
        raise NotImplementedError

    def odd(self, cache: Any) -> str:
        """Return why a cache cannot be mapped; "" if it can."""
        return ""

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState] | None:
        """Read one token (B,1) of each row without a cache -> outputs (B,1,V), the state; None if it cannot be done."""
        return None


class _Dynamic(_Mapping):
    """``DynamicCache``, whose layers have short convolutions and recurrent states, keys and values, or both."""

    _more: Any = None  # layers that the model itself adds to a cache

    def fresh(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def layers(self, cache: Any) -> tuple:
        if self._more is None:
            self._more = copy.deepcopy(cache.layers[len(self.fresh().layers) :])
        return tuple(self.layer(layer) for layer in cache.layers)

    def layer(self, layer: Any) -> Any:
        """Return the state of one layer."""
        found: list[Any] = []
        if hasattr(layer, "conv_states"):
            # Layers with convolutions only have no recurrent state, and the other way round.
            conv, sums = (
                tuple(t for t in of.values() if t is not None) for of in (layer.conv_states, layer.recurrent_states)
            )
            found.append(Recurrent(conv, sums))
        if getattr(layer, "keys", None) is not None:
            keys = layer.keys
            found.append(KeyValues(keys, layer.values, torch.full((len(keys),), keys.shape[2])))
        return tuple(found)

    def cache(self, layers: tuple, lengths: Tensor) -> Any:
        cache = self.fresh()
        cache.layers += copy.deepcopy(self._more)
        for layer, state in zip(cache.layers, layers, strict=True):
            self.fill(layer, state, lengths)
        return cache

    def fill(self, layer: Any, state: tuple, lengths: Tensor) -> None:
        """Put the state of one layer into the layer of a cache."""
        for part in state:
            if isinstance(part, KeyValues):
                keys, values = _aligned(part, lengths)
                layer.lazy_initialization(keys, values)
                if (window := getattr(layer, "sliding_window", None)) is not None:
                    layer.cumulative_length = keys.shape[2]
                    first = max(0, keys.shape[2] - window + 1)
                    keys, values = keys[:, :, first:], values[:, :, first:]
                layer.keys, layer.values = keys, values
            else:
                for kind, given in (("conv", part.conv), ("recurrent", part.sums)):
                    into, begun = getattr(layer, f"{kind}_states"), getattr(layer, f"is_{kind}_states_initialized")
                    for number, t in enumerate(given):
                        into[number], begun[number] = t, True
                        layer.device = t.device
                        if kind == "conv":
                            layer.conv_kernel_size[number], layer.dtype = t.shape[-1], t.dtype
                for number in layer.has_previous_state:
                    layer.has_previous_state[number] = True

    def odd(self, cache: Any) -> str:
        known = {
            "DummyLayer",
            "DynamicLayer",
            "DynamicSlidingWindowLayer",
            "LinearAttentionAndFullAttentionLayer",
            "LinearAttentionAndSlidingWindowAttentionLayer",
            "LinearAttentionLayer",
        }
        others = sorted({type(layer).__name__ for layer in cache.layers} - known)
        return f"it keeps a KV cache of the kind {others[0]}, which cannot be aligned by rows" if others else ""

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState] | None:
        from .transformers import decoding

        engine = decoding.engine_of(self.model)
        if isinstance(engine, str):
            return None
        layers, bound, batch = [list(layer) for layer in state.layers], [], len(tokens)
        for _, wanted in engine.states:
            parts, attends = layers[wanted.layer], isinstance(wanted, decoding.Keys)
            place = next(i for i, part in enumerate(parts) if isinstance(part, KeyValues) == attends)
            part = parts[place]
            if isinstance(wanted, decoding.Keys):
                kv = kv_cache.with_room(part, int(part.length.max()) + 1)
                found: Any = decoding.Bound(kv.keys.contiguous(), kv.values.contiguous(), part.length.contiguous())
                parts[place] = type(part)(found.first, found.second, part.length + 1)
            else:
                assert isinstance(wanted, decoding.Sums)
                found = decoding.arranged(
                    part.conv[0], part.sums[0] if part.sums else None, wanted, batch, engine.dtype
                )
                if isinstance(found, str):
                    return None
                sums = (found.first.mT if wanted.values_first else found.first,) if part.sums else ()
                parts[place] = Recurrent((found.second,), sums)
            bound.append(found)
        outputs = engine.step(decoding.Token(tokens, state.position.contiguous(), None), bound)
        if isinstance(outputs, str):
            return None
        return outputs, DecoderState(state.position + 1, tuple(map(tuple, layers)))


class _MiniMax(_Dynamic):
    """``MiniMaxCache``: a ``DynamicCache`` that also has a list of recurrent states."""

    def fresh(self) -> Any:
        return sys.modules[type(self.model).__module__].MiniMaxCache()

    def layers(self, cache: Any) -> tuple:
        found = []
        for number in range(self.model.config.num_hidden_layers):
            sums = cache.linear_cache[number] if number < len(cache.linear_cache) else None
            if isinstance(sums, Tensor):
                found.append((Recurrent((), (sums,)),))
            else:
                found.append(self.layer(cache.layers[number]))
        return tuple(found)

    def cache(self, layers: tuple, lengths: Tensor) -> Any:
        from transformers.cache_utils import DynamicLayer

        cache = self.fresh()
        for number, state in enumerate(layers):
            cache.layers.append(DynamicLayer())
            if isinstance(state[0], KeyValues):
                self.fill(cache.layers[-1], state, lengths)
            else:
                cache.set_linear_cache(number, state[0].sums[0])
        return cache


class _Rwkv(_Mapping):
    """RWKV-4: a list of five tensors with all layers."""

    def layers(self, cache: Any) -> tuple:
        return (Recurrent((), tuple(cache)),)

    def begin(self, layers: tuple) -> tuple:
        from .transformers.running import BEFORE

        return (Recurrent((), (*layers[0].sums[:4], layers[0].sums[4] + BEFORE)),)

    def cache(self, layers: tuple, lengths: Tensor) -> Any:
        return list(layers[0].sums)


class _Xlstm(_Mapping):
    """``xLSTMCache``: three tensors for each layer."""

    _empty: Any = None

    def layers(self, cache: Any) -> tuple:
        if self._empty is None:
            self._empty = copy.copy(cache)
        return tuple(Recurrent((), tuple(cache.rnn_state[number])) for number in sorted(cache.rnn_state))

    def cache(self, layers: tuple, lengths: Tensor) -> Any:
        cache = copy.copy(self._empty)
        cache.rnn_state = {number: state.sums for number, state in enumerate(layers)}
        # It counts tokens for callers; nothing reads it.
        cache.seqlen_offset = lengths.max()[None].clone()
        return cache
