"""Clustered attentions of ``compat.fast_transformers`` and the modules of their kernels, against plain definitions."""

import pytest
import torch

from longspan.compat.fast_transformers import aggregate as sums
from longspan.compat.fast_transformers import attention as a
from longspan.compat.fast_transformers import hashing
from longspan.compat.fast_transformers import sparse_product as sparse
from longspan.compat.fast_transformers.builders import AttentionBuilder, TransformerEncoderBuilder
from longspan.compat.fast_transformers.clustering import hamming
from longspan.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
from support.tensors import data

N, L, S, H, E, D = 3, 13, 11, 2, 5, 7
LENGTHS, SIZES = LengthMask(torch.tensor([13, 4, 9]), max_len=L), LengthMask(torch.tensor([11, 2, 7]), max_len=S)
SMALL = {"n_layers": 2, "n_heads": 2, "query_dimensions": 5, "value_dimensions": 5, "feed_forward_dimensions": 11}


def qkv(length=L, size=S):
    return data(N, length, H, E), data(N, size, H, E, seed=1), data(N, size, H, D, seed=2)


def full(length, size=None):
    return FullMask(length, length if size is None else size)


def whole(length):
    return LengthMask(torch.full((N,), length))


# Attentions


@pytest.mark.parametrize("kind", [a.ClusteredAttention, a.ImprovedClusteredAttention])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_with_a_cluster_for_each_query_they_are_full_attention(kind, temperature):
    inputs, masks = qkv(), (full(L, S), LENGTHS, SIZES)
    module = kind(clusters=L, softmax_temp=temperature).eval()
    found, expected = module(*inputs, *masks), a.FullAttention(softmax_temp=temperature).eval()(*inputs, *masks)
    assert found.is_contiguous()
    real = LENGTHS.bool_matrix
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-12)
    assert not found[~real].any()


@pytest.mark.parametrize("name", ["clustered", "improved-clustered", "causal-improved-clustered"])
def test_a_row_is_what_it_is_alone(name):
    # The original takes topk of no row more than the shortest has keys, and may start from padding.
    module, (q, k, v) = AttentionBuilder.from_kwargs(clusters=3, topk=6).get(name).eval(), qkv(L, L)
    mask = TriangularCausalMask(L) if "causal" in name else full(L)
    found = module(q, k, v, mask, LENGTHS, LENGTHS)
    for row, length in enumerate([13, 4, 9]):
        one = slice(row, row + 1)
        own = TriangularCausalMask(length) if "causal" in name else full(length)
        lengths = LengthMask(torch.tensor([length]))
        alone = module(q[one, :length], k[one, :length], v[one, :length], own, lengths, lengths)
        torch.testing.assert_close(found[one, :length], alone, rtol=0, atol=1e-12)
        assert not found[row, length:].any()


def test_causal_improved_is_its_definition():
    q, k, v = qkv(L, L)
    q, k = q.requires_grad_(), k.requires_grad_()
    module = a.ImprovedClusteredCausalAttention(3, topk=4, softmax_temp=0.6).eval()
    found = module(q, k, v, TriangularCausalMask(L), LENGTHS, LENGTHS)
    groups, expected = module.divide(q.transpose(1, 2), LENGTHS), torch.zeros_like(found)
    for n, length in enumerate([13, 4, 9]):
        for h in range(H):
            for i in range(length):
                mean = q[n, :, h][groups[n, h] == groups[n, h, i]].mean(0)
                top = (k[n, :length, h] @ mean).topk(4).indices
                seen = top[top <= i]
                if len(seen):
                    p = (0.6 * k[n, seen, h] @ q[n, i, h]).softmax(0)
                    expected = expected.index_put(
                        (torch.tensor(n), torch.tensor(i), torch.tensor(h)), p @ v[n, seen, h]
                    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    # A query whose keys are all in the future.
    assert (found.abs().amax(-1) == 0)[LENGTHS.bool_matrix].any()
    upstream = data(*found.shape, seed=3)
    grads = [torch.autograd.grad(y, (q, k), upstream) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_without_bias_the_length_of_a_query_decides_nothing():
    q = qkv()[0].transpose(1, 2)
    lengths = data(N, H, L, 1, seed=3).exp()
    free, biased = (a.ClusteredAttention(4, hash_bias=bias) for bias in (False, True))
    assert torch.equal(free.divide(q, whole(L)), free.divide(q * lengths, whole(L)))
    assert not torch.equal(biased.divide(q, whole(L)), biased.divide(q * lengths, whole(L)))


def test_builders_pass_the_parameters_and_their_defaults():
    builder = AttentionBuilder.from_kwargs(clusters=7)
    for name, kind in (
        ("clustered", a.ClusteredAttention),
        ("improved-clustered", a.ImprovedClusteredAttention),
        ("causal-improved-clustered", a.ImprovedClusteredCausalAttention),
    ):
        module = builder.get(name)
        assert type(module) is kind
        assert (module.clusters, module.iterations, module.bits, module.hash_bias) == (7, 10, 63, True)
        assert (module.softmax_temp, module.dropout.p) == (None, 0.1)
        bare = kind(7)
        assert (bare.iterations, bare.bits, bare.hash_bias) == (10, 32, True)
        if name != "clustered":
            assert module.topk == bare.topk == 32
    with pytest.raises(ValueError, match="None.*'clusters'"):
        AttentionBuilder().get("clustered")
    builder = AttentionBuilder.from_kwargs(clusters=7, bits=16, iterations=3, hash_bias="false", topk=5)
    module = builder.get("improved-clustered")
    assert (module.bits, module.iterations, module.hash_bias, module.topk) == (16, 3, False, 5)


@pytest.mark.parametrize("name", ["clustered", "improved-clustered", "causal-improved-clustered"])
def test_checkpoints_of_builders_load(name):
    torch.manual_seed(0)
    model = TransformerEncoderBuilder.from_kwargs(attention_type=name, clusters=3, topk=20, **SMALL).get().eval()
    exact = TransformerEncoderBuilder.from_kwargs(attention_type="full", **SMALL).get().eval()
    exact.load_state_dict(model.state_dict())
    model.load_state_dict(exact.state_dict())
    x, mask = torch.rand(4, 20, 10), TriangularCausalMask(20) if "causal" in name else None
    y = model(x, attn_mask=mask)
    assert y.shape == x.shape
    if name != "clustered":
        torch.testing.assert_close(y, exact(x, attn_mask=mask), rtol=0, atol=1e-5)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_they_take_every_dtype_and_sequences_without_tokens(dtype):
    lengths = LengthMask(torch.tensor([13, 0, 9]), max_len=L)
    for name in ("clustered", "improved-clustered", "causal-improved-clustered"):
        module = AttentionBuilder.from_kwargs(clusters=3, topk=6).get(name)
        mask = TriangularCausalMask(L) if "causal" in name else full(L)
        q, k, v = (x.to(dtype).requires_grad_() for x in qkv(L, L))
        y = module(q, k, v, mask, lengths, lengths)
        assert y.dtype is dtype
        assert not y[1].any()
        y.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))
        empty = module(q[:, :0], k[:, :0], v[:, :0], type(mask)(0), whole(0), whole(0))
        assert empty.shape == (N, 0, H, D)


