"""What kinds of teachers read, and how their students are compared with them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Dataset, Tokens, tokenization
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..train.evaluate import Share, default_batch_size, evaluating, total

SHORTEST = 16  # fewest tokens of a text that an encoder reads in training
BLOCK = 12_800  # tokens of an encoder's batch in an evaluation


@dataclass(frozen=True)
class NextTokens:
    """A decoder predicts the next token; its loss are bits per byte or token."""

    teacher: Decoder
    data: Dataset | Tokens

    stage = "logits"
    """the name of the second stage"""
    frozen = ()
    """parts of the model that the second stage does not train"""

    @property
    def unit(self) -> str:
        """The unit of the loss."""
        return f"bits/{self.data.unit}"

    def shown(self, loss: float) -> str:
        """A loss in the lines of a run."""
        return f"{loss:.3f} {self.unit}"

    def framed(self, batch: Tensor, number: int) -> Tensor:
        """Examples of the data as the micro-batch of this number."""
        return batch

    def inputs(self, batch: Tensor) -> Tensor:
        """What the models read for a micro-batch."""
        return self.teacher.shift(batch)

    def read(self, split: str, examples: int) -> Iterator[Tensor]:
        """What the models read in an evaluation on evenly spaced examples (0: all), batch by batch."""
        rows = Share(examples).chosen(self.data.count(split))
        for part in rows.split(default_batch_size(self.data.length, self.data.vocab)):
            yield self.inputs(self.data.take(split, part))

    def sums(self, model: Decoder, split: str, examples: int) -> Tensor:
        """Sums over an evaluation, (2,) float64, of which ``loss`` is made."""
        return total(model, self.data, split, default_batch_size(self.data.length, self.data.vocab), Share(examples))

    def loss(self, sums: Tensor) -> float:
        """The loss of sums."""
        nats, tokens = sums.tolist()
        return nats / tokens / math.log(2)


@dataclass(frozen=True)
class Embeddings:
    """An encoder embeds texts; its loss is 1 - cosine between the embeddings of the student and of the teacher.

    The texts are pieces of the data between the special tokens of the tokenizer. All pieces of a micro-batch have one
    length; from one to the next it is halved, down to at least 16 tokens, and begins again.
    """

    teacher: Encoder
    data: Tokens | Dataset
    before: tuple[int, ...] = ()
    """special tokens before a text"""
    after: tuple[int, ...] = ()
    """special tokens after a text"""
    wanted: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    """the teacher's embeddings in evaluations on a split and a number of examples"""

    stage = "embeddings"
    unit = "1 - cosine"
    # Tokens that the texts do not have, and positions beyond those of training, keep their vectors.
    frozen = ("embedding", "embedding_norm")

    @classmethod
    def of(cls, teacher: Encoder, data: Tokens | Dataset) -> "Embeddings":
        """Read the special tokens. Raises ValueError for a teacher without pooling, and for short examples."""
        if not teacher.config.vocab:
            raise ValueError("the teacher reads vectors (vocab=0); only encoders of tokens can be linearized")
        if teacher.config.pool == "none":
            raise ValueError("the teacher has pool='none'; only encoders with one output per text can be linearized")
        if data.length < SHORTEST:
            raise ValueError(f"length={data.length} must be at least {SHORTEST} for an encoder")
        if not teacher.tokenizer:
            return cls(teacher, data)
        before, after = tokenization.frame(tokenization.encoder(teacher.tokenizer))
        return cls(teacher, data, tuple(before), tuple(after))

    @property
    def sizes(self) -> list[int]:
        """The lengths of texts in tokens, the longest first."""
        found = [self.data.length]
        while found[-1] % 2 == 0 and found[-1] // 2 >= SHORTEST:
            found.append(found[-1] // 2)
        return found

    def shown(self, loss: float) -> str:
        return f"cosine {1 - loss:.4f}"

    def framed(self, batch: Tensor, number: int) -> Tensor:
        """(B,length) -> (B k,length / k), special tokens in place of the last ones."""
        texts = batch.reshape(-1, self.sizes[number % len(self.sizes)])
        kept = texts[:, : texts.shape[1] - len(self.before) - len(self.after)]
        ends = (torch.tensor(part, dtype=torch.long).expand(len(kept), -1) for part in (self.before, self.after))
        begin, end = ends
        return torch.cat([begin, kept, end], 1)

    def inputs(self, batch: Tensor) -> Tensor:
        return batch

    def read(self, split: str, examples: int) -> Iterator[Tensor]:
        """Each length has an equal share of the examples' tokens."""
        rows = Share(examples).chosen(self.data.count(split))
        for number in range(len(self.sizes)):
            for part in rows[number :: len(self.sizes)].split(max(1, BLOCK // self.data.length)):
                if len(part):
                    yield self.framed(self.data.take(split, part), number)

    @torch.no_grad()
    def sums(self, model: Encoder, split: str, examples: int) -> Tensor:
        key, sums = (split, examples), torch.zeros(2, dtype=torch.float64)
        if key not in self.wanted:
            self.wanted[key] = [self.teacher(texts.to(self.teacher.device)) for texts in self.read(split, examples)]
        with evaluating(model):
            for texts, wanted in zip(self.read(split, examples), self.wanted[key], strict=True):
                found = model(texts.to(model.device)).double()
                far = 1 - F.cosine_similarity(found, wanted.to(found), dim=-1).mean()
                # Each batch counts by its tokens, whatever the number of its texts is.
                sums += torch.tensor([far.item() * texts.numel(), texts.numel()], dtype=torch.float64)
        return sums

    def loss(self, sums: Tensor) -> float:
        far, tokens = sums.tolist()
        return far / tokens


Task = NextTokens | Embeddings


def task_of(teacher: Any, data: Dataset | Tokens) -> Task:
    """The task of a teacher. Raises ValueError for one that cannot be linearized, or that cannot read the data."""
    if not isinstance(teacher, Decoder | Encoder):
        raise ValueError(f"the teacher must be a longspan.Decoder or longspan.Encoder, not {type(teacher).__name__}")
    if data.vocab > teacher.config.vocab or (isinstance(teacher, Decoder) and data.vocab != teacher.config.vocab):
        raise ValueError(f"the teacher has vocab={teacher.config.vocab}, but {data.name} has {data.vocab} levels")
    return NextTokens(teacher, data) if isinstance(teacher, Decoder) else Embeddings.of(teacher, data)
