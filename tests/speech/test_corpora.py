"""Corpora: who is held out is in no training, every recording comes once an epoch, and mistakes are reported."""

import hashlib
import re

import numpy as np
import pytest
import torch

pytest.importorskip("kaldi_native_fbank", reason="filter banks: pip install longspan[speech]")

from data_files import pack, shared
from longspan.speech import labels
from longspan_lab.speech import corpora, corpus, digits, fsdd, tones
from recordings import fsdd as fsdd_folder
from recordings import noise, wav_bytes
from support.downloads import serving


def spoken(one: corpus.Utterance, found: corpus.Corpus) -> list[str]:
    return labels.words(one.target, found.labels)


# FSDD


@pytest.fixture
def folder(tmp_path):
    return fsdd_folder(tmp_path / "recordings")


def load(folder, **options) -> corpus.Corpus:
    return corpora.load(f"fsdd:{folder}", **({"units": "letters", "longest": 3} | options))


def test_recordings_are_read_by_name_from_folders_and_archives(folder, tmp_path):
    found, checksum = fsdd.recordings(str(folder))
    assert [(one.speaker, one.digit, one.index) for one in found] == [
        (speaker, digit, index) for speaker in ("ann", "bob", "cy") for digit in (0, 7) for index in (0, 5, 10)
    ]
    first = torch.from_numpy(noise(1600, seed=0).astype(np.float32)) / 32768
    assert torch.equal(found[0].samples, first)
    contents = {f"x/recordings/{path.name}": path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "packed").mkdir()
    pack(tmp_path / "packed" / "all.tar.gz", {**contents, "x/README.md": b"words", "x/1_ann.wav": b"other"})
    for source in (tmp_path / "packed", tmp_path / "packed" / "all.tar.gz"):
        again, same = fsdd.recordings(str(source))
        assert same == checksum
        assert all(torch.equal(a.samples, b.samples) for a, b in zip(found, again, strict=True))


def test_who_is_held_out_is_in_no_training(folder):
    for speaker, held in (("", "cy"), ("ann", "ann")):
        found = load(folder, speaker=speaker)
        assert {one.speaker for epoch in range(3) for one in found.train(epoch)} == {"ann", "bob", "cy"} - {held}
        assert {one.speaker for one in found.held["test"]} == {held}
        assert {one.speaker for part in ("validation", "official") for one in found.held[part]} == {
            "ann",
            "bob",
            "cy",
        } - {held}


def test_every_recording_comes_once_in_each_epoch(folder):
    found = load(folder)
    for epoch in range(5):
        made = found.train(epoch)
        assert sorted(word for one in made for word in spoken(one, found)) == ["seven"] * 2 + ["zero"] * 2
        assert max(len(spoken(one, found)) for one in made) <= 3
    for part, count in (("validation", 4), ("official", 4), ("test", 6)):
        assert sum(len(spoken(one, found)) for one in found.held[part]) == count


def test_short_strings_come_first(tmp_path):
    folder = fsdd_folder(tmp_path / "many", ("ann", "bob"), indices=(0, 5, *range(10, 30)))
    found = load(folder, units="words", longest=9)
    longest = [max(len(one.target) for one in found.train(epoch)) for epoch in (0, 3, 30)]
    assert longest[0] <= 2 < longest[1] <= 5 < longest[2] <= 9


def test_epochs_differ_and_are_the_same_again(folder):
    found, again = load(folder), load(folder)

    def same(a: list, b: list) -> bool:
        return len(a) == len(b) and all(torch.equal(x.frames, y.frames) for x, y in zip(a, b, strict=True))

    assert same(found.train(4), again.train(4))
    assert same(found.held["test"], again.held["test"])
    assert same(found.train(2), found.train(0))
    assert not same(found.train(2), found.train(3))
    assert not same(found.train(1), load(folder, seed=1).train(1))
    assert found.checksum == again.checksum


def test_a_string_is_its_recordings_with_silence_between():
    one, two = torch.ones(500), -torch.ones(300)
    made = fsdd.string([one, two], np.random.default_rng(3), varied=False)
    assert made.sum() == 200
    (begin,) = (made == 1).nonzero()[0]
    assert torch.equal(made[begin : begin + 500], one)
    (second,) = (made == -1).nonzero()[0]
    for silence in (made[:begin], made[begin + 500 : second], made[second + 300 :]):
        assert (silence == 0).all()
        assert len(silence) <= 3200
    assert 400 <= second - begin - 500
    assert 400 <= len(made) - second - 300


