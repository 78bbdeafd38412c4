"""What is left of the systems of Mesa after a number of steps."""

import itertools

import torch
import torch.nn.functional as F

import longspan
from longspan.ops.gated import mesa

D, E = 5, 4


def drawn(n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(2, 2, n, D), dim=-1) for _ in range(2))
    beta, log_decay, ridge = draw(2, 2, n).sigmoid(), F.logsigmoid(draw(2, 2, n) + 2), 0.25 + draw(2, D).exp()
    given = q, k, draw(2, 2, n, E), beta, log_decay, ridge, draw(2, 2, D, D + E)
    return [t.to(dtype).requires_grad_() for t in given]


def sums(state):
    """A state whose matrix is symmetric and positive."""
    first, values = state.split([D, E], -1)
    return torch.cat([first @ first.mT, values], -1)


def call(given, steps=3 * D):
    q, k, v, beta, log_decay, ridge, state = given
    return mesa.attend(q, k, v, beta=beta, log_decay=log_decay, ridge=ridge, steps=steps, state=sums(state))


def test_the_residual_is_that_of_the_last_step():
    """It falls with the steps, and a query along an eigenvector takes one."""
    given = drawn(29)
    found = [call(given, steps=steps)[1].max() for steps in (1, 2, 3, 4, 5)]
    assert all(later < before for before, later in itertools.pairwise(found))
    assert found[-1] < 1e-12 < found[-2]
    _, k, v, beta, log_decay, _, state = given
    one = torch.ones(2, D, dtype=torch.float64)
    assert (
        call((k[:, :, :1], k[:, :, :1], v[:, :, :1], beta[:, :, :1], log_decay[:, :, :1], one, state * 0), 1)[1].max()
        < 1e-15
    )


def test_masked_tokens_have_no_residual():
    module = longspan.build("mesa(steps=1)", 8, 2).double()
    x = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(9)[None] < 6
    found = module.residual(x, mask=mask)
    assert not found[..., 6:].any()
    torch.testing.assert_close(found[..., :6], module.residual(x[:, :6]))
