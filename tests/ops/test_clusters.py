"""Clusters of vectors: hashes, k-means among them, packing by means and unpacking."""

import pytest
import torch

import longspan
from longspan.ops.compress import clusters, prototypes
from support.tensors import data


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def codes(*shape, bits=6, seed=0):
    return torch.randint(2**bits, shape, generator=random(seed))


MASK = torch.tensor([[True] * 29, [False] * 4 + [True] * 9 + [False] * 11 + [True] * 5])


def test_a_hash_tells_the_sides_of_the_planes():
    planes = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]])
    x = torch.tensor([[1.0, 1.0], [1.0, 0.5], [-1.0, 0.6], [0.0, 0.0]])
    assert clusters.hashes(x, planes).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("bits", [1, 31, 32, 63])
def test_a_hash_has_room_for_63_bits(bits):
    planes = torch.cat([torch.zeros(bits, 2), -torch.ones(bits, 1)], 1)
    assert clusters.hashes(torch.zeros(1, 2), planes).tolist() == [2**bits - 1]


def test_k_means_by_hand():
    # The different codes in order are 0, 1, 6, 7, of which two that divide them evenly are 0 and 6.
    groups, centroids = clusters.kmeans(torch.tensor([[[0, 7, 1, 6, 6]]]), 2, 2, 3)
    assert groups.tolist() == [[[0, 1, 0, 1, 1]]]
    # One of two members has the bit 1, so it is 0; one of three, so it is 0.
    assert centroids.tolist() == [[[0, 6]]]
    groups, centroids = clusters.kmeans(torch.tensor([[[0, 7, 1, 7, 6]]]), 2, 2, 3)
    assert centroids.tolist() == [[[0, 7]]]


def test_of_two_centroids_as_near_the_first_is_taken():
    centroids = torch.tensor([[[1, 2, 0]]])
    assert clusters.kmeans(torch.tensor([[[0, 3, 1]]]), 3, 1, 2, centroids=centroids)[0].tolist() == [[[2, 0, 0]]]


@pytest.mark.parametrize("iterations", [1, 2, 7])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("given", [False, True])
def test_k_means_is_its_reference(iterations, mask, given):
    points = codes(2, 3, 29)
    arguments = {"mask": mask, "centroids": codes(2, 3, 5, seed=1) if given else None}
    found = clusters.kmeans(points, 5, iterations, 6, **arguments)
    with longspan.backend("reference"):
        expected = clusters.kmeans(points, 5, iterations, 6, **arguments)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_k_means_in_pieces_is_the_same(monkeypatch):
    points, arguments = codes(4, 2, 29), (5, 6, 6)
    mask = torch.rand(4, 29, generator=random(1)) < 0.7
    found = clusters.kmeans(points, *arguments, mask=mask)
    monkeypatch.setattr(clusters, "MAX_DISTANCES", 2 * 29 * 5 * 3)
    again = clusters.kmeans(points, *arguments, mask=mask)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))


def test_what_is_masked_has_no_part_in_k_means():
    points = codes(2, 3, 29)
    groups, centroids = clusters.kmeans(points, 5, 6, 6, mask=MASK)
    assert (groups[1][:, ~MASK[1]] == 5).all()
    # Codes before, between and after all others, which would be first centroids and move the rest.
    for other in (0, 63, torch.iinfo(torch.int64).max):
        again = clusters.kmeans(points.masked_fill(~MASK[:, None], other), 5, 6, 6, mask=MASK)
        assert torch.equal(again[0], groups)
        assert torch.equal(again[1], centroids)
    alone = clusters.kmeans(points[1:, :, MASK[1]], 5, 6, 6)
    assert torch.equal(groups[1:, :, MASK[1]], alone[0])
    assert torch.equal(centroids[1:], alone[1])


def test_the_order_of_codes_changes_nothing():
    points, order = codes(1, 2, 29), torch.randperm(29, generator=random(1))
    groups, centroids = clusters.kmeans(points, 5, 6, 6)
    again = clusters.kmeans(points[..., order], 5, 6, 6)
    assert torch.equal(again[0], groups[..., order])
    assert torch.equal(again[1], centroids)


def test_each_head_has_first_centroids_of_its_own_codes():
    points = torch.stack([codes(29), 64 + codes(29, seed=1)])[None]
    assert torch.equal(clusters.kmeans(points, 4, 1, 7)[1] >= 64, torch.tensor([[[False] * 4, [True] * 4]]))
    same = points[:, :1].expand(-1, 2, -1)
    assert torch.equal(clusters.kmeans(same, 4, 5, 7)[0][:, 0], clusters.kmeans(points, 4, 5, 7)[0][:, 0])


