"""Stacks: parallel and recurrent runs agree, and the properties of each kind of stack."""

import pytest
import torch
from torch import nn

from longspan import Decoder, DecoderConfig
from longspan.models.stacks import STACKS
from longspan.models.stacks.universal import UniversalState
from longspan.modules.sinusoidal import sinusoid
from stack_cases import SMALL, data, grads, same, stack
from support.mechanisms import in_parts

KINDS = ("plain", "universal(steps=3)", "universal(steps=2, coordinates='step')", "act(steps=4)", "reversible")


def test_every_kind_is_tried():
    assert {kind.split("(")[0] for kind in KINDS} == set(STACKS)


class TestUniversal:
    def test_tied_steps_are_tied_layers(self):
        """T steps of one block are a plain stack of T copies of it, with the coordinates added between."""
        made, x = stack(depth=1, stack="universal(steps=3)", attention="linear"), data()
        tied = stack(depth=3, attention="linear")
        for block in tied.blocks:
            block.load_state_dict(made.blocks[0].state_dict())
        tied.norm.load_state_dict(made.norm.state_dict())
        at, y = torch.arange(13)[None], x
        for t, block in enumerate(tied.blocks, 1):
            place = sinusoid(at, 16, torch.float64) + sinusoid(torch.tensor([[t]]), 16, torch.float64)
            y, _, _ = block(y + place)
        torch.testing.assert_close(made(x)[0], tied.norm(y), rtol=1e-12, atol=1e-12)
        plain = stack(depth=1, stack="universal(steps=3, coordinates='none')", attention="linear")
        plain.load_state_dict(made.state_dict())
        torch.testing.assert_close(plain(x)[0], tied(x)[0], rtol=1e-12, atol=1e-12)

    def test_wrong_states(self):
        made = stack(stack="universal(steps=3)")
        with pytest.raises(ValueError, match="UniversalState of 6 states, not 2"):
            made(data(), stack().init_state(2))
        with pytest.raises(ValueError, match="a tuple of 2 states, not UniversalState"):
            stack()(data(), made.init_state(2))
        message = r"position .* int64 \(2,\), not torch.int64 \(3"
        with pytest.raises(ValueError, match=message):
            made(data(), made.init_state(3))
        for kind in KINDS:
            with pytest.raises(ValueError, match="donate=True"):
                stack(stack=kind)(data(), donate=True)


def pondered(made, x, **given):
    record = {}
    y, _ = made(x, record=record, **given)
    return y, record


class TestAct:
    def test_a_sure_halt_is_one_step(self):
        made, x = stack(depth=1, stack="act(steps=5)", attention="softmax"), data()
        with torch.no_grad():
            made.run.halt.zero_()
            made.run.bias.fill_(9.0)
        one = stack(depth=1, stack="universal(steps=1)", attention="softmax")
        one.load_state_dict({k: v for k, v in made.state_dict().items() if not k.startswith("run.")})
        y, record = pondered(made, x)
        torch.testing.assert_close(y, one(x)[0], rtol=1e-12, atol=1e-12)
        assert (record["steps"] == 1).all()

    def test_halted_tokens_keep_their_state(self):
        made, x = stack(depth=1, stack="act(steps=5, threshold=0.3)", attention="linear"), data(11, batch=3)
        read = []
        made.blocks[0].register_forward_pre_hook(lambda module, given: read.append(given[0]))
        _, record = pondered(made, x)
        counts = record["steps"]
        assert 1 <= counts.min() < counts.max() <= 5
        at = sinusoid(torch.arange(11)[None], 16, torch.float64)
        plain = [r - at - sinusoid(torch.tensor([[t]]), 16, torch.float64) for t, r in enumerate(read, 1)]
        for t in range(1, len(plain)):
            halted = counts < t  # before step t, counted from 1, which made plain[t - 1] into plain[t]
            torch.testing.assert_close(plain[t][halted], plain[t - 1][halted], rtol=1e-9, atol=1e-9)
            assert not torch.equal(plain[t][~halted], plain[t - 1][~halted])

    def test_padding_costs_nothing_and_rows_are_alone(self):
        made, x = stack(stack="act(steps=4)", attention="linear"), data()
        mask = torch.ones(2, 13, dtype=torch.bool)
        mask[1, 6:] = False
        _, record = pondered(made, x, mask=mask)
        _, first = pondered(made, x[:1])
        _, second = pondered(made, x[1:, :6])
        both = torch.cat([first["ponder"][0], second["ponder"][0]])
        torch.testing.assert_close(record["penalty"], both.mean().to(record["penalty"].dtype), rtol=1e-6, atol=1e-6)
        assert (record["ponder"][1, 6:] == 0).all()


