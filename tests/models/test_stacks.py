"""Stacks: parallel and recurrent runs agree, and the properties of each kind of stack."""

import copy
import math

import pytest
import torch
from torch import nn

from longspan import Decoder, DecoderConfig
from longspan.models.stacks import STACKS
from longspan.models.stacks.plain import StackCall
from longspan.models.stacks.universal import Act, UniversalState
from longspan.modules.sinusoidal import sinusoid
from longspan.ops.tensors import upcast_half
from stack_cases import SMALL, data, grads, same, stack

KINDS = ("plain", "universal(steps=3)", "universal(steps=2, coordinates='step')", "act(steps=4)", "reversible")
ATTENTIONS = (
    "softmax",
    "linear",
    "gated_deltanet",
    "local(window=5)",
    "reformer(chunk=3, buckets=4, rounds=3)",
    "linear; softmax",
)


def test_every_kind_is_tried():
    assert {kind.split("(")[0] for kind in KINDS} == set(STACKS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ATTENTIONS)
class TestRecurrent:
    def test_any_cut_gives_one_answer(self, kind, attention):
        made, x = stack(stack=kind, attention=attention), data()
        whole, _ = made(x)
        for cuts in ((1,) * 13, (5, 8), (12, 1)):
            state, parts = made.init_state(2), []
            for part in x.split(cuts, 1):
                y, state = made(part, state)
                parts.append(y)
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


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

    def test_coordinates_by_hand(self):
        """Position 1, step 1: channel 0 is 2 sin 1, channel 1 is 2 cos 1."""
        seen = []
        made = stack(depth=1, stack="universal(steps=1)", attention="linear")
        made.blocks[0].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        made(torch.zeros(1, 2, 16, dtype=torch.float64))
        assert seen[0][0, 1, 0].item() == pytest.approx(2 * math.sin(1))
        assert seen[0][0, 1, 1].item() == pytest.approx(2 * math.cos(1))

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
    @staticmethod
    def halting(biases, steps=None, threshold=0.01):
        """An Act whose halting chances are given, whatever the state: (p_n, penalty)."""
        act = Act(1, steps=steps or len(biases), threshold=threshold, coordinates="none")
        chances = iter(biases)

        class Steps(nn.Module):
            def __iter__(self):
                act.bias.data.fill_(torch.logit(torch.tensor(next(chances), dtype=torch.float64)))
                return iter(())

        call, blocks = StackCall({}), Steps()
        act.double()
        act.halt.data.zero_()
        blocks.__class__.__len__ = lambda self: 0
        y, _ = act(blocks, torch.ones(1, 1, 1, dtype=torch.float64), None, call)
        return y.item(), call.own_record

    @pytest.mark.parametrize(
        ("chances", "steps", "count", "remainder"),
        [
            ((0.3, 0.3, 0.3, 0.3), 4, 4, 0.1),
            ((0.999,), 5, 1, 1.0),
            ((0.3, 0.3, 0.25), 3, 3, 0.4),  # the cap: its remainder is not dropped
            ((0.5, 0.6), 8, 2, 0.5),
            ((1e-6,) * 3, 3, 3, 1 - 2e-6),
        ],
    )
    def test_remainder_and_count_by_hand(self, chances, steps, count, remainder):
        y, record = self.halting(chances, steps)
        assert record["steps"].item() == count
        assert record["ponder"].item() == pytest.approx(count + remainder)
        assert record["penalty"].item() == pytest.approx(count + remainder)
        assert y == pytest.approx(1.0)  # the state is 1 in every step, so the weights sum to 1

    def test_the_gradient_of_the_cost(self):
        """As finite differences have it, with the number of steps taken as constant."""
        made, x = stack(stack="act(steps=6)", attention="linear"), data().requires_grad_()
        record = {"penalty": None}
        made(x, record=record)
        bias = torch.autograd.grad(record["penalty"], made.run.bias)[0]
        # Finite differences, small enough that no token takes another number of steps.
        eps, costs = 1e-6, []
        for sign in (1, -1):
            other = copy.deepcopy(made)
            with torch.no_grad():
                other.run.bias += sign * eps
            record = {}
            other(x, record=record)
            costs.append(record["penalty"])
        torch.testing.assert_close((costs[0] - costs[1]) / (2 * eps), bias, rtol=1e-5, atol=1e-7)

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
    @pytest.mark.parametrize("attention", [*ATTENTIONS, "adaptive_span(span=7, ramp=4)"])
    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_gradients_are_those_of_autograd(self, attention, dropout):
        made = stack(depth=3, stack="reversible", attention=attention, dropout=dropout).train()
        x = data().requires_grad_()
        found = []
        for run in (lambda x: made(x)[0], Twice(made)):
            torch.manual_seed(3)
            y = run(x)
            after = torch.get_rng_state()
            found.append((y, after, grads(made, y, x)))
            assert torch.equal(after, torch.get_rng_state())  # the backward draws no random numbers
        assert torch.equal(found[0][1], found[1][1])
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
        same(found[0][2], found[1][2], 1e-10)

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

    def test_masks_and_documents(self):
        made, x = stack(stack="reversible", attention="softmax").train(), data()
        segments = torch.tensor([[0] * 6 + [1] * 7] * 2)
        y = made(x.clone().requires_grad_(), segments=segments)[0]
        parts = [made(part.clone().requires_grad_())[0] for part in (x[:, :6], x[:, 6:])]
        torch.testing.assert_close(y, torch.cat(parts, 1), rtol=1e-10, atol=1e-10)

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
            ({"prenorm": False}, "prenorm=True"),
            ({"residual": "gru"}, "residual='add'"),
            ({"attention": "realformer"}, "realformer"),
            ({"attention": "sac"}, "sac"),
        ],
    )
    def test_what_cannot_be_reversed(self, fields, message):
        with pytest.raises(ValueError, match=message):
            stack(stack="reversible", **fields)


def test_specs_that_name_no_stack():
    for text, message in (
        ("plan", "'plan'"),
        ("universal(step=3)", "'step'"),
        ("act(threshold=2.0)", "threshold=2.0"),
        ("'plain'", "plain"),
        ("universal(steps=0)", "steps=0"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            stack(stack=text)
    with pytest.raises(ValueError, match="'gur'"):
        stack(residual="gur")


def test_decoders_step_by_step():
    for kind in KINDS:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**SMALL, vocab=11, positions="none", stack=kind)).double().eval()
        tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0))
        whole, _ = model(tokens)
        state = model.init_state(2)
        assert isinstance(state.layers, UniversalState) == kind.startswith(("universal", "act"))
        parts = []
        for token in tokens.split(1, 1):
            y, state = model(token, state)
            parts.append(y)
        torch.testing.assert_close(upcast_half(torch.cat(parts, 1)), whole, rtol=1e-9, atol=1e-9)
