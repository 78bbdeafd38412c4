"""mLSTM as the equations of the paper, and at the limits of its exponential gates."""

import math

import pytest
import torch
import torch.nn.functional as F

import longspan
from support.mechanisms import DIM, HEADS, B, N, fill, seeded
from support.tensors import merge_heads, split_heads


def recurrence(module, x):
    """Eq. 19 to 27, with sums that are not stabilized."""
    q, k, v = (split_heads(layer(x)) for layer in (module.query, module.key, module.value))
    a, b = module.write(x), module.forget(x)
    if module.cap:
        a, b = (module.cap * torch.tanh(t / module.cap) for t in (a, b))
    i, f = a.exp().mT, torch.sigmoid(b).mT
    memory, weight, out = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1]).double(), torch.zeros_like(k[:, :, 0]), []
    for t in range(x.shape[1]):
        memory = f[:, :, t, None, None] * memory + i[:, :, t, None, None] * k[:, :, t, :, None] * v[:, :, t, None, :]
        weight = f[:, :, t, None] * weight + i[:, :, t, None] * k[:, :, t]
        read = q[:, :, t] / math.sqrt(q.shape[-1])
        below = (weight * read).sum(-1).abs().clamp(min=1.0)
        out.append((memory * read[..., None]).sum(-2) / below[..., None])
    h = torch.stack(out, 2)
    if module.norm == "rms":
        h = F.rms_norm(h, (h.shape[-1],), module.head_norm.weight, 1e-5)
    if module.norm == "group":
        h = F.layer_norm(h, (h.shape[-1],), None, None, 1e-5)
    return module.out(merge_heads(h) * torch.sigmoid(module.out_gate(x)))


@pytest.mark.whole
@pytest.mark.parametrize(
    "spec", ["mlstm", "mlstm(expand_k=0.5, cap=2.0, norm='none')", "mlstm(expand_v=1.5, norm='group')"]
)
def test_is_the_recurrence_of_the_paper_with_all_gradients(spec):
    module, x = seeded(spec)
    # Gates that open and close: the running maximum is now renewed, now decayed.
    fill(module, write__weight=2 * module.write.weight, forget__bias=torch.tensor([0.0, 2.0]))
    x = (2 * x).requires_grad_()
    leaves = [x, *module.parameters()]
    weights = torch.linspace(-1, 1, B * N * DIM, dtype=torch.float64).view(B, N, DIM)
    out = [module(x)[0], recurrence(module, x)]
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad((y * weights).sum(), leaves) for y in out]
    for got, expected in zip(*grads, strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_large_gates_stay_finite():
    module, x = seeded("mlstm(norm='none')")
    small = module(x)[0]
    fill(module, write__bias=800.0)  # e^800 overflows
    y, state = module(x, module.init_state(B))
    assert y.isfinite().all()
    assert state.sums.isfinite().all()
    assert not torch.allclose(y, small)
    fill(module, write__bias=-800.0)
    assert module(x)[0].abs().max() < 1e-30


def test_closed_input_gates_keep_the_gradient_of_the_forget_gates():
    module, x = seeded("mlstm(norm='none')")
    fill(module, write__weight=0.0, forget__weight=0.0, forget__bias=2.0)
    y = module(x)[0]
    # All input gates are 1, so the maximum decays from m_0 = 0 on until the next key: it is always 0.
    (got,) = torch.autograd.grad(y[:, -1].square().sum(), module.forget.bias)
    (expected,) = torch.autograd.grad(recurrence(module, x)[:, -1].square().sum(), module.forget.bias)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)
    fill(module, write__bias=-5.0)
    (got,) = torch.autograd.grad(module(x)[0][:, -1].square().sum(), module.forget.bias)
    (expected,) = torch.autograd.grad(recurrence(module, x)[:, -1].square().sum(), module.forget.bias)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)


def test_long_rows_lose_no_precision():
    torch.manual_seed(0)
    module = longspan.build("mlstm(norm='none')", DIM, HEADS)
    x = torch.randn(1, 3000, DIM)
    fill(module, forget__bias=-3.0)  # sums of log gates reach -9000
    y = module(x)[0]
    expected = module.double()(x[:, -40:].double())[0]
    torch.testing.assert_close(y[:, -10:].double(), expected[:, -10:], rtol=1e-4, atol=1e-5)


def test_initialization():
    module, _ = seeded("mlstm", 32, 4)
    torch.testing.assert_close(module.forget.bias.detach(), torch.tensor([3.0, 4.0, 5.0, 6.0], dtype=torch.float64))
    assert not module.write.bias.any()
