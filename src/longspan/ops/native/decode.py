"""A decode step of a whole model in one C call, with packed weights and in-place states."""

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers import use_large_pages
from .build.openmp import threads
from .call import ACTIVATIONS as ROUNDED
from .call import FORMATS, kernels
from .call import MAPS as MAPS
from .call import TYPES as TYPES

# The numbers are those of decode/stages.h and decode/activations.h.
ACTIVATIONS = {"relu": 0, "gelu": 1, "silu": 2, "squared_relu": 3, "geglu": 4, "swiglu": 5}
GATES = {"silu": 2, "sigmoid": 6, "softplus": 7, "identity": 8, "tanh": 9}
IN_ROWS = -1  # the format of a weight that is not packed
DECAYS = {None: 0, "head": 1, "channel": 2}
FINE, NO_MEMORY, BAD_TOKEN, BAD_POSITION, NO_ROOM, BAD_LENGTH = range(6)

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


def _longs(*names: str) -> Iterator[tuple[str, type[ctypes.c_long]]]:
    """Return fields that are integers."""
    return ((name, _LONG) for name in names)


class Linear(ctypes.Structure):
    """A linear map y = W x + b; its weight is packed, or quantized, or that of the model (``IN_ROWS``)."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        *_longs("inputs", "outputs"),
        *((name, _POINTER) for name in ("scales", "factors")),
        *_longs("format", "activations", "prepared"),
    )


class Norm(ctypes.Structure):
    """Layer norm; RMS norm without a bias; no norm without a weight."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("eps", _FLOAT))


class Project(ctypes.Structure):
    """A linear map of a part of the activations, or of the branch's input for -1, followed by an activation."""

    kind = 0
    _fields_ = (("map", Linear), *_longs("start", "to", "activation"))


class LinearAttention(ctypes.Structure):
    """Linear attention of queries, keys and values that are adjacent."""

    kind = 1
    _fields_ = (
        ("rates", _POINTER),
        *_longs("start", "to", "heads", "size", "map"),
        ("eps", _FLOAT),
    )


class SoftmaxAttention(ctypes.Structure):
    """Softmax attention over the cache, to which it adds the token; queries are ``apart`` numbers apart."""

    kind = 2
    _fields_ = (
        ("rates", _POINTER),
        *_longs("query", "apart", "key", "value", "to", "heads", "groups", "size"),
        ("scale", _FLOAT),
    )


class Turn(ctypes.Structure):
    """Rotates the first ``size`` channels of heads that are ``apart`` numbers apart, in place."""

    kind = 3
    _fields_ = (("rates", _POINTER), *_longs("at", "heads", "size", "apart"))


class Convolve(ctypes.Structure):
    """The short convolution, in place, with silu unless ``linear``; its state has ``rows`` inputs of each channel."""

    kind = 4
    _fields_ = (("weights", _POINTER), *_longs("at", "channels", "taps", "rows", "by_channel", "linear"))


class Curve(ctypes.Structure):
    """to = factor * activation(slope * (start + bias)), channel by channel; each of the three may be None."""

    kind = 5
    _fields_ = (
        *((name, _POINTER) for name in ("bias", "slope", "factor")),
        *_longs("start", "to", "width", "activation"),
    )


class Scale(ctypes.Structure):
    """to = add + start * by, with one number for each ``size`` channels: a part, or constants; add may be -1."""

    kind = 6
    _fields_ = (("constants", _POINTER), *_longs("start", "by", "add", "to", "width", "size"))


class Recur(ctypes.Structure):
    """The recurrence with decay and delta rule; its decays are a part or constants, beta is a part or -1."""

    kind = 7
    _fields_ = (
        ("log_decay", _POINTER),
        *_longs("query", "key", "value", "log_decays", "beta", "to", "heads", "key_heads"),
        *_longs("keys", "values", "decay", "normalize"),
        ("scale", _FLOAT),
    )


class HeadNorm(ctypes.Structure):
    """The norm of groups of channels in place, ``apart`` numbers apart, with a gate before or after it, or -1."""

    kind = 8
    _fields_ = (
        ("weight", _POINTER),
        *_longs("at", "groups", "size", "apart", "weight_step", "gate", "activation", "gate_first", "centered"),
        ("eps", _FLOAT),
    )


class Gate(ctypes.Structure):
    """by *= activation(start), for groups of ``size`` channels, those of ``start`` ``apart`` numbers apart."""

    kind = 9
    _fields_ = tuple(_longs("start", "apart", "by", "groups", "size", "activation"))


