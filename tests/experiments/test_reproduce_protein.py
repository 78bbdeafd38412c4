"""Proteins: the contents of a row, the targets of a model, and what it sees."""

import math
from dataclasses import replace

import pytest
import torch

from longspan_lab.data import proteins
from longspan_lab.experiments import protein, residues
from longspan_lab.experiments.experiment import Place
from longspan_lab.experiments.protein import CAUSAL, MASKED, UNIGRAM
from longspan_lab.experiments.residues import LEVELS, MASK, START, Asked
from support.experiments import NOWHERE, unwatched


def sequences(*lengths: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, 20, (length,), generator=random, dtype=torch.uint8) for length in lengths]


@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_everything_once_and_have_little_room_left(seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 18, (97,), generator=random).tolist()
    rows = residues.packed(lengths, 17)
    assert sorted(i for row in rows for i in row) == list(range(97))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= 17
    # No two rows could have been one.
    assert sum(sorted(filled)[:2]) > 17


def test_a_row_has_its_proteins_whole_and_a_long_one_cut():
    found = sequences(5, 11, 3)
    rows = residues.rows(found, 8)
    assert rows.tokens.shape == (2, 8)
    assert rows.tokens[0].tolist() == found[1][:8].tolist()
    assert rows.tokens[1].tolist() == [*found[0].tolist(), *found[2].tolist()]
    assert rows.segments[1].tolist() == [0] * 5 + [1] * 3
    assert rows.real.all()
    short = residues.rows(found[2:], 5)
    assert short.real.tolist() == [[True] * 3 + [False] * 2]
    # What is not real is of no protein.
    assert short.segments.tolist() == [[0, 0, 0, 1, 1]]


def test_the_causal_question_is_one_behind_and_begins_anew():
    found = sequences(3, 2)
    rows = residues.rows(found, 7)
    question = residues.causal(rows)
    a, b = (one.tolist() for one in found)
    assert question.inputs[0, :5].tolist() == [START, a[0], a[1], START, b[0]]
    assert question.asked.tolist() == [[True] * 5 + [False] * 2]


def test_masks_are_drawn_as_in_bert():
    rows = residues.rows(sequences(*[50] * 400), 101)
    question = residues.masked(rows, torch.Generator().manual_seed(0))
    count = int(question.asked.sum())
    assert count / 20_000 == pytest.approx(0.15, abs=0.01)
    assert not (question.asked & ~rows.real).any()
    assert torch.equal(question.inputs[~question.asked], rows.tokens[~question.asked])
    seen, true = question.inputs[question.asked], rows.tokens[question.asked]
    assert (seen == MASK).sum() / count == pytest.approx(0.8, abs=0.03)
    # A tenth is left, and of the tenth that is drawn one of twenty is drawn again.
    assert (seen == true).sum() / count == pytest.approx(0.105, abs=0.02)
    assert seen[seen != MASK].max() < 20


def test_in_tests_every_residue_is_asked_once_and_masked():
    rows = residues.rows(sequences(*[50] * 40), 101)
    every = residues.parts(rows, torch.Generator().manual_seed(0), residues.SHARES)
    assert residues.SHARES == 7
    assert torch.equal(torch.stack([one.asked for one in every]).sum(0), rows.real.long())
    for one in every:
        assert (one.inputs[one.asked] == MASK).all()
        assert torch.equal(one.inputs[~one.asked], rows.tokens[~one.asked])
        assert one.asked.sum() / rows.real.sum() == pytest.approx(1 / 7, abs=0.03)


@pytest.mark.parametrize("task", protein.TASKS)
@pytest.mark.parametrize("name", protein.SPECS)
def test_a_model_sees_its_own_protein_alone_and_not_what_it_is_to_tell(task, name):
    """Another neighbor changes nothing; nor does another residue at a place that is asked for, or later if causal."""
    settings = replace(protein.EXPERIMENT.quick, specs=name)
    model = settings.model(task, name, 0).double()
    rows = residues.rows(sequences(9, 8), 20)
    random = torch.Generator().manual_seed(1)
    question = residues.causal(rows) if task == CAUSAL else residues.parts(rows, random, 1)[0]
    answers = protein.answers(model, rows, question)
    assert answers.shape == (1, 20, LEVELS)
    mask = question.asked
    ends = {0: slice(0, 9), 1: slice(9, 17)}
    for other, same in ((0, 1), (1, 0)):
        near = rows._replace(tokens=torch.where(rows.segments == other, (rows.tokens + 1) % 20, rows.tokens))
        again = residues.causal(near) if task == CAUSAL else Asked(near.tokens.masked_fill(mask, MASK), mask)
        changed = protein.answers(model, near, again)
        torch.testing.assert_close(changed[:, ends[same]], answers[:, ends[same]], atol=1e-9, rtol=0)
        assert not torch.allclose(changed[:, ends[other]], answers[:, ends[other]])
    if task == MASKED:
        at = int(mask[0].nonzero()[0])
        hidden = rows.tokens.clone()
        hidden[0, at] = (hidden[0, at] + 1) % 20
        same = Asked(hidden.masked_fill(mask, MASK), mask)
        assert torch.equal(same.inputs, question.inputs)
    else:
        later = rows.tokens.clone()
        later[0, 5] = (later[0, 5] + 1) % 20
        changed = protein.answers(model, rows, residues.causal(rows._replace(tokens=later)))
        torch.testing.assert_close(changed[:, :6], answers[:, :6], atol=1e-9, rtol=0)
        assert not torch.allclose(changed[:, 6:9], answers[:, 6:9])


