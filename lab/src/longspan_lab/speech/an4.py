"""AN4: names, addresses and commands spoken by 84 people, as the mel cepstra that come with it (CMU, 1991)."""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch

from longspan._utils import atomic_io
from longspan._utils.cache_dirs import expanded
from longspan.data.download import describe, read
from longspan.speech.labels import BOUNDARY, LETTERS, encode

from .corpus import Corpus, Utterance

FILES = ("an4_mfcc13_train.npz", "an4_mfcc13_test.npz")
WORDS = "an4.dic"
FEATURES = 13
EVERY = 12  # every 12th training speaker, by name, is for validation


def load(folder: str, units: str) -> Corpus:
    """Load AN4 with the official test speakers; splits share no speaker.

    Args:
        folder: a folder with the files of cepstra and an4.dic.
        units: letters, or phonemes (the first pronunciation of each word in an4.dic).

    Raises:
        ValueError: for missing or invalid files, other units, and words that are not in an4.dic.
    """
    if units not in ("letters", "phonemes"):
        raise ValueError(f"units={units}: AN4 requires letters or phonemes")
    place = expanded(folder)
    labels, spelt = LETTERS, None
    if units == "phonemes":
        spelt = pronunciations(place / WORDS)
        labels = " ".join([BOUNDARY, *sorted({phone for word in spelt.values() for phone in word})])
    train, test = (_utterances(place / name, labels, spelt) for name in FILES)
    held = sorted({one.speaker for one in train})[EVERY - 1 :: EVERY]
    learned = [one for one in train if one.speaker not in held]
    parts = {"validation": [one for one in train if one.speaker in held], "test": test}
    if shared := {one.speaker for one in test} & {one.speaker for one in train}:
        raise ValueError(f"{place}: the test and training parts share speakers: {', '.join(sorted(shared))}")
    about = f"AN4, {len({one.speaker for one in learned})} speakers, mel cepstra"
    digest = hashlib.sha256(b"".join(read(place / name) for name in FILES)).hexdigest()
    return Corpus(f"an4:{folder}", about, digest, labels, FEATURES, 0, lambda epoch: learned, parts)


def pronunciations(path: Path) -> dict[str, list[str]]:
    """Read a pronunciation dictionary; of variants such as WORD(2) only the first is kept.

    Raises ValueError for an invalid file.
    """
    found: dict[str, list[str]] = {}
    content = atomic_io.without_mark(read(path))
    atomic_io.refuse_nul(content, path)
    for line in content.decode("utf-8", "replace").splitlines():
        word, *phones = line.split()
        if not phones:
            raise ValueError(f"{path} is not a pronunciation dictionary: the line {line!r} has no phonemes")
        if not word.endswith(")"):
            found[word] = phones
    return found


def _utterances(path: Path, labels: str, spelt: dict[str, list[str]] | None) -> list[Utterance]:
    """The utterances of one file. Raises ValueError for an invalid file."""
    content = read(path)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            feats, offsets = file["feats"], file["offsets"]
            speakers, texts = file["speaker"].tolist(), file["text"].tolist()
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path} is not a file of cepstra ({error}){describe(path)}") from error
    right = feats.ndim == 2 and feats.shape[1] == FEATURES and len(offsets) == len(texts) + 1 == len(speakers) + 1
    if not right or offsets[0] != 0 or offsets[-1] != len(feats) or (np.diff(offsets) < 1).any():
        raise ValueError(f"{path} is not a file of cepstra: the shapes of its arrays do not match{describe(path)}")
    frames = torch.from_numpy(feats.astype(np.float32))
    found = []
    for i, (speaker, text) in enumerate(zip(speakers, texts, strict=True)):
        words = [_spelt(word, spelt, path) for word in text.split()]
        found.append(Utterance(speaker, frames[offsets[i] : offsets[i + 1]], encode(words, labels)))
    return found


def _spelt(word: str, spelt: dict[str, list[str]] | None, path: Path) -> list[str]:
    if spelt is None:
        return list(word.lower())
    if word not in spelt:
        raise ValueError(f"{path}: {word} is not in {WORDS}")
    return spelt[word]
