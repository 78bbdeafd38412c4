"""Auxiliary losses of decoders: intermediate layers and several targets per position, each with a separate head."""

from typing import Any

import torch
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.embedding import initialize
from ..models.stacks import Plain, Universal
from ..modules.norms import norm
from .config import step_seed

LATER = 0.5  # weight of the loss of a target that is not the next token


class Auxiliary(nn.Module):
    r"""Training-only heads of a decoder and their loss; the decoder itself is not changed.

    Targets beyond the example, or in the next document, do not count. The last layer's head for the next token is the
    model's.

    Args:
        model: the decoder.
        intermediate: after each layer l below the last of n, predict the next token with a separate head. Its weight is
            1 until $l / 2n$ of the training is done, then 0. In a stack that repeats its blocks, each step of each
            block counts as a layer.
        targets: number of tokens that each position predicts, from the next one on. Those after the first have weight
            0.5 and separate heads.
        steps: steps of the training; ``made`` counts those done.
        seed: seed of the initial weights.

    Raises:
        ValueError: for intermediate losses of a model with one layer, and of the stacks ``act`` and ``reversible``,
            whose layers have no separate hidden states.

    References:
        Al-Rfou et al. 2018 (1808.04444), section 3. All positions predict. The paper does not state the weight 1.
    """

    steps_done: Tensor

    made: Tensor  # () int64, updates made so far

    def __init__(self, model: Decoder, *, intermediate: bool, targets: int, steps: int, seed: int = 0):
        super().__init__()
        config = model.config
        # The exact types: reversible and act are subclasses of these.
        if intermediate and type(model.stack.run) not in (Plain, Universal):
            raise ValueError(
                f"intermediate losses require a hidden state after each layer; stack={config.stack!r} has none"
            )
        self.layers = config.depth * model.stack.run.steps
        if intermediate and self.layers < 2:
            raise ValueError("intermediate losses require at least two layers, but this model has one")
        self.intermediate, self.targets = intermediate, targets

        def head(last: bool) -> nn.Module:
            linear = nn.Linear(config.dim, model.likelihood.size)
            # The stack applies its norm after the last layer.
            return nn.Sequential(norm(config.norm, config.dim), linear) if config.prenorm and not last else linear

        below = range(1, self.layers) if intermediate else ()
        # A separate seed, so that other weights do not depend on these heads.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step_seed(seed, -1, 0))
            heads = {f"{layer}_{ahead}": head(False) for layer in below for ahead in range(1, targets + 1)}
            heads |= {f"{self.layers}_{ahead}": head(True) for ahead in range(2, targets + 1)}
            self.heads = nn.ModuleDict(heads)
            initialize(self, config.depth)
        self.steps = steps
        self.register_buffer("made", torch.zeros((), dtype=torch.int64))
        self.heard: list[Tensor] = []
        self.listening = False
        # Hooks, not submodules: the weights of the blocks belong to the model only.
        if intermediate:
            for block in model.stack.blocks:
                block.register_forward_hook(self._hear)
        if heads:
            model.stack.register_forward_hook(self._hear)

    def _hear(self, _: nn.Module, __: Any, outputs: Any) -> None:
        # Ignore the recomputation of a block during the backward pass.
        if self.listening:
            self.heard.append(outputs[0])

    def listen(self) -> None:
        """Record the hidden states of the next call of the model for ``forward``."""
        self.heard.clear()
        self.listening = True

    def forward(self, model: Decoder, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """The auxiliary loss () in nats per token of the call since ``listen``.

        Args:
            model: the decoder.
            tokens: (B, N) targets of that call.
            segments: (B, N) documents; a target must lie in the document of its position.
        """
        self.listening = False
        loss = torch.zeros((), device=tokens.device)
        if not self.heads:
            return loss
        # After each layer if intermediate, and after the stack's norm.
        hidden = dict(zip(range(1, self.layers), self.heard[:-1], strict=False)) | {self.layers: self.heard[-1]}
        assert len(self.heard) == 1 + self.layers * self.intermediate
        self.heard.clear()
        for name, head in self.heads.items():
            layer, ahead = map(int, name.split("_"))
            weight = weight_of(layer, self.layers, int(self.made), self.steps) * (LATER if ahead > 1 else 1.0)
            if weight:
                loss = loss + weight * self._nats(model, head, hidden[layer], tokens, ahead, segments)
            else:
                # A zero gradient for every weight, since ranks wait for all of them.
                loss = loss + 0.0 * sum(p.sum() for p in head.parameters())
        return loss

    def _nats(
        self, model: Decoder, head: nn.Module, x: Tensor, tokens: Tensor, ahead: int, segments: Tensor | None
    ) -> Tensor:
        """Mean nats of the target ``ahead`` tokens from the input: position i predicts token i + ahead - 1."""
        n = tokens.shape[1] - (ahead - 1)
        if n < 1:
            return torch.zeros((), device=x.device)
        found = model.likelihood.log_prob(head(x[:, :n]), tokens[:, ahead - 1 :])
        if segments is None or ahead == 1:
            return -found.mean()
        same = segments[:, :n] == segments[:, ahead - 1 :]
        return -found.masked_fill(~same, 0.0).sum() / same.sum().clamp(min=1)


def weight_of(layer: int, layers: int, step: int, steps: int) -> float:
    """The weight of layer ``layer`` of 1 ... ``layers`` after ``step`` of ``steps``; always 1 for the last one.

    >>> [[weight_of(layer, 4, step, 16) for layer in (1, 2, 3, 4)] for step in (1, 2, 7, 8)]
    [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    """
    return 1.0 if layer == layers or 2 * layers * step < layer * steps else 0.0
