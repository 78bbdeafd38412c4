"""Recordings: the samples of a file or a stream, a block at a time, or a ValueError of one line that names it."""

import contextlib
import io
import os
import re
import struct
import sys
import threading

import numpy as np
import pytest
import torch

from longspan._utils import atomic_io
from longspan.speech import wav
from recordings import noise, riff, wav_bytes, write

DATA = noise(2501)
EXTENSIBLE = struct.pack("<HHI", 22, 16, 4) + wav.PCM_ID


def by_file(content, path, seconds=0.1):
    path.write_bytes(content)
    return list(wav.chunks(path, seconds))


def by_stream(content, path, seconds=0.1):
    return list(wav.stream(io.BytesIO(content), str(path), seconds))


WAYS = {"file": by_file, "stream": by_stream}


@pytest.fixture(params=WAYS)
def read(request):
    return WAYS[request.param]


def samples(blocks) -> torch.Tensor:
    return torch.cat([block for block, _ in blocks])


def test_samples_are_what_was_written(tmp_path):
    found, rate = wav.read(write(tmp_path / "a.wav", np.array([0, 1, -32768, 32767]), 16000))
    assert (found.tolist(), rate) == ([0.0, 1 / 32768, -1.0, 32767 / 32768], 16000)


@pytest.mark.parametrize("seconds", [0.0005, 0.1, 9.0])
def test_blocks_are_the_whole_and_none_is_longer(read, tmp_path, seconds):
    blocks = read(wav_bytes(DATA), tmp_path / "a.wav", seconds)
    assert {rate for _, rate in blocks} == {8000}
    assert torch.equal(samples(blocks), torch.from_numpy(DATA.astype(np.float32) / 32768))
    assert max(len(block) for block, _ in blocks) <= seconds * 8000
    assert torch.equal(wav.parsed(io.BytesIO(wav_bytes(DATA)), "a")[0], samples(blocks))


SAME = {
    "extensible": {"code": 0xFFFE, "more": EXTENSIBLE},
    "chunks before": {"before": b"LIST" + struct.pack("<I", 3) + b"abc\0junk" + struct.pack("<I", 0)},
    "long format": {"more": b"\0" * 300},
    **{f"size {size:#x}": {"size": size} for size in (0, 2_000_000_000, 0x7FFFF000, 0x80000000, 0xFFFFFFFF)},
}


@pytest.mark.parametrize("kind", SAME)
def test_headers_of_other_programs_have_the_same_samples(read, tmp_path, kind):
    found = read(riff(DATA.tobytes(), **SAME[kind]), tmp_path / "a.wav")
    assert torch.equal(samples(found), torch.from_numpy(DATA.astype(np.float32) / 32768))


def test_what_follows_the_samples_is_not_read(read, tmp_path):
    content = riff(DATA.tobytes()) + b"LIST" + struct.pack("<I", 4) + b"abcd"
    assert len(samples(read(content, tmp_path / "a.wav"))) == len(DATA)


def test_half_a_sample_is_left_out(read, tmp_path):
    content = riff(DATA.tobytes()[:-1], size=0xFFFFFFFF)
    assert len(samples(read(content, tmp_path / "a.wav"))) == len(DATA) - 1


