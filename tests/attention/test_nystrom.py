"""Landmarks over real tokens, the pseudo-inverse row by row, and softmax attention if all tokens are landmarks."""

from typing import Any

import pytest
import torch

import longspan
from longspan.ops.compress import inverse, landmarks
from longspan.ops.tensors import merge, split
from support.tensors import close, data, same

MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
N = 11


def build(options="landmarks=3", dim=6) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"nystrom({options})", dim, 2, causal=False).double()


def matrix(module, x, sizes):
    """The definition for rows x (B,N,dim) without padding, whose segments have these sizes: (B,H,N,N)."""
    q, k = split(module.query(x), 2), split(module.key(x), 2)
    scale = q.shape[-1] ** -0.5
    few_q, few_k = (torch.stack([part.mean(2) for part in t.split(sizes, 2)], 2) for t in (q, k))
    a = (few_q @ few_k.mT * scale).softmax(-1)
    if module.iterations:
        z = a.mT / (a.sum(-2).amax(-1) * a.sum(-1).amax(-1))[..., None, None]
        one = torch.eye(len(sizes), dtype=a.dtype)
        for _ in range(module.iterations):
            z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    else:
        z = torch.linalg.pinv(a)
    found = (q @ few_k.mT * scale).softmax(-1) @ z @ (few_q @ k.mT * scale).softmax(-1)
    if module.convolution:
        width = module.convolution // 2
        for i in range(x.shape[1]):
            for j in range(max(0, i - width), min(x.shape[1], i + width + 1)):
                found[:, :, i, j] = found[:, :, i, j] + module.filters[:, j - i + width]
    return found


@pytest.mark.parametrize("options", ["landmarks=3", "landmarks=3, iterations=0", "landmarks=3, convolution=5"])
def test_it_equals_the_definition(options):
    module, x = build(options), data(2, N, 6).requires_grad_()
    p = matrix(module, x, [4, 4, 3])
    record = {}
    found = module(x, record=record)[0]
    expected = module.out(merge(p @ split(module.value(x), 2)))
    close(record["matrix"], p)
    assert record["mask"].all()
    same(found, expected, (x, *module.parameters()))


class TestAllTokensAreLandmarks:
    """Softmax attention, computed through the pseudo-inverse without a shortcut."""

    @pytest.mark.parametrize("options", ["landmarks=64, iterations=0", "landmarks=64, iterations=30"])
    def test_it_is_softmax(self, options):
        module, x = build(options, dim=16), data(2, 37, 16)
        softmax = longspan.build("softmax", 16, 2, causal=False).double()
        softmax.load_state_dict(module.state_dict())
        # Scores with a large deviation; otherwise the rows are nearly equal and the matrix is nearly singular.
        with torch.no_grad():
            for attention in (module, softmax):
                attention.query.weight.mul_(4)
                attention.key.weight.mul_(4)
        close(module(x)[0], softmax(x)[0], 1e-7)
        mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(1)) < 0.6
        close(module(x, mask=mask)[0], softmax(x, mask=mask)[0], 1e-7)


class TestLandmarks:
    def test_segments_differ_by_one_token_at_most(self):
        x = data(1, 1, N, 3)
        for count in (1, 2, 3, 4, 10, 11):
            members = landmarks.segments_of(x, count)
            assert members.sum(-2).eq(1).all()
            sizes = members.sum(-1)
            assert sizes.max() - sizes.min() <= 1
            # The segments are consecutive.
            assert members.int().argmax(-2).diff().min() >= 0

    def test_means_are_over_real_tokens(self):
        x = data(2, 2, N, 3)
        members = landmarks.segments_of(x, 3, MASK)
        for row, sizes in enumerate(([3, 3, 3], [4, 3, 3])):
            parts = x[row][:, MASK[row]].split(sizes, 1)
            close(landmarks.segment_means(x, members)[row], torch.stack([part.mean(1) for part in parts], 1))

    def test_fewer_tokens_than_landmarks(self):
        x, mask = data(1, 1, N, 3), torch.arange(N)[None] < 2
        members = landmarks.segments_of(x, 5, mask)
        assert sorted(members.sum(-1)[0].tolist()) == [0, 0, 0, 1, 1]
        assert not landmarks.segment_means(x, members)[~members.any(-1)[:, None]].any()


class TestInverse:
    def test_it_is_the_inverse(self):
        a = (3 * data(2, 3, 5, 5)).softmax(-1)
        one = torch.eye(5, dtype=torch.float64).expand(2, 3, 5, 5)
        close(inverse.inverse(a, 0) @ a, one)
        close(inverse.inverse(a, 40) @ a, one, 1e-7)

    def test_zeros_around_a_matrix_stay(self):
        a = (3 * data(4, 4)).softmax(-1)
        wide = torch.nn.functional.pad(a, (0, 2, 0, 2))
        for steps in (0, 6):
            found = inverse.inverse(wide, steps)
            close(found[:4, :4], inverse.inverse(a, steps))
            assert found[4:].abs().max() + found[:, 4:].abs().max() < 1e-12
        assert not inverse.inverse(torch.zeros(3, 3), 6).any()

    def test_six_steps_leave_the_documented_error(self):
        """The docstring's 3e-2 at 128 tokens, for scores of standard deviation 1."""
        a = (data(128, 64) @ data(128, 64, seed=1).mT / 8).softmax(-1)
        errors = [((a @ inverse.inverse(a, steps) @ a) - a).abs().max().item() for steps in (6, 20)]
        assert 3e-3 < errors[0] < 3e-1
        assert errors[1] < 1e-3 * errors[0]
