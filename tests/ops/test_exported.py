"""torch.export: one program for every batch and length, with the outputs, gradients, masks and packed rows of eager."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import longspan
from longspan.ops import gated
from ops.families import FAMILIES

SPECS = ("linear", "gated_deltanet(key_heads=1)", "kda(convolution=0)")


class Flat(nn.Module):
    """An attention whose state comes as its leaves."""

    def __init__(self, attention, **given):
        super().__init__()
        self.attention, self.given = attention, given
        self.leaves, self.spec = pytree.tree_flatten(attention.init_state(1))

    def forward(self, x, *state):
        y, end = self.attention(x, pytree.tree_unflatten(list(state), self.spec), **self.given)
        return y, *pytree.tree_leaves(end)


def operands(batch, n):
    """q, k, v, log_decay, beta, state of two heads of keys and four of values, in float64."""
    return list(FAMILIES["delta-head"].operands(n, (3, 5), batch=batch).values())


@pytest.mark.parametrize("spec", SPECS)
def test_one_program_for_every_batch_and_length(spec):
    torch.manual_seed(0)
    flat = Flat(longspan.build(spec, dim=8, heads=2).double().eval())

    def example(batch, n):
        state = flat.attention(torch.randn(batch, 5, 8).double(), flat.attention.init_state(batch))[1]
        return torch.randn(batch, n, 8).double(), *pytree.tree_leaves(longspan.states.detach(state))

    x, *state = example(2, 50)
    batch, tokens = Dim("B", min=1), Dim("N", min=1)
    shapes = {"x": {0: batch, 1: tokens}, "state": tuple({0: batch} for _ in state)}
    program = export(flat, (x, *state), dynamic_shapes=shapes)
    # Possibly in a submodule, where autocast is off.
    graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
    assert sum("recurrence" in str(node.target) for graph in graphs for node in graph.nodes) == 1
    for rows, n in ((1, 1), (3, 9), (2, 145), (1, 1001)):
        given = example(rows, n)
        for ours, theirs in zip(flat(*given), program.module()(*given), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_decoder_of_several_layers():
    torch.manual_seed(0)
    config = longspan.DecoderConfig(
        dim=8, depth=2, heads=2, feedforward=16, vocab=5, attention="gated_deltanet; softmax"
    )
    model = longspan.Decoder(config).eval()
    program = export(
        model, (torch.tensor([[3, 1, 4], [0, 2, 2]]),), dynamic_shapes=({0: Dim("B", min=1), 1: Dim("N", min=1)},)
    )
    tokens = torch.randint(5, (3, 40), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(program.module()(tokens)[0], model(tokens)[0], atol=1e-6)


def test_the_operation_is_the_recurrence():
    q, k, v, decay, beta, state = operands(2, 70)
    mask = torch.arange(70) % 7 != 3
    for options in (
        {"log_decay": decay, "beta": beta, "mask": mask.expand(2, 70)},
        {"log_decay": decay, "segments": (torch.arange(70) // 17).expand(2, 70)},
        {"beta": beta, "normalize": "l2"},
    ):
        given = (options.get(name) for name in ("mask", "segments", "cu_seqlens"))
        found = torch.ops.longspan.recurrence(
            q, k, v, options.get("log_decay"), options.get("beta"), state, *given, 0.3, "normalize" in options
        )
        ours = gated.recur(q, k, v, scale=0.3, state=state, **options)
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, ours, strict=True))


def test_the_operation_keeps_the_rules_of_torch():
    given = [t.requires_grad_() for t in operands(1, 4)]
    wanted = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.longspan.recurrence, (*given, None, None, None, 0.5, True), test_utils=wanted)


@pytest.mark.parametrize("normalize", [None, "l2"])
def test_gradients_of_an_exported_program(normalize):
    class Recurrence(nn.Module):
        def forward(self, q, k, v, decay, beta, state):
            return gated.recur(q, k, v, log_decay=decay, beta=beta, state=state, normalize=normalize)

    given = [t.requires_grad_() for t in operands(2, 13)]
    program = export(Recurrence(), tuple(given)).module()
    found = torch.autograd.grad(sum(t.sin().sum() for t in program(*given)), given)
    ours = torch.autograd.grad(sum(t.sin().sum() for t in Recurrence()(*given)), given)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, ours, strict=True))
    again = [
        torch.autograd.grad(sum(t.sin().sum() for t in call(*given)), given[0], create_graph=True)[0]
        for call in (program, Recurrence())
    ]
    found, ours = (torch.autograd.grad(t.sin().sum(), given)[1] for t in again)
    assert torch.allclose(found, ours, rtol=1e-8)
