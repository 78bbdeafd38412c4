"""Logits of transformers' models in training, computed only if they are read: the loss takes a part at a time."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...modules.quantized import QuantizedLinear
from ...ops.cross_entropy import linear_cross_entropy
from ...ops.tensors import upcast_half


class LazyLogits:
    """Stands for the logits (B,N,V) of an output layer. Whatever is read from it is read from the tensor.

    Factors and caps of logits, which some models apply, are remembered and applied by the loss too.

    Args:
        hidden: (B,N,D).
        head: The output layer, an ``nn.Linear`` or a ``QuantizedLinear``.
        factor: What the map is multiplied by.
        cap: The cap of the logits; None: no cap.
        bent: Whether the values stand for the tanh of the logits so far.
    """

    def __init__(self, hidden: Tensor, head: Any, factor: float = 1.0, cap: float | None = None, bent: bool = False):
        self.hidden, self.head, self.factor, self.cap, self.bent = hidden, head, factor, cap, bent

    @functools.cached_property
    def tensor(self) -> Tensor:
        """The logits."""
        found = type(self.head).forward(self.head, self.hidden)
        if self.cap is None and not self.bent:
            return found if self.factor == 1 else found * self.factor
        found = (found.float() * (self.factor / (self.cap or 1.0))).tanh()
        return found if self.cap is None else found * self.cap

    def loss(self, labels: Tensor, **options: Any) -> Tensor:
        """``linear_cross_entropy`` of these logits."""
        hidden = self.hidden if self.factor == 1 else self.hidden * self.factor
        weight: Any = self.head.weight
        if isinstance(self.head, QuantizedLinear):
            weight, options = self.head.packed, options | {"activations": self.head.activations}
        return linear_cross_entropy(hidden, weight, labels, self.head.bias, softcap=self.cap, **options)

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    def tanh(self) -> Any:
        """The hyperbolic tangent."""
        if self.cap is not None or self.bent or self.head.bias is not None:
            return self.tensor.tanh()
        return LazyLogits(self.hidden, self.head, self.factor, bent=True)

    def float(self) -> "LazyLogits":
        """The same: the loss is computed in float32."""
        return self

    def _scaled(self, by: Any, inverse: bool) -> Any:
        if isinstance(by, (int, float)) and self.cap is None and by > 0 and self.head.bias is None:
            by = 1 / by if inverse else by
            if not self.bent:
                return LazyLogits(self.hidden, self.head, self.factor * by)
            # by * tanh(factor * y) has the cap ``by`` and the factor ``by * factor``.
            return LazyLogits(self.hidden, self.head, self.factor * by, by)
        return self.tensor / by if inverse else self.tensor * by

    def __mul__(self, by: Any) -> Any:
        return self._scaled(by, False)

    def __rmul__(self, by: Any) -> Any:
        return self._scaled(by, False)

    def __truediv__(self, by: Any) -> Any:
        return self._scaled(by, True)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            return args[0].tanh()
        args, kwargs = pytree.tree_map_only(cls, operator.attrgetter("tensor"), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Only for what this class lacks; copies and pickles ask for some of these before there is a tensor.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def __getitem__(self, at: Any) -> Tensor:
        return self.tensor[at]

    def __len__(self) -> int:
        return len(self.hidden)


def forward(head: Any, hidden: Tensor) -> Any:
    """Replace the ``forward`` of an output layer: in training its logits are lazy."""
    lazy = head.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return LazyLogits(hidden, head) if lazy else type(head).forward(head, hidden)


def cross_entropy(logits: Any, labels: Tensor, **options: Any) -> Tensor:
    """Return ``F.cross_entropy`` of logits (B,N,V), lazy or not, and labels (B,N); (B,N) with ``reduction="none"``."""
    if isinstance(logits, LazyLogits):
        if logits.cap is not None or not logits.bent:
            return logits.loss(labels, **options)
        logits = logits.tensor
    return nn.functional.cross_entropy(upcast_half(logits).movedim(-1, 1), labels, **options)


def loss(usual: Callable[..., Tensor], logits: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the ``usual`` loss of causal language models, of lazy logits too."""
    if not isinstance(logits, LazyLogits) or (logits.bent and logits.cap is None):
        return usual(getattr(logits, "tensor", logits), labels, *args, **kwargs)
    ignored, count = kwargs.get("ignore_index", -100), kwargs.get("num_items_in_batch")
    if (shifted := kwargs.get("shift_labels")) is None:
        shifted = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    shifted = shifted.reshape(logits.hidden.shape[:-1]).to(logits.hidden.device)
    found = logits.loss(shifted, ignore_index=ignored, reduction="mean" if count is None else "sum")
    return found if count is None else found / (count.to(found.device) if isinstance(count, Tensor) else count)


def why_not(model: Any) -> str:
    """Return why a model's logits cannot be lazy, "" if they can."""
    if type(output_layer(model)) not in (nn.Linear, QuantizedLinear):
        return "its output layer must be an nn.Linear or a QuantizedLinear"
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        return "its loss is not that of a causal language model"
    return ""


def output_layer(model: Any) -> Any:
    """Return the output layer of a model of transformers, None if it has none."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