def test_masks_and_sizes_that_cannot_be_are_refused():
    inputs = qkv(L, L)
    for kind in (a.ClusteredAttention, a.ImprovedClusteredAttention):
        with pytest.raises(RuntimeError, match=f"{kind.__name__}.*FullMask"):
            kind(3)(*inputs, TriangularCausalMask(L), whole(L), whole(L))
    with pytest.raises(RuntimeError, match="ImprovedClusteredCausalAttention.*TriangularCausalMask"):
        a.ImprovedClusteredCausalAttention(3)(*inputs, full(L), whole(L), whole(L))
    with pytest.raises(ValueError, match="clusters=0"):
        a.ClusteredAttention(0)
    with pytest.raises(ValueError, match="bits=64.*63"):
        a.ImprovedClusteredAttention(3, bits=64)
    with pytest.raises(ValueError, match="topk=0"):
        a.ImprovedClusteredAttention(3, topk=0)


# Hashes and clusters


@pytest.mark.parametrize("bits", [1, 20, 63])
def test_hashes_are_the_signs_of_projections(bits):
    x, planes = data(100, 8).float(), data(bits, 9, seed=1).float()
    expected = [sum(int(p @ row[:-1] > row[-1]) << b for b, row in enumerate(planes)) for p in x]
    assert hashing.compute_hashes(x, planes).tolist() == expected
    buffer = torch.ones(100, dtype=torch.int64)
    assert hashing.compute_hashes(x, planes, buffer) is buffer
    assert buffer.tolist() == expected
    planes[:, -1] = 0
    hashing.hash_cpu.compute_hashes(x, planes, buffer)
    other = torch.zeros_like(buffer)
    hashing.hash_cpu.compute_hashes_from_projections(x @ planes[:, :-1].mT, other)
    assert torch.equal(buffer, other)
    with pytest.raises(ValueError, match=r"\(bits, 9\).*63"):
        hashing.compute_hashes(x, planes[:, 1:])


def test_clusters_of_hashes():
    hashes = torch.tensor([0, 255, 1, 254, 0, 254, 255])[None, None].repeat(2, 3, 1)
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    groups, counts = hamming.cluster(hashes, lengths, clusters=2, bits=8)
    assert groups.dtype == counts.dtype == torch.int32
    assert groups[0, 0].tolist() == [0, 1, 0, 1, 0, 1, 1]
    # Behind its length a row has nothing, whose group is C + 1 as in the original.
    assert groups[1, 2].tolist() == [0, 1, 0, 1, 0, 3, 3]
    assert counts.tolist() == [[[3, 4]] * 3, [[3, 2]] * 3]
    # Hashes that differ only in bits that are not compared.
    assert hamming.cluster(hashes << 8, lengths, clusters=2, bits=8)[1].tolist() == [[[7, 0]] * 3, [[5, 0]] * 3]
    # More clusters than hashes.
    assert hamming.cluster(hashes, lengths, clusters=30, bits=8)[1].shape == (2, 3, 30)


