"""Retrieval: whether two passages are of one document.

Source: Tay et al. 2020 (2011.04006), section 2.2.3, where papers are matched that cite each other. Their corpus, the
ACL Anthology Network, is not free to take along; documents of any text stand in for it.
"""

import hashlib
import random

from longspan.data.text import documents_of

from .sequences import SPLITS, Arena, arena, rows

PARTS = 10  # of documents, by their sha256: one for validation, one for the test


def load(source: str, length: int, examples: int, tests: int, seed: int) -> Arena:
    """Pairs of passages of ``length`` bytes, half of them of one document, where they do not overlap.

    A document belongs to one split alone, by the sha256 of what it holds; it has two passages at least.

    Raises ValueError for a source that is no text, and where a split has fewer than two documents.
    """
    kind, _, name = source.partition(":")
    if kind != "text" or not name:
        raise ValueError(f"retrieval={source}: expected text:stdlib or text:FOLDER")
    documents = dict.fromkeys(document for document in documents_of(name) if len(document) >= 2 * length)
    counts = dict(zip(SPLITS, (examples, tests, tests), strict=True))
    splits = {}
    for split, count in counts.items():
        own = [document for document in documents if split_of(document) == split]
        if len(own) < 2:
            raise ValueError(
                f"retrieval={source} has {len(own)} documents of {2 * length} bytes or more for {split}; it needs two; "
                "choose a smaller length, or a folder with more files"
            )
        splits[split] = rows(_pairs(own, length, count, random.Random(f"{seed} {split}")), length)
    return arena(f"retrieval, {source}", 256, length, 2, splits)


def split_of(document: bytes) -> str:
    """The split of a document, a function of the document only."""
    part = int.from_bytes(hashlib.sha256(document).digest()[:8]) % PARTS
    return {0: "validation", 1: "test"}.get(part, "train")


def _pairs(documents: list[bytes], length: int, count: int, dice: random.Random) -> list[tuple[tuple[bytes, ...], int]]:
    def below(number: int) -> int:
        return int(dice.random() * number)

    def passage(document: bytes, begin: int) -> bytes:
        return document[begin : begin + length]

    found = []
    for i in range(count):
        first = below(len(documents))
        one, label = documents[first], (i + 1) % 2
        if label:
            # The rest of the document around two passages, cut into three.
            spare = len(one) - 2 * length + 1
            before, after = sorted((below(spare), below(spare)))
            pair = [passage(one, before), passage(one, after + length)]
            if below(2):
                pair.reverse()
        else:
            other = documents[(first + 1 + below(len(documents) - 1)) % len(documents)]
            pair = [passage(text, below(len(text) - length + 1)) for text in (one, other)]
        found.append((tuple(pair), label))
    return found
