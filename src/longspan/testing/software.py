"""Laws of the interface: argument checks, compilation, export, rebuilding, bidirectional and cross attention."""

import warnings
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attention import Attention, build
from ..states import clone
from .gauge import BATCH, DIM, HEADS, TOKENS, Gauge, Subject

# For calls with a mask or a state. Dynamo alone finds what cannot be traced; aot_eager takes more than twice as long.
TRACER = "eager"


def arguments(subject: Subject, gauge: Gauge) -> None:
    """Wrong ranks, shapes, dtypes and states raise ValueError."""
    module, x = subject.make(), subject.data()
    ones, tokens = partial(torch.ones, device=x.device), torch.arange(TOKENS, device=x.device).expand(BATCH, -1)
    gauge.raises(lambda: module(x[0]), "x of rank 2")
    gauge.raises(lambda: module(x[..., :-1]), "x of another width")
    gauge.raises(lambda: module(x.float()), "x of another dtype")
    gauge.raises(lambda: module(x, mask=ones(BATCH, TOKENS)), "a float mask")
    gauge.raises(lambda: module(x, mask=ones(BATCH, TOKENS - 1) > 0), "a mask of another length")
    gauge.raises(lambda: module(x, segments=0 * tokens[:, :1]), "segments of another length")
    gauge.raises(lambda: module(x, segments=-tokens), "segments that decrease")
    gauge.raises(lambda: module(x, donate=True), "donate=True without a state")
    gauge.raises(lambda: module(x, (x,)), "a state of another kind")
    if subject.single:
        gauge.raises(lambda: build(subject.spec, DIM + 1, HEADS), "a width that is not a multiple of heads")
        gauge.raises(lambda: module(x, context_mask=ones(BATCH, 3) > 0), "context_mask alone")
        gauge.raises(lambda: module(x, record=[]), "a record that is not a dict")
    if subject.causal:
        gauge.raises(lambda: module(x, module.init_state(BATCH + 1)), "a state of another batch size")
        gauge.raises(lambda: module(x, module.init_state(BATCH), donate=True), "donate=True under gradients")
        gauge.raises(lambda: module.init_state(-1), "a negative batch")


def rebuilds(subject: Subject, gauge: Gauge) -> None:
    """Spec and weights rebuild the same module, independent of the global random generator."""
    module, x = subject.make(), subject.data()
    y = module(x)[0]
    if subject.single:
        again: nn.Module = build(module.spec, DIM, HEADS, causal=subject.causal).to(x).eval()
        gauge.require(again.spec == module.spec, f"{module.spec!r} builds {again.spec!r}")
    else:
        again = Subject(subject.spec, subject.seed + 1, subject.stack, subject.device).make()
    again.load_state_dict(module.state_dict())
    gauge.close(again(x)[0], y, "rebuilt from spec and weights", 0.0)
    torch.rand(3, device=x.device)
    gauge.close(module(x)[0], y, "after other random draws", 0.0)


def compiles(subject: Subject, gauge: Gauge) -> None:
    """``torch.compile(fullgraph=True)`` gives the same outputs and gradients."""
    module, x = subject.make(), subject.data().requires_grad_()
    calls = {"one call": lambda x: module(x)[0]}
    if not subject.why_not(("mask",)):
        mask = torch.arange(TOKENS, device=x.device) < torch.tensor([[TOKENS], [11]], device=x.device)
        # Both in one call, since each compilation takes seconds.
        more = {} if subject.why_not(("prefix",)) else {"prefix": torch.tensor([13, 5], device=x.device)}
        calls[" and ".join(["a mask", *more])] = lambda x: module(x, mask=mask, **more)[0]
    if subject.causal:
        before = clone(module(subject.data(2, 7), module.init_state(BATCH))[1])
        before = pytree.tree_map(torch.detach, before)
        calls["a state"] = lambda x: module(x, before)[0]
        calls["a step"] = lambda x: module(x[:, :1], before)[0]
    wanted = (x, *module.parameters())
    for what, call in calls.items():
        torch._dynamo.reset()
        with warnings.catch_warnings():
            # Dynamo instantiates a traced autograd.Function, and torch warns about it.
            warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
            found = []
            tracer = "aot_eager" if what == "one call" else TRACER
            for function in (torch.compile(call, fullgraph=True, backend=tracer), call):
                y = function(x)
                # The law of gradients checks that each weight has a gradient.
                found.append((y, *torch.autograd.grad(y.square().sum(), wanted, materialize_grads=True)))
        gauge.close(found[0], found[1], f"compiled with {what}")


