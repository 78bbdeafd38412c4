"""``longspan transcribe``: the words of files, whole or in a stream, and what it refuses."""

import io
import re
import sys
import tracemalloc
import weakref
from pathlib import Path

import pytest
import torch
from test_cli import refused

pytest.importorskip("kaldi_native_fbank", reason="filter banks: pip install longspan[speech]")

from longspan._utils import model_memory
from longspan.cli.entry import INTERRUPTED, OK, main
from longspan.generation import transcription_memory
from longspan.generation.transcription import Listener, Rows, transcribe
from longspan.generation.transcription import transcribe as whole
from longspan.models import checkpoint, pretrained
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.speech import wav
from longspan.speech.features import FilterBank
from longspan.speech.resample import Resampler
from recordings import noise, riff, transcriber, wav_bytes, write


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(at):
    """A causal one that hears nonsense in noise, as a folder."""
    made = transcriber(seed=3, attention="gla", causal=True, features=40).float()
    frames = torch.randn(99, 40) - 3
    made.front.calibrate(frames)
    checkpoint.save(made, "model")
    return made


@pytest.fixture
def files(at):
    return [str(write(Path(name), noise(count, seed), rate)) for name, count, seed, rate in FILES]


FILES = [("a.wav", 24_000, 1, 8000), ("b.wav", 33_333, 2, 16000), ("c.wav", 3, 3, 11025)]


def said(capsys, *words: str) -> list[str]:
    assert main(["transcribe", *words]) == OK
    out, err = capsys.readouterr()
    assert not err
    return out.splitlines()


@pytest.mark.parametrize("beam", [0, 4])
def test_a_stream_has_the_words_of_its_file(model, files, capsys, beam):
    options = ["--beam", str(beam)] if beam else []
    lines = said(capsys, "model", *files, *options)
    assert lines == said(capsys, "model", *files, *options, "--stream")
    assert [line.split("\t")[0] for line in lines] == files
    found = [line.split("\t")[1].split() for line in lines]
    assert found == [transcribe(model, *wav.read(file), beams=beam) for file in files]
    assert len(found[0]) > 3
    assert set("".join(found[0])) <= set("ab")
    # Of one file the words alone.
    assert said(capsys, "model", files[0], *options) == [" ".join(found[0])]


@pytest.mark.parametrize("beams", [0, 3])
@pytest.mark.parametrize("size", [1000, 77])
def test_any_cut_of_the_samples_has_the_same_words_and_scores(model, size, beams):
    samples, rate = torch.from_numpy(noise(9000, 5) / 32768.0).float(), 16000
    listener, found = Listener(model, rate, beams), []
    logits, step = [], model.step

    def seen(frames, state):
        out = step(frames, state)
        logits.append(out[0])
        return out

    model.step = seen
    for piece in samples.split(size):
        found += listener.feed(piece)
    assert found + listener.finish() == whole(model, samples, rate, beams)
    sound = sys.modules["longspan.generation.transcription"].Sound(model, rate)
    expected, _ = model(torch.cat([sound.feed(samples), sound.finish()])[None])
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=1e-5)


def test_words_are_printed_while_they_are_heard(model):
    listener = Listener(model, 8000)
    early = listener.feed(torch.from_numpy(noise(24_000, 1) / 32768.0).float())
    assert len(early) > 3


def test_an_interruption_prints_what_is_done(model, files, capsys, monkeypatch):
    def interrupted(path, seconds):
        if str(path) == files[1]:
            raise KeyboardInterrupt
        yield from chunks(path, seconds)

    chunks = wav.chunks
    monkeypatch.setattr(wav, "chunks", interrupted)
    assert main(["transcribe", "model", *files, "--stream"]) == INTERRUPTED
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("a.wav\t")
    assert re.search("interrupted.* 1 of 3 recordings", err)


def test_models_of_other_kinds_are_refused(model, files, capsys):
    checkpoint.save(Decoder(DecoderConfig(dim=6, depth=1, heads=2, feedforward=7, vocab=17, length=64)), "decoder")
    said = refused(capsys, "transcribe", "decoder", *files)
    assert "decoder holds a decoder; only a transcriber" in said
    assert "mnist holds a decoder; only a transcriber" in refused(capsys, "transcribe", "mnist", *files)
    for command in ("generate", "eval"):
        said = refused(capsys, command, "model")
        assert "model holds a transcriber; only a decoder" in said
        assert "longspan transcribe model FILE.wav" in said


