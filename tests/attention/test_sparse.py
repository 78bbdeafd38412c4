"""Attention under any pattern: properties of all mechanisms with a pattern."""

import pytest
import torch

import longspan
from support.sparse import N, build, data


@pytest.mark.parametrize("law", ["causal", "parallel_is_recurrent", "padding", "bidirectional"])
def test_alternating_layers_keep_the_laws(law):
    """The conformance checks build examples as first layers."""
    stack = "sparse_transformer(block=7, integration='interleaved'); axial(width=7)"
    row = longspan.testing.check(
        law, stack + "; sparse_transformer(block=7, integration='interleaved'); axial(width=7)"
    )
    assert row.status == "passed", row.note


@pytest.mark.full
@pytest.mark.parametrize("masked", [False, True])
def test_packed_rows_stay_separate_when_compiled(masked):
    module, x = build("local(window=5)"), data()
    given = {"segments": torch.tensor([[0] * 11 + [1] * 26, [0] * 37])}
    given |= {"mask": torch.arange(N) % 5 > 0 * torch.ones(2, 1)} if masked else {}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: module(x, **given)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x, **given)[0], rtol=0, atol=1e-12)