def test_a_cluster_without_members_stays_and_is_zero():
    points = torch.full((1, 1, 7), 5)
    groups, centroids = clusters.kmeans(points, 3, 4, 6, centroids=torch.tensor([[[9, 4, 63]]]))
    assert groups.tolist() == [[[1] * 7]]
    assert centroids.tolist() == [[[9, 5, 63]]]
    assert clusters.kmeans(points, 3, 4, 6)[0].tolist() == [[[0] * 7]]
    x = data(1, 1, 7, 2).requires_grad_()
    means = clusters.mean(x, groups, 3)
    assert not means[0, 0, [0, 2]].any()
    means.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_first_centroids_are_different_codes_however_often_one_comes():
    assert clusters.kmeans(torch.tensor([[[0] * 10 + [7]]]), 2, 3, 3)[0].tolist() == [[[0] * 10 + [1]]]


def test_more_clusters_than_codes():
    groups, centroids = clusters.kmeans(torch.tensor([[[4, 2, 4]]]), 5, 3, 3)
    assert groups.tolist() == [[[1, 0, 1]]]
    assert centroids[0, 0, :2].tolist() == [2, 4]
    assert clusters.kmeans(codes(2, 3, 0), 5, 3, 6)[0].shape == (2, 3, 0)
    hidden = clusters.kmeans(codes(1, 1, 4), 2, 3, 6, mask=torch.zeros(1, 4, dtype=torch.bool))[0]
    assert hidden.tolist() == [[[2] * 4]]


def test_a_sequence_of_no_more_tokens_than_clusters_has_one_each():
    x, planes = data(2, 3, 29, 4), data(8, 5, seed=1)
    assert torch.equal(clusters.assign(x, planes, 29, 3), torch.arange(29).expand(2, 3, 29))
    assert torch.equal(clusters.assign(0 * x, planes, 100, 3), torch.arange(29).expand(2, 3, 29))
    # The second row has 14 real tokens.
    groups = clusters.assign(x, planes, 14, 3, mask=MASK)
    assert torch.equal(groups[1, 0][MASK[1]], torch.arange(14))
    assert (groups[1, 0][~MASK[1]] == 14).all()
    assert groups[0, 0].bincount().max() > 1
    assert torch.equal(groups[0], clusters.assign(x[:1], planes, 14, 3)[0])
    assert not torch.equal(clusters.assign(x, planes, 13, 3, mask=MASK)[1, 0][MASK[1]], torch.arange(14))


def test_equal_vectors_share_a_cluster_and_the_global_generator_has_no_part():
    x, planes = data(1, 2, 29, 4), data(63, 5, seed=1)
    x[:, :, 20:] = x[:, :, 3:4]
    torch.manual_seed(1)
    groups = clusters.assign(x, planes, 6, 5)
    assert torch.initial_seed() == 1
    assert torch.equal(torch.rand(1), torch.manual_seed(1) and torch.rand(1))
    assert (groups[:, :, 20:] == groups[:, :, 3:4]).all()


def test_a_mean_hands_its_gradient_to_the_members_in_equal_parts():
    x, groups = data(1, 1, 5, 2).requires_grad_(), torch.tensor([[[0, 2, 0, 0, 3]]])
    means, upstream = clusters.mean(x, groups, 3), data(1, 1, 3, 2, seed=1)
    torch.testing.assert_close(means[0, 0, 0], x[0, 0, [0, 2, 3]].mean(0))
    torch.testing.assert_close(means[0, 0, 2], x[0, 0, 1])
    (gradient,) = torch.autograd.grad(means, x, upstream)
    expected = torch.stack(
        [upstream[0, 0, 0] / 3, upstream[0, 0, 2], *[upstream[0, 0, 0] / 3] * 2, 0 * upstream[0, 0, 0]]
    )
    torch.testing.assert_close(gradient[0, 0], expected)
    assert torch.autograd.gradcheck(lambda x: clusters.mean(x, groups, 3), x)
    assert clusters.count(groups, 3).tolist() == [[[3, 0, 1]]]


def test_unpacked_members_have_what_their_cluster_has():
    y, groups = data(1, 1, 3, 2).requires_grad_(), torch.tensor([[[0, 2, 0, 3]]])
    x = clusters.spread(y, groups)
    torch.testing.assert_close(x[0, 0], torch.stack([y[0, 0, 0], y[0, 0, 2], y[0, 0, 0], 0 * y[0, 0, 0]]))
    assert torch.autograd.gradcheck(lambda y: clusters.spread(y, groups), y)


