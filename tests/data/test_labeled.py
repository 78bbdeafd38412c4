"""Labeled texts: rows of files as bytes and classes, splits that follow from the texts, and what is refused."""

import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma

import pytest
import torch

from longspan import data
from longspan.data import generated

WORDS = ["".join(word) for word in itertools.product("abcd", repeat=3)]
ROWS = [(f'{word}\t"{word}"\n\u00fc', "good" if "a" in word else "bad") for word in WORDS]
PLAIN = [(word, "good" if "a" in word else "bad") for word in WORDS]


def jsonl(rows):
    return "".join(json.dumps({"id": 3, "text": text, "label": label}) + "\n" for text, label in rows)


def table(rows, dialect="excel-tab"):
    out = io.StringIO()
    writer = csv.writer(out, dialect)
    writer.writerows([("label", "note", "text"), *((label, "", text) for text, label in rows)])
    return out.getvalue()


def read(found, split):
    """The rows of a split, read token by token."""
    tokens, mask, labels = found.take(split, torch.arange(found.count(split)))
    return [
        (bytes(row[real].tolist()).decode(), found.labels[label])
        for row, real, label in zip(tokens, mask, labels.tolist(), strict=True)
    ]


def expected(rows, split):
    places = {0: "validation", 1: "test"}
    digests = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % 20 for text, _ in rows]
    return [row for row, digest in zip(rows, digests, strict=True) if places.get(digest, "train") == split]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda rows: jsonl(rows).encode()),
        ("a.jsonl.gz", lambda rows: gzip.compress(jsonl(rows).encode())),
        ("a.jsonl.xz", lambda rows: lzma.compress(jsonl(rows).encode())),
        ("a.tsv", lambda rows: table(rows).encode()),
        ("a.tsv.xz", lambda rows: lzma.compress(table(rows).encode("utf-8-sig"))),
        ("a.csv.gz", lambda rows: gzip.compress(table(rows, "excel").encode())),
    ],
)
def test_a_file_is_all_there_once_and_in_order(name, write, tmp_path):
    (tmp_path / name).write_bytes(write(ROWS))
    found = data.load(f"labels:{tmp_path / name}")
    assert (found.vocab, found.labels, found.unit, found.grid) == (256, ("bad", "good"), "label", ())
    assert found.length == max(len(text.encode()) for text, _ in ROWS)
    for split in ("train", "validation", "test"):
        assert read(found, split) == expected(ROWS, split) != []
        assert found.mean(split) == pytest.approx(
            sum(len(t.encode()) for t, _ in read(found, split)) / found.count(split)
        )


def test_a_long_text_is_cut_and_padding_is_masked(tmp_path):
    rows = [(word * (1 + i), label) for i, (word, label) in enumerate(PLAIN)]
    (tmp_path / "a.jsonl").write_text(jsonl(rows))
    found = data.load(f"labels:{tmp_path / 'a.jsonl'}", 10)
    assert found.length == 10
    assert read(found, "train") == [(text[:10], label) for text, label in expected(rows, "train")]
    tokens, mask, _ = found.take("train", torch.tensor([0, 40]))
    assert tokens.shape == mask.shape == (2, 10)
    assert mask.sum(1).tolist() == [len(read(found, "train")[i][0]) for i in (0, 40)]
    assert not tokens[~mask].any()


def test_a_folder_has_a_file_for_each_split(tmp_path):
    parts = {"train.tsv.gz": PLAIN[:40], "test.jsonl": PLAIN[40:50], "validation.csv": PLAIN[50:]}
    for name, rows in parts.items():
        text = jsonl(rows) if "jsonl" in name else table(rows, "excel" if "csv" in name else "excel-tab")
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    (tmp_path / "README.md").write_text("not data")
    found = data.load(f"labels:{tmp_path}")
    for name, rows in parts.items():
        assert read(found, name.partition(".")[0]) == rows
    (tmp_path / "validation.csv").unlink()
    found = data.load(f"labels:{tmp_path}")
    assert read(found, "test") == PLAIN[40:50]
    held = expected(PLAIN[:40], "validation")
    assert read(found, "validation") == held != []
    assert read(found, "train") == [row for row in PLAIN[:40] if row not in held]
    (tmp_path / "test.tsv").write_text(table(PLAIN[:3]))
    with pytest.raises(ValueError, match=r"two files for test: test.jsonl and test.tsv"):
        data.load(f"labels:{tmp_path}")
    for path in tmp_path.glob("test.*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no file for test, such as test.jsonl or .tsv.gz"):
        data.load(f"labels:{tmp_path}")


def test_classes_are_sorted_and_renumbered_by_name(tmp_path):
    rows = [(word, 10 if "a" in word else 2 if "b" in word else "x") for word in WORDS]
    (tmp_path / "a.jsonl").write_text(jsonl(rows))
    found = data.load(f"labels:{tmp_path / 'a.jsonl'}")
    assert found.labels == ("2", "10", "x")
    other = found.renumbered(["x", "unseen", "10", "2"])
    assert other.labels == ("x", "unseen", "10", "2")
    assert read(other, "test") == read(found, "test")
    with pytest.raises(ValueError, match="has the label '10'.* 2, x"):
        found.renumbered(["2", "x"])


def test_generated_texts_are_labeled_by_their_majority():
    found = data.load("labels:majority")
    for split in ("train", "validation", "test"):
        assert all(label == max("ab", key=text.count) for text, label in read(found, split))
    assert found.count("train") + found.count("validation") + found.count("test") == 4000
    assert len(found.checksum) == 64
    assert list(generated.majority()) == list(generated.majority())
