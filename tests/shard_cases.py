"""What every rank of the tests of sequence parallelism runs: whole rows in one process, and their shards."""

import collections
import contextlib
import copy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import longspan
from longspan.distributed import mean_over_ranks, sequence_parallel, shard, shard_inputs
from longspan.distributed import shards as exchange
from longspan.distributed.collectives import gather

BATCH, HEADS, DIM = 2, 2, 16


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, as a fraction of the largest number, if that is above 1."""
    a, b = a.detach(), b.detach()
    if not b.numel():
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def cut(t, lengths, rank):
    return None if t is None else t.split(lengths, 1)[rank]


def attention_gaps(group, spec, lengths, segments=None, mask=None, stated=False):
    """Return the largest gaps of outputs, last state, gradients of inputs and of weights, of one attention."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    attention = longspan.build(spec, dim=DIM, heads=HEADS).double()
    generator = torch.Generator().manual_seed(1)
    n = sum(lengths)
    x = torch.randn(BATCH, n, DIM, generator=generator, dtype=torch.float64)
    seed = torch.randn(BATCH, n, DIM, generator=generator, dtype=torch.float64)
    before = attention.init_state(BATCH) if stated else None
    if stated == "continued":
        with torch.no_grad():
            before = attention(torch.randn(BATCH, 3, DIM, generator=generator, dtype=torch.float64), before)[1]
    given = {name: t for name, t in (("segments", segments), ("mask", mask)) if t is not None}
    whole = x.clone().requires_grad_()
    y, after = attention(whole, before, **given)
    (y * seed).sum().backward()
    wanted = [p.grad for p in attention.parameters()]
    attention.zero_grad()
    own = cut(x, lengths, rank).clone().requires_grad_()
    with sequence_parallel(attention, group):
        z, last = attention(own, before, **{name: cut(t, lengths, rank) for name, t in given.items()})
        (z * cut(seed, lengths, rank)).sum().backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in attention.parameters()]
    for grad in found:
        dist.all_reduce(grad, group=group)
    state = 0.0
    if stated and rank == size - 1:
        # States of equal content may differ in slots that are not in use.
        more = torch.randn(BATCH, 4, DIM, generator=generator, dtype=torch.float64)
        state = gap(attention(more, last)[0], attention(more, after)[0])
    weights = max(gap(a, torch.zeros_like(a) if b is None else b) for a, b in zip(found, wanted, strict=True))
    found = [gap(z, cut(y, lengths, rank)), state, gap(own.grad, cut(whole.grad, lengths, rank)), weights]
    worst = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return worst.tolist()