def test_what_is_varied_is_another_length_and_loudness():
    one = torch.from_numpy(noise(1000).astype(np.float32)) / 32768
    made = [fsdd.string([one], np.random.default_rng(seed), varied=True) for seed in range(20)]
    loudness = {round(float(x.std()), 4) for x in made}
    assert len(loudness) == 20
    # Some without noise: exact zeros in the end.
    assert {bool((x[-300:] == 0).all()) for x in made} == {True, False}


def test_a_download_is_checked_and_kept(monkeypatch, folder, tmp_path):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    contents = {f"free/recordings/{path.name}": path.read_bytes() for path in folder.iterdir()}
    digest = pack(tmp_path / "served" / "v1.0.9.tar.gz", contents)
    with serving(tmp_path / "served") as (address, asked):
        monkeypatch.setattr(fsdd, "MIRRORS", (f"{address}v1.0.9.tar.gz",))
        with pytest.raises(ValueError, match=rf"cannot download v1.0.9.tar.gz \(sha256 {fsdd.SHA256}\)"):
            corpora.load("fsdd", units="letters")
        monkeypatch.setattr(fsdd, "SHA256", digest)
        for _ in range(2):
            found = corpora.load("fsdd", units="words", longest=2)
            assert (found.name, found.checksum) == ("fsdd", load(folder).checksum)
    assert asked.count("/v1.0.9.tar.gz") == 2  # one that was refused, one that was kept
    assert (tmp_path / "cache" / "fsdd" / "v1.0.9.tar.gz").exists()


