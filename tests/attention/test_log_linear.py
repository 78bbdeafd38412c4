"""Log-linear attention on the gates of Mamba-2 as the sum over pairs."""

import pytest
import torch
import torch.nn.functional as F

from support.mechanisms import fill, seeded, state_space


@pytest.mark.whole
@pytest.mark.parametrize(("levels", "key_heads", "heads"), [(15, 1, 2), (3, 2, 4)])
def test_is_the_sum_over_pairs(levels, key_heads, heads):
    module, u = seeded(f"log_linear(levels={levels}, channels=5, key_heads={key_heads})", 8, heads)
    fill(module, scale=torch.linspace(0.5, 1.5, 16), skip=torch.linspace(-1, 2, heads))
    fill(module, level_scale=torch.linspace(-2, 2, heads * levels).view(heads, levels))
    weight = F.softplus(module.level(u).unflatten(-1, (heads, levels)) * module.level_scale)

    def level(i, j):
        return weight[:, i, :, min((i ^ j).bit_length(), levels - 1)]

    torch.testing.assert_close(module(u)[0], state_space(module, u, level))