class Traffic(TorchDispatchMode):
    """Count the collectives of a call, and the bytes of the tensors that they gather, reduce or send."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()
        self.bytes = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name.startswith("c10d::"):
            name = name[6:].strip("_")
            # The larger tensor: the output of an all-gather, the input of a reduce-scatter.
            sizes = [t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(sizes)
        return function(*args, **(kwargs or {}))


def decoder(**options):
    torch.manual_seed(0)
    fields = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 20, "vocab": 11, "length": 64, "positions": "none"}
    return longspan.Decoder(longspan.DecoderConfig(**fields | options)).double().train()


def row(n, batch=BATCH, seed=1):
    return torch.randint(11, (batch, n), generator=torch.Generator().manual_seed(seed))


def half_errors(group, spec, how, n):
    """Return how far bfloat16 is from float64, with shards of n tokens and in one process, and the dtypes exchanged.

    The errors are root sums of squares: of the log-likelihoods, and of the gradients of the weights.
    """
    size, sent = dist.get_world_size(group), set()
    exact = decoder(attention=spec)
    tokens = row(n * size)

    def run(model, inputs, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and model is not exact):
            outputs, _ = model(inputs)
        nll = -model.likelihood.log_prob(outputs, targets)
        (nll.sum() / tokens.numel()).backward()
        return nll.detach().double(), [p.grad.double() for p in model.parameters()]

    def half():
        return copy.deepcopy(exact).to(torch.bfloat16 if how == "weights" else torch.float32)

    def off(pairs):
        return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5

    wide, alone, spread = exact, half(), half()
    if how == "weights":  # the rounding of the weights themselves is no error
        exact.load_state_dict({name: t.double() for name, t in alone.state_dict().items()})
    nll, grads = run(wide, wide.shift(tokens), tokens)
    one, own = run(alone, alone.shift(tokens), tokens)
    with sequence_parallel(spread, group), recorded(sent):
        found, parts = run(spread, *shard_inputs(spread, tokens, group))
    for grad in parts:
        dist.all_reduce(grad, group=group)
    every = [torch.empty_like(found) for _ in range(size)]
    dist.all_gather(every, found, group=group)
    shards, whole = [
        (off([(a, nll)]), off(zip(b, grads, strict=True))) for a, b in ((torch.cat(every, 1), parts), (one, own))
    ]
    return shards, whole, sorted(map(str, sent))


@contextlib.contextmanager
def recorded(sent):
    """Add the dtypes of all tensors that layers exchange to a set."""
    made = exchange.gather, exchange.from_before

    def kept(function):
        return lambda x, *rest: (sent.add(x.dtype), function(x, *rest))[1]

    exchange.gather, exchange.from_before = map(kept, made)
    try:
        yield
    finally:
        exchange.gather, exchange.from_before = made


def weight_gaps(model, wanted):
    """Return the largest gap of the gradients of a model to those of another, as fractions of the largest of each.

    Some are zero up to rounding, such as those of the keys' biases in softmax attention.
    """
    gaps, least = [], 1e-6 * max(float(grad.abs().max()) for grad in wanted if grad is not None)
    for (name, p), other in zip(model.named_parameters(), wanted, strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        if other is None:
            assert grad is None or not grad.any(), name
        else:
            gaps.append(float((grad - other).abs().max() / other.abs().max().clamp(min=least)))
    return max(gaps)


def decoder_gaps(group, lengths, mask=None, segments=None, late=False, twice=False, frozen=(), **options):
    """Return the gaps of the logits and of the gradients of a decoder's weights, after a mean over all real tokens."""
    rank, n = dist.get_rank(group), sum(lengths)
    whole, own, tokens = decoder(**options), decoder(**options), row(n)
    for part in (model.get_submodule(name) for model in (whole, own) for name in frozen):
        part.requires_grad_(False)
    given = {name: t for name, t in (("segments", segments), ("mask", mask)) if t is not None}
    outputs, _ = whole(whole.shift(tokens), **given)
    nll = -whole.likelihood.log_prob(outputs, tokens)
    loss = nll.mean() if mask is None else nll[mask].mean()
    loss.backward()
    parts = {name: cut(t, lengths, rank) for name, t in given.items()}
    inputs, targets = cut(own.shift(tokens), lengths, rank), cut(tokens, lengths, rank)
    with sequence_parallel(own, group):
        found, _ = own(inputs, **parts)
        if twice:  # another call between the two passes of the first
            own(inputs.flip(0))
        value = mean_over_ranks(-own.likelihood.log_prob(found, targets), parts.get("mask"), group)
        if not late:
            value.backward()
    if late:
        value.backward()
    for p in own.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= len(lengths)
    worst = [gap(found, cut(outputs, lengths, rank)), gap(value, loss)]
    worst.append(weight_gaps(own, [p.grad for p in whole.parameters()]))
    return max(worst)


