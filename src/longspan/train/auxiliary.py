"""Auxiliary losses: layers below the last predict too, and each position more than one token; by heads of their own."""

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
    r"""Heads that a training adds to a decoder, and the loss that they add; the decoder itself is not changed.

    ``intermediate``: after each layer l below the last of n a head predicts the next token, with weight 1 as long as
    less than $l / 2n$ of the training is done, and 0 from there on, so that half-way none is left. In a stack that
    repeats its blocks, each step of each block is a layer. ``targets``: how many tokens, from the next one on, each
    position predicts; those after the first have the weight 0.5, and heads of their own at each layer that predicts.
    The last layer's head for the next token is the model's. A target beyond the example, or of the next document, does
    not count. ``steps``: of the training, of which ``steps_done`` are done.

    Source: Al-Rfou et al. 2018 (1808.04444), section 3; all positions predict, as ever. The paper does not say that
    intermediate losses have weight 1 while they count. Raises ValueError for intermediate losses of a model
    with one layer, and of a stack whose layers leave no hidden states: ``act`` and ``reversible``.
    """

    steps_done: Tensor

    made: Tensor  # () int64, updates made so far

    def __init__(self, model: Decoder, *, intermediate: bool, targets: int, steps: int, seed: int = 0):
        super().__init__()
        config = model.config
        if intermediate and not isinstance(model.stack.run, Plain | Universal):
            raise ValueError(f"intermediate losses need a hidden state after each layer, not {config.stack!r}")
        self.layers = config.depth * model.stack.run.steps
        if intermediate and self.layers < 2:
            raise ValueError("intermediate losses are those of layers below the last, and this model has one layer")
        self.intermediate, self.targets = intermediate, targets

        def head(last: bool) -> nn.Module:
            linear = nn.Linear(config.dim, model.likelihood.size)
            # The stack's own norm has been at the last layer.
            return nn.Sequential(norm(config.norm, config.dim), linear) if config.prenorm and not last else linear

        below = range(1, self.layers) if intermediate else ()
        # Draws of its own, which no other weight has and nobody else misses.
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
        # Not in a list of modules: they are the model's, and their weights must not be here too.
        if intermediate:
            for block in model.stack.blocks:
                block.register_forward_hook(self._hear)
        if heads:
            model.stack.register_forward_hook(self._hear)

    def _hear(self, _: nn.Module, __: Any, outputs: Any) -> None:
        # A backward that computes a block again is nobody to be heard.
        if self.listening:
            self.heard.append(outputs[0])

    def listen(self) -> None:
        """The next call of the model is the one whose hidden states ``forward`` reads."""
        self.heard.clear()
        self.listening = True

    def forward(self, model: Decoder, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """The loss to be added, in nats per token: () of the targets (B,N) of the call since ``listen``.

        segments (B,N) are documents, in which targets must lie.
        """
        self.listening = False
        loss = torch.zeros((), device=tokens.device)
        if not self.heads:
            return loss
        # After each layer where they are asked for, and after the stack's norm.
        hidden = dict(zip(range(1, self.layers), self.heard[:-1], strict=False)) | {self.layers: self.heard[-1]}
        assert len(self.heard) == 1 + self.layers * self.intermediate
        self.heard.clear()
        for name, head in self.heads.items():
            layer, ahead = map(int, name.split("_"))
            weight = weight_of(layer, self.layers, int(self.made), self.steps) * (LATER if ahead > 1 else 1.0)
            if weight:
                loss = loss + weight * self._nats(model, head, hidden[layer], tokens, ahead, segments)
            else:
                # Every weight has a gradient, of zero: ranks wait for all of them.
                loss = loss + 0.0 * sum(p.sum() for p in head.parameters())
        return loss

    def _nats(
        self, model: Decoder, head: nn.Module, x: Tensor, tokens: Tensor, ahead: int, segments: Tensor | None
    ) -> Tensor:
        """Mean nats of the target ``ahead`` tokens from the input: what stands at i is about token i + ahead - 1."""
        n = tokens.shape[1] - (ahead - 1)
        if n < 1:
            return torch.zeros((), device=x.device)
        found = model.likelihood.log_prob(head(x[:, :n]), tokens[:, ahead - 1 :])
        if segments is None or ahead == 1:
            return -found.mean()
        same = segments[:, :n] == segments[:, ahead - 1 :]
        return -found.masked_fill(~same, 0.0).sum() / same.sum().clamp(min=1)


def weight_of(layer: int, layers: int, step: int, steps: int) -> float:
    """The weight of layer ``layer`` of 1 ... ``layers`` when ``step`` of ``steps`` are done; the last one's stays 1.

    >>> [[weight_of(layer, 4, step, 16) for layer in (1, 2, 3, 4)] for step in (1, 2, 7, 8)]
    [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    """
    return 1.0 if layer == layers or 2 * layers * step < layer * steps else 0.0