def test_figures_are_of_the_residues_that_are_asked_for():
    rows = residues.rows(sequences(9, 8), 20)
    settings = protein.EXPERIMENT.quick
    model = settings.model(CAUSAL, "softmax", 0)
    question = residues.causal(rows)
    found = protein.tested(model, rows, [question], 1)
    with torch.no_grad():
        logits = protein.answers(model, rows, question)
    p = logits.softmax(-1).gather(-1, rows.tokens[..., None])[..., 0][rows.real].double()
    assert found["perplexity"] == pytest.approx(math.exp(-p.log().mean()), rel=1e-4)
    right = (logits.argmax(-1) == rows.tokens)[rows.real].double().mean()
    assert found["accuracy"] == pytest.approx(float(right), abs=1e-5)


def test_frequencies_are_counted_in_training():
    rows = residues.rows([torch.tensor([0, 0, 0, 1], dtype=torch.uint8)], 5)
    counts = torch.zeros(LEVELS, dtype=torch.long)
    counts[0], counts[1] = 74, 0
    found = protein.unigram(counts, rows, [residues.causal(rows)])
    # 75, 1, and one more for each of the others: 99 in all.
    assert found["perplexity"] == pytest.approx((75 / 99) ** -0.75 * (1 / 99) ** -0.25, abs=1e-4)
    assert found["accuracy"] == 0.75


def test_the_frequencies_are_those_of_training(monkeypatch):
    seen = []
    monkeypatch.setattr(protein, "unigram", lambda counts, rows, questions: seen.append(counts) or {})
    protein.measure(protein.EXPERIMENT.quick, {"task": CAUSAL, "model": UNIGRAM}, NOWHERE)
    found = proteins.load("synthetic", 0)
    train = torch.cat([found.sequences[i] for i in found.splits["train"].tolist()]).long()
    assert all(torch.equal(counts, torch.bincount(train, minlength=LEVELS)) for counts in seen)


def test_a_model_that_learns_beats_the_frequencies(tmp_path):
    """The synthetic proteins' residues depend on the one before, which one block can learn."""
    sizes: dict = {"dim": 16, "steps": 60, "batch": 8, "rate": 1e-2, "every": 60}
    settings, place = replace(protein.EXPERIMENT.quick, specs="linear", **sizes), Place(tmp_path, unwatched)
    frequencies, learned = (
        protein.measure(settings, point, place)
        for point in ({"task": CAUSAL, "model": UNIGRAM}, {"task": CAUSAL, "model": "linear", "seed": 0})
    )
    assert frequencies["perplexity"] < LEVELS
    assert learned["perplexity"] < 0.9 * frequencies["perplexity"]
    assert learned["accuracy"] > frequencies["accuracy"]


def test_all_models_are_asked_the_same_in_tests(monkeypatch):
    seen = []
    monkeypatch.setattr(protein, "learn", lambda *_: [])
    monkeypatch.setattr(protein, "tested", lambda model, rows, questions, batch: seen.append(questions) or {})
    monkeypatch.setattr(protein, "unigram", lambda counts, rows, questions: seen.append(questions) or {})
    for name in ("softmax", "performer(map='relu')"):
        protein.measure(protein.EXPERIMENT.quick, {"task": MASKED, "model": name, "seed": 0}, NOWHERE)
    protein.measure(protein.EXPERIMENT.quick, {"task": MASKED, "model": UNIGRAM}, NOWHERE)
    one, two, _, frequencies = seen
    for other in (two, frequencies):
        assert all(torch.equal(a.asked, b.asked) for a, b in zip(one, other, strict=True))


def test_models_share_their_sizes():
    settings = protein.EXPERIMENT.quick
    sizes = {
        sum(p.numel() for p in settings.model(CAUSAL, name, 0).parameters())
        for name in ("softmax", "performer(map='relu')", "performer", "linear")
    }
    assert len(sizes) == 1