def mesh_gaps(group, kind, data, sequence, **options):
    """Return the gap of the weights' gradients of DDP or FSDP2 over both dimensions of a mesh to one process."""
    mesh = init_device_mesh("cpu", (data, sequence), mesh_dim_names=("data", "sequence"))
    whole, model, tokens = decoder(**options), decoder(**options), row(14, batch=2 * data)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 6:] = False
    outputs, _ = whole(whole.shift(tokens), mask=mask)
    (-whole.likelihood.log_prob(outputs, tokens)[mask].mean()).backward()
    mine = slice(2 * mesh.get_local_rank("data"), 2 * mesh.get_local_rank("data") + 2)
    inputs, targets = shard_inputs(model, tokens[mine], mesh["sequence"])
    seen = shard(mask[mine], mesh["sequence"])
    if kind == "ddp":
        call = DistributedDataParallel(model)
    else:
        flat = init_device_mesh("cpu", (data * sequence,))
        for block in model.stack.blocks:
            fully_shard(block, mesh=flat)
        call = fully_shard(model, mesh=flat)
    with sequence_parallel(model, mesh["sequence"]):
        found, _ = call(inputs, mask=seen)
        mean_over_ranks(-model.likelihood.log_prob(found, targets), seen).backward()
    return weight_gaps(model, [p.grad for p in whole.parameters()])


def traffic(group, n, depth, attention, train=True):
    """Return the calls and bytes of the collectives of a decoder's forward and backward pass."""
    model, size = decoder(attention=attention, depth=depth).float(), dist.get_world_size(group)
    inputs = row(n * size)[:, :n]
    with sequence_parallel(model, group):
        with Traffic() as forward:
            outputs, _ = model(inputs)
        with CommDebugMode() as comm, Traffic() as backward:
            outputs.sum().backward()
    total = comm.get_total_counts()
    assert total == sum(backward.calls.values()), (comm.get_comm_counts(), backward.calls)
    return [(dict(t.calls), dict(t.bytes)) for t in (forward, backward)]


def refusal(group, make, *arguments, call=None):
    """Return the message of the ValueError that a model, or a call of it, raises."""
    model = make(*arguments)
    try:
        with sequence_parallel(model, group):
            call(model)
    except ValueError as error:
        return str(error)
    return ""


def unequal(group, rows, lengths, masked=()):
    """Return the messages of calls whose shards do not fit together."""
    rank, model = dist.get_rank(group), longspan.build("linear", dim=DIM, heads=HEADS)
    x = torch.zeros(rows[rank], lengths[rank], DIM)
    given = {"mask": torch.ones(x.shape[:2], dtype=torch.bool)} if rank in masked else {}
    return refusal(group, lambda: model, call=lambda m: m(x, **given))


def decreasing(group):
    model, rank = longspan.build("linear", dim=DIM, heads=HEADS), dist.get_rank(group)
    ids = torch.full((1, 3), 5 - rank)
    return refusal(group, lambda: model, call=lambda m: m(torch.zeros(1, 3, DIM), segments=ids))


def left_out(group):
    """Let rank 0 use nothing of what it gathers, and return how the backward pass ends."""
    x = torch.ones(2, requires_grad=True)
    every = gather(x, group)
    loss = every.sum() if dist.get_rank(group) else x.sum()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def sampled(group, lengths):
    """Return the gap of a continuation of a row after a sequence-parallel prefill by the last rank."""
    rank = dist.get_rank(group)
    model, n = decoder(attention="gated_deltanet; linear").eval(), sum(lengths)
    tokens = row(n + 5)
    with torch.no_grad():
        wanted, _ = model(tokens)
        with sequence_parallel(model, group):
            _, state = model(cut(tokens[:, :n], lengths, rank), model.init_state(BATCH))
        if rank + 1 < len(lengths):
            return 0.0
        return gap(model(tokens[:, n:], state)[0], wanted[:, n:])


def training_traffic(group, kind):
    """Return the bytes of the collectives of a training step under DDP or FSDP2, and the number of weights."""
    model, tokens = decoder(attention="linear").float(), row(8)
    count = sum(p.numel() for p in model.parameters())
    if kind == "ddp":
        call = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.stack.blocks:
            fully_shard(block, mesh=mesh)
        call = fully_shard(model, mesh=mesh, reshard_after_forward=True)
    with Traffic() as seen:
        outputs, _ = call(model.shift(tokens))
        outputs.sum().backward()
    return dict(seen.bytes), count
