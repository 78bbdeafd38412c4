"""Which calls the Triton kernels serve."""

import pytest
import torch

import longspan


def test_tensors_on_the_cpu_do_not_choose_triton():
    q = torch.randn(1, 2, 8, 16)
    with longspan.ops.watch() as seen:
        longspan.linear_attention(q, q, q)
    assert "triton" not in [use.backend for use in seen]


def test_a_forced_call_that_triton_cannot_serve_raises():
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64, device="cuda" if torch.cuda.is_available() else "cpu")
    with longspan.backend("triton"), pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        longspan.linear_attention(q, q, q)
