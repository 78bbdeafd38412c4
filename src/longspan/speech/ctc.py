"""Connectionist temporal classification: the loss, greedy decoding, and a beam of prefixes."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLANK = 0
# Tokens after which a beam does not take a label back: without a language model, what comes that much later says
# nothing about it.
LAG = 15


def loss(logits: Tensor, tokens: Tensor, targets: Sequence[Sequence[int]]) -> Tensor:
    """Mean nats per label: logits (B,N,C), of which the first tokens (B,) of each row are real; B targets -> ().

    The probability of a target is the sum over all ways to write it with repetitions and blanks (class 0) between.
    Source: Graves et al. 2006, sections 3 and 4.

    Raises ValueError for a target that its row has no room for: a token for each label, one more between equal ones.
    """
    for row, target in enumerate(targets):
        needed = room(target)
        if needed > int(tokens[row]):
            raise ValueError(
                f"row {row} has {int(tokens[row])} tokens, and its {len(target)} labels need {needed}; give tokens "
                "fewer frames, or leave such utterances out"
            )
    sizes = torch.tensor([len(target) for target in targets])
    flat = torch.tensor([label for target in targets for label in target], dtype=torch.long)
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    nats = F.ctc_loss(scores, flat.to(logits.device), tokens.cpu(), sizes, blank=BLANK, reduction="sum")
    return nats / max(len(flat), 1)


def room(target: Sequence[int]) -> int:
    """How many tokens a target needs at least.

    >>> room([3, 3, 1])
    4
    """
    return len(target) + sum(a == b for a, b in itertools.pairwise(target))


class Greedy:
    """The likeliest class of each token, repetitions and blanks taken out, a few tokens at a time.

    >>> greedy = Greedy()
    >>> greedy.feed(torch.eye(3)[[1, 1, 0, 1]]), greedy.feed(torch.eye(3)[[1, 2]])
    ([1, 1], [2])
    """

    def __init__(self) -> None:
        self.last = BLANK

    def feed(self, scores: Tensor) -> list[int]:
        """Scores (N,C) of the next tokens -> the labels that they add."""
        found = []
        for label in scores.argmax(-1).tolist():
            if label not in (BLANK, self.last):
                found.append(label)
            self.last = label
        return found

    def finish(self) -> list[int]:
        """The labels that were not told yet: none."""
        return []


class Ends(NamedTuple):
    """What is known of a prefix."""

    blank: float  # log-probability of its alignments that end in a blank
    label: float  # and of those that end in its last label
    heard: tuple[int, ...]  # the token at which each of its labels came up


class PrefixBeam:
    """The likeliest labels, each with the probability of all its alignments, of ``beams`` prefixes followed.

    >>> beam = PrefixBeam(2)
    >>> beam.feed(torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log())
    []
    >>> [(labels, round(math.exp(score), 2)) for labels, score in beam.best()]
    [((1,), 0.64), ((), 0.36)]

    With as many beams as there are prefixes the result is exact. Labels on which all followed prefixes agree are told
    and forgotten; so are those that came up ``LAG`` tokens ago, as the likeliest prefix has them, and prefixes without
    them are not followed any more. Thus a stream waits for no word longer than that, and its memory does not grow.
    ``best`` has what comes after the labels that were told.

    Source: Graves 2012, section 7.5.3, as a beam; Hannun et al. 2014 (1408.2873), algorithm 1, no language model.
    Raises ValueError for less than one beam.
    """

    def __init__(self, beams: int):
        if beams < 1:
            raise ValueError(f"beams={beams} must be at least 1")
        self.beams, self.tokens = beams, 0
        # Of the labels that were told the last one stays: what follows decides whether it is repeated.
        self.told = 0
        self.prefixes = {(): Ends(0.0, -math.inf, ())}

    def feed(self, scores: Tensor) -> list[int]:
        """Log-probabilities (N,C) of the next tokens -> the labels that are settled by now and were not told yet."""
        found = []
        for row in scores.tolist():
            self._step(row)
            found += self._decided()
        return found + self._agreed()

    def finish(self) -> list[int]:
        """The labels of the likeliest prefix that were not told yet."""
        return list(self.best()[0][0])

    def best(self) -> list[tuple[tuple[int, ...], float]]:
        """(labels, log-probability) of each followed prefix, the likeliest first."""
        return [(prefix[self.told :], _add(ends.blank, ends.label)) for prefix, ends in self.prefixes.items()]

    def _step(self, row: list[float]) -> None:
        new: dict[tuple[int, ...], Ends] = {}
        none = -math.inf
        for prefix, (blank, other, heard) in self.prefixes.items():
            total, last = _add(blank, other), prefix[-1] if prefix else BLANK
            before = new.get(prefix)
            new[prefix] = Ends(total + row[BLANK], other + row[last] if prefix else none, heard)
            if before:
                new[prefix] = new[prefix]._replace(label=_add(new[prefix].label, before.label))
            for label in range(len(row)):
                if label != BLANK:
                    longer = (*prefix, label)
                    before = new.get(longer, Ends(none, none, (*heard, self.tokens)))
                    # After a label that ends a prefix, the same one is its repetition unless a blank came between.
                    more = (blank if label == last else total) + row[label]
                    new[longer] = before._replace(label=_add(before.label, more))
        kept = sorted(new, key=lambda prefix: -_add(new[prefix].blank, new[prefix].label))[: self.beams]
        self.prefixes = {prefix: new[prefix] for prefix in kept}
        self.tokens += 1

    def _decided(self) -> list[int]:
        """The likeliest prefix's labels that came up long ago; the others must have them, too."""
        best = next(iter(self.prefixes))
        old = [i for i, token in enumerate(self.prefixes[best].heard) if self.tokens - token > LAG]
        known = max(len(old), self.told)
        found, self.told = best[self.told : known], known
        self.prefixes = {prefix: ends for prefix, ends in self.prefixes.items() if prefix[:known] == best[:known]}
        self._forget()
        return list(found)

    def _agreed(self) -> list[int]:
        """The labels that all prefixes begin with."""
        first, *others = self.prefixes
        same = min(map(len, self.prefixes))
        for prefix in others:
            same = next((i for i in range(same) if prefix[i] != first[i]), same)
        found, self.told = first[self.told : same], same
        self._forget()
        return list(found)

    def _forget(self) -> None:
        """All labels that were told but the last."""
        gone = max(self.told - 1, 0)
        self.told -= gone
        self.prefixes = {
            prefix[gone:]: ends._replace(heard=ends.heard[gone:]) for prefix, ends in self.prefixes.items()
        }


def _add(a: float, b: float) -> float:
    """log(exp a + exp b)."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
