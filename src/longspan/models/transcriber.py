"""A transcriber: frames of speech become tokens, a stack of blocks reads them, a linear head tells labels."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..speech import ctc
from .config import TranscriberConfig
from .embedding import Embedding
from .stacks import Stack, check_fits_in_memory


class Front(nn.Module):
    """Frames to tokens: each token reads ``context`` frames, of which the last ``stride`` are its own.

    Frames are shifted and scaled by fixed numbers per channel, ``calibrate``'s, and by nothing of the utterance itself.
    """

    mean: Tensor  # (features,)
    deviation: Tensor  # (features,)

    def __init__(self, features: int, stride: int, context: int, dim: int):
        super().__init__()
        self.features, self.stride, self.context = features, stride, context
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))
        self.read = nn.Linear(features * context, dim)

    def calibrate(self, frames: Tensor) -> None:
        """Take mean and deviation of each channel from frames (T,features), those of the training."""
        self.mean.copy_(frames.mean(0))
        self.deviation.copy_(frames.std(0).clamp(min=1e-3))

    def start(self, batch: int) -> Tensor:
        """The frames before the first one: as average as frames can be, (B,context-stride,features)."""
        return self.mean.expand(batch, self.context - self.stride, self.features).clone()

    def forward(self, frames: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """frames (B,T,features), those before that are still needed -> tokens (B,N,dim), those needed from now on."""
        x = torch.cat([before, frames], 1)
        count = (x.shape[1] - self.context + self.stride) // self.stride
        if count < 1:
            return x.new_zeros(len(x), 0, self.read.out_features), x
        scaled = (x - self.mean) / self.deviation
        rows = scaled.unfold(1, self.context, self.stride)[:, :count]  # (B,N,features,context)
        return self.read(rows.flatten(2)), x[:, count * self.stride :]


class TranscriberState(NamedTuple):
    """What is kept of the frames that were read; see ``Transcriber``."""

    frames: Tensor  # (B,R,features) those that tokens to come still read
    position: Tensor  # (B,) int64, tokens so far
    layers: tuple  # one state per block


class Transcriber(nn.Module):
    """Tells what is said: frames (B,T,features) -> scores (B,N,classes) of each token, of ``stride`` frames each.

    >>> import torch, longspan
    >>> config = longspan.TranscriberConfig(dim=8, depth=2, heads=2, feedforward=16, features=5, labels="yes no")
    >>> model = longspan.Transcriber(config)
    >>> logits, tokens = model(torch.randn(1, 31, 5))
    >>> logits.shape, tokens
    (torch.Size([1, 15, 3]), tensor([15]))

    Class 0 is the blank, class i label i - 1 of the config. ``lengths`` (B,) are the real frames of each row; what
    comes after them is not read, and frames that fill no token are left out. A causal transcriber also goes on:
    ``logits, state = model.step(frames, state)`` from ``model.init_state(B)`` gives the scores of the tokens that these
    frames complete, whatever the cut of the frames into calls.

    Source: Katharopoulos et al. 2020 (2006.16236), section 4.3, for the encoder with a CTC loss; Graves et al. 2006 for
    the loss. Raises ValueError for a spec that cannot be built, and weights that would take more memory than this
    machine has.
    """

    def __init__(self, config: TranscriberConfig):
        super().__init__()
        check_fits_in_memory(config, Transcriber)
        self.config = config
        self.front = Front(config.features, config.stride, config.context, config.dim)
        self.embedding = Embedding(0, config)  # type: ignore[arg-type]
        self.stack = Stack(config, causal=config.causal, positions=config.positions)
        self.head = nn.Linear(config.dim, 1 + len(config.labels.split()))

    def calibrate(self, frames: Tensor) -> None:
        """Take mean and deviation of each channel from frames (T,features), those of the training."""
        self.front.calibrate(frames)

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See the class -> logits (B,N,classes), tokens (B,).

        Raises ValueError for frames of another shape, and lengths that do not fit them.
        """
        frames, tokens, mask = tokens_of(frames, lengths, self.config.features, self.config.stride)
        x, _ = self.front(frames, self.front.start(len(frames)))
        if not x.shape[1]:
            return self.head(x), tokens
        x, _ = self.embedding(x, mask=mask)
        x, _ = self.stack(x, mask=mask)
        return self.head(x), tokens

    def init_state(self, batch: int) -> TranscriberState:
        """The state before the first frame. Raises ValueError for a transcriber that is not causal."""
        if not self.config.causal:
            raise ValueError("this transcriber sees whole recordings and has no state; build it with causal=True")
        position = torch.zeros(batch, dtype=torch.long, device=self.head.weight.device)
        return TranscriberState(self.front.start(batch), position, self.stack.init_state(batch))

    def step(self, frames: Tensor, state: TranscriberState) -> tuple[Tensor, TranscriberState]:
        """The next frames (B,T,features) -> logits (B,N,classes) of the tokens that they complete, the state after.

        Raises ValueError for frames of another shape and a state of another kind.
        """
        if not isinstance(state, TranscriberState):
            raise ValueError(f"a transcriber continues a TranscriberState, not {type(state).__name__}")
        frames, _, _ = tokens_of(frames, None, self.config.features, self.config.stride)
        x, left = self.front(frames, state.frames)
        if not x.shape[1]:
            return self.head(x), state._replace(frames=left)
        x, position = self.embedding(x, state.position)
        x, layers = self.stack(x, state.layers)
        return self.head(x), TranscriberState(left, position, layers)  # type: ignore[arg-type]

    def loss(self, frames: Tensor, lengths: Tensor, targets: list[list[int]]) -> Tensor:
        """Mean nats per label by CTC; see ``ctc.loss``, which says what is raised."""
        logits, counts = self(frames, lengths)
        return ctc.loss(logits, counts, targets)


def tokens_of(
    frames: Tensor, lengths: Tensor | None, features: int, stride: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """frames (B,T,features), lengths (B,) -> frames with zeros after each row's end, tokens (B,), mask (B,N) or None.

    Raises ValueError for frames of another shape, and lengths that do not fit them.
    """
    if frames.dim() != 3 or frames.shape[-1] != features or not frames.is_floating_point():
        raise ValueError(f"frames must be floating-point (B, T, {features}), not {frames.dtype} {tuple(frames.shape)}")
    batch, most = frames.shape[:2]
    if lengths is None:
        return frames, torch.full((batch,), most // stride, device=frames.device), None
    if lengths.dtype != torch.int64 or tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must be int64 {(batch,)}, not {lengths.dtype} {tuple(lengths.shape)}")
    if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise ValueError(f"lengths run from {int(lengths.min())} to {int(lengths.max())}, of {most} frames")
    real = torch.arange(most, device=frames.device) < lengths[:, None]
    tokens = lengths // stride
    mask = torch.arange(most // stride, device=frames.device) < tokens[:, None]
    return frames.masked_fill(~real[..., None], 0.0), tokens, mask