def test_half_precision_is_summed_in_float32():
    x = torch.ones(1, 1, 5000, 1, dtype=torch.bfloat16)
    assert clusters.mean(x, torch.zeros(1, 1, 5000, dtype=torch.int64), 1).item() == 1


@pytest.mark.parametrize("sizes", [[1], [64, 64], [65, 1, 0, 63], [0, 0, 200], [129, 0, 7, 64, 1]])
def test_tiles_hold_the_members_of_one_cluster(sizes):
    n, count = sum(sizes), len(sizes)
    groups = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
    groups = groups[torch.randperm(n, generator=random())][None, None]
    for given in (groups, groups.masked_fill(torch.rand(n, generator=random(1)) < 0.3, count)):
        slot, owner = prototypes.tiles(given, count)
        assert len(set(slot.flatten().tolist())) == n
        assert slot.max() < owner.shape[-1] * prototypes.TILE
        own = owner[0, 0, slot[0, 0] // prototypes.TILE]
        real = given[0, 0] < count
        assert torch.equal(own[real], given[0, 0][real])
        # Tokens without a cluster have separate tiles.
        assert not set((slot[0, 0][real] // prototypes.TILE).tolist()) & set(
            (slot[0, 0][~real] // prototypes.TILE).tolist()
        )


@pytest.mark.parametrize("topk", [0, 1, 7, 300])
@pytest.mark.parametrize("keys", [211, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_clusters_is_its_definition(topk, keys, masked):
    n, count = 211, 3
    groups = torch.randint(count, (2, 2, n), generator=random()).clamp(max=1)  # the last one is empty
    tensors = [data(2, 2, n, 4), data(2, 2, keys, 4, seed=1), data(2, 2, keys, 3, seed=2)]
    mask = None
    if masked:
        groups = groups.masked_fill(torch.rand(n, generator=random(3)) < 0.3, count)
        mask = torch.rand(2, keys, generator=random(4)) < 0.6
        mask[0] = False
    found = []
    for name in ("auto", "reference"):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        with longspan.backend(name):
            out = prototypes.attend(q, k, v, groups, count, topk=topk, mask=mask)
        found.append((out, *torch.autograd.grad(out, (q, k, v), data(*out.shape, seed=5))))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    assert found[0][0].any()
    if mask is not None:
        assert not found[0][0][0].any()
        assert not found[0][0].transpose(1, 2)[(groups == count).transpose(1, 2)].any()


def test_attention_of_clusters_by_hand():
    log2 = torch.tensor(2.0, dtype=torch.float64).log()
    q = torch.tensor([2.0, 4.0, -3.0], dtype=torch.float64).view(1, 1, 3, 1)
    k = torch.stack([0 * log2, log2 / 3]).view(1, 1, 2, 1)
    v = torch.tensor([0.0, 3.0], dtype=torch.float64).view(1, 1, 2, 1)
    groups = torch.tensor([[[0, 0, 1]]])
    # The means 3 and -3 weigh the second key 2/3 and 1/3.
    for topk in (0, 1):
        o = prototypes.attend(q, k, v, groups, 2, topk=topk).flatten()
        torch.testing.assert_close(o, torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64))
    # All keys by the query's own scores: 2^(2/3) and 2^(4/3) to one.
    o = prototypes.attend(q, k, v, groups, 2, topk=2).flatten()
    odds = 2 ** (torch.tensor([2.0, 4.0, -3.0], dtype=torch.float64) / 3)
    torch.testing.assert_close(o, 3 * odds / (1 + odds))


def test_among_is_causal_by_the_numbers_of_keys():
    q, k, v = data(1, 1, 9, 4), data(1, 1, 9, 4, seed=1), data(1, 1, 9, 3, seed=2)
    groups, top = torch.tensor([[[0, 1, 0, 1, 0, 1, 0, 1, 0]]]), torch.tensor([[[[1, 5, 2], [8, 4, 3]]]])
    out = prototypes.among(q, k, v, groups, top, causal=True)[0, 0]
    for i in range(9):
        seen = [j for j in top[0, 0, groups[0, 0, i]].tolist() if j <= i]
        weights = (k[0, 0, seen] @ q[0, 0, i] / 2).softmax(0)
        torch.testing.assert_close(out[i], weights @ v[0, 0, seen])
    assert not out[0].any()
