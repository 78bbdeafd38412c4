"""Other rates and filter banks: any cut of the samples gives the same."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

pytest.importorskip("kaldi_native_fbank", reason="filter banks: pip install longspan[speech]")

from longspan.speech import features, wav
from longspan.speech.resample import Resampler, resampled
from recordings import noise, write


def cut(samples: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Pieces of drawn lengths, empty ones among them."""
    random, pieces = np.random.default_rng(seed), []
    while len(samples):
        count = int(random.choice([0, 1, 7, 80, 333]))
        pieces.append(samples[:count])
        samples = samples[count:]
    return pieces


# Rates

RATES = [(16000, 8000), (44100, 8000), (8000, 16000), (6800, 8000), (8000, 8000), (11025, 8000)]


@pytest.mark.parametrize("rates", RATES, ids=str)
def test_a_tone_stays_the_same_tone(rates):
    source, target = rates
    time = torch.arange(source // 5, dtype=torch.float64) / source
    tone = torch.sin(2 * math.pi * 440 * time).float()
    found = resampled(tone, source, target)
    assert len(found) == math.ceil(len(tone) * target / source)
    again = torch.sin(2 * math.pi * 440 * torch.arange(len(found), dtype=torch.float64) / target).float()
    inside = slice(target // 50, -target // 50)
    assert (found[inside] - again[inside]).abs().max() < 2e-3


def test_what_the_lower_rate_cannot_hold_is_taken_away():
    time = torch.arange(3200, dtype=torch.float64) / 16000
    high = torch.sin(2 * math.pi * 5500 * time).float()
    assert resampled(high, 16000, 8000)[200:-200].abs().max() < 0.02


@pytest.mark.parametrize("rates", RATES, ids=str)
def test_any_cut_has_the_same_samples(rates):
    samples = torch.from_numpy(noise(2111).astype(np.float32)) / 32768
    resampler = Resampler(*rates)
    pieces = [resampler.feed(piece) for piece in cut(samples, seed=1)]
    found = torch.cat([*pieces, resampler.finish()])
    whole = resampled(samples, *rates)
    assert found.shape == whole.shape
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


def test_rates_below_one_are_refused():
    with pytest.raises(ValueError, match="source=0 and target=8000 samples per second must be at least 1"):
        Resampler(0, 8000)


# Filter banks


def test_a_frame_is_the_log_energy_of_its_own_samples():
    """One frame written out: Kaldi's pre-emphasis, window and triangles on the mel scale."""
    samples = torch.from_numpy(noise(360).astype(np.float64)) / 32768
    window = samples[80:280]
    window = window - window.mean()
    window = window - 0.97 * torch.cat([window[:1], window[:-1]])
    at = torch.arange(200, dtype=torch.float64)
    window = window * (0.5 - 0.5 * torch.cos(2 * math.pi * at / 199)) ** 0.85
    power = torch.fft.rfft(window, 256).abs() ** 2

    def mel(hertz):
        return 1127.0 * torch.log1p(torch.as_tensor(hertz, dtype=torch.float64) / 700)

    edges = torch.linspace(float(mel(20.0)), float(mel(4000.0)), 42, dtype=torch.float64)
    bins = mel(torch.arange(128) * 8000 / 256)
    energies = []
    for left, middle, right in edges.unfold(0, 3, 1):
        up, down = (bins - left) / (middle - left), (right - bins) / (right - middle)
        energies.append((torch.minimum(up, down).clamp(min=0) * power[:128]).sum())
    found = features.filter_bank(samples.float(), 8000)
    assert found.shape == (3, 40)
    torch.testing.assert_close(found[1].double(), torch.stack(energies).log(), rtol=0, atol=2e-3)


def test_any_cut_has_the_same_frames():
    samples = torch.from_numpy(noise(5003).astype(np.float32)) / 32768
    whole, bank = features.filter_bank(samples, 8000), features.FilterBank(8000)
    assert torch.equal(torch.cat([bank.feed(piece) for piece in cut(samples, seed=2)]), whole)
    assert len(whole) == 1 + (5003 - 200) // 80


def test_silence_is_finite_and_less_than_a_frame_is_none():
    assert features.filter_bank(torch.zeros(400), 8000).isfinite().all()
    assert features.filter_bank(torch.zeros(199), 8000).shape == (0, 40)


def test_a_long_stream_needs_no_more_memory(tmp_path):
    """Python's own memory; that of the library is freed by the frames that are forgotten."""
    path = write(tmp_path / "a.wav", noise(160_000))

    def peak(seconds: float) -> int:
        resampler, bank = Resampler(16000, 8000), features.FilterBank(8000)
        tracemalloc.start()
        for samples, _ in wav.chunks(path, seconds):
            bank.feed(resampler.feed(samples))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(0.05) < peak(20.0) / 20
