"""CTC: the loss and the decoders against every alignment written out, and error rates."""

import itertools
import math
import re

import pytest
import torch

from longspan.speech import ctc, labels
from longspan.speech.ctc import Greedy, PrefixBeam
from longspan_lab.speech import errors


def collapsed(alignment: tuple[int, ...]) -> tuple[int, ...]:
    """Repetitions and blanks taken out."""
    return tuple(label for label, _ in itertools.groupby(alignment) if label)


def every(scores: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The probability of each labeling: the sum over all alignments, one by one."""
    found: dict[tuple[int, ...], float] = {}
    rows = scores.exp().tolist()
    for alignment in itertools.product(range(scores.shape[1]), repeat=len(rows)):
        probability = math.prod(row[label] for row, label in zip(rows, alignment, strict=True))
        key = collapsed(alignment)
        found[key] = found.get(key, 0.0) + probability
    return found


def drawn(tokens: int, classes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(tokens, classes, generator=generator, dtype=torch.float64)).log_softmax(-1)


@pytest.mark.parametrize(("tokens", "classes"), [(1, 2), (5, 3), (6, 2), (4, 4)])
def test_the_loss_sums_over_all_alignments(tokens, classes):
    scores = drawn(tokens, classes, 0)
    for target, probability in every(scores).items():
        found = ctc.loss(scores[None], torch.tensor([tokens]), [list(target)])
        assert found.item() * max(len(target), 1) == pytest.approx(-math.log(probability), rel=1e-5)


def test_the_loss_is_per_label_and_reads_real_tokens_alone():
    first, second = drawn(5, 3, 1), drawn(3, 3, 2)
    batch = torch.zeros(2, 5, 3, dtype=torch.float64)
    batch[0], batch[1, :3] = first, second
    batch[1, 3:] = torch.randn(2, 3)
    found = ctc.loss(batch, torch.tensor([5, 3]), [[1, 2], [2]])
    nats = -math.log(every(first)[1, 2]) - math.log(every(second)[2,])
    assert found.item() == pytest.approx(nats / 3, rel=1e-5)


def test_a_target_without_room_is_refused():
    with pytest.raises(ValueError, match="row 1 has 2 tokens, .* 2 labels need 3"):
        ctc.loss(torch.randn(2, 5, 3), torch.tensor([5, 2]), [[1], [2, 2]])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("tokens", "classes"), [(1, 3), (5, 3), (7, 2), (4, 4)])
def test_a_beam_as_wide_as_all_prefixes_is_exact(tokens, classes, seed):
    scores = drawn(tokens, classes, seed)
    beam = PrefixBeam(10_000)
    found = beam.feed(scores)
    assert found == []  # the empty prefix is followed, and agrees with none
    found, true = dict(beam.best()), every(scores)
    assert {key for key, score in found.items() if score > -math.inf} == set(true)
    for key, probability in true.items():
        assert math.exp(found[key]) == pytest.approx(probability, rel=1e-9)
    assert tuple(beam.finish()) == max(true, key=lambda key: true[key])


def test_a_beam_sums_what_the_likeliest_path_does_not():
    """Two tokens: blank twice is the likeliest path, and the label the likeliest labeling."""
    scores = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert Greedy().feed(scores) == []
    beam = PrefixBeam(3)
    assert beam.feed(scores) + beam.finish() == [1]


def test_greedy_takes_out_repetitions_and_blanks():
    path = [0, 1, 1, 0, 1, 2, 2, 0, 0, 1]
    assert Greedy().feed(torch.eye(3)[path]) == [1, 1, 2, 1]


@pytest.mark.parametrize("make", [Greedy, lambda: PrefixBeam(1), lambda: PrefixBeam(4)], ids=["greedy", "1", "4"])
def test_any_cut_tells_the_same_labels(make):
    scores = drawn(200, 4, 3)
    whole = make()
    expected = whole.feed(scores) + whole.finish()
    assert len(expected) > 20
    for size in (1, 3, 50):
        decoder = make()
        found = [label for piece in scores.split(size) for label in decoder.feed(piece)]
        assert found + decoder.finish() == expected


def test_a_beam_forgets_what_is_settled_and_waits_for_nothing_long():
    """An early doubt that nothing resolves: the more likely label is returned, and the memory does not grow."""
    beam = PrefixBeam(4)
    doubt, sure = torch.tensor([[1e-9, 0.6, 0.4]]).log(), torch.tensor([[1.0, 1e-9, 1e-9], [1e-9, 1.0, 1e-9]]).log()
    assert beam.feed(doubt) == []
    found = []
    for turn in range(100):
        found += beam.feed(sure)
        tokens = 2 * turn + 3
        assert bool(found) == (tokens > ctc.LAG)
        assert 1 + turn + 1 - len(found) <= ctc.LAG // 2 + 2
        assert max(len(prefix) for prefix in beam.prefixes) <= ctc.LAG
    assert found + beam.finish() == [1] * 101
    with pytest.raises(ValueError, match="beams=0 must be at least 1"):
        PrefixBeam(0)


# Error rates


def test_edits_are_the_fewest_there_are():
    """Against the recursion of the definition."""

    def fewest(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return fewest(a[1:], b[1:])
        return 1 + min(fewest(a[1:], b), fewest(a, b[1:]), fewest(a[1:], b[1:]))

    words = ["", *("".join(word) for n in (1, 2, 3, 4) for word in itertools.product("ab", repeat=n))]
    for a in words:
        for b in words[::3]:
            assert errors.edits(a, b) == fewest(a, b)


def test_a_rate_is_over_all_that_is_true():
    assert errors.rate([("ab", "abc"), ("xyz", "z")]) == 3 / 4
    with pytest.raises(ValueError, match="an error rate requires"):
        errors.rate([("a", "")])


# Labels


def test_words_are_encoded_and_spelt_again():
    classes = labels.encode(["ab", "b"], "| a b")
    assert classes == [2, 3, 1, 3]
    assert labels.words(classes, "| a b") == ["ab", "b"]
    assert labels.encode([["one"], ["two"]], "one two") == [1, 2]
    with pytest.raises(ValueError, match=re.escape("unknown label 'c'; known: a, b, |")):
        labels.encode(["abc"], "| a b")


@pytest.mark.parametrize("text", ["| a b", "a b"])
def test_a_speller_tells_what_its_words_are_in_the_end(text):
    classes = [1, 2, 2, 1, 1, 2, 1] if text == "a b" else [1, 2, 2, 1, 1, 3, 2, 1, 3]
    for size in (1, 2, 9):
        speller, found = labels.Speller(text), []
        for begin in range(0, len(classes), size):
            found += speller.feed(classes[begin : begin + size])
        assert found + speller.finish() == labels.words(classes, text)


def test_a_word_is_returned_when_it_ends():
    speller = labels.Speller("| a b")
    assert [speller.feed([label]) for label in (2, 3, 1, 2)] == [[], [], ["ab"], []]
    assert speller.finish() == ["a"]
    assert speller.finish() == []
