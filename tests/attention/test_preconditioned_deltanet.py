"""The preconditioned delta rule, worked by hand, and against its recurrence in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from longspan.ops.gated import preconditioned
from support.hand import plain
from support.mechanisms import Bare, fill, tokens

S = 1 / (1 + math.exp(-1.0))  # silu(1): what every projected one becomes


def test_by_hand():
    module = plain("preconditioned_deltanet(span=2.0, expand_v=1.0, convolution=0)", 2)
    # All four gates are 1/2: sigmoid(0), and e^(-softplus(0)).
    fill(module, rate__weight=0.0, weight__weight=0.0, decay__weight=0.0, fade__weight=0.0)
    fill(module, a_log=0.0, fade_log=0.0, dt_bias=0.0, fade_bias=0.0, center=0.0)
    module.norm = Bare()

    def scale(a):
        u = math.log(a + 1e-6)
        return 2 ** (-u / (1 + abs(u)))

    # k = (1, 0) twice: A_1 = 1/2, A_2 = 3/4. The first write is M_1 s / 2, of which half is left.
    first = scale(0.5) * S / 2
    second = first / 2 + scale(0.75) / 2 * (S - first / 2)
    found = module(tokens((1, 0), (1, 0)))[0]
    # A key's length is sqrt(s^2 + 1e-6).
    torch.testing.assert_close(found, tokens((first, 0), (second, 0)) / math.sqrt(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 29, 70])
def test_equals_its_recurrence(n):
    heads, keys, values = 2, 5, 6
    generator = torch.Generator().manual_seed(n)

    def draw(*shape):
        return torch.randn(2, heads, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(n, keys), dim=-1) for _ in range(2))
    beta, weight, g, f = draw(n).sigmoid(), draw(n).sigmoid(), -draw(n).abs(), -draw(n).abs()
    given = [q, k, draw(n, values), beta, g, weight, f, draw(n)[0, :, 0].clone(), draw(keys, values), draw(keys).abs()]
    given = [t.requires_grad_() for t in given]
    q, k, v, beta, g, weight, f, center, sums, curvature = given
    gates = {"beta": beta, "log_decay": g, "weight": weight.mT, "log_fade": f.mT, "center": center}
    o, after = preconditioned.attend(q, k, v, **gates, span=1.5, state=(sums, curvature))
    rows = []
    for t in range(n):
        key = k[:, :, t]
        curvature = f[:, :, t, None].exp() * curvature + weight[:, :, t, None] * key**2
        u = (curvature + 1e-6).log() - center[:, None]
        write = beta[:, :, t, None] * key * 1.5 ** (-u / (1 + u.abs()))
        sums = g[:, :, t, None, None].exp() * sums
        sums = sums + write[..., None] * (v[:, :, t] - (key[:, :, None] @ sums)[:, :, 0])[:, :, None]
        rows.append((q[:, :, t, None] @ sums)[:, :, 0] / keys**0.5)
    right = torch.stack(rows, 2), sums, curvature

    def gradients(found):
        return torch.autograd.grad(sum(t.sin().sum() for t in found), given)

    torch.testing.assert_close((o, *after), right, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients((o, *after)), gradients(right), rtol=1e-9, atol=1e-9)
