"""The decode engine for models of transformers: one more token of each row in one C call.

A causal language model of a type in ``branches.SERVED`` uses it by itself, in ``generate`` and in calls with one token
and a cache. Any other call, and any model with something that the engine does not know, runs in the layers of
transformers.
"""

import ctypes
import functools
import inspect
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ... import ops
from ...generation.native_mixers import quantized_map
from ...modules.quantized import QuantizedEmbedding
from ...ops.native import decode
from ...ops.native.call import FORMATS, available
from ...ops.operands import followed, holds, mark_overwritten
from . import branches
from .branches import Keys, Plan, Shifted, Sums, Unserved
from .packing import cache_of
from .record import version

SINCE = (5, 24)
"""The first version of transformers whose layers and caches the engine knows."""
ENGINE = "the decode engine"
_ROOM = "longspan_room"
_FREE = 64  # slots for keys that a cache gets at least when it grows
stepped: dict[str, Counter[str]] = {}
"""number of calls with single tokens by the type of the model and what has computed them"""
_CACHES = ("cache", "past_key_values", "cache_params")
# Arguments of a call that are read, or have no meaning for one token.
_READ = {*_CACHES, "input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict"}


class Token(NamedTuple):
    """One more token of each row."""

    tokens: Tensor
    """(B,1) int64"""
    places: Tensor
    """(B,) int64, their positions"""
    begin: Tensor | None
    """(B,) int64, how much padding is before the rows in caches of keys; None: none"""


class Bound(NamedTuple):
    """The state of a branch in the order of the engine."""

    first: Tensor
    """sums (B,H,D,E), or keys (B,G,capacity,D)"""
    second: Tensor
    """recent inputs (B,C,K), or values"""
    lengths: Tensor | None = None
    """(B,) int64, the keys of each row; None for sums"""


class Room(NamedTuple):
    """Keys and values in a layer of a cache, with free slots after them."""

    seen: tuple[Tensor, Tensor]
    """those that the layer has (B,G,n,D)"""
    slots: tuple[Tensor, Tensor]
    """(B,G,capacity,D)"""


