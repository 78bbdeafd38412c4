"""Features of speech: log-mel filter banks, a frame of 25 ms every 10 ms, also a little at a time."""

import numpy as np
import torch
from torch import Tensor

from .._utils import optional_deps

BINS = 40
SHIFT, LENGTH = 0.010, 0.025  # seconds between frames, and of one


class FilterBank:
    """Samples -> frames of ``bins`` log-mel energies, the same for any cut into calls.

    Kaldi's, by kaldi-native-fbank: pre-emphasis 0.97, a Povey window, the power spectrum in triangles from 20 Hz to
    half the rate, no dither. A frame is told as soon as its last sample is there; samples that fill no frame are left.
    Nothing depends on what comes later or on the loudness of the whole, so that a stream has the features of its file.

    Raises ImportError without kaldi-native-fbank.
    """

    def __init__(self, rate: int, bins: int = BINS):
        optional_deps.need("filter banks", "kaldi_native_fbank")
        import kaldi_native_fbank

        options = kaldi_native_fbank.FbankOptions()
        options.frame_opts.samp_freq = rate
        options.frame_opts.frame_shift_ms, options.frame_opts.frame_length_ms = 1000 * SHIFT, 1000 * LENGTH
        options.frame_opts.dither = 0.0
        options.frame_opts.snip_edges = True
        options.mel_opts.num_bins = bins
        self.rate, self.bins = rate, bins
        self.bank = kaldi_native_fbank.OnlineFbank(options)
        self.told = 0

    def feed(self, samples: Tensor) -> Tensor:
        """The next samples (N,) -> the frames (T,bins) that are whole by now, float32."""
        if len(samples):
            self.bank.accept_waveform(self.rate, samples.tolist())
        ready = self.bank.num_frames_ready
        rows = [np.array(self.bank.get_frame(i)) for i in range(self.told, ready)]
        # What was told is not needed again, so that a stream's memory does not grow.
        self.bank.pop(ready - self.told)
        self.told = ready
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self.bins)


def filter_bank(samples: Tensor, rate: int, bins: int = BINS) -> Tensor:
    """All samples (N,) at once -> (T,bins). Raises ImportError without kaldi-native-fbank."""
    return FilterBank(rate, bins).feed(samples)
