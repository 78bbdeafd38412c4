"""Proteins: amino acids as tokens, in splits that share no family.

| name | proteins |
|---|---|
| ``protein:FILE`` | those of a FASTA file: plain, .gz or .xz |
| ``protein:FOLDER`` | those of the one FASTA file (.fasta, .faa or .fa, packed or not) in a folder |
| ``synthetic`` | families of a few mutated copies, generated from the seed |

Families are inferred from the sequences. Two proteins are in one family if one shares at least a hundredth of its words
of six residues with the other, and at least two words; families are the connected components. A hash of the smallest
sequence of a family determines its split: one of ten values is validation, one is test.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longspan._utils import atomic_io as files
from longspan._utils.cache_dirs import expanded
from longspan._utils.spec import known
from longspan.data.download import read

# Twenty amino acids, then what stands for several or for rare ones: B, Z, X; O, U.
RESIDUES = "ACDEFGHIKLMNPQRSTVWYBOUXZ"
STANDARD = 20
WORD = 6
# How the names of FASTA files end, where a folder is looked through; each also with .gz or .xz.
SUFFIXES = (".fasta", ".faa", ".fa")
# Part of its words that a protein shares with one of its family.
SHARED = 0.01
PARTS = 10
SYNTHETIC_FAMILIES = 40


@dataclass(frozen=True, eq=False)
class Proteins:
    """Sequences of amino acids, each with the family that it was found to be of."""

    name: str
    sequences: tuple[Tensor, ...] = field(repr=False)
    """uint8 tokens, places in RESIDUES"""
    families: Tensor = field(repr=False)
    """(count,) int64: the number of the family of each"""
    checksum: str
    """sha256 (hex) of the file, unpacked; "" for what a seed makes"""

    @cached_property
    def splits(self) -> dict[str, Tensor]:
        """train, validation and test: (count,) int64 numbers of sequences. Raises ValueError where one is empty."""
        smallest: dict[int, bytes] = {}
        for family, sequence in zip(self.families.tolist(), self.sequences, strict=True):
            word = sequence.numpy().tobytes()
            smallest[family] = min(smallest.get(family, word), word)
        parts = {family: int.from_bytes(hashlib.sha256(word).digest()[:8]) % PARTS for family, word in smallest.items()}
        part = torch.tensor([parts[family] for family in self.families.tolist()])
        found = {"train": part > 1, "validation": part == 0, "test": part == 1}
        empty = [split for split, chosen in found.items() if not chosen.any()]
        if empty:
            raise ValueError(
                f"{self.name} has {len(self.sequences)} proteins of {len(smallest)} families, none of which is in "
                f"{empty[0]}; add more proteins"
            )
        return {split: chosen.nonzero()[:, 0] for split, chosen in found.items()}


def load(name: str, seed: int = 0) -> Proteins:
    """The proteins of one of the names in the table above; ``seed`` makes the synthetic ones.

    Raises ValueError for an unknown name, without a file, for a missing file, for one that is no FASTA of proteins, and
    for a folder that has not just one.
    """
    kind, source = parsed(name)
    if kind == "synthetic":
        return synthetic(seed)
    path = _inside(expanded(source))
    content = read(path)
    sequences = tuple(fasta(content, str(path)))
    return Proteins(name, sequences, families(sequences), hashlib.sha256(content).hexdigest())


def parsed(name: str) -> tuple[str, str]:
    """Kind and path of a name in the table above. Raises ValueError for another, and without a file."""
    kind, colon, source = name.partition(":")
    known(kind, {"protein": 0, "synthetic": 0}, "protein data")
    if kind == "synthetic" and colon:
        raise ValueError(f"data={name}: synthetic proteins are made from the seed, and come from no file")
    if kind == "protein" and not source:
        raise ValueError(
            "data=protein needs a file, protein:FILE.fasta or .fasta.gz: UniProt's own changes with its releases, so "
            "none is downloaded. Proteome UP000000625 of uniprot.org is that of E. coli K-12, of 4.4 thousand proteins"
        )
    return kind, source


def _inside(path: Path) -> Path:
    """The FASTA file of a folder; a path that is no folder as it is."""
    if not path.is_dir():
        return path
    ends = tuple(suffix + packed for suffix in SUFFIXES for packed in ("", ".gz", ".xz"))
    files = sorted(one.name for one in path.iterdir() if one.name.endswith(ends))
    if len(files) != 1:
        there = ", ".join(files) or "none"
        raise ValueError(f"{path} must have one FASTA file ({', '.join(SUFFIXES)}, also .gz or .xz), but has: {there}")
    return path / files[0]


def fasta(content: bytes, where: str) -> list[Tensor]:
    """The sequences of a FASTA file as tokens, those of fewer than WORD residues left out.

    Raises ValueError for content that does not begin with ">", for letters that stand for no amino acid, and where no
    sequence is left.
    """
    content = files.without_mark(content)
    if not content.startswith(b">"):
        raise ValueError(f"{where} is not a FASTA file: it begins with {content[:20]!r}, not with '>'")
    table = np.full(256, 255, np.uint8)
    table[np.frombuffer(RESIDUES.encode(), np.uint8)] = np.arange(len(RESIDUES))
    found = []
    for entry in content[1:].split(b"\n>"):
        title, _, letters = entry.partition(b"\n")
        # A stop at the end is no residue.
        letters = b"".join(letters.split()).upper().rstrip(b"*")
        tokens = table[np.frombuffer(letters, np.uint8)]
        if (wrong := tokens == 255).any():
            letter = chr(letters[int(wrong.argmax())])
            called = title.decode("utf-8", errors="replace")[:30]
            raise ValueError(f"{where}: {called} has {letter!r}, which is not an amino acid; known: {RESIDUES}")
        if len(tokens) >= WORD:
            found.append(torch.from_numpy(tokens))
    if not found:
        raise ValueError(f"{where} has no protein of at least {WORD} residues")
    return found


def words(sequence: Tensor) -> np.ndarray:
    """The different words of WORD residues in a sequence, as sorted numbers."""
    windows = sequence.numpy().astype(np.int64)
    size = len(windows) - WORD + 1
    number = sum(windows[i : size + i] * len(RESIDUES) ** (WORD - 1 - i) for i in range(WORD))
    return np.unique(number)


def shares(sequences: tuple[Tensor, ...]) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, of which the one with fewer words shares at least SHARED of them with the other.

    At least two, so that a single word makes no family of short ones.
    """
    each = [words(sequence) for sequence in sequences]
    counts = np.array([len(one) for one in each])
    owners = np.repeat(np.arange(len(each)), counts)
    flat = np.concatenate(each)
    order = np.argsort(flat, kind="stable")
    flat, owners = flat[order], owners[order]
    found = []
    for i, one in enumerate(each):
        begins, ends = np.searchsorted(flat, one), np.searchsorted(flat, one, side="right")
        others = np.concatenate([owners[begin:end] for begin, end in zip(begins, ends, strict=True)])
        common = np.bincount(others, minlength=len(each))
        enough = np.maximum(2, SHARED * np.minimum(counts, counts[i]))
        found += [(i, int(j)) for j in np.flatnonzero(common >= enough) if j > i]
    return found


