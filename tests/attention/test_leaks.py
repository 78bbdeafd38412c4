"""The leak of published causal forms with 1, 4 and 8 heads: docstrings and page have the measured figures."""

import re

import pytest

from longspan._utils.spec import head
from longspan.attention.base import REGISTRY
from longspan_lab.tools import leaks

(LAB,) = leaks.PAGES
SPECS = [
    "reformer(chunk=8, rounds=1, buckets=16, published=True)",
    "reformer(chunk=8, rounds=1, buckets=4, published=True)",
    "reformer(chunk=8, rounds=1, buckets=16, published=True, cross=True)",
    "routing(clusters=8, window=8, published=True)",
    "informer(factor=5, published=True)",
]


def test_every_measured_form_is_compared():
    assert sorted(SPECS) == sorted(leaks.SPECS)
    assert leaks.HEADS == (1, 4, 8)


@pytest.mark.parametrize("spec", SPECS)
def test_the_docstring_and_the_page_have_the_measured_figures(spec):
    shares = leaks.shares(spec)
    # The three figures in one sentence, with any words between them.
    figures = r"\b[^%.;]*?(?: %)?[^%.;]*?".join(rf"(?<![\d.]){re.escape(share)}" for share in shares) + " %"
    assert re.search(figures, " ".join(REGISTRY[head(spec)].__doc__.split()))
    row = f"| `{spec}` | {' | '.join(f'{share} %' for share in shares)} |"
    assert row in LAB.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "spec", ["reformer(chunk=8, rounds=1, buckets=4)", "routing(clusters=8, window=8)", "informer"]
)
def test_the_default_forms_leak_nothing_with_many_heads(spec):
    assert leaks.leak(spec, 8) == 0
