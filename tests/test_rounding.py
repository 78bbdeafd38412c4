"""What the laws of numbers take for rounding: changes of the exact answer, element by element, and nothing else."""

import pytest
import torch
from torch import nn

from longspan.checks import Broken, Gauge, rounding

X = torch.tensor([[1.0, 1.0], [1.0, -1.0 + 1e-5]], dtype=torch.float64)  # sums of 2, and of 1e-5


def ratios(module, x):
    """One good and one nearly singular quotient, and their difference."""
    quotients = module(x) / x.sum(-1, keepdim=True)
    return [quotients, quotients.sum((0, 1))[None]]


@pytest.fixture
def question():
    module = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(module.weight)
    with torch.no_grad():
        module.weight[0, 1] = 0.5
    return ratios, module, (X,)


def judged(question, errors, sums=0):
    call, module, inputs = question
    expected = call(module, *inputs)
    found = [e.detach() + torch.tensor(d, dtype=torch.float64) for e, d in zip(expected, errors, strict=True)]
    gauge = Gauge()
    rounding.close(gauge, found, expected, "ratios", 1e-6, question, torch.float32, sums=sums)
    return gauge


def size(question):
    """The singular quotient."""
    return question[0](question[1], X)[0][1].item()


def test_an_error_that_roundings_explain_passes(question):
    assert size(question) == pytest.approx(5e4, rel=1e-4)
    assert judged(question, ([[0.0], [1e-2 * size(question)]], [0.0])).tolerance == 1e-6


@pytest.mark.parametrize("error", [0.2, float("nan"), float("inf")])
def test_one_that_they_do_not_explain_fails(question, error):
    with pytest.raises(Broken, match="ratios: differ by"):
        judged(question, ([[0.0], [error * size(question)]], [0.0]))


def test_the_same_error_of_a_good_element_fails(question):
    with pytest.raises(Broken):
        judged(question, ([[1e-2 * size(question)], [0.0]], [0.0]))


def test_a_change_to_something_not_finite_grants_nothing(question):
    def singular(module, x):
        return [torch.where(x == X, x, torch.inf)]

    with pytest.raises(Broken):
        judged((singular, question[1], (X,)), ([[1e-3, 0.0], [0.0, 0.0]],))


def test_sums_in_which_large_terms_cancel(question):
    """1000 q - 1000 q + 1 has no condition of its own, and the roundings of its terms all the same."""

    def cancelling(module, x):
        quotients = ratios(module, x)[0]
        return [quotients, (quotients - quotients).sum()[None] + 1e3]

    errors = ([[0.0], [0.0]], [1.0])
    judged((cancelling, *question[1:]), errors, sums=1)
    with pytest.raises(Broken):
        judged((cancelling, *question[1:]), errors)
    with pytest.raises(Broken):
        judged((cancelling, *question[1:]), ([[0.0], [0.0]], [1e3]), sums=1)
