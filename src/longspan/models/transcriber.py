"""The transcriber: frames of speech become tokens, a stack of blocks and a linear head map them to labels."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..speech import ctc
from .config import TranscriberConfig
from .embedding import Embedding, outputs_of
from .stacks import Stack, check_fits_in_memory


class Front(nn.Module):
    """Maps frames to tokens: each token reads ``context`` frames, of which the last ``stride`` are its own.

    Frames are normalized by constants per channel, which ``calibrate`` sets, not by statistics of the recording.
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
        """Set the mean and the standard deviation of each channel from training frames (T,features)."""
        self.mean.copy_(frames.mean(0))
        self.deviation.copy_(frames.std(0).clamp(min=1e-3))

    def start(self, batch: int) -> Tensor:
        """Return padding frames before the first one, the mean of each channel: (B,context-stride,features)."""
        return self.mean.expand(batch, self.context - self.stride, self.features).clone()

    def forward(self, frames: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """frames (B,T,features), earlier frames still needed -> tokens (B,N,dim), frames needed later."""
        x = torch.cat([before, frames], 1)
        count = (x.shape[1] - self.context + self.stride) // self.stride
        if count < 1:
            return x.new_zeros(len(x), 0, self.read.out_features), x
        scaled = (x - self.mean) / self.deviation
        rows = scaled.unfold(1, self.context, self.stride)[:, :count]  # (B,N,features,context)
        return self.read(rows.flatten(2)), x[:, count * self.stride :]


class TranscriberState(NamedTuple):
    """The state of a causal transcriber."""

    frames: Tensor  # (B,R,features), frames that later tokens read
    position: Tensor  # (B,) int64, tokens so far
    layers: tuple  # one state per block


class Transcriber(nn.Module):
    """Maps frames of speech (B,T,features) to logits (B,N,classes), one token per ``stride`` frames.

    Class 0 is the blank, class i is label i - 1 of the config. A causal transcriber also reads streams:
    ``logits, state = model.step(frames, state)``, from ``model.init_state(B)``, returns the logits of the tokens that
    these frames complete. The result does not depend on how frames are split into calls.

    Args:
        config: Sizes, attention, positions, labels and frames.

    Raises:
        ValueError: For a spec that cannot be built, and weights that do not fit into memory.

    Example:
        >>> import torch, longspan
        >>> config = longspan.TranscriberConfig(dim=8, depth=2, heads=2, feedforward=16, features=5, labels="yes no")
        >>> model = longspan.Transcriber(config)
        >>> logits, tokens = model(torch.randn(1, 31, 5))
        >>> logits.shape, tokens
        (torch.Size([1, 15, 3]), tensor([15]))

    References:
        Katharopoulos et al. 2020 (2006.16236), section 4.3, for an encoder with a CTC loss; Graves et al. 2006 for CTC.
    """

    def __init__(self, config: TranscriberConfig):
        super().__init__()
        check_fits_in_memory(config, Transcriber)
        self.config = config
        self.front = Front(config.features, config.stride, config.context, config.dim)
        self.embedding = Embedding(0, config)  # pyright: ignore[reportArgumentType] (the fields that it reads are there)
        self.stack = Stack(config, causal=config.causal, positions=config.positions)
        self.head = nn.Linear(config.dim, 1 + len(config.labels.split()))

    def calibrate(self, frames: Tensor) -> None:
        """Set the mean and the standard deviation of each channel from training frames (T,features)."""
        self.front.calibrate(frames)

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map whole recordings to logits.

        Args:
            frames: (B,T,features).
            lengths: (B,) int64, the real frames of each row; None: all. Frames after them and frames that do not fill a
                token are ignored.

        Returns:
            Logits (B,N,classes), and the number of tokens of each row (B,).

        Raises:
            ValueError: For frames of another shape, and lengths that do not fit them.
        """
        frames, tokens, mask = tokens_of(frames, lengths, self.config.features, self.config.stride)
        x, _ = self.front(frames, self.front.start(len(frames)))
        if not x.shape[1]:
            return self.head(x), tokens
        x, _ = self.embedding(x, mask=mask)
        x, _ = self.stack(x, mask=mask)
        return outputs_of(self.head, x), tokens

    def init_state(self, batch: int) -> TranscriberState:
        """Return the state before the first frame. Raises ValueError if the transcriber is not causal."""
        if not self.config.causal:
            raise ValueError("this transcriber reads whole recordings and has no state; build it with causal=True")
        position = torch.zeros(batch, dtype=torch.long, device=self.head.weight.device)
        return TranscriberState(self.front.start(batch), position, self.stack.init_state(batch))

    def step(self, frames: Tensor, state: TranscriberState) -> tuple[Tensor, TranscriberState]:
        """Read the next frames of a stream.

        Args:
            frames: (B,T,features).
            state: The state of ``init_state`` or of an earlier step.

        Returns:
            Logits (B,N,classes) of the tokens that these frames complete, and the next state.

        Raises:
            ValueError: For frames of another shape, and a state of another type.
        """
        if not isinstance(state, TranscriberState):
            raise ValueError(f"state must be a TranscriberState, not {type(state).__name__}")
        frames, _, _ = tokens_of(frames, None, self.config.features, self.config.stride)
        x, left = self.front(frames, state.frames)
        if not x.shape[1]:
            return self.head(x), state._replace(frames=left)
        x, position = self.embedding(x, state.position)
        x, layers = self.stack(x, state.layers)
        return self.head(x), TranscriberState(left, position, layers)

    def loss(self, frames: Tensor, lengths: Tensor, targets: list[list[int]]) -> Tensor:
        """Return the CTC loss in mean nats per label; see ``ctc.loss`` for the targets and the errors."""
        logits, counts = self(frames, lengths)
        return ctc.loss(logits, counts, targets)


def tokens_of(
    frames: Tensor, lengths: Tensor | None, features: int, stride: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """frames (B,T,features), lengths (B,) -> frames with zeros after each row's end, tokens (B,), mask (B,N) or None.

    Raises:
        ValueError: For frames of another shape, and lengths that do not fit them.
    """
    if frames.dim() != 3 or frames.shape[-1] != features or not frames.is_floating_point():
        raise ValueError(f"frames must be floating-point (B, T, {features}), not {frames.dtype} {tuple(frames.shape)}")
    batch, most = frames.shape[:2]
    if lengths is None:
        return frames, torch.full((batch,), most // stride, device=frames.device), None
    if lengths.dtype != torch.int64 or tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must be int64 {(batch,)}, not {lengths.dtype} {tuple(lengths.shape)}")
    if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise ValueError(
            f"lengths range from {int(lengths.min())} to {int(lengths.max())}, but there are {most} frames"
        )
    real = torch.arange(most, device=frames.device) < lengths[:, None]
    tokens = lengths // stride
    mask = torch.arange(most // stride, device=frames.device) < tokens[:, None]
    return frames.masked_fill(~real[..., None], 0.0), tokens, mask
