"""A UTF-8 byte order mark at the beginning of a text file is no part of its text."""

import codecs
import gzip
import re
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_files import noise
from longspan.cli import targets, train
from longspan.data import documents, labeled, pairs, text
from longspan_lab.data import proteins, series
from longspan_lab.data.arena import listops, reviews
from longspan_lab.speech import an4

WORDS = [f"word{i}" for i in range(400)]
DATES = [datetime(2016, 7, 1) + timedelta(hours=i) for i in range(series.ETT_ENDS[-1])]
HOURS = "date,A\n" + "".join(f"{date},{date.hour}\n" for date in DATES)


def of_pairs(path: Path):
    found = pairs.load(str(path), 0)
    splits = {split: [part.tolist() for column in both for part in column] for split, both in found.splits.items()}
    return found.vocab, found.length, found.checksum, splits


def of_sources(path: Path):
    return targets._sources(SimpleNamespace(source=None, sources=str(path)), numbers=False)


READERS = {
    "w.tsv": (of_pairs, "".join(f"{word}\t{word[::-1]}\n" for word in WORDS)),
    "w.tsv.gz": (of_pairs, "".join(f"{word}\t{word[::-1]}\n" for word in WORDS)),
    "w.jsonl": (of_pairs, "".join(f'{{"source": [{i}, 1], "target": [1, {i}]}}\n' for i in range(400))),
    "sources.txt": (of_sources, "one\ntwo\n"),
    "an4.dic": (an4.pronunciations, "GO  G OW\nIT  IH T\n"),
    "listops.tsv": (lambda path: list(listops.lines(path)), "( [MAX 1 2 ] )\t2\n[MIN 3 4 ]\t3\n"),
    "reviews.jsonl": (lambda path: list(reviews._lines(path)), '{"text": "good", "label": 1}\n'),
    "p.fasta": (
        lambda path: [one.tolist() for one in proteins.load(f"protein:{path}").sequences],
        ">a\nACDEFGHIKL\n>b\nLKIHGFEDCA\n",
    ),
    "hours.csv": (lambda path: series.table("ett", path).values.tolist(), HOURS),
    "recipe.yaml": (lambda path: train._recipe(str(path))[1], "run:\n  steps: 3\n"),
}


# What a mark does not concern, or whose readers have a test of their own.
BEYOND = {
    "labels.jsonl": (
        lambda path: labeled.load(str(path), 0),
        "".join(f'{{"text": "{word} fine", "label": {i % 2}}}\n' for i, word in enumerate(WORDS)),
    ),
    "labels.csv": (
        lambda path: labeled.load(str(path), 0),
        "text,label\n" + "".join(f"{word},{i % 2}\n" for i, word in enumerate(WORDS)),
    ),
    "documents.txt": (lambda path: list(documents.pieces(documents.sources([str(path)])[0])), "a fine text\n" * 9),
    "documents.jsonl": (
        lambda path: list(documents.pieces(documents.sources([str(path)])[0])),
        '{"text": "a fine text"}\n' * 9,
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_mark_changes_nothing(tmp_path, name):
    read, content = READERS[name]
    found = []
    for mark in (b"", codecs.BOM_UTF8):
        data = mark + content.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        found.append(read(path))
    assert found[0] == found[1]


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("name", [*READERS, "labels.jsonl", "labels.csv", "documents.txt", "documents.jsonl"])
def test_other_encodings_are_refused_by_name(tmp_path, name, coding):
    read, content = (READERS | BEYOND)[name]
    path = tmp_path / name
    data = content.encode(coding)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(ValueError, match=re.escape(name)):
        read(path)


@pytest.mark.parametrize("name", ["labels.jsonl", "documents.jsonl"])
def test_half_of_a_surrogate_pair_is_refused_with_its_line(tmp_path, name):
    read, content = BEYOND[name]
    lines = content.splitlines()
    (tmp_path / name).write_text("\n".join([*lines[:2], lines[2].replace("fine", "\\ud800"), *lines[3:]]) + "\n")
    with pytest.raises(ValueError, match=rf"{name}.*line 3|line 3 of .*{name}"):
        read(tmp_path / name)


def test_a_mark_inside_a_file_is_text(tmp_path):
    """Only the beginning of a file has a mark; elsewhere the character is a part of what is written."""
    path = tmp_path / "w.tsv"
    lines = [f"{word}\tx\n".encode() for word in WORDS]
    path.write_bytes(b"".join([lines[0], codecs.BOM_UTF8 + lines[1], *lines[2:]]))
    found = pairs.load(str(path), 0)
    marked = 0
    for split in found.splits:
        sources = found.take(split, torch.arange(found.count(split))).source
        marked += sum(row[:3].tolist() == list(codecs.BOM_UTF8) for row in sources)
    assert marked == 1


def test_bytes_are_taken_as_they_are(tmp_path):
    """``text:FILE`` is made of bytes, and not of characters."""
    path = tmp_path / "book.txt"
    path.write_bytes(codecs.BOM_UTF8 + noise(9000).tobytes())
    found = text.load(str(path), 100)
    assert found.splits["train"][:3].tolist() == list(codecs.BOM_UTF8)
