"""The preconditioned delta rule against its recurrence in float64."""

import pytest
import torch
import torch.nn.functional as F

from longspan.ops.gated import preconditioned


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