class Twice(nn.Module):
    """The plain form of a reversible stack, for autograd to walk through."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x, record=None, **given):
        one = two = x
        records = []
        for block in self.made.blocks:
            own = dict(record) if record is not None and "record" in block.attention.supported_args else None
            one = one + block.attention_branch(two, None, record=own, **given)[0]
            two = two + block.ffn_branch(one)
            records.append(own or {})
        if record is not None:
            record["penalty"] = torch.stack([own["penalty"] for own in records if "penalty" in own]).sum()
        return self.made.norm((one + two) / 2)


class TestReversible:
    def test_penalties_have_gradients(self):
        made = stack(depth=2, stack="reversible", attention="adaptive_span(span=7, ramp=4)").train()
        x, costs = data().requires_grad_(), []
        for run in (made, Twice(made)):
            record = {"penalty": None}
            y = run(x, record=record)
            y = y[0] if isinstance(y, tuple) else y
            costs.append(
                torch.autograd.grad(y.sum() + 3 * record["penalty"], list(made.parameters()), allow_unused=True)
            )
        same(*costs, 1e-10)

    def test_nothing_is_kept_for_the_backward(self):
        """However deep, the graph keeps the two streams at the end and the weights."""

        def kept(kind, depth):
            sizes = []

            def pack(t):
                sizes.append(t.numel())
                return t

            made, x = stack(depth=depth, stack=kind, attention="softmax").train(), data(40).requires_grad_()
            weights = {p.data_ptr() for p in made.parameters()}

            def keep(t):
                return pack(t) if t.data_ptr() not in weights else t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                made(x)[0].sum()
            return sum(sizes)

        assert kept("reversible", 12) == kept("reversible", 2)
        assert kept("plain", 12) > 4 * kept("plain", 2)

    def test_autocast_is_replayed(self):
        made = stack(stack="reversible", attention="softmax").float().train()
        x, kinds = data().float().requires_grad_(), []
        made.blocks[0].attention.query.register_forward_hook(lambda module, given, y: kinds.append(y.dtype))
        found = []
        for run in (lambda x: made(x)[0], Twice(made)):
            with torch.autocast("cpu", torch.bfloat16):
                y = run(x)
            found.append(grads(made, y.float(), x))
        same(*found, 0.03)
        assert kinds == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stack": "plan"}, "'plan'"),
        ({"stack": "universal(step=3)"}, "'step'"),
        ({"stack": "act(threshold=2.0)"}, "threshold=2.0"),
        ({"stack": "'plain'"}, "plain"),
        ({"stack": "universal(steps=0)"}, "steps=0"),
        ({"residual": "gur"}, "'gur'"),
        ({"stack": "reversible", "prenorm": False}, "prenorm=True"),
        ({"stack": "reversible", "residual": "gru"}, "residual='add'"),
        ({"stack": "reversible", "attention": "realformer"}, "realformer"),
        ({"stack": "reversible", "attention": "sac"}, "sac"),
    ],
)
def test_what_is_no_stack_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        stack(**fields)


def test_decoders_step_by_step():
    for kind in KINDS:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**SMALL, vocab=11, positions="none", stack=kind)).double().eval()
        tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0))
        whole, _ = model(tokens)
        assert isinstance(model.init_state(2).layers, UniversalState) == kind.startswith(("universal", "act"))
        torch.testing.assert_close(in_parts(model, tokens, 1)[0], whole, rtol=1e-9, atol=1e-9)
