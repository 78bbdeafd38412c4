"""Proteins: letters as tokens, families from shared words, and splits that no family is on both sides of."""

import gzip
import hashlib
import re

import numpy as np
import pytest
import torch

from data_files import shared
from longspan_lab.data import proteins, series
from longspan_lab.data.proteins import RESIDUES, SHARED, WORD, Proteins

FASTA = b">one first\nMKV\nLAAGI\n>two\nmkvlwwgu*\n>short\nMKV\n>three\nACDEFGHIKLMNPQRSTVWY\n"


def drawn(count: int, seed: int, length: int = 60) -> list[torch.Tensor]:
    """Random sequences, which are of no family."""
    random = np.random.default_rng(seed)
    return [torch.from_numpy(random.integers(0, 20, length, dtype=np.uint8)) for _ in range(count)]


def letters(sequence: torch.Tensor) -> str:
    return "".join(RESIDUES[i] for i in sequence.tolist())


def test_letters_are_tokens_and_entries_are_proteins(tmp_path):
    (tmp_path / "some.fasta").write_bytes(FASTA)
    (tmp_path / "some.fasta.gz").write_bytes(gzip.compress(FASTA))
    plain, packed = (proteins.load(f"protein:{tmp_path / name}") for name in ("some.fasta", "some.fasta.gz"))
    # The short one has no whole word.
    assert [letters(one) for one in plain.sequences] == ["MKVLAAGI", "MKVLWWGU", "ACDEFGHIKLMNPQRSTVWY"]
    assert plain.checksum == packed.checksum == hashlib.sha256(FASTA).hexdigest()
    assert all(map(torch.equal, plain.sequences, packed.sequences))


