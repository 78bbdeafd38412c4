"""Which calls the Triton kernels serve."""

import pytest
import torch

import longspan
from longspan.ops import triton


def test_tensors_on_the_cpu_do_not_choose_triton():
    q = torch.randn(1, 2, 8, 16)
    with longspan.ops.watch() as seen:
        longspan.linear_attention(q, q, q)
    assert "triton" not in [use.backend for use in seen]


def test_a_forced_call_that_triton_cannot_serve_raises():
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")
    with longspan.backend("triton"), pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        longspan.linear_attention(q, q, q)


def test_an_older_triton_serves_no_call(monkeypatch):
    monkeypatch.setattr(triton, "_installed", lambda: (3, 2))
    assert triton.missing() == "they need Triton 3.3, which torch 2.7 brings, not 3.2"
