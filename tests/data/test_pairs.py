"""Pairs: lines of a file as sources and targets, splits that follow from the sources, padding and its masks."""

import datetime
import gzip
import hashlib
import itertools
import json
import lzma
import re

import pytest
import torch

from longspan import data
from longspan.data import generated, pairs

WORDS = ["".join(word) for word in itertools.product("abcd", repeat=3)]
LINES = [f"{word}\t{word[::-1]}{len(word)}" for word in WORDS]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "words.tsv"
    path.write_text("\n".join(LINES) + "\n")
    return path


def rows(found, split):
    """The pairs of a split as text, read token by token."""
    batch = found.take(split, torch.arange(found.count(split)))
    for source, real, target, kept in zip(*batch, strict=True):
        tokens = target[kept].tolist()
        assert tokens.pop() == found.stop
        yield bytes(source[real].tolist()).decode(), bytes(tokens).decode()


def test_a_file_is_all_there_once_and_in_order(file):
    found = data.load(f"pairs:{file}")
    assert (found.vocab, found.stop, found.length, found.unit, found.grid) == (257, 256, 5, "token", ())
    split = {split: list(rows(found, split)) for split in ("train", "validation", "test")}
    lines = [tuple(line.split("\t")) for line in LINES]
    assert sorted(pair for part in split.values() for pair in part) == sorted(lines)
    for part in split.values():
        assert part == [line for line in lines if line in part]
    assert found.checksum == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_split_is_a_function_of_the_source_alone(file):
    before = {split: {one for one, _ in rows(data.load(f"pairs:{file}"), split)} for split in ("validation", "test")}
    more = [*(f"{i}\tx" for i in range(50)), *reversed(LINES), *(f"{word}\tagain" for word in WORDS)]
    file.write_text("\n".join(more))
    found = data.load(f"pairs:{file}")
    for split, sources in before.items():
        now = [one for one, _ in rows(found, split)]
        assert {one for one in now if one in WORDS} == sources
        assert all(now.count(one) == 2 for one in sources)


@pytest.mark.parametrize(("name", "pack"), [("w.tsv.gz", gzip.compress), ("w.tsv.xz", lzma.compress)])
def test_packed_files_are_the_same(file, name, pack):
    (file.parent / name).write_bytes(pack(file.read_bytes()))
    one, other = data.load(f"pairs:{file}"), data.load(f"pairs:{file.parent / name}")
    assert one.checksum == other.checksum
    assert list(rows(one, "train")) == list(rows(other, "train"))


def test_lines_may_end_as_in_windows_and_targets_may_be_empty(file):
    file.write_bytes("\r\n".join([*LINES, "é\t"]).encode())
    found = data.load(f"pairs:{file}")
    every = [pair for split in found.splits for pair in rows(found, split)]
    assert ("é", "") in every
    assert len(every) == 65


def test_numbers_as_lines_of_json(tmp_path):
    path = tmp_path / "numbers.jsonl"
    path.write_text("\n".join(json.dumps({"source": [i, 300], "target": [300 - i]}) for i in range(100)))
    found = data.load(f"pairs:{path}")
    assert (found.vocab, found.stop, found.length) == (302, 301, 2)
    batch = found.take("train", torch.arange(found.count("train")))
    assert torch.equal(batch.source[:, 0] + batch.target[:, 0], torch.full((found.count("train"),), 300))
    assert (batch.target[:, 1] == 301).all()


def test_padding_is_on_the_right_and_masked(file):
    file.write_text("\n".join([*LINES, *(f"{'x' * n}\t{'y' * (20 - n)}" for n in range(1, 20))]))
    found = data.load(f"pairs:{file}")
    batch = found.take("train", torch.arange(found.count("train")))
    for tokens, mask in ((batch.source, batch.source_mask), (batch.target, batch.mask)):
        assert (mask.int().diff(dim=1) <= 0).all()
        assert mask.any(0).all()
        assert (tokens[~mask] == 0).all()
    few = found.take("train", torch.tensor([0, 3]))
    assert few.source.shape == (2, 3)


class TestGenerated:
    def test_every_date_is_what_its_words_say(self):
        """By what stands in the text, read in another way than it was written."""
        forms = set()
        for text, iso in generated.dates():
            date, low = datetime.date.fromisoformat(iso), text.lower()
            assert generated.FIRST <= date <= generated.LAST
            if named := re.search("|".join(m[:3].lower() for m in generated.MONTHS), low.replace("second", "")):
                assert date.strftime("%b").lower() == named[0]
            if named := re.match("mon|tue|wed|thu|fri|sat|sun", low):
                assert date.strftime("%a").lower() == named[0]
            digits = re.findall(r"\d+", text)
            years = [d for d in digits if len(d) == 4]
            assert not years or years == [str(date.year)]
            match re.split(r"([./])", text):
                case [day, ".", month, ".", _]:
                    assert (int(day), int(month)) == (date.day, date.month)
                case [month, "/", day, "/", _] if len(month) < 4:
                    assert (int(day), int(month)) == (date.day, date.month)
                case [_, "/", month, "/", day]:
                    assert (int(day), int(month)) == (date.day, date.month)
            if text.isdigit():
                assert text == iso.replace("-", "")
            forms.add(re.sub(r"\d+", "9", re.sub("[a-z]+", "a", low)))
        assert len(forms) >= len(generated.FORMS)

    def test_days_have_their_ordinals(self):
        said = [generated._ordinal(day) for day in (1, 12, 20, 21, 30, 31)]
        assert said == ["first", "twelfth", "twentieth", "twenty-first", "thirtieth", "thirty-first"]
        said = [f"{day}{generated._ending(day)}" for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30)]
        assert said == "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 30th".split()

    @pytest.mark.parametrize("task", generated.TASKS)
    def test_they_never_change(self, task):
        torch.manual_seed(99)
        found = data.load(f"pairs:{task}")
        assert sum(found.count(split) for split in found.splits) == generated.COUNT
        assert found.checksum == CHECKSUMS[task]

    def test_another_seed_gives_others(self):
        for task in (generated.dates, generated.reverse):
            assert list(task(0, 5)) == list(task(0, 9))[:5]
            assert list(task(0, 5)) != list(task(1, 5))


CHECKSUMS = {
    "dates": "2297f5b73df17a140b71f1dcd672ca48489580397fdb96e6db982df6b248750a",
    "reverse": "3dc898de4e8baa9ce15a93ce619c48428a9a237a18c1cd583e6a7e1b13de5104",
}


def test_words_and_tokens():
    assert pairs.encode("3 1  4", True) == [3, 1, 4]
    assert pairs.decode([3, 1], True) == "3 1"
    assert pairs.decode(pairs.encode("é", False), False) == "é"
    with pytest.raises(ValueError, match="not 'x'"):
        pairs.encode("3 x", True)
