"""What the laws of numbers take for rounding: changes of the exact answer, element by element, and nothing else."""

import pytest
import torch
from torch import nn

from longspan import testing
from longspan.testing import Broken, Gauge
from longspan.testing.rounding import Question

X = torch.tensor([[1.0, 1.0], [1.0, -1.0 + 1e-5]], dtype=torch.float64)  # sums of 2, and of 1e-5


def ratios(module, x):
    """A good and a nearly singular quotient, and their sum."""
    quotients = module(x) / x.sum(-1, keepdim=True)
    return [quotients, quotients.sum((0, 1))[None]]


@pytest.fixture
def module():
    linear = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 0.5]]))
    return linear


def judged(module, errors, function=ratios, sums=0):
    question = Question(function, module, X, sums=sums)
    found = [e + torch.tensor(d, dtype=torch.float64) for e, d in zip(question.answer, errors, strict=True)]
    gauge = Gauge()
    question.close(gauge, found, "ratios", 1e-6, torch.float32)
    return gauge


def size(module):
    """The singular quotient."""
    return ratios(module, X)[0][1].item()


def test_an_error_that_roundings_explain_passes(module):
    assert size(module) == pytest.approx(5e4, rel=1e-4)
    gauge = judged(module, ([[0.0], [1e-2 * size(module)]], [0.0]))
    assert gauge.tolerance == 1e-6
    assert gauge.excused == pytest.approx(1e-2)


def test_an_error_within_the_tolerance_needs_no_excuse(module):
    assert judged(module, ([[0.0], [5e-7 * size(module)]], [0.0])).excused == 0.0


def test_a_report_says_what_was_excused():
    report = testing.Report(
        "x", (testing.Row("oracle", "passed", 1e-6, 1e-5, "The law.", 3e-4), testing.Row("a", "passed", 0, 0, ""))
    )
    assert str(report).splitlines()[1].endswith("The law. Beyond: 3.0e-04, where the data's roundings are magnified.")
    assert str(report).count("Beyond") == 1


@pytest.mark.parametrize("error", [0.2, float("nan"), float("inf")])
def test_one_that_they_do_not_explain_fails(module, error):
    with pytest.raises(Broken, match="ratios: differ by"):
        judged(module, ([[0.0], [error * size(module)]], [0.0]))


def test_the_same_error_of_a_good_element_fails(module):
    with pytest.raises(Broken):
        judged(module, ([[1e-2 * size(module)], [0.0]], [0.0]))


def test_a_change_to_something_not_finite_grants_nothing(module):
    def singular(_, x):
        return [torch.where(x == X, x, torch.inf)]

    with pytest.raises(Broken):
        judged(module, ([[1e-3, 0.0], [0.0, 0.0]],), singular)


def test_sums_in_which_large_terms_cancel(module):
    """q - q + 1000 does not move with q, and has the roundings of its terms all the same."""

    def cancelling(module, x):
        quotients = ratios(module, x)[0]
        return [quotients, (quotients - quotients).sum()[None] + 1e3]

    errors = ([[0.0], [0.0]], [1.0])
    judged(module, errors, cancelling, sums=1)
    with pytest.raises(Broken):
        judged(module, errors, cancelling)
    with pytest.raises(Broken):
        judged(module, ([[0.0], [0.0]], [1e3]), cancelling, sums=1)


def test_the_largest_change_of_all_neighbors_counts(module):
    calls = iter(range(100))

    def jumpy(module, x):
        return [torch.full((), 5.0 if next(calls) == 3 else 1.0, dtype=torch.float64)]

    gauge = Gauge()
    Question(jumpy, module, X).close(gauge, [torch.tensor(30.0, dtype=torch.float64)], "jumps", 1e-6, torch.float32)
    assert gauge.excused == pytest.approx(29.0)
