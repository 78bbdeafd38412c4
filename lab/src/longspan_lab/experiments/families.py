"""One model of each family and an LSTM with equally many weights."""

import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan._utils import model_memory
from longspan.generation.sampling import generate, prefill
from longspan.models import likelihood
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.states.utils import nbytes

from .learning import closest, parameters

VOCAB = 256


class Family(NamedTuple):
    """An attention, or several tiled over the blocks, with its positions and its way to read a text."""

    attention: str  # "" for the LSTM; {window} and {length} are replaced by the settings
    positions: str = "none"
    stream: bool = False  # reads the text in order and carries its state along


REFERENCE, LSTM_NAME = "softmax", "lstm"
FAMILIES = {
    REFERENCE: Family("softmax(rotary=10000.0)"),
    "local": Family("local(window={window}, rotary=10000.0)"),
    "transformer_xl": Family("transformer_xl(memory={length}, same_length=False, segment={length})", stream=True),
    "linear": Family("linear(rotary=10000.0)"),
    "performer": Family("performer", "sinusoidal"),
    "gla": Family("gla"),
    "ssd": Family("ssd"),
    "gated_deltanet": Family("gated_deltanet"),
    # Three of four layers, as in Qwen3-Next.
    "hybrid": Family("gated_deltanet; gated_deltanet; gated_deltanet; softmax(rotary=10000.0)"),
    LSTM_NAME: Family(""),
}


class LSTM(nn.Module):
    """A long short-term memory over bytes, with the interface of ``Decoder``.

    ``outputs, state = lstm(tokens, state)``: tokens (B,N) int64, where ``vocab`` is the start token, to outputs
    (B,N,vocab); the state is (hidden, cell), each (depth,B,dim). The forget gates start with a bias of 1
    (Jozefowicz et al. 2015, section 2).

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """

    def __init__(self, dim: int, depth: int, vocab: int = VOCAB):
        super().__init__()
        self.start, self.likelihood = vocab, likelihood.build("categorical", vocab)
        self.embedding = nn.Embedding(vocab + 1, dim)
        self.cells = nn.LSTM(dim, dim, depth, batch_first=True)
        self.head = nn.Linear(dim, vocab)
        for layer in range(depth):
            with torch.no_grad():
                getattr(self.cells, f"bias_ih_l{layer}")[dim : 2 * dim] = 1.0
                getattr(self.cells, f"bias_hh_l{layer}")[dim : 2 * dim] = 0.0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    def shift(self, tokens: Tensor) -> Tensor:
        """The inputs whose targets are ``tokens`` (B,N): the start token in front, the last token dropped."""
        return F.pad(tokens, (1, 0), value=self.start)[:, : tokens.shape[1]]

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Any]:
        """Apply the model; the class documents the shapes."""
        outputs, state = self.cells(self.embedding(tokens), state)
        return self.head(outputs), state


Model = Decoder | LSTM


class Size(NamedTuple):
    """Sizes that the models share."""

    dim: int
    depth: int
    heads: int
    layers: int  # of the LSTM
    window: int
    length: int


def build(name: str, size: Size) -> Model:
    """A model as it is born. Raises ValueError for sizes that do not fit each other."""
    if name == LSTM_NAME:
        return LSTM(width(size), size.layers)
    return Decoder(config(name, size))


@functools.lru_cache
def config(name: str, size: Size) -> DecoderConfig:
    """A decoder's config: as wide as the others, with a feed-forward network that equalizes its size.

    Raises ValueError where its attention alone is larger than that, and for sizes that do not fit each other.
    """
    if name == REFERENCE:
        return _config(name, size, 4 * size.dim)
    target = parameters(_shapes(config(REFERENCE, size)))
    one, two = (parameters(_shapes(_config(name, size, inner))) for inner in (1, 2))
    inner = 1 + round((target - one) / (two - one))
    if inner < 1:
        raise ValueError(f"dim={size.dim}: the attention of {name} has more weights than a whole block of {REFERENCE}")
    return _config(name, size, inner)


def _config(name: str, size: Size, inner: int) -> DecoderConfig:
    family = FAMILIES[name]
    attention = family.attention.format(window=size.window, length=size.length)
    config = DecoderConfig(dim=size.dim, depth=size.depth, heads=size.heads, vocab=VOCAB, feedforward=inner)
    return replace(config, attention=attention, positions=family.positions)


def _shapes(config: DecoderConfig) -> nn.Module:
    return model_memory.shapes(lambda: Decoder(config))


@functools.lru_cache
def width(size: Size) -> int:
    """Width of the LSTM that is closest in size to the softmax decoder."""
    target = parameters(_shapes(config(REFERENCE, size)))
    return closest(lambda dim: _lstm(dim, size.layers), target)


def _lstm(dim: int, layers: int) -> int:
    """Weights of an LSTM: embedding, gates with two biases each, head."""
    return (VOCAB + 1) * dim + layers * (8 * dim * dim + 8 * dim) + VOCAB * (dim + 1)


@torch.no_grad()
def state_bytes(model: Model, prompt: Tensor) -> int:
    """Bytes of the state after a sequence (1,P)."""
    if isinstance(model, LSTM):
        return nbytes(model(prompt)[1])
    # One more for the start token.
    return nbytes(prefill(model, prompt, capacity=prompt.shape[1] + 1)[1].layers)


def written(model: Model, prompt: Tensor, tokens: int) -> Iterator[Tensor]:
    """Yield tokens (B,) sampled after a prompt (B,P): ``generate``, and the same with the steps of the LSTM."""
    if isinstance(model, LSTM):
        return _steps(model, prompt, tokens)
    return generate(model, prompt, max_new_tokens=tokens, seed=0, stream=True)


def _steps(model: LSTM, prompt: Tensor, tokens: int) -> Iterator[Tensor]:
    generator, state = torch.Generator().manual_seed(0), None
    read = F.pad(prompt, (1, 0), value=model.start)
    for _ in range(tokens):
        # Entered for each token: a generator must not hold a context open while its caller runs.
        with torch.no_grad():
            outputs, state = model(read, state)
            token = model.likelihood.sample(outputs[:, -1], generator=generator)
        yield token
        read = token[:, None]


def speed(model: Model, prompt: Tensor, tokens: int, rounds: int) -> float:
    """Tokens per second of all rows after a prompt (B,P), without reading the prompt: the fastest round."""
    found = []
    for _ in range(rounds):
        drawn = written(model, prompt, tokens + 1)
        next(drawn)
        begin = time.perf_counter()
        count = sum(1 for _ in islice(drawn, tokens))
        if prompt.is_cuda:
            torch.cuda.synchronize()
        found.append(count * len(prompt) / (time.perf_counter() - begin))
    return max(found)