def test_what_is_wrong_with_recordings_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match="no recordings at .*none: there is no such file or folder"):
        load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no recordings in .*empty: looked for DIGIT_SPEAKER_INDEX\.wav"):
        load(tmp_path / "empty")
    (tmp_path / "bad.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"bad\.tar\.gz is not a complete tar\.gz .*sha256 is"):
        load(tmp_path / "bad.tar.gz")
    with pytest.raises(ValueError, match="speaker=dan is not in the data.*: ann, bob, cy"):
        load(folder, speaker="dan")
    with pytest.raises(ValueError, match="has 1 speaker"):
        load(fsdd_folder(tmp_path / "one", ("ann",)))
    with pytest.raises(ValueError, match="index of at least 10"):
        load(fsdd_folder(tmp_path / "few", indices=(0, 5)))
    (folder / "0_ann_0.wav").write_bytes(wav_bytes(noise(100), rate=16000))
    with pytest.raises(ValueError, match=r"0_ann_0\.wav has 16000 samples per second; .* 8000"):
        load(folder)


def test_the_real_recordings():
    found, _ = fsdd.recordings(str(shared("fsdd")))
    assert len(found) == 2000
    assert {one.speaker for one in found} == {"george", "jackson", "nicolas", "yweweler"}


# AN4


def an4_folder(folder, **changes):
    """Two files of cepstra, and a dictionary."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for part, speakers in (("train", [f"s{i:02}" for i in range(24)]), ("test", ["t1"])):
        texts = ["GO", "STOP IT"] * (len(speakers) // 2) or ["GO"]
        content = {
            "feats": random.standard_normal((30 * len(speakers), 13)).astype(np.float32),
            "offsets": np.arange(len(speakers) + 1) * 30,
            "speaker": np.array(speakers),
            "text": np.array(texts),
        }
        np.savez(folder / f"an4_mfcc13_{part}.npz", **(content | changes.get(part, {})))
    (folder / "an4.dic").write_text("GO  G OW\nGO(2)  G AH\nIT  IH T\nSTOP  S T AA P\n")
    return folder


def test_an4_has_the_official_test_and_whole_speakers_for_validation(tmp_path):
    found = corpora.load(f"an4:{an4_folder(tmp_path / 'an4')}", units="letters")
    assert {one.speaker for one in found.held["validation"]} == {"s11", "s23"}
    assert {one.speaker for one in found.held["test"]} == {"t1"}
    assert len({one.speaker for one in found.train(0)}) == 22
    assert spoken(found.train(0)[1], found) == ["stop", "it"]
    assert found.train(0)[1].frames.shape == (30, 13)
    phones = corpora.load(f"an4:{tmp_path / 'an4'}", units="phonemes")
    assert phones.labels == "| AA G IH OW P S T"
    assert [spoken(one, phones) for one in phones.train(0)[:2]] == [["G-OW"], ["S-T-AA-P", "IH-T"]]


@pytest.mark.parametrize(
    ("changes", "units", "said"),
    [
        ({"train": {"text": np.array(["NO"] * 24)}}, "phonemes", "NO is not in an4.dic"),
        ({"train": {"offsets": np.arange(25)}}, "letters", "its sha256 is"),
        ({"test": {"speaker": np.array(["s03"])}}, "letters", "speakers: s03"),
        ({}, "words", "units=words: .*letters or phonemes"),
    ],
)
def test_what_is_wrong_with_an4_is_said(tmp_path, changes, units, said):
    with pytest.raises(ValueError, match=said):
        corpora.load(f"an4:{an4_folder(tmp_path / 'an4', **changes)}", units=units)


def test_files_of_something_else_are_said(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*an4_mfcc13_train\.npz: No such file"):
        corpora.load(f"an4:{tmp_path}", units="letters")
    folder = an4_folder(tmp_path / "an4")
    (folder / "an4_mfcc13_test.npz").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"an4_mfcc13_test\.npz is not a file of cepstra"):
        corpora.load(f"an4:{folder}", units="letters")
    (folder / "an4.dic").write_text("GO\n")
    with pytest.raises(ValueError, match=r"an4\.dic is not a pronunciation dictionary: the line 'GO' has no phonemes"):
        corpora.load(f"an4:{folder}", units="phonemes")


def test_the_real_cepstra():
    found = corpora.load(f"an4:{shared('an4')}", units="phonemes")
    assert len(found.train(0)) + len(found.held["validation"]) == 948
    assert len(found.held["test"]) == 78
    assert len(found.labels.split()) == 34  # 33 phonemes and the boundary


# Tones, batches, names


def test_tones_are_made_by_the_seed_and_leave_a_speaker_out():
    found = corpora.load("tones", units="words", longest=4, seed=1)
    again = tones.load("words", 4, 1)
    assert torch.equal(found.train(2)[0].frames, again.train(2)[0].frames)
    assert not torch.equal(found.train(2)[0].frames, found.train(3)[0].frames)
    assert {one.speaker for one in found.held["test"]} == {"held out"}
    assert "held out" not in {one.speaker for one in (*found.train(0), *found.held["validation"])}


@pytest.mark.parametrize("units", labels.UNITS)
def test_digits_in_all_units(units):
    text = digits.labels_of(units)
    found = labels.words(digits.target(range(10), units), text)
    spelt = [word.replace(" ", "-") for word in digits.PHONEMES] if units == "phonemes" else list(digits.SPOKEN)
    assert found == spelt


def test_batches_hold_each_utterance_once_with_little_padding():
    made = [corpus.Utterance("a", torch.zeros(n, 2), [1]) for n in (9, 1, 5, 8, 2, 4, 7)]
    groups = corpus.batches(made, 3, (0, 1))
    assert sorted(len(one.frames) for group in groups for one in group) == [1, 2, 4, 5, 7, 8, 9]
    assert sorted(sorted(len(one.frames) for one in group) for group in groups) == [[1, 2, 4], [5, 7, 8], [9]]
    orders = {str([[len(one.frames) for one in g] for g in corpus.batches(made, 3, (0, seed))]) for seed in range(9)}
    assert len(orders) > 1
    frames, lengths, targets = corpus.padded([made[0], made[1]])
    assert (frames.shape, lengths.tolist(), targets) == ((2, 9, 2), [9, 1], [[1], [1]])


NAMES = [
    ("fsd", {}, "unknown corpus of speech 'fsd' (did you mean 'fsdd'?); known: an4, fsdd, tones"),
    ("fsdd:", {}, "nothing follows the colon of 'fsdd:'; pass e.g. fsdd:FOLDER"),
    ("tones:a", {}, "tones:a: "),
    ("an4", {}, "an4 cannot be downloaded"),
    ("tones", {"speaker": "ann"}, "speaker=ann: tones "),
    ("tones", {"units": "sounds"}, "unknown unit of labels 'sounds'; known: letters, phonemes, words"),
]


@pytest.mark.parametrize(("name", "options", "message"), NAMES)
def test_names_that_mean_nothing(name, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        corpora.load(name, **{"units": "letters"} | options)


def test_the_checksum_is_of_names_and_contents(folder):
    digest = hashlib.sha256()
    for name in sorted((path.name for path in folder.iterdir()), key=lambda n: (n.split("_")[1], n[0], len(n), n)):
        digest.update(name.encode() + (folder / name).read_bytes())
    assert fsdd.recordings(str(folder))[1] == digest.hexdigest()
