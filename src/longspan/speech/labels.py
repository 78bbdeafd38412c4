"""Labels of a transcriber (letters, phonemes or words) as numbers and as text."""

from collections.abc import Sequence

from .._utils.spec import known

BOUNDARY = "|"  # the label between two words, where labels are parts of them
LETTERS = f"{BOUNDARY} a b c d e f g h i j k l m n o p q r s t u v w x y z"
UNITS = ("letters", "phonemes", "words")


def names(labels: str) -> tuple[str, ...]:
    """The labels of a config; label i is class i + 1.

    >>> names("| a b")
    ('|', 'a', 'b')
    """
    return tuple(labels.split())


def encode(words: Sequence[Sequence[str]], labels: str) -> list[int]:
    """Encode words, each a sequence of labels, as classes; with a boundary between words if ``labels`` has one.

    Raises ValueError for an unknown label.
    """
    number = {name: i for i, name in enumerate(names(labels), 1)}
    found: list[int] = []
    for i, word in enumerate(words):
        if i and BOUNDARY in number:
            found.append(number[BOUNDARY])
        found += (number[known(one, number, "label")] for one in word)
    return found


def words(classes: Sequence[int], labels: str) -> list[str]:
    """Decode classes as words: letters are concatenated, phonemes joined by hyphens.

    >>> words([2, 3, 1, 2], "| a b"), words([2, 3, 1, 2], "| AH B"), words([2, 1], "one two")
    (['ab', 'a'], ['AH-B', 'AH'], ['two', 'one'])
    """
    found = names(labels)
    if BOUNDARY not in found:
        return [found[i - 1] for i in classes]
    glue = "-" if any(len(name) > 1 for name in found) else ""
    groups: list[list[str]] = [[]]
    for i in classes:
        if found[i - 1] == BOUNDARY:
            groups.append([])
        else:
            groups[-1].append(found[i - 1])
    return [glue.join(group) for group in groups if group]


class Speller:
    """Streaming version of ``words``: reads a few classes at a time and returns complete words."""

    def __init__(self, labels: str):
        self.labels, self.left = labels, []
        self.between = [i for i, name in enumerate(names(labels), 1) if name == BOUNDARY]

    def feed(self, classes: Sequence[int]) -> list[str]:
        """The words that are complete now: those before the last boundary, or all if there are no boundaries."""
        self.left += classes
        if not self.between:
            return self.finish()
        ends = [i for i, label in enumerate(self.left) if label in self.between]
        cut = ends[-1] + 1 if ends else 0
        done, self.left = self.left[:cut], self.left[cut:]
        return words(done, self.labels)

    def finish(self) -> list[str]:
        """The remaining words."""
        done, self.left = self.left, []
        return words(done, self.labels)