class Mark:
    """What a model consists of, to notice that it has changed: modules, hooks, tensors and their memory.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._parts = [d for m in modules for d in (m._modules, m._parameters, m._buffers) if d]
        self._sizes = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks, m.__dict__)]
        self._sizes += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]
        self._modules, self._found = [m.__dict__ for m in modules], self._now()
        self._settings = self._numbers()

    def _numbers(self) -> list[Any]:
        return [v for d in self._modules for v in d.values() if type(v) in (int, float, str, bool)]

    def _now(self) -> tuple[Any, ...]:
        ids = map(id, itertools.chain.from_iterable(map(dict.values, self._parts)))
        memory = map(Tensor.data_ptr, self._tensors)
        return (*ids, *map(len, self._sizes), *memory, *(t._version for t in self._tensors))

    def holds(self, settings: bool) -> bool:
        """Return whether nothing has changed; numbers and names in the modules are compared with ``settings`` only."""
        return self._now() == self._found and (not settings or self._numbers() == self._settings)


class Engine:
    """The decode engine for a causal language model of transformers.

    It reads linear maps and embeddings where the model has them, and keeps copies of small weights.

    Args:
        model: The model.
        kind: Its type, such as ``qwen3_5``.

    Raises:
        Unserved: It cannot be computed.
    """

    def __init__(self, model: Any, kind: str):
        self.made: Plan = branches.plan(model, kind)
        self.kind = kind
        self.dtype = self.made.weights.dtype
        self.logits = torch.float32 if branches.SERVED[kind].wide else self.dtype
        self.states = [(i, state) for i, state in enumerate(self.made.states) if state is not None]
        self.attends = [state.layer for _, state in self.states if isinstance(state, Keys)]
        made, rows = self.made, self.made.tokens
        self.embed: Callable[[Tensor], Tensor] | None = None  # of embeddings that the step does not read
        tokens = decode.Linear()
        if type(rows) is QuantizedEmbedding and rows.format in FORMATS:
            tokens = quantized_map(made.weights, rows)
        elif type(rows) is nn.Embedding and rows.max_norm is None:
            tokens = made.weights.table(rows.weight)
        else:
            self.embed = rows
        self.packed = (decode.Branch * len(made.branches))(*made.branches)
        self.plan = decode.Model(
            ctypes.addressof(self.packed),
            None,
            made.begin,
            made.norm,
            tokens,
            made.head,
            len(made.branches),
            rows.embedding_dim,
            rows.num_embeddings,
            0,
            decode.TYPES[self.dtype],
            made.kept,
            made.token_factor,
            made.head_factor,
        )
        made.weights.settle()

    def __call__(self, token: Token, cache: Any) -> Tensor | str:
        """Read one more token of each row.

        Args:
            token: The token.
            cache: A ``DynamicCache``, which is overwritten.

        Returns:
            The logits (B,1,V), or why the cache does not fit; it has not changed then.
        """
        batch, layers, bound = len(token.tokens), cache.layers, []
        for _, state in self.states:
            layer = layers[state.layer] if state.layer < len(layers) else None
            found = (_keys if isinstance(state, Keys) else _sums)(layer, state, batch, self.dtype)
            if isinstance(found, str):
                return found
            bound.append(found)
        out = self.step(token, bound)
        if not isinstance(out, str):
            for (_, state), one in zip(self.states, bound, strict=True):
                if isinstance(state, Keys):
                    _grown(layers[state.layer], (one.first, one.second))
        return out

    def step(self, token: Token, bound: Sequence[Bound]) -> Tensor | str:
        """Read one more token of each row.

        Args:
            token: The token.
            bound: The states of the branches that have one, which are overwritten; caches of keys have a free slot.

        Returns:
            The logits (B,1,V), or why the token cannot be read; no state has changed then.
        """
        addresses = (decode.State * len(self.made.branches))()
        begin = None if token.begin is None else token.begin.data_ptr()
        for (i, _), (first, second, lengths) in zip(self.states, bound, strict=True):
            places = None if lengths is None else token.places.data_ptr()
            length = None if lengths is None else lengths.data_ptr()
            addresses[i] = decode.State(first.data_ptr(), second.data_ptr(), length, places, begin, first.shape[2])
        given, embedded = token.tokens.contiguous(), None
        if self.embed is not None:
            if bool(((given < 0) | (given >= self.plan.vocab)).any()):
                return "a token is out of range"
            embedded = self.embed(given).float().contiguous()
        # The kernel's output, independent of torch's default dtype and device.
        out = torch.empty(len(given), 1, self.made.head.outputs, dtype=torch.float32, device="cpu")
        code = decode.step(self.plan, addresses, given, token.places, embedded, out)
        if code == decode.BAD_TOKEN:
            return "a token is out of range"
        assert code == decode.FINE, code
        changed = [t for one in bound for t in (one.first, one.second) if not t.is_inference()]
        mark_overwritten(*changed)
        count(self.kind, ENGINE)
        return out.to(self.logits)


def count(kind: str, what: str) -> None:
    """Count a call of a model of a type under what has computed it."""
    stepped.setdefault(kind, Counter())[what] += 1


def _keys(layer: Any, state: Any, batch: int, dtype: torch.dtype) -> Bound | str:
    """Return the slots of keys and values in a layer of a cache, with room for one more token."""
    if type(layer).__name__ not in ("DynamicLayer", "LinearAttentionAndFullAttentionLayer") or layer.keys is None:
        return "its cache does not keep all keys"
    seen = layer.keys, layer.values
    for t in seen:
        if not _plain(t, dtype, (batch, state.groups, seen[0].shape[2], state.size)):
            return "its keys or values have another dtype or shape"
    room, n = layer.__dict__.get(_ROOM), seen[0].shape[2]
    if room is not None and room.seen[0] is seen[0] and room.seen[1] is seen[1] and n < room.slots[0].shape[2]:
        keys, values = room.slots
    else:
        keys, values = (t.new_empty(batch, state.groups, n + max(_FREE, n // 8), state.size) for t in seen)
        keys[:, :, :n], values[:, :, :n] = seen
    return Bound(keys, values, torch.full((batch,), n, dtype=torch.int64, device="cpu"))


def _grown(layer: Any, slots: tuple[Tensor, Tensor]) -> None:
    """Let a layer of a cache have one more key and value, which are in the slots."""
    n = layer.keys.shape[2] + 1
    layer.keys, layer.values = (t[:, :, :n] for t in slots)
    # A copy of the cache has a copy of it. Where other keys replace these, it is not used again.
    layer.__dict__[_ROOM] = Room((layer.keys, layer.values), slots)


def _sums(layer: Any, state: Any, batch: int, dtype: torch.dtype) -> Bound | str:
    """Return the sums and the recent inputs in a layer of a cache, in the order of the engine."""
    known = ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
    if type(layer).__name__ not in known or not layer.has_previous_state.get(0):
        return "its cache has no state yet"
    if layer.record_past:
        return "its cache records the past"
    recent, sums = layer.conv_states[0], layer.recurrent_states[0]
    found = arranged(recent, sums, state, batch, dtype)
    if not isinstance(found, str):
        layer.conv_states[0] = found.second
        if state.sums is not None and found.first.data_ptr() != sums.data_ptr():
            layer.recurrent_states[0] = found.first.mT if state.values_first else found.first
    return found


def arranged(recent: Any, sums: Any, state: Sums, batch: int, dtype: torch.dtype) -> Bound | str:
    """Return the state of a recurrent layer in the order of the engine, a copy if necessary, or why it does not fit.

    Args:
        recent: The recent inputs of its convolution (B,C,K).
        sums: Its sums, as a cache has them; ignored for a convolution alone.
        state: What the layer needs.
        batch: Number of rows.
        dtype: That of the model.
    """
    if not _plain(recent, dtype, (batch, *state.recent)):
        return "the inputs of a convolution have another dtype or shape"
    recent = recent.contiguous()
    if state.sums is None:
        return Bound(recent, recent)
    *heads, keys, values = state.sums
    if not _plain(sums, torch.float32, (batch, *heads, *((values, keys) if state.values_first else (keys, values)))):
        return "the sums of a layer have another dtype or shape"
    return Bound((sums.mT if state.values_first else sums).contiguous(), recent)


def _plain(t: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    fits = type(t) is Tensor and t.dtype == dtype and t.is_cpu and t.shape == shape
    return fits and not t.requires_grad and not t.is_neg() and holds(t)


class Known(NamedTuple):
    """What is known of a model."""

    mark: Mark
    found: Engine | str
    """its engine, or why it has none"""
    cache: Any
    """a weak reference to the cache of the last call"""


_known: "weakref.WeakKeyDictionary[nn.Module, Known]" = weakref.WeakKeyDictionary()


def engine(model: Any, kind: str, cache: Any = None) -> Engine | str:
    """Return the engine of a model of a type, or why it has none. It is built again if the model has changed.

    Args:
        model: The model.
        kind: Its type, such as ``qwen3_5``.
        cache: The cache of the call. With another one than before, more is compared.
    """
    if ops.resolve_backend("a decoder's step", ("reference", "torch", "native"), "native") != "native":
        return "another backend is forced"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if followed() or torch._C._len_torch_dispatch_stack():
        return "a transform or a mode follows the call"
    known = _known.get(model)
    same = known is not None and (cache is None or known.cache() is cache)
    if known is not None and known.mark.holds(settings=not same):
        if not same:
            _known[model] = known._replace(cache=weakref.ref(cache))
        return known.found
    mark = Mark(model)
    try:
        found: Engine | str = Engine(model, kind) if available("decode/step") else "the kernels could not be compiled"
    except Unserved as reason:
        found = str(reason)
    _known[model] = Known(mark, found, (lambda: None) if cache is None else weakref.ref(cache))
    return found


def engine_of(model: Any) -> Engine | str:
    """Return the engine of an accelerated model, or why it has none."""
    kind = type(model).__module__.rpartition(".")[2].removeprefix("modeling_")
    if getattr(model.config, "family", None) is not None:
        kind = model.config.model_type  # of flash-linear-attention
    if kind not in branches.SERVED or not type(model).__name__.endswith("ForCausalLM") or version() < SINCE:
        return f"it has no plan for models of the type {kind}"
    return engine(model, kind)


def advanced(model: Any, tokens: Tensor, states: Sequence[Any]) -> tuple[Tensor, list[Any]] | str:
    """Read one more token of each row of an RWKV-7.

    Args:
        model: A model of flash-linear-attention.
        tokens: (B,1) int64.
        states: Those of its layers, which are overwritten.

    Returns:
        The logits (B,1,V) and the states, or why the engine does not compute it; no state has changed then.
    """
    found = _advanced(model, tokens, states)
    if isinstance(found, str):
        count(model.config.model_type, f"its layers, since {found}")
    return found


def _advanced(model: Any, tokens: Tensor, states: Sequence[Any]) -> tuple[Tensor, list[Any]] | str:
    found = engine_of(model)
    if isinstance(found, str):
        return found
    after, bound, batch = list(states), [], len(tokens)
    for _, wanted in found.states:
        assert isinstance(wanted, Shifted)
        block = after[wanted.layer]
        part = block if wanted.sums is None else block.mixer
        sums = None if wanted.sums is None else part.sums
        if not _plain(part.last, torch.float32, (batch, 1, wanted.channels)) or (
            wanted.sums is not None and not _plain(sums, torch.float32, (batch, *wanted.sums))
        ):
            return "a state has another dtype or shape"
        last = part.last.contiguous()
        bound.append(Bound(last if sums is None else sums.contiguous(), last))
        mixed = block.mixer if sums is None else part._replace(sums=bound[-1].first, last=last)
        after[wanted.layer] = block._replace(last=last) if sums is None else block._replace(mixer=mixed)
    token = _token({"input_ids": tokens}, None)
    outputs = token if isinstance(token, str) else found.step(token, bound)
    return outputs if isinstance(outputs, str) else (outputs, after)


def stepping(original: Callable, kind: str) -> Callable:
    """Wrap the ``forward`` of a causal language model so that the engine reads single tokens after a cache.

    Args:
        original: The method.
        kind: The type of the model.
    """
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        # First, so that a compiler sees only the original.
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_grad_enabled():  # pyright: ignore[reportPrivateImportUsage] (documented by torch)
            return original(self, *args, **kwargs)
        given = kwargs if not args else dict(zip(names, args, strict=False)) | kwargs
        tokens, cache = given.get("input_ids"), cache_of(given)
        if cache is None or tokens is None or tokens.dim() != 2 or tokens.shape[1] != 1 or len(args) > len(names):
            return original(self, *args, **kwargs)
        found = _stepped(self, kind, given, cache)
        if isinstance(found, str):
            count(kind, f"the layers of transformers, since {found}")
            return original(self, *args, **kwargs)
        outputs = getattr(sys.modules[type(self).__module__], branches.SERVED[kind].output)
        return outputs(logits=found, cache=cache)

    return forward


def _stepped(model: Any, kind: str, given: Mapping[str, Any], cache: Any) -> Tensor | str:
    """Return the logits (B,1,V) of a call, or why the engine does not compute it."""
    if type(cache).__name__ != "DynamicCache" or cache.offloading:
        return f"its cache is a {type(cache).__name__}"
    for name, value in given.items():
        if name not in _READ and value is not None and value is not False:
            return f"{name} is given"
    if isinstance(given.get("logits_to_keep"), Tensor) or given.get("use_cache") is False:
        return "logits_to_keep is a tensor, or use_cache is False"
    config = model.config
    if given.get("return_dict") is False or config.return_dict is False:
        return "it returns a tuple"
    if config.output_hidden_states or config.output_attentions or getattr(config, "output_router_logits", False):
        return "it returns hidden states or attentions"
    found = engine(model, kind, cache)
    if isinstance(found, str):
        return found
    token = _token(given, cache.layers[found.attends[0]].keys if found.attends else None)
    return token if isinstance(token, str) else found(token, cache)


def _token(given: Mapping[str, Any], keys: Tensor | None) -> Token | str:
    """Return the token of a call after a cache with these keys, or why it is not one for the engine."""
    tokens, mask, places = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    assert tokens is not None
    if tokens.dtype != torch.int64 or not tokens.is_cpu:
        return "its tokens are not int64 on the CPU"
    batch, n, begin = len(tokens), 0 if keys is None else keys.shape[2], None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != batch:
            return "its mask is not one of padding"
        mask = mask.bool()
        if not bool(mask.all()):
            if not bool(mask[:, -1].all()):
                return "a row ends with padding"
            if keys is not None:
                begin = mask.shape[1] - mask.sum(1)
                if mask.shape[1] != n + 1 or not torch.equal(mask, torch.arange(n + 1) >= begin[:, None]):
                    return "there is padding between tokens"
        elif keys is not None and mask.shape[1] != n + 1:
            return "its mask has another length than the cache"
    if places is None:
        at = torch.full((batch,), n, dtype=torch.int64, device="cpu")
        return Token(tokens, at if begin is None else at - begin, begin)
    if places.dim() == 3:
        rotary = places[-3:]
        if not bool((rotary == rotary[:1]).all()):
            return "its positions are those of an image"
        places = rotary[0]
    if places.dim() == 1:
        places = places[None]
    if places.dtype != torch.int64 or places.shape[-1] != 1 or len(places) not in (1, batch):
        return "its positions are not one for each row"
    return Token(tokens, places[:, 0].expand(batch).contiguous(), begin)
