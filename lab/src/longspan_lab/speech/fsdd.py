"""The Free Spoken Digit Dataset, and strings of digits composed of its recordings."""

import hashlib
import io
import re
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan._utils import atomic_io
from longspan._utils.cache_dirs import cache_folder, expanded
from longspan.data.download import ARCHIVE_ERRORS, describe, fetch, members
from longspan.speech import wav
from longspan.speech.features import BINS, filter_bank
from longspan.speech.resample import resampled

from .corpus import Corpus, Utterance
from .digits import labels_of, target

# Version 1.0.9: 2500 recordings of five speakers, CC BY-SA 4.0.
MIRRORS = ("https://github.com/Jakobovski/free-spoken-digit-dataset/archive/v1.0.9.tar.gz",)
SHA256 = "8bc44cde129d505cbbb6b365c09f80c663f2aa77578afc634e6141a2f87100c0"
RATE = 8000
NAME = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")
OFFICIAL = range(5)  # the official test set's indices
VALIDATION = range(5, 10)
SPEEDS = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25)
FIRST = 2  # digits of a string in the first epoch, at most
KEPT = 3  # epochs with the same strings
ARCHIVES = (".tar.gz", ".tgz")


class Recording(NamedTuple):
    """A recording of one digit."""

    digit: int
    speaker: str
    index: int
    samples: Tensor  # (N,) float32, 8000 a second


def load(source: str, units: str, speaker: str, longest: int, seed: int) -> Corpus:
    """Strings of 1 to ``longest`` digits of one speaker each; ``speaker`` is only in the test ("": the last by name).

    Each training recording occurs once per epoch. Each string has a random speed, loudness and noise, drawn again every
    third epoch. Strings have at most two digits in the first epoch and one more in each following one, since alignments
    are easier to learn on short strings (Amodei et al. 2015, section 3.2). Of the other speakers, indices 5 to 9 are
    for validation; 0 to 4, the official test set, are ``official``.

    Raises ValueError as in ``recordings``, for an unknown speaker, and for fewer than two speakers.
    """
    found, checksum = recordings(source)
    speakers = sorted({one.speaker for one in found})
    if len(speakers) < 2:
        raise ValueError(f"fsdd:{source} has {len(speakers)} speaker; it needs at least two, since one is held out")
    chosen = speaker or speakers[-1]
    if chosen not in speakers:
        raise ValueError(f"speaker={chosen} is not in the data; speakers: {', '.join(speakers)}")
    known = [one for one in found if one.speaker != chosen]
    learned = [one for one in known if one.index not in (*OFFICIAL, *VALIDATION)]
    if not learned:
        raise ValueError(f"fsdd:{source} has no training recording; those have an index of at least 10")
    strings = partial(_strings, units=units)
    parts = {
        "validation": [one for one in known if one.index in VALIDATION],
        "official": [one for one in known if one.index in OFFICIAL],
        "test": [one for one in found if one.speaker == chosen],
    }
    held = {
        name: strings(part, np.random.default_rng([seed, i]), longest=longest, varied=False)
        for i, (name, part) in enumerate(parts.items())
    }
    about = f"{len(found)} recordings; {chosen} held out of {', '.join(speakers)}"

    @lru_cache(maxsize=1)
    def drawn(first: int) -> list[Utterance]:
        random = np.random.default_rng([seed, 3, first])
        return strings(learned, random, longest=min(longest, FIRST + first), varied=True)

    def train(epoch: int) -> list[Utterance]:
        return drawn(epoch - epoch % KEPT)

    return Corpus(f"fsdd:{source}" if source else "fsdd", about, checksum, labels_of(units), BINS, RATE, train, held)


