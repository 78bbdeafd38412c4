"""Mixture of block attention: which blocks win a tie."""

import torch

from support.sparse import build, data


def test_equal_means_take_the_first_blocks():
    """Whatever number of blocks there is: queries are 0, so that only the rule for ties decides."""
    module, x = build("moba(block=2, top=2)"), data(29)
    torch.nn.init.zeros_(module.query.weight)
    torch.nn.init.zeros_(module.query.bias)
    y = module(x)[0]
    for n in (5, 8, 27):
        torch.testing.assert_close(module(x[:, :n])[0], y[:, :n], rtol=0, atol=1e-14)
    v = module.value(x)
    torch.testing.assert_close(y[:, 27], module.out((v[:, :2].sum(1) + v[:, 26:28].sum(1)) / 4))