def test_mistakes_are_one_line(model, files, capsys):
    checkpoint.save(transcriber(features=40).float(), "both")
    checkpoint.save(transcriber(rate=0, causal=True).float(), "cepstra")
    line = refused(capsys, "transcribe", "both", *files, "--stream")
    assert "--stream" in line
    assert "both" in line
    for options in ([], ["--stream"]):
        line = refused(capsys, "transcribe", "cepstra", files[0], *options)
        assert "frames of another kind, such as AN4's cepstra" in line
        write(Path("slow.wav"), noise(99), 4000)
        line = refused(capsys, "transcribe", "model", "slow.wav", *options)
        assert "slow.wav: the recording has 4000 samples per second, but this model needs at least 8000" in line
        assert "cannot read none.wav: No such file" in refused(capsys, "transcribe", "model", "none.wav", *options)
    assert "--beam=-1 must not be negative" in refused(capsys, "transcribe", "model", *files, "--beam", "-1")
    assert "no checkpoint at" in refused(capsys, "transcribe", "nowhere", *files)
    assert "FILE.wav" in refused(capsys, "transcribe", "model")


def given(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("size", [None, 0, 0xFFFFFFFF])
@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["whole", "stream"])
def test_standard_input_has_the_words_of_its_file(model, files, capsys, monkeypatch, options, size):
    expected = said(capsys, "model", files[0])
    given(monkeypatch, riff(noise(24_000, 1).tobytes(), size=size))
    assert said(capsys, "model", "-", *options) == expected


@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["whole", "stream"])
def test_what_is_wrong_with_a_recording_names_it(model, capsys, monkeypatch, options):
    bad = {
        "": "is empty",
        wav_bytes(noise(0)): "has no samples",
        wav_bytes(noise(99), rate=4000): "the recording has 4000 samples per second",
        wav_bytes(noise(8), channels=2): "2 channels",
        wav_bytes(noise(99))[:-4]: "ends too early: 97 of 99",
        b"nothing" * 9: "",
    }
    for content, expected in bad.items():
        content = content or b""
        Path("bad.wav").write_bytes(content)
        line = refused(capsys, "transcribe", "model", "bad.wav", *options)
        assert re.fullmatch(f"longspan: error: bad.wav:? .*{expected}.*\n", line)
        given(monkeypatch, content)
        line = refused(capsys, "transcribe", "model", "-", *options)
        assert re.fullmatch("longspan: error: standard input:? .*\n", line)


# Memory


def test_a_recording_is_read_a_block_at_a_time(model, monkeypatch):
    """No call sees more than a block, and each block is gone when the next but one is asked for."""
    seen = []
    for kind in (Resampler, FilterBank):
        feed = kind.feed
        monkeypatch.setattr(kind, "feed", lambda self, x, feed=feed: (seen.append(len(x)), feed(self, x))[1])
    samples = torch.from_numpy(noise(50_000, 1) / 32768.0).float()
    expected = whole(model, samples, 16000)
    assert max(seen) == sys.modules["longspan.generation.transcription"].BLOCK

    def blocks():
        kept = []
        for piece in samples.split(1000):
            assert all(before() is None for before in kept[:-1])
            block = piece.clone()
            kept.append(weakref.ref(block))
            yield block
            del block

    assert whole(model, blocks(), 16000) == expected
    assert len(expected) > 3


@pytest.mark.parametrize("source", ["file", "standard input"])
def test_what_python_holds_does_not_grow_with_a_recording(model, capsys, monkeypatch, source):
    def peak(count: int) -> int:
        write(Path("long.wav"), noise(count), 16000)
        if source == "standard input":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(open("long.wav", "rb")))
        tracemalloc.start()
        assert main(["transcribe", "model", "long.wav" if source == "file" else "-"]) == OK
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        sys.stdin.close() if source == "standard input" else None
        return found

    peak(1600)  # what is imported stays
    assert peak(160_000) < peak(16_000) + 64 * 1024


