"""Learned spans against the definition: the soft mask, what trimming leaves out, and how a span moves."""

import math
from typing import Any

import pytest
import torch

import longspan
from longspan.attention.adaptive_span import AdaptiveSpan
from support.sparse import heads_of
from support.tensors import data, same

N = 17
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 12, [False] + [True] * 16])


def build(options, fractions=(0.27, 0.43)) -> Any:
    torch.manual_seed(0)
    module = longspan.build(f"adaptive_span({options})", 6, 2).double()
    if not module.dynamic:
        module.fraction.data = torch.tensor(fractions, dtype=torch.float64)
    return module


def definition(module, x):
    """m e^s / sum m e^s, each written out."""
    q, k, v = heads_of(module, x, "query", "key", "value")
    s = (q @ k.mT * 3**-0.5).exp()
    if module.dynamic:
        z = module.span * (x @ module.extent.weight.mT + module.extent.bias).sigmoid().mT[..., None]
    else:
        z = module.span * module.fraction[:, None, None]
    distance = torch.arange(N)[:, None] - torch.arange(N)
    m = ((module.ramp + z - distance) / module.ramp).clamp(0, 1).tril()
    p = m * s / (m * s).sum(-1, keepdim=True)
    return module.out((p @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("options", ["span=7, ramp=3", "span=19, ramp=4", "span=5, ramp=3, dynamic=True"])
def test_it_equals_the_definition(options):
    module, x = build(options), data(2, N, 6).requires_grad_()
    same(module(x)[0], definition(module, x), (x, *module.parameters()))


@pytest.mark.parametrize(("fractions", "keys"), [((0.0, 0.0), 3), ((0.2, 0.55), 9), ((0.5, 0.1), 8), ((1.0, 0.3), 13)])
def test_trimmed_keys_have_weight_zero(monkeypatch, fractions, keys):
    """ceil(z + R) keys are all that the widest head sees: fewer would change the outputs, and more do not."""
    module, x = build("span=10, ramp=3", fractions), data(2, N, 6)
    assert module.keys_seen() == keys == math.ceil(10 * max(fractions) + 3)
    assert module.init_state(2).keys.shape[2] == keys
    record = {}
    trimmed, grads = module(x, record=record)[0], []
    for seen in (keys, N):
        monkeypatch.setattr(AdaptiveSpan, "keys_seen", lambda self, seen=seen: seen)
        y = module(x)[0]
        torch.testing.assert_close(y, trimmed, rtol=1e-13, atol=1e-13)
        grads.append(torch.autograd.grad(y.square().sum(), [*module.parameters()]))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    last = record["matrix"][:, :, N - 1]
    assert (last[..., N - keys] > 0).any(1).all()
    assert not last[..., : N - keys].any()


def test_the_penalty_is_the_mean_span_of_real_tokens():
    module, x, record = build("span=10, ramp=4", (0.25, 0.5)), data(2, N, 6), {}
    module(x, record=record, mask=MASK)
    assert record["penalty"].item() == pytest.approx(3.75)
    (grad,) = torch.autograd.grad(record["penalty"], module.fraction)
    assert grad.tolist() == pytest.approx([5.0, 5.0])
    module = build("span=10, ramp=4, dynamic=True")
    module(x, record=record, mask=MASK)
    expected = 10 * (x @ module.extent.weight.mT + module.extent.bias).sigmoid()
    torch.testing.assert_close(module.spans(x), expected.mT)
    torch.testing.assert_close(record["penalty"], expected[MASK].mean())
    module(x, record=record, mask=torch.zeros_like(MASK))
    assert record["penalty"] == 0


@pytest.mark.parametrize(("outside", "border"), [(-0.3, 0.0), (1.3, 1.0)])
def test_a_fraction_outside_its_range_counts_as_the_border(outside, border):
    """Its gradient is that of the border, of either sign, until a projection moves it there."""
    x, upstream = data(2, N, 6), data(2, N, 6, seed=1)
    module, inside = build("span=6, ramp=4", (outside, outside)), build("span=6, ramp=4", (border, border))
    found, expected = module(x)[0], inside(x)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for sign in (1, -1):
        (grad,) = torch.autograd.grad((sign * module.spans(x)).sum(), module.fraction)
        assert (grad == sign * 6 * 2 * N).all()
        grads = [
            torch.autograd.grad((sign * y * upstream).sum(), one.fraction, retain_graph=True)[0]
            for y, one in ((found, module), (expected, inside))
        ]
        torch.testing.assert_close(*grads, rtol=0, atol=0)
    module.project()
    assert module.fraction.tolist() == [border, border]
    build("span=6, ramp=4, dynamic=True").project()


def test_a_state_serves_while_the_spans_fit():
    module, x = build("span=10, ramp=3", (0.5, 0.2)), data(2, N, 6)
    with torch.no_grad():
        _, state = module(x[:, :9], module.init_state(2))
        module.fraction[0] = 0.1
        torch.testing.assert_close(module(x[:, 9:], state)[0].isfinite().all(), torch.tensor(True))
        module.fraction[0] = 0.9
        with pytest.raises(ValueError, match="8 keys.* 12;"):
            module(x[:, 9:], state)
        _, state = module(x[:, :9], module.init_state(2))
        torch.testing.assert_close(module(x[:, 9:], state)[0], module(x)[0][:, 9:], rtol=1e-10, atol=1e-10)
