"""Training on several devices: every parameter has a gradient in every step, and replicas equal one process."""

import contextlib
import inspect
import json
import os
import random
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.attention import list_mechanisms, mechanism_examples
from longspan.attention.base import REGISTRY, own_options
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import fit, loop, objectives
from longspan.train.place import PLACE
from support.runs import start, trained, wait_for
from training_process import HANGS, TINY, tiny

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


@pytest.mark.parametrize("name", [name for name in list_mechanisms() if "gradients" not in REGISTRY[name].exempt])
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


def taken(folder, devices, accumulate):
    """The examples that each step read, by all processes together."""
    found = {}
    for rank in range(devices):
        for index, indices in json.loads((folder / f"taken-{rank}.json").read_text()).items():
            found.setdefault(int(index) // accumulate, []).extend(indices)
    return {step: sorted(indices) for step, indices in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "penalty"),
    [("linear", 0.0), (COMPRESSIVE, 0.0), (COMPRESSIVE, 0.01), ("adaptive_span(span=7, ramp=3)", 0.01)],
)
def test_two_devices_equal_one_with_the_double_batch(attention, penalty, tmp_path):
    model = asdict(TINY) | {"attention": attention, "positions": "none", "dropout": 0.0}
    fields = {"steps": 4, "penalty": penalty, "model": model}
    trained(tmp_path / "two", batch=3, devices=2, **fields)
    trained(tmp_path / "one", batch=6, **fields)
    first, second = (torch.load(tmp_path / "two" / f"weights-{rank}.pt") for rank in (0, 1))
    alone = torch.load(tmp_path / "one" / "weights-0.pt")
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"the replicas differ in {name}"
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-5, msg=name)
    assert taken(tmp_path / "two", 2, 1) == taken(tmp_path / "one", 1, 1)


def recorded(monkeypatch):
    """The examples of each micro-batch of runs in this process."""
    order, found = objectives.batch_indices, []

    def kept(*arguments):
        found.append(order(*arguments).tolist())
        return found[-1]

    monkeypatch.setattr(objectives, "batch_indices", lambda *arguments: torch.tensor(kept(*arguments)))
    return found


FIELDS = {"steps": 6, "save_every": 3, "evaluate_every": 6, "schedule": "constant"}
PLAIN = replace(TINY, dropout=0.0)


# As of an older version, which counted micro-batches, and had no run.nodes and no run.strategy.
@pytest.mark.parametrize("older", [False, True])
def test_the_place_is_counted_in_examples(older, tmp_path, monkeypatch):
    found = recorded(monkeypatch)
    fit(PLAIN, tiny(tmp_path / "whole", batch=6, **FIELDS), progress=False)
    whole = found[:6]
    save = loop.Task.on_save_checkpoint
    if older:
        monkeypatch.setattr(
            loop.Task, "on_save_checkpoint", lambda *args: (save(*args), args[1]["longspan"].pop(PLACE))
        )
    fit(PLAIN, tiny(tmp_path / "a", batch=6, **FIELDS | {"steps": 3}), progress=False)
    recipe = tmp_path / "a" / "run" / "config.yaml"
    if older:
        content = yaml.safe_load(recipe.read_text())
        content["run"] = {k: v for k, v in content["run"].items() if k not in ("nodes", "strategy")}
        recipe.write_text(yaml.safe_dump(content))
    found.clear()
    result = fit(PLAIN, tiny(tmp_path / "a", batch=2, accumulate=3, **FIELDS), resume=True, progress=False)
    assert result.steps == 6
    steps = [[*a, *b, *c] for a, b, c in zip(found[0:9:3], found[1:9:3], found[2:9:3], strict=True)]
    assert [sorted(one) for one in steps] == [sorted(one) for one in whole[3:]]
    models = [longspan.load(tmp_path / name / "run").state_dict() for name in ("a", "whole")]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"devices": 4},
            r"on 4 devices with run.batch=6: a step has 6 examples, which is not a multiple of 24; choose",
        ),
        ({"devices": 2}, r"a step has 6 examples, which is not a multiple of 12; set run.batch to a divisor of 3, or"),
        ({"batch": 4}, r"other settings: run.batch \(6 -> 4\)"),
        ({"accumulate": 2}, r"other settings: run.accumulate \(1 -> 2\)"),
        ({"accumulate": 2, "batch": 6, "devices": 2}, r"run.accumulate \(1 -> 2\), run.devices \(1 -> 2\)"),
    ],
)
def test_devices_that_cannot_share_a_step_are_refused(fields, message, tmp_path):
    fit(PLAIN, tiny(tmp_path, batch=6, **FIELDS | {"steps": 1}), progress=False)
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ValueError, match=message):
        fit(PLAIN, tiny(tmp_path, **{"batch": 6} | FIELDS | fields), resume=True, progress=False)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


# The same order of examples as in test_fsdp.py, by the other strategy.
@pytest.mark.slow
def test_resumed_on_two_devices_reads_the_examples_of_one(tmp_path):
    fields = {"dropout": 0.0, "batch": 3, **FIELDS}
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    trained(whole, accumulate=2, **fields)
    trained(moved, accumulate=2, **fields | {"steps": 3})
    trained(moved, accumulate=2, devices=2, resume=True, **fields)
    recipe = yaml.safe_load((moved / "run" / "config.yaml").read_text())["run"]
    assert (recipe["devices"], recipe["accumulate"]) == (2, 1)
    wanted = taken(whole, 1, 2)
    assert all(indices == wanted[step] for step, indices in taken(moved, 2, 1).items() if 3 <= step < 6)
    found, alone = (torch.load(folder / "weights-0.pt") for folder in (moved, whole))
    for name, value in found.items():
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-5, msg=name)


def children(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the other processes in /proc")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_at_any_moment_nothing_is_lost(strategy, tmp_path):
    fields = {"dropout": 0.0, "steps": 30, "save_every": 2, "evaluate_every": 8, "strategy": strategy, "keep": 3}
    chance, killed = random.Random(strategy), tmp_path / "killed"
    trained(tmp_path / "whole", batch=6, **fields)
    # Alternately a process of two, and the only one.
    for attempt, sizes in enumerate([{"batch": 3, "devices": 2}, {"batch": 6}, {"batch": 3, "devices": 2}]):
        at = 4 + 8 * attempt
        process = start(killed, resume=attempt > 0, pause=0.03, **fields | sizes)
        wait_for(killed, process, at)
        time.sleep(chance.uniform(0, 0.5))
        os.kill(chance.choice([process.pid, *children(process)]), signal.SIGKILL)
        try:
            process.wait(timeout=HANGS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        left = [path for path in (killed / "run" / "checkpoints").iterdir() if path.name.startswith("step-")]
        assert left
        # What is there is whole.
        steps = {path: checkpoint.read_config(path)["step"] for path in left}
        assert all(path.name == f"step-{step:08d}" for path, step in steps.items())
        assert all(p.isfinite().all() for path in left for p in checkpoint.load(path).parameters())
    trained(killed, resume=True, **fields, batch=3, devices=2)
    found, wanted = (longspan.load(f / "run" / "checkpoints" / "step-00000030") for f in (killed, tmp_path / "whole"))
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, wanted.state_dict()[name], rtol=0, atol=3e-5, msg=name)
    tables = [(f / "run" / "metrics.csv").read_text().splitlines()[1:] for f in (killed, tmp_path / "whole")]
    assert [row.split(",")[0] for row in tables[0]] == [row.split(",")[0] for row in tables[1]]
