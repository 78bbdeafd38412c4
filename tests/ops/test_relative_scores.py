"""Relative positions: the shift against a direct gather, what it leaves in the triangle, blocks against all pairs."""

import pytest
import torch

import longspan
from longspan.ops import rows
from longspan.ops.softmax import relative
from support.tensors import data


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 7), (5, 5), (5, 11), (4, 9)])
def test_the_shift_is_a_gather_where_distances_are_not_negative(n, m):
    """Entry (i, j) is the product of query i with the vector of its distance to key j."""
    position, r = data(2, 3, n, 4), data(3, m, 4, seed=1)  # r of the distances m - 1 ... 0
    found = relative.shift(position @ r.mT, m)
    assert found.shape == (2, 3, n, m)
    for i in range(n):
        for j in range(m - n + i + 1):
            distance = m - n + i - j
            expected = (position[:, :, i] * r[:, m - 1 - distance]).sum(-1)
            torch.testing.assert_close(found[:, :, i, j], expected, rtol=1e-12, atol=1e-12)


def test_the_upper_right_triangle_is_of_other_rows():
    """What must be masked: with the vectors of distances from 0 on alone, keys behind a query get the next row's."""
    products = data(1, 1, 3, 3)
    found = relative.shift(products, 3)[0, 0]
    assert found[0, 2] == products[0, 0, 1, 0]
    assert found[0, 1] == 0  # the column that the shift has put in
    assert found[1, 2] == 0


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (4, 9), (5, 2)])
def test_with_distances_of_both_signs_nothing_is_left_over(n, m):
    """n + m - 1 of them: from that of the last query and the first key down to that of the first and the last."""
    position, r = data(2, 3, n, 4), data(3, n + m - 1, 4, seed=1)
    found = relative.shift(position @ r.mT, m)
    index = (n - 1) - torch.arange(n)[:, None] + torch.arange(m)
    expected = torch.einsum("bhnd,hnmd->bhnm", position, r[:, index])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ahead", [0, 3, 90])
@pytest.mark.parametrize("back", [1, 5, 90])
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_are_the_definition(back, ahead, groups, monkeypatch):
    """Over several blocks, after keys that came before, with gradients of everything."""
    monkeypatch.setattr(relative, "FEWEST", 7)
    monkeypatch.setattr(relative, "MOST", 16)
    n, m = 53, 53 if ahead else 61
    operands = [
        data(2, 2, n, 4),
        data(2, 2, n, 4, seed=1),
        data(2, groups, m, 4, seed=2),
        data(2, groups, m, 3, seed=3),
    ]
    vectors = data(groups, 400, 4, seed=4)
    operands = [t.requires_grad_() for t in (*operands, vectors)]

    def table(top, bottom):
        return operands[4][:, 200 - top : 201 - bottom]

    at = torch.arange(n).expand(2, -1)
    far = (at + m - n).clamp(max=back) * (torch.arange(2)[:, None] + at % 3 > 0)
    near = (n - 1 - at).clamp(max=ahead) if ahead else None
    found = []
    for name in ("torch", "reference"):
        with longspan.backend(name):
            given = relative.Operands(*operands[:4], table, far, near, 0.5)
            y = relative.attend(given, back=back, ahead=ahead)
        found.append([y, *torch.autograd.grad(y.square().sum(), operands)])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


def test_a_long_sequence_takes_memory_for_its_windows_alone():
    """The largest tensor of a training step has a block of queries with its keys, not N x N numbers."""
    n, back = 4001, 32
    q = data(1, 1, n, 2).requires_grad_()
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.untyped_storage().nbytes() for t in (out,) if isinstance(t, torch.Tensor))
            return out

    far = torch.arange(n)[None].clamp(max=back)
    with Sizes():
        given = relative.Operands(q, q, q, q, lambda a, b: data(1, a - b + 1, 2), far, None, 1.0)
        y = relative.attend(given, back=back)
        y.sum().backward()
    assert max(sizes) < 8 * n * 16


def test_the_last_real_tokens_are_kept_and_share_no_memory():
    """A view would keep all tokens alive."""
    x, before, mask = data(3, 7, 2), data(3, 4, 2, seed=1), torch.arange(7) < torch.tensor([[7], [2], [0]])
    kept = rows.last_valid(torch.cat([before, x], 1), mask, 4)
    for row in range(3):
        torch.testing.assert_close(kept[row], torch.cat([before[row], x[row, mask[row]]])[-4:])
    tokens = data(2, 9, 3)
    assert rows.last_valid(tokens, None, 4).data_ptr() not in range(
        tokens.data_ptr(), tokens.data_ptr() + tokens.nbytes
    )
