"""Layers with the blocks of a file: linear maps whose rows or columns are in another order, and experts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...modules.quantized import QuantizedEmbedding, QuantizedLinear
from ...ops.quantized import multiply, pack
from ...ops.quantized.formats import FORMATS, Blocks
from ...ops.quantized.operands import Map
from ...ops.quantized.packing import Packed, part
from .architectures import Row


class How(NamedTuple):
    """How blocks are read."""

    activations: str
    """those of products"""
    release: Callable[[], None]
    """lets the system take back the memory of what was read of the file"""

    def map(self, blocks: Blocks, bias: nn.Parameter | None = None) -> QuantizedLinear:
        """Return the linear map with this weight."""
        return QuantizedLinear(pack(blocks, self.release), bias, activations=self.activations)


def quantized(module: nn.Linear | nn.Embedding, given: Sequence[Blocks], row: Row, config: Any, how: How) -> nn.Module:
    """Return a layer that computes what ``module`` does, with the blocks of its weight.

    Args:
        module: The layer.
        given: Its weight, the rows of several tensors one after the other.
        row: The order of rows and columns.
        config: Of the model.
        how: How the blocks are read.
    """
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(pack(given[0], how.release), activations=how.activations)
    rows = None if row.rows is None else row.rows(config).argsort()
    columns = None if row.columns is None else row.columns(config).argsort()
    if len({one.format for one in given}) > 1:
        return Reordered([how.map(one) for one in given], rows, None)
    blocks = given[0]._replace(data=torch.cat([one.data for one in given])) if len(given) > 1 else given[0]
    if rows is not None:
        blocks = blocks._replace(data=blocks.data[rows])
    if columns is not None:
        moved = _moved(blocks, columns)
        if moved is None:
            return Reordered([how.map(blocks)], None, columns.argsort())
        blocks = moved
    return how.map(blocks, module.bias)


def _moved(blocks: Blocks, order: Tensor) -> Blocks | None:
    """Return the weight with its columns in another order; None if columns of one block would part."""
    form = FORMATS[blocks.format]
    places = order.view(-1, form.block)
    whole = places[:, :1] // form.block * form.block + torch.arange(form.block)
    if not torch.equal(places, whole):
        return None
    data = blocks.data.view(len(blocks.data), -1, form.size)[:, places[:, 0] // form.block]
    return blocks._replace(data=data.flatten(1))


class Reordered(nn.Module):
    """Linear maps whose outputs together are those of one, with inputs and outputs in another order.

    Args:
        maps: The maps.
        outputs: The place of each output among those of all maps, or None.
        inputs: The place of each input of the maps among those given, or None.
    """

    def __init__(self, maps: Sequence[nn.Module], outputs: Tensor | None, inputs: Tensor | None):
        super().__init__()
        self.outputs: Tensor | None
        self.inputs: Tensor | None
        self.maps = nn.ModuleList(maps)
        self.register_buffer("outputs", outputs, persistent=False)
        self.register_buffer("inputs", inputs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(...,K) -> (...,N)."""
        x = x if self.inputs is None else x[..., self.inputs]
        y = torch.cat([one(x) for one in self.maps], -1)
        return y if self.outputs is None else y[..., self.outputs]


class Experts(nn.Module):
    """Experts of transformers with weights in blocks: each is a gated feed-forward.

    Args:
        given: The weights of gates, inner and outer maps, of all experts one after the other.
        count: Number of experts.
        activation: Of the gates.
        how: How the blocks are read.
    """

    def __init__(self, given: Sequence[Blocks], count: int, activation: Callable[[Tensor], Tensor], how: How):
        super().__init__()
        self.count, self.activation = count, activation
        # One weight for all experts, since a module for each would be many. Their sizes are whole blocks, and so whole
        # groups of rows.
        self.gate, self.up, self.down = (how.map(one) for one in given)

    def weights(self, expert: int) -> list[Packed]:
        """Return the weights of an expert: gates, inner and outer map."""
        found, (inner, outer) = [], (self.down.inputs, self.gate.inputs)
        for m, outputs in ((self.gate, inner), (self.up, inner), (self.down, outer)):
            begin = expert * m.outputs // self.count
            found.append(part(m.packed, begin, begin + outputs))
        return found

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens (N,K), their experts (N,k) and the weights of those (N,k) -> (N,K)."""
        found, activations = torch.zeros_like(hidden_states), self.gate.activations
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            gate, up, down = self.weights(expert)
            g, u = (multiply(Map(hidden_states[token], None, *one, activations)) for one in (gate, up))
            y = multiply(Map(self.activation(g) * u, None, *down, activations))
            found.index_add_(0, token, (y * top_k_weights[token, place, None]).to(found.dtype))
        return found