class Mix(ctypes.Structure):
    """Mixes of the branch's input with that of the token before, for ``count`` adjacent rows of weights."""

    kind = 10
    _fields_ = (("weights", _POINTER), *_longs("to", "count"))


class Blend(ctypes.Structure):
    """Keeps a part for later branches if ``by`` is -1, else moves the part towards what was kept, by a part."""

    kind = 11
    _fields_ = tuple(_longs("at", "by", "width"))


class Rwkv(ctypes.Structure):
    """The recurrence of RWKV-7 with its group norm and its gate."""

    kind = 12
    _fields_ = (
        *((name, _POINTER) for name in ("directions", "shares", "bonus", "weight", "bias")),
        *_longs("query", "key", "value", "log_decays", "rate", "gate", "to", "heads", "keys", "values"),
        *((name, _FLOAT) for name in ("least", "eps")),
    )


class Arrange(ctypes.Structure):
    """A part in another order: ``count`` runs of ``size`` numbers, of which each has its place in ``start``."""

    kind = 13
    _fields_ = (("places", _POINTER), *_longs("start", "to", "count", "size"))


class Select(ctypes.Structure):
    """The selective scan of Mamba for one token: step sizes, b and c, and the gate are parts."""

    kind = 14
    _fields_ = (
        ("rates", _POINTER),
        ("skip", _POINTER),
        *_longs("x", "dt", "b", "c", "gate", "to", "channels", "size"),
    )


class Expert(ctypes.Structure):
    """A gated feed-forward network; without a weight of ``value``, ``gate`` has the outputs of both."""

    _fields_ = (("gate", Linear), ("value", Linear), ("out", Linear))


class Experts(ctypes.Structure):
    """The sum of the ``chosen`` experts with the largest logits, and of a shared one that is the last."""

    kind = 15
    _fields_ = (
        ("experts", _POINTER),
        *_longs("logits", "to", "count", "chosen", "normalize", "activation", "shared", "by"),
    )


class Stage(ctypes.Structure):
    """One of the structures above; with ``wait`` all threads wait for its results."""

    _fields_ = (("what", _POINTER), ("kind", _LONG), ("wait", _LONG))


class Branch(ctypes.Structure):
    """x = after(x + factor * out(stages(before(x)))), such as a mixer or a network; out may be absent."""

    _fields_ = (
        *((name, Norm) for name in ("before", "after")),
        ("out", Linear),
        ("stages", _POINTER),
        *_longs("count", "width", "mixed"),
        ("factor", _FLOAT),
    )


class Model(ctypes.Structure):
    """A decoder: embeddings, branches, norm and head."""

    _fields_ = (
        *((name, _POINTER) for name in ("branches", "table")),
        *((name, Norm) for name in ("begin", "norm")),
        *((name, Linear) for name in ("tokens", "head")),
        *_longs("depth", "dim", "vocab", "length", "type", "kept"),
        *((name, _FLOAT) for name in ("token_factor", "head_factor")),
    )


class State(ctypes.Structure):
    """The state of one branch."""

    _fields_ = (
        *((name, _POINTER) for name in ("first", "second", "position", "places", "begin")),
        ("capacity", _LONG),
    )


class Journal(NamedTuple):
    """What the stages of the last call with several tokens have read."""

    layers: tuple[Tensor | None, ...]  # (B,room,2,width) float32 of each branch with sums or a convolution
    kept: Tensor  # (B,) int64, how many of its tokens remain

    @property
    def room(self) -> int:
        return max((layer.shape[1] for layer in self.layers if layer is not None), default=0)