def recordings(source: str = "") -> tuple[list[Recording], str]:
    """The recordings of a folder or a tar.gz in the order of their names, and the sha256 of all of them.

    Recordings are files DIGIT_SPEAKER_INDEX.wav at any depth, or inside a tar.gz. Without a source, version 1.0.9 is
    downloaded once, checked by sha256, and kept in the cache folder.

    Raises ValueError if there are none, for invalid files, and if the download fails; ImportError if a download needs
    pooch.
    """
    path = expanded(source) if source else fetch(MIRRORS, SHA256, cache_folder() / "fsdd")
    if not path.exists():
        raise ValueError(f"no recordings at {path.absolute()}: there is no such file or folder")
    if path.is_dir():
        named = {file.name: file for file in sorted(path.rglob("*.wav")) if NAME.fullmatch(file.name)}
        packed = [file for end in ARCHIVES for file in sorted(path.glob(f"*{end}"))]
        contents = {name: atomic_io.read(file) for name, file in named.items()} if named else _unpacked(packed)
    else:
        contents = _unpacked([path])
    if not contents:
        raise ValueError(f"no recordings in {path}: looked for DIGIT_SPEAKER_INDEX.wav, also inside .tar.gz")
    found, digest = [], hashlib.sha256()
    for name in sorted(contents, key=_order):
        samples, rate = wav.parsed(io.BytesIO(contents[name]), name)
        if rate != RATE:
            raise ValueError(f"{name} has {rate} samples per second; expected {RATE}")
        digest.update(name.encode() + contents[name])
        digit, speaker, index = NAME.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess] (names are checked)
        found.append(Recording(int(digit), speaker, int(index), samples))
    return found, digest.hexdigest()


def _order(name: str) -> tuple[str, int, int]:
    digit, speaker, index = NAME.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess] (names are checked)
    return speaker, int(digit), int(index)


def _unpacked(archives: list[Path]) -> dict[str, bytes]:
    """The recordings inside tar.gz files, by their names."""
    found = {}
    for path in archives:
        try:
            for name, content in members(path, lambda name: NAME.fullmatch(PurePosixPath(name).name) is not None):
                found[PurePosixPath(name).name] = content
        except ARCHIVE_ERRORS as error:
            raise ValueError(f"{path} is not a complete tar.gz ({error}){describe(path)}") from error
    return found


def _strings(
    found: list[Recording], random: np.random.Generator, *, units: str, longest: int, varied: bool
) -> list[Utterance]:
    """Each recording once, in strings of 1 to ``longest`` of one speaker."""
    made = []
    for speaker in sorted({one.speaker for one in found}):
        own = [one for one in found if one.speaker == speaker]
        own = [own[i] for i in random.permutation(len(own))]
        while own:
            count = int(random.integers(1, longest + 1))
            some, own = own[:count], own[count:]
            samples = string([one.samples for one in some], random, varied=varied)
            frames = filter_bank(samples, RATE)
            made.append(Utterance(speaker, frames, target([one.digit for one in some], units)))
    return made


def string(spoken: list[Tensor], random: np.random.Generator, *, varied: bool) -> Tensor:
    """Concatenate recordings, with 0.05 to 0.4 s of silence after each, and 0 to 0.4 s before the first.

    ``varied``: apply one of ten speeds, which changes the pitch (Ko et al. 2015), a gain of up to 12 dB either way, and
    white noise of -80 to -40 dB or none.
    """
    if varied:
        speed = SPEEDS[random.integers(len(SPEEDS))]
        spoken = [resampled(one, round(speed * RATE), RATE) for one in spoken]
    pieces = [_silence(random, 0)]
    for one in spoken:
        pieces += [one, _silence(random, RATE // 20)]
    samples = torch.cat(pieces)
    if varied:
        samples = samples * float(10 ** (random.uniform(-12, 12) / 20))
        if random.random() < 0.8:
            level = 10 ** (random.uniform(-80, -40) / 20)
            samples = samples + torch.from_numpy(random.standard_normal(len(samples)).astype(np.float32)) * level
    return samples


def _silence(random: np.random.Generator, least: int) -> Tensor:
    return torch.zeros(int(random.integers(least, 2 * RATE // 5)))
