"""Training on several devices: every parameter has a gradient in every step, and replicas equal one process."""

import inspect
from dataclasses import asdict

import pytest
import torch
from test_resume import finish, start
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.attention import list_mechanisms, mechanism_examples
from longspan.attention.base import REGISTRY, own_options
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from training_process import TINY

SIZES = {"dim": 8, "heads": 2, "feedforward": 12}
COMPRESSIVE = "compressive(memory=16, compressed=8, rate=2)"
STACKS = ("plain", "universal(steps=2)", "act(steps=2)", "reversible")
GATES = ("gru", "input", "output", "highway", "sigtanh")


def options(name):
    """Its examples, its defaults, and each with every switch and every optional choice turned."""
    cls, seen = REGISTRY[name], []
    for spec in dict.fromkeys([*mechanism_examples(name), name]):
        try:
            with torch.random.fork_rng():
                given = {p: getattr(built(spec), p) for p in own_options(cls)}
        except ValueError:  # no defaults
            continue
        changes = [{}, *({p: not value} for p, value in given.items() if isinstance(value, bool))]
        seen += [given | change for change in changes]
    return [one for i, one in enumerate(seen) if one not in seen[:i]]


def built(spec):
    name = spec.partition("(")[0]
    return longspan.build(spec, 8, 2, causal="causal" in REGISTRY[name].directions)


def without_gradient(module, call):
    loss = call(module)
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return [name for (name, _), grad in zip(module.named_parameters(), found, strict=True) if grad is None]


@pytest.mark.parametrize("name", list_mechanisms())
def test_outputs_alone_give_every_parameter_a_gradient(name):
    """Not only the penalty does, and not only long sequences do: data-parallel training waits for all of them."""
    cls = REGISTRY[name]
    for given in options(name):
        causal = "causal" in cls.directions
        try:
            module = cls(8, 2, **({"causal": causal} if "causal" in inspect.signature(cls).parameters else {}), **given)
        except ValueError:  # switches that do not go together
            continue
        for n in (29, 1):
            x = torch.randn(2, n, 8, generator=torch.Generator().manual_seed(1))
            assert without_gradient(module.train(), lambda m, x=x: m(x)[0].sum()) == [], (given, n)


@pytest.mark.parametrize(("stack", "residual"), [*((s, "add") for s in STACKS), *(("plain", g) for g in GATES)])
def test_so_do_stacks(stack, residual):
    config = DecoderConfig(**SIZES, depth=2, attention="gla", vocab=5, stack=stack, residual=residual)
    tokens = torch.randint(5, (2, 7), generator=torch.Generator().manual_seed(0))
    assert without_gradient(Decoder(config).train(), lambda m: m(m.shift(tokens))[0].sum()) == []


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return -self.model.likelihood.log_prob(self.model(self.model.shift(tokens))[0], tokens).mean()


def test_compressive_takes_a_second_step_of_data_parallel_training(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        config = DecoderConfig(**SIZES, depth=2, attention="compressive", positions="none", vocab=5)
        module = DistributedDataParallel(Loss(Decoder(config)))
        for _ in range(2):
            module(torch.randint(5, (2, 9))).backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "penalty"), [(COMPRESSIVE, 0.0), (COMPRESSIVE, 0.01), ("adaptive_span(span=7, ramp=3)", 0.01)]
)
def test_two_devices_equal_one_with_the_double_batch(attention, penalty, tmp_path):
    model = asdict(TINY) | {"attention": attention, "positions": "none", "dropout": 0.0}
    fields = {"steps": 4, "penalty": penalty, "model": model}
    two = start(tmp_path / "two", batch=3, devices=2, **fields)
    finish(two, tmp_path / "two")
    one = start(tmp_path / "one", batch=6, devices=1, **fields)
    finish(one, tmp_path / "one")
    first, second = (torch.load(tmp_path / "two" / f"weights-{rank}.pt") for rank in (0, 1))
    alone = torch.load(tmp_path / "one" / "weights-0.pt")
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"the replicas differ in {name}"
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-5, msg=name)
