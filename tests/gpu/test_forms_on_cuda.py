"""The torch forms as they are planned for a GPU: values, memory and number of launches. Without one, on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.ops import linear
from longspan.ops.gated import chunks, decay_per_channel, pairs
from longspan.ops.linear.operands import LinearOperands
from longspan.testing.pairs import all_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
causal = linear.causally
# Neither starts work on the device: views, allocations, and questions about a tensor.
FREE = (
    "device view _unsafe_view _reshape_alias expand transpose permute t slice select unsqueeze squeeze as_strided "
    "detach alias split split_with_sizes unbind unfold diagonal narrow empty empty_like new_empty empty_strided"
).split()


@pytest.fixture
def planned(monkeypatch):
    """Plan for a GPU, whatever the device."""
    for module in (causal, chunks):
        monkeypatch.setattr(module, "_on_gpu", lambda x: True)


class Work(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, at their peak, and the operations that start work."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.launches = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.launches += func._schema.name.split("::")[1].rstrip("_") not in FREE
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self):
        return sum(size for _, size in self.alive.values())


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def outcome(form, inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    outputs = form(*inputs)
    upstream = [random(*t.shape, seed=7).to(t.dtype) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)]


def error(found, expected):
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def around(n, masked, packed):
    mask = (torch.rand(2, n, generator=torch.Generator().manual_seed(1)) < 0.7).to(DEVICE) if masked else None
    segments = (torch.arange(n, device=DEVICE) // 37).expand(2, -1) if packed else None
    return {"mask": mask, "segments": segments}


@pytest.mark.parametrize("packed", [False, True])
def test_products_of_bfloat16_lose_no_more_than_those_of_float32(packed, planned, monkeypatch):
    q, k, v = (random(2, 3, 500, 32, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    options = {"feature_map": "elu", "eps": 1e-6, **around(500, True, packed)}
    assert causal._operands(q, v) == torch.bfloat16
    assert causal._operands(q.half(), v.half()) is causal._operands(q.float(), v.float()) is None

    def run(*inputs):
        return outcome(lambda q, k, v: causal.attend(LinearOperands(q, k, v, None, **options)), inputs)

    expected, rounded = run(q.double(), k.double(), v.double()), run(q, k, v)
    monkeypatch.setattr(causal, "_operands", lambda q, v: None)
    for one, plain, right in zip(rounded, run(q, k, v), expected, strict=True):
        # The state is not rounded.
        assert one.dtype == plain.dtype
        assert error([one], [right]) <= max(1.05 * error([plain], [right]), 1e-5)


@pytest.mark.parametrize(
    "row",
    all_pairs(
        shape=((8, 16, 4096, 64), (2, 16, 16384, 128), (1, 1, 2**17, 64), (256, 16, 512, 64)),
        packed=(False, True),
        dtype=(torch.bfloat16, torch.float32),
    ),
    ids=str,
)
def test_linear_attention_takes_at_most_four_times_the_memory_of_its_inputs(row, planned):
    """An upper limit: without a GPU, products of bfloat16 also make copies in float32."""
    shape, packed, dtype = row.values()
    with FakeTensorMode(), Work() as work:
        q, k, v = (torch.empty(shape, dtype=dtype) for _ in range(3))
        segments = torch.empty(shape[0], shape[2], dtype=torch.long) if packed else None
        before = work.bytes()
        causal._forward(LinearOperands(q, k, v, None, None, segments, "elu", 1e-6, chunk=causal.WIDE), True)
    assert work.peak <= 4 * before
    parts, spans = causal._plan(q, v, segments, causal.WIDE)
    assert work.launches <= 100 * len(parts) * len(spans)
    assert packed or len(parts) * len(spans) <= 9


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_launches_do_not_grow_with_the_number_of_chunks(decay, delta, planned, monkeypatch):
    for module in (chunks, decay_per_channel):
        # On a CPU, which the fake tensors are on, it reads numbers that they do not have.
        monkeypatch.setattr(module, "faded", lambda x, to=None: x.exp())

    def launches(n):
        with FakeTensorMode(), Work() as work:
            q, k, v = (torch.empty(1, 2, n, 16) for _ in range(3))
            log_decay = {"none": None, "head": torch.empty(1, 2, n), "channel": torch.empty(1, 2, n, 16)}[decay]
            given = q, k, v, log_decay, torch.empty(1, 2, n) if delta else None, torch.empty(1, 2, 16, 16), None, None
            r = chunks.Chunked(*given, 1.0)
            o, end, starts = chunks._forward(r, True)
            chunks._backward(r, (o, end), (starts,), [True] * 6)
        return work.launches

    short, long = launches(64 * 16), launches(64 * 128)
    # Pairs: three more levels. Decay per head without the delta rule: a product for every 32 chunks.
    assert long - short <= 130


def test_inverses_are_as_exact_as_substitution():
    """Within a tenth of u |T^-1| |T| |T^-1| |b|, the first-order bound of both (Higham 2002, sections 8.1 and 14.2)."""

    def keys(like=0.0, norm=1.0):
        found = F.normalize(random(50, 64, 32) + like * random(50, 1, 32, seed=1), dim=-1)
        return norm * found.float()

    for name, k, beta in (
        ("random", keys(), 1.0),
        ("erasing twice", keys(), 2.0),
        ("alike", keys(like=10.0), 1.0),
        ("alike, erasing twice", keys(like=10.0), 2.0),
        ("equal", keys()[:, :1].expand(-1, 64, -1), 2.0),
        ("long", keys(norm=1.5), 1.0),
    ):
        triangle = (beta * k @ k.mT).tril(-1)
        right = random(50, 64, 16, seed=2, dtype=torch.float32)
        how = {"upper": False, "unitriangular": True}
        expected = torch.linalg.solve_triangular(triangle.double(), right.double(), **how)
        found = (pairs.inverted(triangle) @ right).double()
        exact = triangle.double() + torch.eye(64, dtype=torch.float64, device=DEVICE)
        inverse = torch.linalg.inv(exact).abs()
        bound = torch.finfo(torch.float32).eps / 2 * inverse @ exact.abs() @ inverse @ right.double().abs()
        assert (found - expected).norm() <= 0.1 * bound.norm(), name


@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_inverses(width):
    triangle = random(3, 2, width, width)
    expected = torch.linalg.inv(triangle.tril(-1) + torch.eye(width, dtype=torch.float64, device=DEVICE))
    assert error([pairs.inverted(triangle.tril(-1))], [expected]) <= 1e-10 * float(expected.abs().max())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_pairs_are_the_loop(count, reverse):
    for moves in (random(1, 2, 1, count, 4, 4), random(1, 2, 3, count, 4, 1), random(1, 1, 1, count, 1, 1), None):
        parts, state = random(1, 2, 3, count, 4, 5, seed=1), random(1, 2, 3, 4, 5, seed=2)
        found, end = pairs.chain(moves, parts, state, reverse=reverse)
        for i in reversed(range(count)) if reverse else range(count):
            assert error([found[:, :, :, i]], [state]) <= 1e-12
            if moves is None:
                kept = state
            else:
                kept = moves[:, :, :, i] @ state if moves.shape[-1] > 1 else moves[:, :, :, i] * state
            state = kept + parts[:, :, :, i]
        assert error([end], [state]) <= 1e-12
