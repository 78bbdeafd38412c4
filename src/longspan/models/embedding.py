"""Token embeddings with positions, and the checks of a model's input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention
from ..attention.validation import real_segments
from ..modules.positions import Learned, Sinusoidal, parse
from ..modules.quantized import QuantizedEmbedding
from ..modules.sinusoidal import sinusoid
from ..ops.arguments import check_mask, check_segments
from ..ops.operands import check_stored, same_device
from ..ops.tensors import positions
from ..states.counters import check_counts
from .config import DecoderConfig, EncoderConfig


class Embedding(nn.Module):
    """Maps tokens to vectors and adds none, sinusoidal or learned positions; other kinds belong to the attention."""

    def __init__(self, tokens: int, config: DecoderConfig | EncoderConfig):
        super().__init__()
        self.positions, self.length = parse(config.positions), config.length
        self.tokens = nn.Embedding(tokens, config.dim) if tokens else nn.Identity()
        if isinstance(self.positions, Learned):
            self.table = nn.Embedding(config.length, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, start=None, *, mask=None, segments=None) -> tuple[Tensor, Tensor]:
        """tokens (B,N) or vectors (B,N,dim), start (B,) first positions -> (B,N,dim), next positions (B,)."""
        # The segment of a masked token would separate its neighbors, and its position is unused.
        segments = None if segments is None else real_segments(segments, mask)
        at, end = positions(tokens, start, mask=mask, segments=segments)
        x = self.tokens(tokens)
        if isinstance(self.positions, Learned):
            at = at if mask is None else at.masked_fill(~mask, 0)
            if not _unread(at) and (last := int(at.max())) >= self.length:
                raise ValueError(
                    f"position {last} is beyond the table of {self.length} learned positions; "
                    f"shorten the sequence, or train with a larger length= or with other positions"
                )
            x = x + self.table(at)
        elif isinstance(self.positions, Sinusoidal):
            kind = self.positions
            x = x + sinusoid(at, x.shape[-1], x.dtype, layout=kind.layout, base=kind.base)
        return self.dropout(x), end


def outputs_of(head: nn.Module, x: Tensor) -> Tensor:
    """Return ``head(x)``, not as the view of (B N,outputs) that a linear layer with a bias returns.

    FSDP2 puts a hook on the outputs, which a change of a view in place would drop.
    """
    y = head(x)
    # Safe, since a linear layer does not save its outputs.
    return torch.ops.aten._unsafe_view(y, y.shape) if isinstance(head, nn.Linear) and y.requires_grad else y


class TiedHead(nn.Module):
    """Output layer with the weights of the token embedding, without the start token, its last row.

    It is a module because tools that shard modules (FSDP2) gather the weights before a module's forward. It has no
    parameters, so state dicts contain the weights once.
    """

    def __init__(self, tokens: nn.Embedding):
        super().__init__()
        self.tie(tokens)

    def tie(self, tokens: nn.Module) -> None:
        """Share the weights of another embedding."""
        # In a tuple, which nn.Module does not register as a submodule.
        self._tokens: tuple[Any] = (tokens,)

    @property
    def tokens(self) -> nn.Module:
        """The token embedding."""
        return self._tokens[0]

    @property
    def weight(self) -> Tensor:
        """The weight (tokens, dim) of the token embedding."""
        return self._tokens[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """(B,N,dim) -> (B,N,tokens-1)."""
        if isinstance(self.tokens, QuantizedEmbedding):
            return self.tokens.project(x)[..., :-1]
        weight = self.weight
        if weight.is_meta and not x.is_meta:
            # Offloaded weights exist only during the forward of their module.
            weight = self._tokens[0](torch.arange(len(weight), device=x.device))
        return F.linear(x, weight[:-1])


def check_tokens(tokens: Tensor, highest: int, mask: Tensor | None, segments: Tensor | None = None) -> None:
    """Raise ValueError unless tokens are int64 (B,N) in 0..highest, and mask and segments fit.

    The range of one token per row on a CUDA device is not read, which would wait for the device in each decode step:
    the look-up of the embedding asserts it on the device.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2:
        came = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be int64 (B, N), not {came}")
    _check_own(tokens, mask, segments)
    if _unread(tokens):
        return
    low, high = (int(t) for t in tokens.aminmax())
    if low < 0 or high > highest:
        raise ValueError(f"tokens range from {low} to {high}; this model accepts 0 to {highest}")


def _unread(indices: Tensor) -> bool:
    """Whether the values of indices (B,N) are not checked here: there are none, they are unknown, or in a decode step.

    Reading them in a decode step on a CUDA device would wait for it; the look-up asserts their range on the device.
    """
    return torch.compiler.is_compiling() or not indices.numel() or (indices.is_cuda and indices.shape[1] == 1)


def _check_own(x: Tensor, mask: Tensor | None, segments: Tensor | None) -> None:
    batch, n = x.shape[:2]
    if mask is not None:
        check_mask("mask", mask, (batch, n))
    if segments is not None:
        check_segments(segments, (batch, n))


def check_position(position: Tensor, tokens: Tensor) -> None:
    """Raise ValueError unless ``position`` is a counter of tokens, int64 (B,), as in a decoder's state."""
    batch = tokens.shape[0]
    if not isinstance(position, Tensor) or position.dtype != torch.int64 or tuple(position.shape) != (batch,):
        came = f"{position.dtype} {tuple(position.shape)}" if isinstance(position, Tensor) else type(position).__name__
        raise ValueError(f"the state's position must be int64 {(batch,)}, not {came}")
    same_device(tokens=tokens, state=position)
    check_stored("the state", position)
    check_counts("position", position)


class Model(nn.Module):
    """A model whose weights can be drawn again."""

    config: Any

    def reset_parameters(self) -> None:
        """Draw all weights and buffers as a new model does, also after ``to_empty`` on the meta device."""
        reset_parameters(self, self.config.depth)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device


class Generator(Model):
    """A model that predicts tokens from the ones before them."""

    @property
    def start(self) -> int:
        """The start token, which precedes the first token, in an encoder-decoder that of the target."""
        return self.config.vocab

    def shift(self, tokens: Tensor) -> Tensor:
        """Return the inputs for the targets ``tokens`` (B,N): prepend the start token, drop the last token."""
        return F.pad(tokens, (1, 0), value=self.start)[:, : tokens.shape[1]]


def reset_parameters(model: nn.Module, depth: int) -> None:
    """Draw all weights and buffers of a model as a new one does, also of one on the meta device after ``to_empty``."""
    modules: list[Any] = [
        module for module in model.modules() if module is not model and hasattr(module, "reset_parameters")
    ]
    # The maps of an attention first, since the attention may draw them in another way.
    for module in sorted(modules, key=lambda module: isinstance(module, Attention)):
        module.reset_parameters()
    initialize(model, depth)


def initialize(model: nn.Module, depth: int) -> None:
    """Initialize weights as GPT-2: normal with std 0.02, divided by sqrt(2 depth) for outputs into the residual."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            residual = name.endswith(("attention.out", "feedforward.contract"))
            nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if residual else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