def families(sequences: tuple[Tensor, ...]) -> Tensor:
    """(count,) int64: equal numbers for proteins that ``shares`` connects, directly or by way of others."""
    above = list(range(len(sequences)))

    def first(i: int) -> int:
        while above[i] != i:
            above[i] = above[above[i]]
            i = above[i]
        return i

    for i, j in shares(sequences):
        one, two = sorted((first(i), first(j)))
        above[two] = one
    return torch.tensor([first(i) for i in range(len(sequences))]).unique(return_inverse=True)[1]


def synthetic(seed: int) -> Proteins:
    """Families of one to four: random chains in which a residue depends on the one before, and copies with a tenth
    of the residues drawn anew.
    """
    random = np.random.default_rng(seed)
    steps = random.dirichlet(np.full(STANDARD, 0.3), STANDARD)
    found = []
    for _ in range(SYNTHETIC_FAMILIES):
        chain = [int(random.integers(STANDARD))]
        for _ in range(int(random.integers(20, 60))):
            chain.append(int(random.choice(STANDARD, p=steps[chain[-1]])))
        for _ in range(int(random.integers(1, 5))):
            copy = np.array(chain, np.uint8)
            drawn = random.random(len(copy)) < 0.1
            copy[drawn] = random.integers(0, STANDARD, int(drawn.sum()))
            found.append(torch.from_numpy(copy))
    sequences = tuple(found)
    return Proteins("synthetic", sequences, families(sequences), "")