@dataclass
class Weights:
    """A model's weights for a step; their memory lives as long as this object.

    Args:
        dtype: The dtype of linear maps and embeddings.
        packs: Whether linear maps are copied in the order of a step. If not, the step reads those of the model.
    """

    dtype: torch.dtype
    packs: bool = True
    kept: list[Tensor] = field(default_factory=list)

    def linear(self, weights: Iterable[Tensor], biases: Iterable[Tensor | None]) -> Linear:
        """Return maps (out,in) of one input as one map with concatenated outputs."""
        if not self.packs:
            (weight,), (bias,) = weights, biases
            outputs, inputs = weight.shape
            bias_at = None if bias is None else self.numbers(bias)
            return Linear(self._keep(weight.detach()), bias_at, inputs, outputs, None, None, IN_ROWS, 0, 0)
        weight, biases = torch.cat([w.detach() for w in weights]).contiguous(), list(biases)
        library = kernels("decode/step")
        packed = weight.new_empty(library.longspan_packed_size(*weight.shape))
        library.longspan_pack(weight.data_ptr(), *weight.shape, TYPES[self.dtype], packed.data_ptr())
        given = [b for b in biases if b is not None]
        bias = self.numbers(torch.cat(given)) if given else None
        assert len(given) in (0, len(biases))
        outputs, inputs = weight.shape
        return Linear(self._keep(packed), bias, inputs, outputs)

    def quantized(self, tensors: Iterable[Tensor], how: tuple[str, str], bias: Tensor | None, *sizes: int) -> Linear:
        """Return a quantized map, without a copy of its weight.

        Args:
            tensors: The quants, scales and factors of a packed weight.
            how: Its format and the kind of activations, keys of ``call.FORMATS`` and ``call.ACTIVATIONS``.
            bias: (outputs,), or None.
            sizes: Inputs and outputs. Fewer outputs than those of the weight are the first ones.
        """
        quants, scales, factors = (self._keep(t.detach().contiguous()) for t in tensors)
        bias_at = None if bias is None else self.numbers(bias)
        return Linear(quants, bias_at, *sizes, scales, factors, FORMATS[how[0]], ROUNDED[how[1]], 0)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        return Norm(self.numbers(weight), None if bias is None else self.numbers(bias), eps)

    def numbers(self, x: Tensor) -> int:
        """Return the address of a copy in float32."""
        return self._keep(x.detach().to(torch.float32, copy=True).contiguous())

    def taps(self, weight: Tensor, bias: Tensor | None) -> int:
        """Return the address of the weights (C,K) and biases (C,) of a convolution in the order of a step."""
        weight = weight.detach().float().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        channels, count = weight.shape
        # Whole vectors of channels, of 16 at most.
        packed = torch.empty(-(-channels // 16) * 16 * (count + 1), dtype=torch.float32, device="cpu")
        address = None if bias is None else bias.data_ptr()
        kernels("decode/step").longspan_pack_taps(weight.data_ptr(), address, channels, count, packed.data_ptr())
        return self._keep(packed)

    def table(self, x: Tensor) -> Linear:
        """Return a table (rows,d) in the model's dtype."""
        kept = self._keep(x.detach().clone(memory_format=torch.contiguous_format) if self.packs else x.detach())
        return Linear(kept, None, x.shape[1], x.shape[0], None, None, IN_ROWS, 0, 0)

    def order(self, places: Tensor) -> int:
        """Return the address of integers."""
        return self._keep(places.to(torch.int64).contiguous())

    def settle(self) -> None:
        """Move all that a step reads to large pages, since reading by small ones takes longer."""
        use_large_pages(self.kept)

    def _keep(self, x: Tensor) -> int:
        self.kept.append(x)
        return x.data_ptr()

    @property
    def bytes(self) -> int:
        """The size of the copies in bytes."""
        return sum(t.nbytes for t in self.kept)


def step(
    model: Model,
    states: "ctypes.Array[State]",
    tokens: Tensor | None,
    positions: Tensor,
    embedded: Tensor | None,
    out: Tensor,
    journal: Journal | None = None,
) -> int:
    """Run one token of every sequence and write the outputs to ``out``; with a journal K tokens.

    Args:
        model: The packed model.
        states: The states of all layers, updated in place.
        tokens: (B,K) int64, or None.
        positions: (B,) int64, the positions of the first tokens.
        embedded: (B,K,d) float32 in place of tokens, or None.
        out: (B,K,outputs), filled by the call.
        journal: Its tokens that remain are applied to the states, before which the K tokens are computed on copies and
            recorded in it. Its room is at least K. None: K is 1.

    Returns:
        FINE, or an error code; no state has changed then.

    Raises:
        MemoryError: the activations cannot be allocated.
    """
    read = kept = None
    if journal is not None:
        read = (_POINTER * len(journal.layers))(*(None if t is None else t.data_ptr() for t in journal.layers))
        kept = journal.kept.data_ptr()
    code = kernels("decode/step").longspan_decode(
        ctypes.addressof(model),
        ctypes.addressof(states),
        None if tokens is None else tokens.data_ptr(),
        positions.data_ptr(),
        None if embedded is None else embedded.data_ptr(),
        *out.shape[:2],
        read,
        kept,
        0 if journal is None else journal.room,
        out.data_ptr(),
        threads(),
    )
    if code == NO_MEMORY:
        raise MemoryError(f"cannot allocate the activations of {len(out)} sequences")
    return code
