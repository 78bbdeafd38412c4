"""Recordings to words: whole ones, or a few samples at a time by a causal transcriber."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.transcriber import Transcriber
from ..speech.ctc import Greedy, PrefixBeam
from ..speech.features import FilterBank
from ..speech.labels import Speller
from ..speech.resample import Resampler
from . import transcription_memory

# Seconds of silence before the beginning, since models are trained on words that begin out of it, and after the end, in
# which a causal transcriber tells what it heard last.
HEAD, TAIL = 0.2, 0.3
BLOCK = 2**14  # samples that are made into frames at a time


class Sound:
    """Samples at any rate from the model's on -> the frames that it reads, a few at a time.

    Raises ValueError for a model whose frames are no recordings', and a rate below its own.
    """

    def __init__(self, model: Transcriber, rate: int):
        wanted = model.config.rate
        if not wanted:
            raise ValueError("this model reads frames of another kind than recordings have, such as AN4's cepstra")
        if rate < wanted:
            raise ValueError(f"the recording has {rate} samples per second; this model needs at least {wanted}")
        self.resampler, self.bank = Resampler(rate, wanted), FilterBank(wanted, model.config.features)
        self.head, self.tail = (torch.zeros(round(seconds * rate)) for seconds in (HEAD, TAIL))

    def feed(self, samples: Tensor) -> Tensor:
        """The next samples (N,) -> frames (T,features); those of a short silence before the first."""
        before, self.head = self.head, self.head[:0]
        pieces = torch.cat([before, samples]).split(BLOCK)
        return torch.cat([self.bank.feed(self.resampler.feed(piece)) for piece in pieces])

    def finish(self) -> Tensor:
        """The last frames, those of a short silence after the end among them."""
        return torch.cat([self.feed(self.tail), self.bank.feed(self.resampler.finish())])


class Rows:
    """Rows that come a few at a time, in one tensor that doubles.

    Small tensors that stay, between large ones that go, would leave holes that nothing fits: an hour of frames in a
    list, 58 MB, makes a process of 20 GB.
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
        """All rows so far, (T,features)."""
        return self.kept[: self.count]


class Listener:
    """Words while they are said: samples (N,) at ``rate`` per second, a few at a time, by a causal transcriber.

    ``words = listener.feed(samples)``, then ``listener.finish()``. Together they are the words of ``transcribe``, for
    any cut of the samples. Memory does not grow where the attention's state does not. ``beams``: of a beam of prefixes
    those words are told on which all agree; 0 is greedy decoding.

    Raises ValueError for a transcriber that is not causal, and as ``transcribe`` does.
    """

    def __init__(self, model: Transcriber, rate: int, beams: int = 0):
        self.model, self.state = model, model.init_state(1)
        self.sound, self.decoder = Sound(model, rate), PrefixBeam(beams) if beams else Greedy()
        self.speller = Speller(model.config.labels)

    def feed(self, samples: Tensor) -> list[str]:
        """The next samples (N,) -> the words that are complete by now and were not told yet."""
        return self._read(self.sound.feed(samples))

    def finish(self) -> list[str]:
        """The words that were not told yet."""
        found = self._read(self.sound.finish())
        return found + self.speller.feed(self.decoder.finish()) + self.speller.finish()

    def _read(self, frames: Tensor) -> list[str]:
        with torch.no_grad():
            logits, self.state = self.model.step(frames[None], self.state)
        return self.speller.feed(self.decoder.feed(logits[0].log_softmax(-1)))


def transcribe(model: Transcriber, samples: Tensor | Iterable[Tensor], rate: int, beams: int = 0) -> list[str]:
    """The words of a recording: samples (N,) from -1 to 1, ``rate`` of them a second, any from the model's own on.

    ``samples`` may also be blocks (N,) that follow one another, of which one at a time is in memory. ``beams``:
    prefixes that a beam search follows; 0 is greedy decoding. The model hears a silence of 0.2 s before the beginning
    and of 0.3 s after the end.

    Raises ValueError for a model whose frames are no recordings', a rate below its own, a negative number of beams and
    a recording for which the model needs more memory than this machine has; ImportError without kaldi-native-fbank.
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
    """Log-probabilities (N,classes) -> words."""
    speller = Speller(labels)
    return speller.feed(classes(scores, beams)) + speller.finish()


def classes(scores: Tensor, beams: int = 0) -> list[int]:
    """Log-probabilities (N,classes) -> the labels' classes, greedily or by a beam of prefixes."""
    decoder = PrefixBeam(beams) if beams else Greedy()
    return decoder.feed(scores) + decoder.finish()
