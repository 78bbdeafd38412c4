"""Connectionist temporal classification: loss, greedy decoding, and prefix beam search."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLANK = 0
# Tokens after which a beam does not revise a label. Without a language model, later tokens do not affect it.
LAG = 15


def loss(logits: Tensor, tokens: Tensor, targets: Sequence[Sequence[int]]) -> Tensor:
    """The CTC loss: mean nats per label.

    The probability of a target is the sum over all its alignments with repetitions and blanks (class 0).

    Args:
        logits: (B, N, C).
        tokens: (B,) number of real tokens in each row.
        targets: B sequences of labels.

    Returns:
        The loss, ().

    Raises:
        ValueError: for a target that does not fit its row; it needs a token per label, and one more between equal ones.

    References:
        Graves et al. 2006, sections 3 and 4.
    """
    for row, target in enumerate(targets):
        needed = room(target)
        if needed > int(tokens[row]):
            raise ValueError(
                f"row {row} has {int(tokens[row])} tokens, but its {len(target)} labels need {needed}; use fewer "
                "frames per token, or leave out such utterances"
            )
    sizes = torch.tensor([len(target) for target in targets])
    flat = torch.tensor([label for target in targets for label in target], dtype=torch.long)
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    nats = F.ctc_loss(scores, flat.to(logits.device), tokens.cpu(), sizes, blank=BLANK, reduction="sum")
    return nats / max(len(flat), 1)


def room(target: Sequence[int]) -> int:
    """The smallest number of tokens that a target needs.

    >>> room([3, 3, 1])
    4
    """
    return len(target) + sum(a == b for a, b in itertools.pairwise(target))


class Greedy:
    """Greedy decoding: the most likely class of each token, without repetitions and blanks, a few tokens at a time.

    >>> greedy = Greedy()
    >>> greedy.feed(torch.eye(3)[[1, 1, 0, 1]]), greedy.feed(torch.eye(3)[[1, 2]])
    ([1, 1], [2])
    """

    def __init__(self) -> None:
        self.last = BLANK

    def feed(self, scores: Tensor) -> list[int]:
        """Read scores (N, C) of the next tokens; return the new labels."""
        found = []
        for label in scores.argmax(-1).tolist():
            if label not in (BLANK, self.last):
                found.append(label)
            self.last = label
        return found

    def finish(self) -> list[int]:
        """The labels not returned yet: none."""
        return []


class Ends(NamedTuple):
    """The state of a prefix."""

    blank: float  # log-probability of its alignments that end in a blank
    label: float  # log-probability of those that end in its last label
    heard: tuple[int, ...]  # the token at which each of its labels appeared


class PrefixBeam:
    """Prefix beam search: the most likely label sequences, summed over alignments.

    >>> beam = PrefixBeam(2)
    >>> beam.feed(torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log())
    []
    >>> [(labels, round(math.exp(score), 2)) for labels, score in beam.best()]
    [((1,), 0.64), ((), 0.36)]

    The result is exact if there are as many beams as prefixes. Labels common to all prefixes are returned and dropped.
    Labels of the best prefix that appeared ``LAG`` tokens ago are returned, too, and prefixes without them are dropped.
    So the delay and the memory of a stream are bounded. ``best`` has the labels that were not returned yet.

    Raises ValueError for ``beams`` < 1.

    References:
        Graves 2012, section 7.5.3, as a beam; Hannun et al. 2014 (1408.2873), algorithm 1, without a language model.
    """

    def __init__(self, beams: int):
        if beams < 1:
            raise ValueError(f"beams={beams} must be at least 1")
        self.beams, self.tokens = beams, 0
        # The last returned label is kept, to detect its repetition.
        self.emitted = 0
        self.prefixes = {(): Ends(0.0, -math.inf, ())}

    def feed(self, scores: Tensor) -> list[int]:
        """Read log-probabilities (N, C) of the next tokens; return the labels that are decided now."""
        found = []
        for row in scores.tolist():
            self._step(row)
            found += self._decided()
        return found + self._agreed()

    def finish(self) -> list[int]:
        """The labels of the best prefix that were not returned yet."""
        return list(self.best()[0][0])

    def best(self) -> list[tuple[tuple[int, ...], float]]:
        """(labels, log-probability) of each prefix, the best first."""
        return [(prefix[self.emitted :], _add(ends.blank, ends.label)) for prefix, ends in self.prefixes.items()]

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
                    # The same label again is a repetition, unless a blank came between.
                    more = (blank if label == last else total) + row[label]
                    new[longer] = before._replace(label=_add(before.label, more))
        kept = sorted(new, key=lambda prefix: -_add(new[prefix].blank, new[prefix].label))[: self.beams]
        self.prefixes = {prefix: new[prefix] for prefix in kept}
        self.tokens += 1

    def _decided(self) -> list[int]:
        """The labels of the best prefix that are older than ``LAG``; drop prefixes without them."""
        best = next(iter(self.prefixes))
        old = [i for i, token in enumerate(self.prefixes[best].heard) if self.tokens - token > LAG]
        known = max(len(old), self.emitted)
        found, self.emitted = best[self.emitted : known], known
        self.prefixes = {prefix: ends for prefix, ends in self.prefixes.items() if prefix[:known] == best[:known]}
        self._forget()
        return list(found)

    def _agreed(self) -> list[int]:
        """The labels that begin all prefixes."""
        first, *others = self.prefixes
        same = min(map(len, self.prefixes))
        for prefix in others:
            same = next((i for i in range(same) if prefix[i] != first[i]), same)
        found, self.emitted = first[self.emitted : same], same
        self._forget()
        return list(found)

    def _forget(self) -> None:
        """Drop all returned labels but the last."""
        gone = max(self.emitted - 1, 0)
        self.emitted -= gone
        self.prefixes = {
            prefix[gone:]: ends._replace(heard=ends.heard[gone:]) for prefix, ends in self.prefixes.items()
        }


def _add(a: float, b: float) -> float:
    """log(exp a + exp b)."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
