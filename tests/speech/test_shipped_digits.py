"""The transcriber inside the package: small, honest about its making, and right about known recordings."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("kaldi_native_fbank", reason="filter banks: pip install longspan[speech]")
pytest.importorskip("matplotlib", reason="the script reads the experiment: pip install longspan[plot]")

from data_files import shared
from longspan.cli.entry import main
from longspan.generation.transcription import Listener, transcribe
from longspan.models import checkpoint, pretrained
from longspan.models.config import TranscriberConfig
from longspan.speech import wav
from longspan_lab.speech import fsdd
from longspan_lab.speech.digits import SPOKEN
from longspan_lab.tools import shipped_speech
from recordings import fsdd as fsdd_folder
from recordings import write

ROOT = Path(__file__).parents[2]
NAMES = pretrained.names("transcriber")


@pytest.fixture(scope="module")
def recordings():
    return fsdd.recordings(str(shared("fsdd")))


def test_digits_are_there():
    assert "digits" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_small_and_records_how_it_was_made(name):
    folder = pretrained.path(name)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {checkpoint.WEIGHTS, checkpoint.CONFIG, pretrained.RECORD}
    assert sum(files.values()) < 3e6
    record, header, model = pretrained.record(name), checkpoint.read_config(folder), pretrained.load(name)
    assert record["command"].startswith("longspan reproduce speech --scale laptop --data fsdd:PATH ")
    assert record["seed"] == header["run"]["seed"]
    assert record["epochs"] == header["run"]["epochs"] == record["curve"][-1][0]
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert re.fullmatch(r"[0-9a-f]{40}\+?", record["commit"])
    assert {"processor", "cores", "threads"} <= set(record["machines"][0])
    assert "CC BY-SA 4.0" in record["licence"]
    assert model.config.causal
    assert model.config.labels.split() == list(SPOKEN)
    # No folder of the machine that made it.
    texts = [(folder / file).read_text() for file in (checkpoint.CONFIG, pretrained.RECORD)]
    assert not any(re.search(r'"(/|~|\w:\\)|:/(?!/)', text) for text in texts)


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_errors_are_far_from_chance(name):
    record = pretrained.record(name)
    for part in ("held-out speaker", "official test, other speakers"):
        found = record["recordings"][part]
        assert found["right"] / found["count"] > 0.5  # of ten digits one is right by chance
    assert record["streaming"]["largest_difference"] < 1e-3


def test_the_record_has_the_errors_of_these_recordings(recordings):
    found, checksum = recordings
    record, model = pretrained.record("digits"), pretrained.load("digits")
    assert record["data"] == {"fsdd": checksum}
    held = record["held_out_speaker"]
    assert (
        shipped_speech.heard(model, shipped_speech.official(found, held))
        == record["recordings"]["official test, other speakers"]
    )
    few = [one for one in found if one.speaker == held][::10]
    share = record["recordings"]["held-out speaker"]
    assert shipped_speech.heard(model, few)["right"] / 50 == pytest.approx(share["right"] / share["count"], abs=0.2)


def test_a_file_is_transcribed_at_other_rates_and_in_a_stream(recordings, tmp_path, capsys):
    found, _ = recordings
    held = pretrained.record("digits")["held_out_speaker"]
    known = [one for one in found if one.speaker != held]
    spoken = [next(one for one in known if one.digit == digit) for digit in range(10)]  # of the official test
    silence = torch.zeros(1600)
    samples = torch.cat([part for one in spoken for part in (one.samples, silence)])
    path = write(tmp_path / "all.wav", (samples * 32767).short().numpy())
    assert main(["transcribe", "digits", str(path)]) == 0
    whole = capsys.readouterr().out
    assert main(["transcribe", "digits", str(path), "--stream"]) == 0
    assert capsys.readouterr().out == whole
    right = sum(word in whole.split() for word in SPOKEN)
    assert right >= 5
    twice = samples.repeat_interleave(2)  # at double the rate; what is too high is filtered out
    again = transcribe(pretrained.load("digits"), twice, 16000)
    assert len(set(again) & set(whole.split())) >= right - 2


def test_listening_is_transcribing(recordings):
    model, (found, _) = pretrained.load("digits"), recordings
    for one in found[::251]:
        for size in (80, 1234):
            listener = Listener(model, fsdd.RATE)
            words = [word for piece in one.samples.split(size) for word in listener.feed(piece)]
            assert words + listener.finish() == transcribe(model, one.samples, fsdd.RATE)


# Making one


def test_an_experiment_becomes_a_model(tmp_path, monkeypatch, capsys):
    folder = fsdd_folder(tmp_path / "recordings")
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "package")
    words = "--encoders gla --direction causal --positions none --units words --epochs 2 --lengths 100".split()
    out = tmp_path / "out"
    assert main(["reproduce", "speech", "--quick", "--data", f"fsdd:{folder}", "--out", str(out), *words]) == 0
    record = shipped_speech.ship(out, "gla", str(folder), "toy")
    assert record == pretrained.record("toy")
    assert record["command"].startswith("longspan reproduce speech --quick --data fsdd:PATH --units words ")
    assert record["held_out_speaker"] == "cy"
    assert record["recordings"]["held-out speaker"]["count"] == 6
    assert record["recordings"]["official test, other speakers"]["count"] == 4
    model = pretrained.load("toy")
    assert type(model.config) is TranscriberConfig
    best = checkpoint.load(out / "speech-work" / "gla").state_dict()
    assert all(torch.equal(value, best[key].bfloat16().float()) for key, value in model.state_dict().items())
    assert str(tmp_path) not in (pretrained.path("toy") / checkpoint.CONFIG).read_text()
    with pytest.raises(ValueError, match=r"speech\.json has no training of linear"):
        shipped_speech.ship(out, "linear", str(folder), "toy")
    (folder / "0_ann_0.wav").unlink()
    with pytest.raises(ValueError, match="was made with other recordings than fsdd:"):
        shipped_speech.ship(out, "gla", str(folder), "toy")
    # Its files are read as any other's.
    path = next(folder.iterdir())
    capsys.readouterr()
    assert main(["transcribe", "toy", str(path)]) == 0
    assert capsys.readouterr().out.split() == transcribe(model, *wav.read(path))
