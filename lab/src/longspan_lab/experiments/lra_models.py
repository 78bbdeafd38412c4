"""Classifiers of long sequences: the same model around every mechanism, in sizes that fit the sequences."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from longspan._utils import spec
from longspan.attention import list_mechanisms
from longspan.attention.registry import mechanism
from longspan.models.config import EncoderConfig
from longspan.models.embedding import Embedding
from longspan.models.stacks import Stack
from longspan.ops.edges import reinforce

from ..data.arena import Arena, Batch

ALL = "all"
# Options that are meant for thousands of tokens, as parts of a sequence: n tokens, an eighth and a sixteenth of them,
# and the side of a square of n pixels. Other mechanisms are built by name alone.
SIZES: dict[str, str] = {
    "adaptive_span": "span={eighth}, ramp={sixteenth}, initial={sixteenth}.0",
    "axial": "width={side}",
    "bigbird": "block={sixteenth}",
    "clustered": "clusters={eighth}",
    "compressive": "memory={eighth}, compressed={eighth}",
    "dsa": "keys={eighth}",
    "etc": "globals=8, radius={sixteenth}",
    "exact_topk": "keys={eighth}",
    "image": "block={eighth}, memory={eighth}",
    "improved_clustered": "clusters={eighth}, topk={eighth}",
    "infini": "segment={eighth}",
    "linformer": "length={n}, slots={eighth}",
    "local": "window={sixteenth}",
    "longformer": "window={sixteenth}",
    "lowrank_band": "window={sixteenth}",
    "moba": "block={sixteenth}",
    "nsa": "block={sixteenth}, window={sixteenth}",
    "nystrom": "landmarks={eighth}",
    "poolingformer": "window={sixteenth}, far_window={far}",
    "reformer": "chunk={sixteenth}, buckets={even}",
    # Its picks are sequential: with four per token it trains for as long as all other mechanisms together.
    "sac": "edges=2",
    "routing": "clusters=8, window={eighth}",
    "set_transformer": "points={eighth}",
    "sinkhorn": "block={eighth}",
    "sparse": "pattern='band({sixteenth})'",
    "sparse_transformer": "block={side}",
    "synthesizer": "length={n}",
    "transformer_xl": "memory={n}",
}


def mechanisms(specs: str) -> list[str]:
    """The specs that a setting names; ``all``: every registered mechanism, by its name."""
    return list_mechanisms() if specs == ALL else spec.split(specs)


def sized(text: str, length: int) -> str:
    """The spec to build for sequences of ``length`` tokens: a bare name gets fitting sizes, any other spec stays.

    >>> sized("linformer", 256), sized("linear", 256), sized("local(window=7)", 256)
    ('linformer(length=256, slots=32)', 'linear', 'local(window=7)')
    """
    if text not in SIZES:
        return text
    side = math.isqrt(length)
    parts = {"n": length, "eighth": length // 8, "sixteenth": length // 16, "side": side}
    # Buckets come in pairs, and seven tokens are the fewest that can be pooled.
    own = {"even": 2 * max(length // 16, 2), "far": max(length // 4, 8)}
    fitting = SIZES[text].format(**own, **{name: max(part, 2) for name, part in parts.items()})
    return f"{text}({fitting})"


def both(text: str) -> bool:
    """Whether the mechanism of a spec sees the whole sequence instead of the past alone."""
    return "bidirectional" in mechanism(spec.head(text) or text).directions


class Shape(NamedTuple):
    """The sizes of a classifier, as plain values."""

    spec: str
    dim: int
    depth: int
    heads: int
    feedforward: int
    vocab: int
    length: int
    towers: int
    classes: int


def shape(settings: Any, text: str, task: Arena) -> Shape:
    """The classifier of the settings' sizes for a task."""
    own = settings.dim, settings.depth, settings.heads, settings.feedforward
    return Shape(sized(text, task.length), *own, task.vocab, task.length, task.towers, task.classes)


