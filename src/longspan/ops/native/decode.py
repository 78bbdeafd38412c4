"""A token step of a whole decoder in one C call: weights packed once, states read and written where they are."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .build.openmp import threads
from .call import MAPS as MAPS
from .call import TYPES as TYPES
from .call import kernels

# The numbers are those of decode/step.cpp and decode/activations.h.
ACTIVATIONS = {"relu": 0, "gelu": 1, "silu": 2, "squared_relu": 3, "geglu": 4, "swiglu": 5}
LINEAR, SOFTMAX = 0, 1
FINE, NO_MEMORY, BAD_TOKEN, BAD_POSITION, NO_ROOM, BAD_LENGTH = range(6)

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class Linear(ctypes.Structure):
    """y = W x + b."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG))


class Norm(ctypes.Structure):
    """Layer norm, or RMS norm where there is no bias; no weight: none at all."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("eps", _FLOAT))


class Layer(ctypes.Structure):
    """One block: its two norms, its linear maps, its attention."""

    _fields_ = (
        *((name, Norm) for name in ("norm1", "norm2")),
        *((name, Linear) for name in ("project", "out", "expand", "contract")),
        ("rates", _POINTER),
        *((name, _LONG) for name in ("kind", "groups", "map", "activation")),
        ("eps", _FLOAT),
    )


class Model(ctypes.Structure):
    """A decoder."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "tokens", "table")),
        ("norm", Norm),
        ("head", Linear),
        *((name, _LONG) for name in ("depth", "dim", "heads", "vocab", "length", "type", "prenorm")),
    )


class State(ctypes.Structure):
    """The state of one layer."""

    _fields_ = (("first", _POINTER), ("second", _POINTER), ("position", _POINTER), ("capacity", _LONG))


@dataclass
class Weights:
    """Copies of a model's weights in the order in which a step reads them; they live as long as this does."""

    dtype: torch.dtype
    kept: list[Tensor] = field(default_factory=list)

    def linear(self, weights: Iterable[Tensor], biases: Iterable[Tensor | None]) -> Linear:
        """Maps of one input, (out,in) each, that become one with their outputs side by side."""
        weight, biases = torch.cat([w.detach() for w in weights]).contiguous(), list(biases)
        library = kernels("decode")
        packed = weight.new_empty(library.longspan_packed_size(*weight.shape))
        library.longspan_pack(weight.data_ptr(), *weight.shape, TYPES[self.dtype], packed.data_ptr())
        given = [b for b in biases if b is not None]
        bias = self.numbers(torch.cat(given)) if given else None
        assert len(given) in (0, len(biases))
        outputs, inputs = weight.shape
        return Linear(self._keep(packed), bias, inputs, outputs)

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        return Norm(self.numbers(weight), None if bias is None else self.numbers(bias), eps)

    def numbers(self, x: Tensor) -> int:
        """The address of a copy in float32."""
        return self._keep(x.detach().to(torch.float32, copy=True).contiguous())

    def table(self, x: Tensor) -> int:
        """The address of a copy in the model's type."""
        return self._keep(x.detach().clone(memory_format=torch.contiguous_format))

    def _keep(self, x: Tensor) -> int:
        self.kept.append(x)
        return x.data_ptr()

    @property
    def bytes(self) -> int:
        """What the copies take."""
        return sum(t.nbytes for t in self.kept)


def step(
    model: Model,
    states: ctypes.Array,
    tokens: Tensor | None,
    positions: Tensor,
    embedded: Tensor | None,
    out: Tensor,
) -> int:
    """One token of every sequence: tokens (B,1) int64, or embedded (B,1,d) float32 -> out (B,1,outputs), filled.

    -> FINE, or what was wrong, and then no state was changed. Raises MemoryError.
    """
    code = kernels("decode").longspan_decode(
        ctypes.addressof(model),
        ctypes.addressof(states),
        None if tokens is None else tokens.data_ptr(),
        positions.data_ptr(),
        None if embedded is None else embedded.data_ptr(),
        len(out),
        out.data_ptr(),
        threads(),
    )
    if code == NO_MEMORY:
        raise MemoryError(f"no memory for the activations of {len(out)} sequences")
    return code