def exports(subject: Subject, gauge: Gauge) -> None:
    """``torch.export`` makes one decode step a graph from token and state to output and state."""
    module, x = subject.make(), subject.data()
    with torch.no_grad():
        _, state = module(x[:, :7], module.init_state(BATCH))
        leaves, structure = pytree.tree_flatten(state)

        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = module

            def forward(self, token: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
                y, after = self.inner(token, pytree.tree_unflatten(leaves, structure))
                return y, pytree.tree_leaves(after)

        program = torch.export.export(Step(), (x[:, 7:8], leaves))
        y, after = program.module()(x[:, 7:8], leaves)
        expected = module(x[:, 7:8], state)
        gauge.close(y, expected[0], "an exported step")
        # Growing states may differ in spare capacity, so compare their continuations.
        again = module(x[:, 8:], pytree.tree_unflatten(after, structure))[0]
        gauge.close(again, module(x[:, 8:], expected[1])[0], "a continuation of an exported step's state")


def bidirectional(subject: Subject, gauge: Gauge) -> None:
    """The bidirectional form sees later tokens, has no state, and ignores token order unless positions are built in."""
    module, x = subject.make(causal=False), subject.data()
    y = module(x)[0]
    gauge.raises(lambda: module.init_state(BATCH), "init_state of a bidirectional attention")
    parts = [part for part in module.modules() if isinstance(part, Attention) and part.key_pattern is not None]
    bounds = [
        part.max_lookahead
        for part in module.modules()
        if isinstance(part, Attention) and part.max_lookahead is not None
    ]
    last = min([TOKENS - 1, *bounds, *(_last_seen(part) for part in parts)])
    moved = module(x.index_copy(1, torch.tensor([last], device=x.device), subject.data(2, 1)))[0]
    gauge.require((moved[:, 0] - y[:, 0]).abs().max() > 1e-6, f"the first output does not see token {last}")
    if not any(getattr(part, "positional", False) for part in module.modules()):
        order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5)).to(x.device)
        gauge.close(module(x[:, order])[0], y[:, order], "permuted tokens")
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool, device=x.device)
    mask[0, 3:9] = False
    alone = module(x[:1, mask[0]])[0]
    gauge.close(module(x, mask=mask)[0][:1, mask[0]], alone, "a bidirectional row with padding")


def _last_seen(part: Attention) -> int:
    """The last of TOKENS tokens that the first one sees in any head, by the pattern of the layer."""
    assert part.key_pattern is not None
    pairs = part.key_pattern.dense(
        part.num_prefix_tokens + TOKENS, heads=part.heads, layer=getattr(part, "layer", 0)
    ).any(0)
    return int(pairs[part.num_prefix_tokens, part.num_prefix_tokens :].nonzero().max())


def cross(subject: Subject, gauge: Gauge) -> None:
    """``context=``: every query sees every real context token, in any order; the state keeps the context."""
    module, x, context = subject.make(), subject.data(), subject.data(2, 11)
    if getattr(module, "positional", False):
        gauge.raises(lambda: module(x, context=context), "context= with built-in positions")
        return
    y, state = module(x, context=context)
    mask = torch.ones(BATCH, 11, dtype=torch.bool, device=x.device)
    mask[0, 4:8] = False
    order = torch.randperm(11, generator=torch.Generator().manual_seed(5)).to(x.device)
    gauge.close(module(x, context=context[:, order])[0], y, "a permuted context")
    garbage = torch.where(mask[..., None], context, 1e3)
    masked, masked_state = module(x, context=garbage, context_mask=mask)
    gauge.close(masked[:1], module(x[:1], context=context[:1, mask[0]])[0], "a context with padding")
    gauge.close(masked[1:], y[1:], "the other row's context")
    gauge.close(module(x[:, 5:], state)[0], y[:, 5:], "a later call with the state alone")
    gauge.close(module(x[:, 5:], masked_state)[0], masked[:, 5:], "a later call with the state of a padded context")
    gauge.close(module(x.flip(1), context=context)[0], y.flip(1), "queries in another order")
    other = subject.make(causal=False) if not subject.why_not(("bidirectional",)) else module
    gauge.close(other(x, context=context)[0], y, "the other direction")
    gauge.raises(lambda: module(x, state, context=context), "context= together with a state")
    moved = module(x, context=torch.cat([context[:, :-1], subject.data(3, 1)], 1))[0]
    gauge.require((moved[:, 0] - y[:, 0]).abs().max() > 1e-6, "the first query does not see the last context token")
    blind, _ = module(x, context=context, context_mask=torch.zeros_like(mask))
    gauge.require(blind.isfinite().all(), "a context of padding only: not finite")


def carry(subject: Subject, gauge: Gauge) -> None:
    """A layer without a carry behaves as the first layer of a stack, and passes a carry on."""
    module, x = subject.make(), subject.data()
    y, _, handed = module(x, carry=module.init_carry(x, None))
    gauge.close(module(x)[0], y, "no carry against the first layer's carry")
    gauge.require(handed is not None, "a class with has_layer_carry returns no carry")
