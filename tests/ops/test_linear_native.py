"""The step of linear attention by its native kernel, and kernels that cannot be compiled."""

import pytest
import torch

import longspan
from longspan import backend
from longspan.ops import linear
from longspan.ops.linear.native import step as linear_step
from longspan.ops.native import build
from longspan.ops.native.call import available

needs_kernels = pytest.mark.skipif(not available("linear"), reason="no native kernels here")


def operands(b, h, d, e, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (scale * torch.randn(b, h, 1, d, generator=generator) for _ in range(2))
    return q, k, torch.randn(b, h, 1, e, generator=generator), torch.rand(b, h, d, e + 1, generator=generator)


def step(q, k, v, state, *, feature_map="elu", donate=False):
    return linear.named(q, k, v, causal=True, feature_map=feature_map, eps=1e-6, state=state, donate=donate)


@pytest.fixture
def counted(monkeypatch):
    """How often the kernel for one token was called."""
    calls = []
    original = linear_step

    def counting(*args, **rest):
        found = original(*args, **rest)
        if found is not None:
            calls.append(1)
        return found

    monkeypatch.setitem(linear.FORMS.table, "native", linear.FORMS.table["native"]._replace(step=counting))
    return calls


@needs_kernels
class TestStep:
    @pytest.mark.parametrize("donate", [False, True])
    def test_views_are_read_as_they_are(self, donate, counted):
        q, k, v, state = operands(4, 3, 7, 5)
        expected = step(q, k, v, state)
        wide = torch.cat([k, q], -1)[..., 7:]
        turned = state.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        assert not wide.is_contiguous()
        assert not turned.is_contiguous()
        found = step(wide, k, v, turned, donate=donate)
        assert len(counted) == 2
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    @pytest.mark.parametrize(
        ("change", "causes"),
        [
            (lambda q, k, v, s: (q.requires_grad_(), k, v, s), "gradients are recorded"),
            (lambda q, k, v, s: (q, k, v, s.requires_grad_()), "gradients are recorded"),
            (lambda q, k, v, s: operands(1, 1, 1025, 1), "the head is too large"),
            (lambda q, k, v, s: operands(1, 1, 1, 1024), "the head is too large"),
        ],
    )
    def test_what_it_cannot_take_goes_to_the_kernel_for_sequences(self, change, causes, counted):
        q, k, v, state = change(*operands(2, 3, 7, 5))
        with backend("native"):
            o, after = step(q, k, v, state)
        with backend("reference"):
            wanted = step(*(t.detach().double() for t in (q, k, v, state)))
        assert not counted, causes
        torch.testing.assert_close(o.double(), wanted[0], atol=1e-5, rtol=max(1e-5, torch.finfo(q.dtype).eps))
        torch.testing.assert_close(after.double(), wanted[1], atol=1e-5, rtol=1e-5)


def _gradients(call, shapes):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    grads = torch.autograd.grad(call(*leaves).sin().sum(), leaves)
    assert not any(grad.requires_grad for grad in grads)
    return grads


@pytest.mark.parametrize(
    ("unit", "call", "shapes"),
    [
        ("linear", longspan.linear_attention, [(2, 3, 40, 8)] * 3),
        ("gated", lambda q, k, b: longspan.delta_rule(q, k / 9, q, beta=b.sigmoid()[..., 0]), [(2, 3, 40, 8)] * 3),
        ("general", lambda q, r, e: longspan.general_delta_rule(q, q, q, read=r / 9, erase=e / 9), [(2, 3, 40, 8)] * 3),
        ("convolution", lambda x, w: longspan.causal_convolution(x, w)[0], [(2, 40, 8), (8, 4)]),
        ("pattern", lambda q, k, v: longspan.sparse_attention(q, k, v, "causal"), [(2, 3, 40, 8)] * 3),
    ],
)
def test_gradients_where_the_backward_pass_could_not_be_compiled(unit, call, shapes, monkeypatch):
    if not available(unit):
        pytest.skip("no native kernels here")
    with longspan.backend("native"):
        right = _gradients(call, shapes)
        monkeypatch.setitem(build._found, f"{unit}/backward", None)
        found = _gradients(call, shapes)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