def test_a_folder_is_its_one_fasta_file(tmp_path):
    message = r"must have one FASTA file \(\.fasta, \.faa, \.fa, also \.gz or \.xz\), but has: "
    (tmp_path / "README.md").write_text("no proteins")
    with pytest.raises(ValueError, match=message + "none"):
        proteins.load(f"protein:{tmp_path}")
    (tmp_path / "some.faa.gz").write_bytes(gzip.compress(FASTA))
    found, given = (proteins.load(f"protein:{path}") for path in (tmp_path, tmp_path / "some.faa.gz"))
    assert found.checksum == given.checksum == hashlib.sha256(FASTA).hexdigest()
    assert all(map(torch.equal, found.sequences, given.sequences))
    (tmp_path / "more.fasta").write_bytes(FASTA)
    with pytest.raises(ValueError, match=message + "more.fasta, some.faa.gz"):
        proteins.load(f"protein:{tmp_path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MKVLAAGI\n", "some.fasta is not a FASTA file: it begins with b'MKVLAAGI"),
        (b"", "some.fasta is not a FASTA file: it begins with b''"),
        (b">one\nMKVLJAGI\n", "one has 'J', which is not an amino acid; known: ACDEFGHIKLMNPQRSTVWYBOUXZ"),
        (b">one\nMK*VLAAGI\n", "one has '*'"),
        (b">one\nMKV\n", f"some.fasta has no protein of at least {WORD} residues"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    (tmp_path / "some.fasta").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        proteins.load(f"protein:{tmp_path / 'some.fasta'}")


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (proteins.load, "protein", "data=protein needs a file, protein:FILE.fasta or .fasta.gz: UniProt's own changes"),
        (proteins.load, "protein:", "data=protein needs a file"),
        (proteins.load, "proteins", "unknown protein data 'proteins' (did you mean 'protein'?)"),
        (proteins.load, "synthetic:x", "data=synthetic:x: synthetic proteins are made from the seed"),
        (proteins.load, "protein:nowhere.fasta", "nowhere.fasta"),
        (series.load, "etth", "unknown series data 'etth' (did you mean 'ett'?); known: ett, synthetic"),
        (series.load, "ett:", "data=ett:: write ett, ett:FILE, ett:FOLDER or synthetic"),
        (series.load, "synthetic:x", "data=synthetic:x: write ett, ett:FILE, ett:FOLDER or synthetic"),
        (series.load, "ett:nowhere.csv", "nowhere.csv"),
    ],
)
def test_names_that_are_none(load, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(name)


def shared_words(one: torch.Tensor, two: torch.Tensor) -> tuple[int, int]:
    """How many different words both have, and how many the one with fewer has: from the letters."""
    a, b = ({letters(s)[i : i + WORD] for i in range(len(s) - WORD + 1)} for s in (one, two))
    return len(a & b), min(len(a), len(b))


def test_pairs_share_words_as_the_letters_say():
    random = np.random.default_rng(0)
    found = drawn(12, 1)
    for i in range(0, 12, 2):
        # The next one has a piece of this one, each longer than the one before.
        length, at = WORD + i // 2, int(random.integers(0, 40))
        found[i + 1][at : at + length] = found[i][5 : 5 + length]
    expected = []
    for i in range(len(found)):
        for j in range(i + 1, len(found)):
            both, fewer = shared_words(found[i], found[j])
            if both >= max(2, SHARED * fewer):
                expected.append((i, j))
    assert proteins.shares(tuple(found)) == expected
    # One word is none; two are enough for so short ones.
    assert expected == [(i, i + 1) for i in range(2, 12, 2)]


def test_a_word_that_comes_again_counts_once():
    one, two = (half + sequence % 10 for half, sequence in zip((0, 10), drawn(2, 5), strict=True))
    word = torch.tensor([0, 1, 2, 0, 3, 4], dtype=torch.uint8)
    # So far apart that no word but this is in both twice.
    one[0:6], one[30:36], two[10:16], two[40:46] = word, word, word, word
    assert shared_words(one, two)[0] == 1
    assert proteins.shares((one, two)) == []


def test_long_proteins_need_a_hundredth_of_their_words():
    # Of ten kinds of residues each, so that they share nothing by chance.
    one, two = (half + sequence % 10 for half, sequence in zip((0, 10), drawn(2, 2, 1000), strict=True))
    two[100 : 100 + WORD + 7] = one[300 : 300 + WORD + 7]
    assert shared_words(one, two)[0] == 8
    assert proteins.shares((one, two)) == []
    two[500 : 500 + WORD + 1] = one[700 : 700 + WORD + 1]
    assert proteins.shares((one, two)) == [(0, 1)]


def test_families_are_what_is_connected():
    a, b, c, d, e = drawn(5, 3)
    # a - b - c hang together, though a and c share nothing; d and e are alone.
    b[:20], c[-20:] = a[:20], b[-20:]
    assert proteins.shares((a, d, c, e, b)) == [(0, 4), (2, 4)]
    assert proteins.families((a, d, c, e, b)).tolist() == [0, 1, 0, 2, 0]


def test_no_family_is_in_two_splits_whatever_the_order():
    found = proteins.load("synthetic", 0)
    again = [found.sequences[i] for i in torch.randperm(len(found.sequences), generator=torch.Generator()).tolist()]
    other = Proteins("synthetic", tuple(again), proteins.families(tuple(again)), "")
    for data in (found, other):
        splits = {split: set(chosen.tolist()) for split, chosen in data.splits.items()}
        assert sorted(i for part in splits.values() for i in part) == list(range(len(data.sequences)))
        where = {i: split for split, part in splits.items() for i in part}
        assert all(where[i] == where[j] for i, j in proteins.shares(data.sequences))
        assert len(data.families.unique()) < len(data.sequences)
    one, two = (
        {s: sorted(letters(d.sequences[i]) for i in c.tolist()) for s, c in d.splits.items()} for d in (found, other)
    )
    assert one == two


def test_too_few_families_are_refused():
    found = tuple(drawn(1, 4))
    with pytest.raises(ValueError, match="has 1 proteins of 1 families"):
        _ = Proteins("few", found, proteins.families(found), "").splits


def test_synthetic_proteins_follow_from_the_seed():
    one, two, other = (proteins.load("synthetic", seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one.sequences, two.sequences))
    assert [len(s) for s in one.sequences] != [len(s) for s in other.sequences]


def test_no_test_protein_of_the_bacterium_is_a_relative_of_one_in_training():
    found = proteins.load(f"protein:{shared('protein') / 'ecoli_k12_UP000000625.fasta.gz'}")
    assert len(found.sequences) == 3991
    where = torch.empty(3991, dtype=torch.long)
    for number, chosen in enumerate(found.splits.values()):
        where[chosen] = number
    pairs = torch.tensor(proteins.shares(found.sequences))
    assert len(pairs) > 1000
    assert torch.equal(where[pairs[:, 0]], where[pairs[:, 1]])
    counts = where.bincount().tolist()
    assert counts[0] > 0.75 * 3991
    assert min(counts) > 0.05 * 3991
