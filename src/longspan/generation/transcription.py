"""Transcription of whole recordings, or of streams by a causal transcriber."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.transcriber import Transcriber
from ..speech.ctc import Greedy, PrefixBeam
from ..speech.features import FilterBank
from ..speech.labels import Speller
from ..speech.resample import Resampler
from . import transcription_memory

# Seconds of silence before the recording, as in training, and after it, since a causal transcriber recognizes the last
# word with a delay.
HEAD, TAIL = 0.2, 0.3
BLOCK = 2**14  # samples that are converted to frames at a time


class Sound:
    """Converts a stream of samples to frames, and resamples rates above the model's.

    Raises:
        ValueError: For a model that does not read recordings, and a rate below the model's.
    """

    def __init__(self, model: Transcriber, rate: int):
        wanted = model.config.rate
        if not wanted:
            raise ValueError("this model does not read recordings, but frames of another kind, such as AN4's cepstra")
        if rate < wanted:
            raise ValueError(f"the recording has {rate} samples per second, but this model needs at least {wanted}")
        self.resampler, self.bank = Resampler(rate, wanted), FilterBank(wanted, model.config.features)
        self.head, self.tail = (torch.zeros(round(seconds * rate)) for seconds in (HEAD, TAIL))

    def feed(self, samples: Tensor) -> Tensor:
        """Convert the next samples (N,) to frames (T,features); a short silence precedes the first ones."""
        before, self.head = self.head, self.head[:0]
        pieces = torch.cat([before, samples]).split(BLOCK)
        return torch.cat([self.bank.feed(self.resampler.feed(piece)) for piece in pieces])

    def finish(self) -> Tensor:
        """Return the last frames, including those of a short silence after the end."""
        return torch.cat([self.feed(self.tail), self.bank.feed(self.resampler.finish())])


class Rows:
    """A growing tensor of rows, whose capacity doubles.

    A list of small tensors between large temporary ones would fragment the memory: an hour of frames, 58 MB, makes a
    process of 20 GB.
    """

    def __init__(self, features: int):
        self.kept, self.count = torch.zeros(1024, features), 0

    def add(self, rows: Tensor) -> None:
        """Append rows (T,features)."""
        needed = self.count + len(rows)
        if needed > len(self.kept):
            larger = self.kept.new_zeros(max(needed, 2 * len(self.kept)), self.kept.shape[1])
            larger[: self.count] = self.all()
            self.kept = larger
        self.kept[self.count : needed] = rows
        self.count = needed

    def all(self) -> Tensor:
        """Return all rows so far, (T,features)."""
        return self.kept[: self.count]


class Listener:
    """Transcribes a stream of samples with a causal transcriber.

    Call ``feed`` with samples, then ``finish``. Together they return the words of ``transcribe``, for any split of the
    samples. Memory is constant if the attention's state has a constant size.

    Args:
        model: A causal transcriber.
        rate: Samples per second.
        beams: Number of prefixes of a beam search, which returns words once all prefixes agree; 0 is greedy decoding.

    Raises:
        ValueError: For a transcriber that is not causal, and as ``transcribe`` does.
    """

    def __init__(self, model: Transcriber, rate: int, beams: int = 0):
        self.model, self.state = model, model.init_state(1)
        self.sound, self.decoder = Sound(model, rate), PrefixBeam(beams) if beams else Greedy()
        self.speller = Speller(model.config.labels)

    def feed(self, samples: Tensor) -> list[str]:
        """Read the next samples (N,) and return the words that are complete since the last call."""
        return self._read(self.sound.feed(samples))

    def finish(self) -> list[str]:
        """End the stream and return the remaining words."""
        found = self._read(self.sound.finish())
        return found + self.speller.feed(self.decoder.finish()) + self.speller.finish()

    def _read(self, frames: Tensor) -> list[str]:
        with torch.no_grad():
            logits, self.state = self.model.step(frames[None], self.state)
        return self.speller.feed(self.decoder.feed(logits[0].log_softmax(-1)))


def transcribe(model: Transcriber, samples: Tensor | Iterable[Tensor], rate: int, beams: int = 0) -> list[str]:
    """Transcribe a recording, with a silence of 0.2 s before and 0.3 s after it.

    Args:
        model: The transcriber.
        samples: (N,) from -1 to 1, or an iterable of consecutive blocks (N,), of which one at a time is in memory.
        rate: Samples per second, at least the model's.
        beams: Number of prefixes of a beam search; 0 is greedy decoding.

    Returns:
        The words.

    Raises:
        ValueError: For a model that does not read recordings, a rate below the model's, a negative number of beams, and
            a recording that needs more memory than this machine has.
        ImportError: Without kaldi-native-fbank.
    """
    if beams < 0:
        raise ValueError(f"beams={beams} must not be negative; 0 is greedy decoding")
    sound = Sound(model, rate)
    blocks = (samples,) if isinstance(samples, Tensor) else samples
    rows = Rows(model.config.features)
    for block in blocks:
        rows.add(sound.feed(block))
    rows.add(sound.finish())
    frames = rows.all()
    transcription_memory.afford(model, frames)
    with torch.no_grad():
        logits, _ = model(frames[None])
    return decoded(logits[0].log_softmax(-1), model.config.labels, beams)


def decoded(scores: Tensor, labels: str, beams: int = 0) -> list[str]:
    """Decode log-probabilities (N,classes) to words."""
    speller = Speller(labels)
    return speller.feed(classes(scores, beams)) + speller.finish()


def classes(scores: Tensor, beams: int = 0) -> list[int]:
    """Decode log-probabilities (N,classes) to classes of labels, greedily or by prefix beam search."""
    decoder = PrefixBeam(beams) if beams else Greedy()
    return decoder.feed(scores) + decoder.finish()