BAD = {
    "cut": (wav_bytes(noise(8))[:-4], "ends too early: 6 of 8"),
    "slow": (wav_bytes(noise(8), rate=7), "has 7 samples per second; expected 1000 to 400000"),
    "fast": (riff(b"\0" * 8, rate=0xFFFFFFFF), "has 4294967295 samples per second"),
    "no samples": (wav_bytes(noise(0)), "has no samples"),
    "no samples, no size": (riff(b"", size=0xFFFFFFFF), "has no samples"),
    "no data": (wav_bytes(noise(8))[:36], "ends too early: it has no data chunk"),
    "no format": (b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd", "has a data chunk before its format chunk"),
    "short format": (b"RIFF\0\0\0\0WAVEfmt \4\0\0\0abcddata\0\0\0\0", "has a format chunk of 4 bytes; at least 16"),
    "huge format": (b"RIFF\0\0\0\0WAVEfmt \377\377\377\377abcd", r"has a chunk b'fmt ' of 4294967295 bytes before its"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_is_one_line_that_names_the_file(read, tmp_path, kind):
    content, said = BAD[kind]
    with pytest.raises(ValueError, match=rf"bad\.wav {said}") as error:
        read(content, tmp_path / "bad.wav")
    assert "\n" not in str(error.value)


def test_every_beginning_of_a_recording_is_refused(read, tmp_path):
    content = riff(DATA.tobytes()[:10], before=b"LIST" + struct.pack("<I", 2) + b"ab")
    if read is by_file:
        pytest.importorskip("soundfile")
    for end in range(len(content)):
        with pytest.raises(ValueError, match=r"bad\.wav"):
            read(content[:end], tmp_path / "bad.wav")
    assert len(samples(read(content, tmp_path / "bad.wav"))) == 5


def test_several_channels_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.wav has 2 channels; convert it to one channel"):
        by_file(wav_bytes(noise(8), channels=2), tmp_path / "a.wav")


OTHERS = {
    "two channels": {"channels": 2},
    "bytes": {"bits": 8},
    "float": {"code": 3, "bits": 32},
    "no code": {"code": 0},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_stream_has_16_bits_and_one_channel(tmp_path, kind):
    with pytest.raises(ValueError, match=r"a has \d channels of \d+ bits in format 0x000\d; convert it to a wav file"):
        by_stream(riff(b"\0" * 8, **OTHERS[kind]), "a")
    with pytest.raises(ValueError, match="a is not a RIFF WAVE stream"):
        by_stream(b"fLaC" + b"\0" * 60, "a")


def test_a_search_for_samples_has_an_end():
    class Endless(io.RawIOBase):
        """A header, and then empty chunks for ever."""

        begin = io.BytesIO(riff(b"")[:36])

        def readable(self):
            return True

        def readinto(self, buffer):
            content = self.begin.read(len(buffer)) or bytes(len(buffer))
            buffer[: len(content)] = content
            return len(content)

    found = wav.stream(io.BufferedReader(Endless()), "a", 0.1)
    with pytest.raises(ValueError, match="a has no data chunk among its first 1000 chunks"):
        next(found)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_named_pipe_is_a_stream(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(riff(DATA.tobytes(), size=0xFFFFFFFF),))
    writer.start()
    found, rate = wav.read(path)
    writer.join()
    assert (len(found), rate) == (len(DATA), 8000)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_named_pipe_without_a_writer_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setattr(atomic_io.open_stream, "__defaults__", (0.05,))
    with pytest.raises(ValueError, match=r"cannot read .*pipe: no program wrote to this FIFO within 0\.05 s"):
        wav.read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none\.wav: No such file"):
        wav.read(tmp_path / "none.wav")
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory"):
        wav.read(tmp_path)
    with pytest.raises(ValueError, match="1e-05 s have no sample at 8000 samples per second"):
        list(wav.chunks(write(tmp_path / "a.wav", noise(8)), 1e-5))


class TestOtherFormats:
    """Files that libsndfile decodes."""

    @pytest.fixture
    def soundfile(self):
        return pytest.importorskip("soundfile", reason="other sound files: pip install longspan[speech]")

    @pytest.mark.parametrize("kind", ["WAV PCM_24", "WAV FLOAT", "WAV PCM_32", "FLAC PCM_16", "AIFF PCM_16"])
    def test_what_keeps_every_bit_has_the_same_samples(self, soundfile, tmp_path, kind):
        container, subtype = kind.split()
        path = tmp_path / f"a.{container.lower()}"
        soundfile.write(path, DATA / 32768, 8000, subtype=subtype)
        found, rate = wav.read(path)
        assert rate == 8000
        assert torch.equal(found, torch.from_numpy(DATA.astype(np.float32) / 32768))
        assert max(len(block) for block, _ in wav.chunks(path, 0.1)) <= 800

    @pytest.mark.parametrize("kind", ["OGG VORBIS", "MP3 MPEG_LAYER_III", "WAV ULAW", "WAV PCM_U8"])
    def test_what_loses_some_has_what_the_library_reads(self, soundfile, tmp_path, kind):
        container, subtype = kind.split()
        path = tmp_path / f"a.{container.lower()}"
        soundfile.write(path, np.sin(np.arange(20_000) / 9), 16000, subtype=subtype)
        expected, _ = soundfile.read(path, dtype="float32")
        found, rate = wav.read(path)
        assert rate == 16000
        # Decoders of lossy formats differ by roundings from block to block.
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-5)
        assert len(found) >= 20_000

    def test_a_file_may_not_say_how_many_samples_it_has(self, soundfile, tmp_path):
        """As flac files that were written to a pipe: 36 bits of the header are 0."""
        path = tmp_path / "a.flac"
        soundfile.write(path, DATA, 8000)
        content = bytearray(path.read_bytes())
        content[21:26] = bytes([content[21] & 0xF0, 0, 0, 0, 0])
        path.write_bytes(content)
        assert torch.equal(wav.read(path)[0], torch.from_numpy(DATA.astype(np.float32) / 32768))

    @pytest.mark.parametrize("name", ["a.raw", "a.wav", "no\udcffname.wav"])
    def test_what_it_does_not_know_is_refused(self, soundfile, tmp_path, name):
        path = tmp_path / name
        try:
            path.write_bytes(b"nothing that sounds" * 9)
        except OSError:
            pytest.skip("a file system whose names are UTF-8")
        with pytest.raises(ValueError, match=re.escape(name) + " cannot be decoded"):
            wav.read(path)
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=re.escape(name) + " is empty"):
            wav.read(path)

    def test_what_was_cut_is_refused_in_every_format(self, soundfile, tmp_path):
        path, seen = tmp_path / "a.bin", set()
        for form in soundfile.available_formats():
            for subtype in soundfile.available_subtypes(form):
                try:
                    soundfile.write(path, noise(9000) / 40_000, 8000, format=form, subtype=subtype)
                    whole = wav.read(path)[0]
                # A format that needs other samples or names, has no header, or does not say where it ends.
                except (soundfile.SoundFileError, ValueError):
                    continue
                seen.add(form)
                content = path.read_bytes()
                for size in (len(content) // 3, len(content) - 301, len(content) - 2):
                    path.write_bytes(content[:size])
                    with contextlib.suppress(ValueError):
                        found = wav.read(path)[0]
                        # Only what fills the last block is missing.
                        assert torch.equal(found, whole), f"{form} {subtype}, {size} of {len(content)} bytes"
        assert seen >= {"WAV", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC", "OGG", "NIST"}

    @pytest.mark.parametrize(
        ("kind", "place", "unknown"), [("AU PCM_16", 8, b"\xff" * 4), ("W64 PCM_16", -2, b"\xff" * 7 + b"\x7f")]
    )
    def test_a_size_that_nobody_knew_announces_nothing(self, soundfile, tmp_path, kind, place, unknown):
        """As programs write it that write to a pipe."""
        path = tmp_path / "a.bin"
        form, subtype = kind.split()
        soundfile.write(path, DATA / 32768, 8000, format=form, subtype=subtype)
        content = bytearray(path.read_bytes())
        if place < 0:
            place = content.index(b"data") + (16 if form == "W64" else 4)
        content[place : place + len(unknown)] = unknown
        path.write_bytes(content)
        assert len(wav.read(path)[0]) == len(DATA)

    def test_no_samples_and_several_channels_are_refused(self, soundfile, tmp_path):
        path = tmp_path / "a.wav"
        soundfile.write(path, DATA[:0], 8000, subtype="PCM_24")
        with pytest.raises(ValueError, match=r"a\.wav has no samples"):
            wav.read(path)
        path = tmp_path / "a.flac"
        soundfile.write(path, np.stack([DATA, DATA], 1), 8000)
        with pytest.raises(ValueError, match=r"a\.flac has 2 channels; convert it to one channel"):
            wav.read(path)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30])
    def test_samples_are_finite(self, soundfile, tmp_path, value):
        path = tmp_path / "a.wav"
        soundfile.write(path, np.array([0.0, value, 0.0]), 8000, subtype="FLOAT")
        with pytest.raises(ValueError, match=r"a\.wav has samples that are not finite, or larger than"):
            wav.read(path)


def test_wav_files_of_16_bits_need_no_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(wav.read(write(tmp_path / "a.wav", DATA))[0]) == len(DATA)
    path = tmp_path / "b.wav"
    path.write_bytes(riff(b"\0" * 30, bits=24))
    with pytest.raises(ImportError, match=re.escape('soundfile; pip install ".[speech]"')):
        wav.read(path)
