"""``longspan transcribe``: the words of files, whole or in a stream, and what it refuses."""

import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("kaldi_native_fbank", reason="filter banks: pip install longspan[speech]")

from longspan import checkpoint, shipped
from longspan.cli import INTERRUPTED, OK, WRONG, main
from longspan.config import Config
from longspan.model import Decoder
from longspan.speech import Listener, transcribe, wav
from longspan.speech import transcribe as whole
from recordings import noise, transcriber, write


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(at):
    """A causal one that hears nonsense in noise, as a folder."""
    made = transcriber(seed=3, attention="gla", causal=True, features=40).float()
    frames = torch.randn(99, 40) - 3
    made.front.calibrate(frames)
    checkpoint.save("model", made)
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
    told = [line.split("\t")[1].split() for line in lines]
    assert told == [transcribe(model, *wav.read(file), beams=beam) for file in files]
    assert len(told[0]) > 3
    assert set("".join(told[0])) <= set("ab")
    # Of one file the words alone.
    assert said(capsys, "model", files[0], *options) == [" ".join(told[0])]


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
    sound = sys.modules["longspan.speech.transcribe"].Sound(model, rate)
    expected, _ = model(torch.cat([sound.feed(samples), sound.finish()])[None])
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=1e-5)


def test_words_are_told_while_they_are_heard(model):
    listener = Listener(model, 8000)
    early = listener.feed(torch.from_numpy(noise(24_000, 1) / 32768.0).float())
    assert len(early) > 3


def test_an_interruption_says_what_is_done(model, files, capsys, monkeypatch):
    def interrupted(path, seconds):
        if path == files[1]:
            raise KeyboardInterrupt
        yield from chunks(path, seconds)

    chunks = wav.chunks
    monkeypatch.setattr(wav, "chunks", interrupted)
    assert main(["transcribe", "model", *files, "--stream"]) == INTERRUPTED
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("a.wav\t")
    assert err == "longspan: interrupted: 1 of 3 recordings are transcribed\n"


def refused(capsys, *words: str) -> str:
    assert main(list(words)) == WRONG
    return capsys.readouterr().err


def test_models_of_other_kinds_are_refused(model, files, capsys):
    checkpoint.save("decoder", Decoder(Config(dim=6, depth=1, heads=2, feedforward=7, vocab=17, length=64)))
    said = refused(capsys, "transcribe", "decoder", *files)
    assert "decoder holds a decoder; only a transcriber tells what is said, such as longspan reproduce speech" in said
    assert "mnist holds a decoder; only a transcriber" in refused(capsys, "transcribe", "mnist", *files)
    for command in ("generate", "eval"):
        said = refused(capsys, command, "model")
        assert "model holds a transcriber; only a decoder predicts and generates tokens; what is said in a" in said
        assert "is told by longspan transcribe model FILE.wav" in said


def test_mistakes_are_one_line(model, files, capsys):
    checkpoint.save("both", transcriber(features=40).float())
    checkpoint.save("cepstra", transcriber(rate=0, causal=True).float())
    assert "--stream needs a causal model; both sees whole" in refused(capsys, "transcribe", "both", *files, "--stream")
    for options in ([], ["--stream"]):
        line = refused(capsys, "transcribe", "cepstra", files[0], *options)
        assert "this model reads frames of another kind than recordings have, such as AN4's cepstra" in line
        write(Path("slow.wav"), noise(99), 4000)
        line = refused(capsys, "transcribe", "model", "slow.wav", *options)
        assert "the recording has 4000 samples per second; this model needs at least 8000" in line
        assert "cannot read none.wav: No such file" in refused(capsys, "transcribe", "model", "none.wav", *options)
    assert "--beam=-1 must not be negative" in refused(capsys, "transcribe", "model", *files, "--beam", "-1")
    assert "no checkpoint at" in refused(capsys, "transcribe", "nowhere", *files)
    assert "files" in refused(capsys, "transcribe", "model")


def test_a_name_that_nobody_has_is_told_the_models_of_the_kind(files, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "package")
    checkpoint.save(shipped.FOLDER / "numbers", transcriber(features=40).float().bfloat16())
    checkpoint.save(shipped.FOLDER / "toy", Decoder(Config(dim=6, depth=1, heads=2, feedforward=7, vocab=17)))
    assert shipped.names() == ("numbers", "toy")
    assert shipped.names("transcriber") == ("numbers",)
    line = refused(capsys, "transcribe", "numbres", *files)
    assert re.search("nor is it a model inside longspan: numbers\n$", line)
    assert re.search("nor is it a model inside longspan: toy\n$", refused(capsys, "generate", "tyo"))
    assert len(said(capsys, "numbers", files[0])) == 1


def test_without_filter_banks_it_says_what_to_install(model, files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaldi_native_fbank", None)
    line = refused(capsys, "transcribe", "model", *files)
    assert 'missing for filter banks: kaldi_native_fbank; pip install "longspan[speech]"' in line


def test_silence_is_around_every_recording(model):
    """0.2 s before, and 0.3 s after, in which a causal model tells what it heard last; in a stream, too."""
    samples = torch.from_numpy(noise(4000, 7) / 32768.0).float()
    sound = sys.modules["longspan.speech.transcribe"].Sound(model, 16000)
    frames = torch.cat([sound.feed(samples), sound.finish()])
    # 0.25 s of sound and 0.5 s of silence at 8000 samples per second, a frame of 200 of them every 80.
    assert len(frames) == 1 + (1600 + 2000 + 2400 - 200) // 80
    assert torch.equal(frames[0], frames[-1])
    assert len(set(frames[:18, 0].tolist())) == 1 < len(set(frames[18:, 0].tolist()))