class Classifier(nn.Module):
    """Tokens and learned positions, a stack of blocks, the mean over real tokens, a hidden layer, and the classes.

    Two sequences are read by the same stack, each alone; their means e and f are compared as [e, f, e * f, e - f]. A
    mechanism that has only a causal form has that one. Weights have PyTorch's initialization, from ``seed`` alone.

    Source: Tay et al. 2020 (2011.04006), section 2.2, and its code's dual head, google-research/long-range-arena
    cd31e5c, models/layers/common_layers.py. Raises ValueError for what cannot be built.
    """

    def __init__(self, shape: Shape, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = EncoderConfig(
                attention=shape.spec,
                dim=shape.dim,
                depth=shape.depth,
                heads=shape.heads,
                vocab=shape.vocab,
                feedforward=shape.feedforward,
                length=shape.length,
                positions="learned",
            )
            self.embedding = Embedding(shape.vocab, config)
            self.stack = Stack(config, causal=not both(shape.spec))
            width = shape.dim if shape.towers == 1 else 4 * shape.dim
            self.head = nn.Sequential(nn.Linear(width, shape.dim), nn.ReLU(), nn.Linear(shape.dim, shape.classes))
        self.shape = shape
        # Statistics of the layers since the last step, for mechanisms that need them.
        self.counted: dict[int, Any] = {}

    def forward(self, tokens: Tensor, mask: Tensor | None = None, record: dict | None = None) -> Tensor:
        """Tokens (B,T,N), mask (B,T,N) bool, True on real ones -> (B,classes)."""
        rows, real = tokens.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        x, _ = self.embedding(rows, mask=real)
        x, _ = self.stack(x, mask=real, record=record)
        weights = x.new_ones(x.shape[:2]) if real is None else real.to(x.dtype)
        mean = (x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)  # (B*T,dim)
        pooled = mean.unflatten(0, tokens.shape[:2])
        if self.shape.towers == 1:
            return self.head(pooled[:, 0])
        e, f = pooled.unbind(1)
        return self.head(torch.cat([e, f, e * f, e - f], 1))

    def loss(self, batch: Batch) -> Tensor:
        """Mean nats per example. Sampled picks, such as those of sac, learn from each row's likelihood."""
        attentions = self.stack.attentions()
        wanted = {
            "log_prob": any(attention.samples for attention in attentions),
            "statistics": any(attention.statistics for attention in attentions),
        }
        record: dict[str, Any] | None = {name: None for name, asked in wanted.items() if asked} or None
        nats = F.cross_entropy(self(batch.tokens, batch.mask, record), batch.labels, reduction="none")  # (B,)
        if record is None:
            return nats.mean()
        for layer, (attention, recorded) in enumerate(zip(attentions, record["layers"], strict=True)):
            if attention.statistics:
                before, new = self.counted.get(layer), recorded["statistics"]
                self.counted[layer] = new if before is None else pytree.tree_map(torch.add, before, new)
        if "log_prob" not in record:
            return nats.mean()
        # Its gradient is that of the expected loss.
        return nats.mean() + reinforce(record["log_prob"], -nats.detach().repeat_interleave(self.shape.towers))

    def update(self) -> None:
        """Update what has no gradient, after the optimizer's step."""
        for layer, statistics in self.counted.items():
            self.stack.attentions()[layer].update({"statistics": statistics})
        self.counted.clear()

    @torch.no_grad()
    def accuracy(self, task: Arena, split: str, batch: int, device: str, most: int) -> float:
        """Share of correct classes in the first ``most`` examples of a split; leaves the model in training mode."""
        right, count = 0, min(most, task.count(split))
        self.eval()
        try:
            for chosen in torch.arange(count).split(batch):
                found = task.take(split, chosen).to(device)
                right += int((self(found.tokens, found.mask).argmax(1) == found.labels).sum())
        finally:
            self.train()
        return right / count