def test_buffers_of_clusters_are_overwritten():
    hashes = torch.cat([torch.zeros(50).long(), torch.full((50,), 255)]).view(1, 1, 100)
    lengths, centroids = torch.full((1,), 100, dtype=torch.int32), torch.full((1, 1, 2), 77)
    groups, counts = torch.empty(1, 1, 100, dtype=torch.int32), torch.empty(1, 1, 2, dtype=torch.int32)
    found = hamming.cluster(hashes, lengths, groups, counts, centroids, bits=8)
    assert found[0] is groups
    assert found[1] is counts
    assert counts.tolist() == [[[50, 50]]]
    assert centroids.tolist() == [[[0, 255]]]
    centroids.fill_(77)
    hamming.cluster_cpu(hashes, lengths, centroids, groups, counts, 0, 8)
    assert sorted(centroids.flatten().tolist()) == [0, 255]


# Sums and products


def test_aggregate_and_broadcast_are_sums_with_factors():
    x, factors = data(2, 3, 20, 4), data(2, 3, 5, seed=1)
    groups = torch.randint(-1, 7, (2, 3, 20), generator=torch.Generator().manual_seed(2)).int()
    member = torch.nn.functional.one_hot(groups.long() + 1, 8)[..., 1:6].double()
    expected = torch.einsum("nhlc,nhle,nhc->nhce", member, x, factors)
    torch.testing.assert_close(sums.aggregate(x, groups, factors), expected)
    buffer = torch.ones_like(expected)
    assert sums.clustered_aggregate(x, groups, factors, torch.tensor([20, 20]), buffer) is buffer
    torch.testing.assert_close(buffer, expected)
    sums.aggregate_cpu(x, groups, factors, buffer)
    torch.testing.assert_close(buffer, 2 * expected)
    y = data(2, 3, 5, 4, seed=3)
    spread = torch.einsum("nhlc,nhce,nhc->nhle", member, y, factors)
    torch.testing.assert_close(sums.broadcast(y, groups, factors), spread)
    torch.testing.assert_close(sums.clustered_broadcast(y, groups, torch.zeros(2, 3, 5), factors), spread)
    # A buffer keeps what it has where there is no group.
    kept = torch.full_like(x, 9.0)
    sums.broadcast_cpu(y, groups, factors, kept)
    torch.testing.assert_close(kept, spread.where(member.any(-1, keepdim=True), 9.0))


def test_an_empty_group_sums_to_zero_whatever_its_factor():
    groups, factors = torch.zeros(1, 1, 4, dtype=torch.int32), 1 / torch.tensor([[[4.0, 0.0]]])
    assert sums.aggregate(torch.ones(1, 1, 4, 2), groups, factors).tolist() == [[[[1, 1], [0, 0]]]]


@pytest.mark.parametrize("room", [2**24, 300])
def test_sparse_products_are_picked_from_all(room, monkeypatch):
    monkeypatch.setattr(sparse, "_ROOM", room)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv())
    top = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(i))[:4] for i in range(N * H * L)])
    top = top.view(N, H, L, 4)
    found, expected = sparse.sparse_dot_product(q, k, top), (q @ k.mT).gather(-1, top)
    torch.testing.assert_close(found, expected)
    upstream = data(*found.shape, seed=5)
    grads = [torch.autograd.grad(y, (q, k), upstream, retain_graph=True) for y in (found, expected)]
    torch.testing.assert_close(*grads)
    weights = found.softmax(-1)
    read, expected = sparse.sparse_weighted_average(weights, v, top), torch.zeros(N, H, L, S).double()
    expected = expected.scatter(-1, top, weights) @ v
    torch.testing.assert_close(read, expected)
    upstream = data(*read.shape, seed=6)
    grads = [torch.autograd.grad(y, (q, v), upstream, retain_graph=True) for y in (read, expected)]
    torch.testing.assert_close(*grads)


def test_clustered_products_are_those_of_the_group():
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv(150))
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(4, (N, H, 150), generator=generator)  # of which 3 is none
    counts, lengths = torch.zeros(N, H, 3), torch.tensor([150] * N)
    top = torch.stack([torch.randperm(S, generator=generator)[:5] for _ in range(N * H * 3)]).view(N, H, 3, 5)
    each = torch.cat([top, top[:, :, :1]], 2).gather(2, groups[..., None].expand(-1, -1, -1, 5))
    real = (groups < 3)[..., None]
    found = sparse.clustered_sparse_dot_product(q, k, top, groups.int(), counts, lengths)
    expected = sparse.sparse_dot_product(q, k, each) * real
    torch.testing.assert_close(found, expected)
    read = sparse.clustered_sparse_weighted_average(found.exp(), v, top, groups.int(), counts)
    torch.testing.assert_close(read, sparse.sparse_weighted_average(expected.exp(), v, each) * real)
    upstream = data(*found.shape, seed=5)
    grads = [torch.autograd.grad(y, (q, k), upstream, retain_graph=True) for y in (found, expected)]
    torch.testing.assert_close(*grads)
