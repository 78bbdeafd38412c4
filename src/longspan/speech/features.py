"""Speech features: log-mel filter banks, a frame of 25 ms every 10 ms, also streaming."""

import numpy as np
import torch
from torch import Tensor

from .._utils import optional_deps

BINS = 40
SHIFT, LENGTH = 0.010, 0.025  # seconds between frames, and of one


class FilterBank:
    """Frames of ``bins`` log-mel energies, the same for any cut of the samples into calls.

    Kaldi's features by kaldi-native-fbank: pre-emphasis 0.97, a Povey window, the power spectrum in triangles from
    20 Hz to half the rate, no dither. A frame is returned as soon as its last sample is read; an incomplete last frame
    is dropped. Frames depend only on their samples, so a stream has the features of its file.

    Args:
        rate: samples per second.
        bins: mel bins per frame.

    Raises:
        ImportError: without kaldi-native-fbank.
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
        self.read = 0

    def feed(self, samples: Tensor) -> Tensor:
        """Read samples (N,); return the frames (T, bins) float32 that are complete now."""
        if len(samples):
            self.bank.accept_waveform(self.rate, samples.tolist())
        ready = self.bank.num_frames_ready
        rows = [np.array(self.bank.get_frame(i)) for i in range(self.read, ready)]
        # Drop returned frames, so that the memory of a stream does not grow.
        self.bank.pop(ready - self.read)
        self.read = ready
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self.bins)


def filter_bank(samples: Tensor, rate: int, bins: int = BINS) -> Tensor:
    """The frames (T, bins) of a whole recording (N,). Raises ImportError without kaldi-native-fbank."""
    return FilterBank(rate, bins).feed(samples)
