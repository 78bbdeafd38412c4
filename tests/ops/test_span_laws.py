"""Laws on the forms in torch with short spans and small groups of rows, as they are planned for a CPU and for a GPU."""

from functools import partial

import pytest
import torch

from longspan.ops import linear
from longspan.ops.gated import chunks
from ops.laws import collected

FORMS, PACKAGES = ("torch",), ("gated", "linear")
globals().update(
    collected(
        FORMS,
        "test_values_and_gradients_equal_the_definition",
        "test_masked_tokens_are_not_read",
        "test_derivatives_and_their_derivatives_equal_numerical_ones",
        "test_strong_decay_keeps_the_digits_of_what_remains",
    )
)


@pytest.fixture(autouse=True, params=["one group of rows", "row by row", "as for a GPU"])
def for_gpu(request, monkeypatch):
    causal, gpu = linear.causally, request.param == "as for a GPU"
    settings = [(causal, "CHUNK", 7), (causal, "WIDE", 8), (causal, "SPAN", 21), (causal, "LEAST", 2)]
    settings += [(causal, "MOST", 100), (chunks, "SPAN", 64 * 4), (chunks, "TOGETHER", 2)]
    settings += [(chunks, "chunked", partial(chunks.chunked, chunk=8))]
    # Of four bytes, two heads and what a token of the widths (5, 3) takes.
    tokens = 21 if request.param == "row by row" else 10_000
    settings += [(causal, "BUDGET", tokens * 4 * 2 * (2 * 5 + 2 * 3 + 7))]
    settings += [(module, "_on_gpu", lambda x: gpu) for module in (causal, chunks)]
    for module, name, value in settings:
        monkeypatch.setattr(module, name, value)
    return gpu


def test_sequences_of_these_laws_have_several_spans(for_gpu):
    q = torch.zeros(2, 2, 139, 5)
    assert len(linear.causally._plan(q, q[..., :3], None, 7)[1]) > 2
    parts = chunks.Chunked(q, q, q, None, None, q[:, :, :5], None, None, 1.0, chunk=8)
    assert len(parts.places) > 1
    assert parts.form == ("pairs" if for_gpu else "loop")