def test_rows_are_those_that_were_added():
    rows, pieces = Rows(3), [torch.randn(count, 3) for count in (0, 1, 1000, 30, 5000, 7)]
    for piece in pieces:
        rows.add(piece)
    assert torch.equal(rows.all(), torch.cat(pieces))


def test_peak_memory_is_that_of_what_lives_together():
    weight = torch.zeros(1000)  # 4000 bytes
    with transcription_memory.Peak() as peak:
        for _ in range(5):
            one = weight + 1
            two = one * 2
            view = two[10:].view(2, -1)
            del one, two, view
    assert (peak.top, peak.live) == (8000, 0)


@pytest.mark.parametrize("attention", ["linear", "local(window=8)", "alibi", "talking_heads"])
def test_memory_is_estimated_from_short_calls(attention):
    """The estimate for more tokens is what a call on them takes, whether it grows with their number or its square."""
    quadratic = attention in ("alibi", "talking_heads")
    # Sums go on in other blocks from 512 tokens on.
    tokens, short = (1024, 256) if quadratic else (4096, 1024)
    model, frames = transcriber(attention=attention), torch.randn(2 * tokens, 5, dtype=torch.float64)
    found, measured = transcription_memory.estimate(model, frames, short), transcription_memory._measured(model, frames)
    assert measured == pytest.approx(found, rel=0.05)
    assert (measured > 2 * 8 * tokens**2) == quadratic  # a matrix of float64 for each of two heads


@pytest.mark.parametrize("causal", [True, False])
def test_what_does_not_fit_is_refused_before_it_is_taken(causal, monkeypatch):
    model = transcriber(attention="talking_heads", causal=causal, features=40).float()
    samples = torch.from_numpy(noise(30_000) / 32768.0).float()
    monkeypatch.setattr(transcription_memory, "PROBE", 16)
    assert isinstance(whole(model, samples, 8000), list)
    monkeypatch.setattr(model_memory, "memory", lambda: 200_000)
    hint = "use --stream" if causal else "cut it into shorter ones, or use a causal model"
    with pytest.raises(ValueError, match=rf"a recording of 211 tokens would take .* KiB of memory; .* KiB; {hint}"):
        whole(model, samples, 8000)
    # Short recordings are not measured.
    monkeypatch.setattr(transcription_memory, "PROBE", 1000)
    assert isinstance(whole(model, samples, 8000), list)


def test_an_unknown_name_is_refused_with_the_models_of_the_kind(files, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "package")
    checkpoint.save(transcriber(features=40).float().bfloat16(), pretrained.FOLDER / "numbers")
    checkpoint.save(Decoder(DecoderConfig(dim=6, depth=1, heads=2, feedforward=7, vocab=17)), pretrained.FOLDER / "toy")
    assert pretrained.names() == ("numbers", "toy")
    assert pretrained.names("transcriber") == ("numbers",)
    line = refused(capsys, "transcribe", "numbres", *files)
    assert re.search(r"numbres.*\(numbers\)\n$", line)
    assert re.search(r"tyo.*\(toy\)\n$", refused(capsys, "generate", "tyo"))
    assert len(said(capsys, "numbers", files[0])) == 1


def test_without_filter_banks_it_prints_what_to_install(model, files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaldi_native_fbank", None)
    line = refused(capsys, "transcribe", "model", files[0])
    assert 'missing for filter banks: kaldi_native_fbank; pip install ".[speech]"' in line


def test_silence_is_around_every_recording(model):
    """0.2 s before, and 0.3 s after, in which a causal model tells what it heard last; in a stream, too."""
    samples = torch.from_numpy(noise(4000, 7) / 32768.0).float()
    sound = sys.modules["longspan.generation.transcription"].Sound(model, 16000)
    frames = torch.cat([sound.feed(samples), sound.finish()])
    # 0.25 s of sound and 0.5 s of silence at 8000 samples per second, a frame of 200 of them every 80.
    assert len(frames) == 1 + (1600 + 2000 + 2400 - 200) // 80
    assert torch.equal(frames[0], frames[-1])
    assert len(set(frames[:18, 0].tolist())) == 1 < len(set(frames[18:, 0].tolist()))
