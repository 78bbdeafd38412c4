"""Options of training: learning rates, skipped steps, averages of weights, compiled blocks, loggers, and speed."""

import itertools
import math
import sys
import types

import pytest
import torch

import longspan
from longspan.cli.entry import main
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.stacks.block import Block
from longspan.train import TrainConfig, average, fit, loop, objectives, rate, speed
from support.runs import rows
from training_process import TINY, tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread")


# Fields of a run, the steps, and the learning rates there.
WARM = [0.125, 0.25, 0.375, 0.5]
WSD = {"steps": 20, "warmup": 4, "learning_rate": 2.0, "schedule": "wsd", "decay": 8, "final": 0.25}


RATES = [
    *(
        ({"schedule": schedule, "steps": 20, "warmup": 4, "learning_rate": 0.5} | more, range(5), [*WARM, 0.5])
        for schedule, more in (("constant", {}), ("cosine", {}), ("drop", {"drop_at": 9}), ("wsd", {"decay": 8}))
    ),
    ({"schedule": "constant"}, range(5), [1e-3] * 5),
    ({"steps": 3, "warmup": 3}, (3,), [1e-3]),
    ({"schedule": "drop", "drop_at": 7, "learning_rate": 1e-3}, (0, 6, 7, 999), [1e-3, 1e-3, 1e-4, 1e-4]),
    # A cosine falls to 0 by way of a half, or to a share.
    ({"steps": 10, "learning_rate": 2.0}, range(11), [1 + math.cos(math.pi * step / 10) for step in range(11)]),
    ({"steps": 25, "warmup": 5, "learning_rate": 2.0}, (5, 15, 25), [2.0, 1.0, 0.0]),
    ({"steps": 10, "learning_rate": 2.0, "final": 0.1}, (0, 5, 10), [2.0, 1.1, 0.2]),
    # Constant, and then in a line: for a tenth of the steps by default, and never during the warm-up.
    (WSD, range(4, 13), [2.0] * 9),
    (WSD, range(12, 21), [2.0 - 1.5 / 8 * step for step in range(9)]),
    (WSD, (20, 30), [0.5, 0.5]),
    ({"steps": 100, "learning_rate": 1.0, "schedule": "wsd"}, (0, 90, 95, 100), [1.0, 1.0, 0.5, 0.0]),
    (WSD | {"steps": 10, "learning_rate": 1.0, "decay": 50, "final": 0.0}, (4, 7, 10), [1.0, 0.5, 0.0]),
]


@pytest.mark.parametrize(("fields", "steps", "rates"), RATES)
def test_learning_rates(fields, steps, rates):
    assert [rate(TrainConfig(**fields), step) for step in steps] == pytest.approx(rates, abs=1e-12)


def broken(monkeypatch, *steps):
    """Make the loss of these micro-batches NaN."""
    loss = objectives.NextToken.loss

    def scripted(self, model, batch):
        found = loss(self, model, batch)
        self.calls = getattr(self, "calls", -1) + 1
        return found._replace(total=found.total * math.nan) if self.calls in steps else found

    monkeypatch.setattr(objectives.NextToken, "loss", scripted)


class TestSkips:
    def test_a_step_without_update_changes_nothing_but_the_step(self, tmp_path, monkeypatch):
        seen = []
        batch_end = loop.Keeper.on_train_batch_end

        def watched(keeper, trainer, task, *rest):
            state = trainer.optimizers[0].state_dict()["state"]
            seen.append(
                [p.detach().clone() for p in task.model.parameters()]
                + [one["exp_avg"].clone() for one in state.values()]
            )
            batch_end(keeper, trainer, task, *rest)

        monkeypatch.setattr(loop.Keeper, "on_train_batch_end", watched)
        broken(monkeypatch, 4, 5)
        fit(TINY, tiny(tmp_path, skip_nonfinite=2, weight_decay=0.1), progress=False)
        same = [all(map(torch.equal, a, b)) for a, b in itertools.pairwise(seen)]
        assert [step for step, equal in enumerate(same, 1) if equal] == [4, 5]
        assert [(row["step"], row["skipped"]) for row in rows(tmp_path)] == [
            ("4", "0"),
            ("8", "2"),
            ("10", "2"),
            ("11", "2"),
        ]
        assert all(math.isfinite(float(row["loss"])) for row in rows(tmp_path))

    @pytest.mark.parametrize(
        ("most", "steps", "saved"),
        [(0, (0,), "nothing was saved yet"), (0, (3,), ""), (1, (3, 4), ""), (2, (2, 3, 4), "")],
    )
    def test_too_many_in_a_row_end_the_training(self, tmp_path, monkeypatch, most, steps, saved):
        broken(monkeypatch, *steps)
        with pytest.raises(ValueError, match=f"the gradient's norm became nan at step {steps[-1]}; {saved}"):
            fit(TINY, tiny(tmp_path, skip_nonfinite=most), progress=False)

    def test_skips_with_steps_between_never_end_it(self, tmp_path, monkeypatch):
        broken(monkeypatch, 1, 3, 5, 7, 9)
        assert fit(TINY, tiny(tmp_path, skip_nonfinite=1), progress=False).steps == 11
        assert rows(tmp_path)[-1]["skipped"] == "5"

    def test_a_resume_keeps_the_count(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            broken(patch, 2, 3)
            fit(TINY, tiny(tmp_path, skip_nonfinite=2, steps=6), progress=False)
        fit(TINY, tiny(tmp_path, skip_nonfinite=2, steps=8), resume=True, progress=False)
        assert rows(tmp_path)[-1]["skipped"] == "2"

    def test_states_that_are_not_finite_begin_anew(self):
        config = DecoderConfig(dim=8, depth=1, heads=2, feedforward=8, vocab=256, attention="linear", positions="none")
        data = longspan.data.load("text:stdlib", 16)
        model = longspan.Decoder(config)
        objective = objectives.build(model, TrainConfig(stream=True, batch=2, data="text:stdlib"), data)
        objective.loss(model, objective.batch(0, 0, 1))
        kept = objective.carry.state
        objective.skip(model)
        assert objective.carry.state is kept
        state = kept.layers[0]
        kept = kept._replace(layers=(state._replace(**{state._fields[0]: state[0] * math.nan}),))
        objective.carry.state = kept
        objective.skip(model)
        assert objective.carry.state is None
        assert objective.loss(model, objective.batch(1, 0, 1)).total.isfinite()


class TestAverage:
    def test_it_follows_the_weights(self, tmp_path, monkeypatch):
        steps = []
        update = average.Average.update

        def watched(self, model, step):
            update(self, model, step)
            steps.append({name: p.detach().clone() for name, p in model.named_parameters()})

        monkeypatch.setattr(average.Average, "update", watched)
        fit(TINY, tiny(tmp_path, ema=0.6), progress=False)
        expected = steps[0]
        for step, own in enumerate(steps, 1):
            decay = min(0.6, step / (step + 9))
            expected = {name: decay * old + (1 - decay) * own[name] for name, old in expected.items()}
        place = checkpoint.resolve(tmp_path / "run", prefer="last")
        found = checkpoint.load_training(place)["average"]
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], expected[name], atol=1e-7) for name in found)
        model = longspan.load(place)
        average.load_average(model, place)
        assert all(torch.equal(p, found[name]) for name, p in model.named_parameters())

    def test_eval_and_generate_take_it_on_request(self, tmp_path, capsys):
        fit(TINY, tiny(tmp_path, ema=0.9), progress=False)
        fit(TINY, tiny(tmp_path / "plain", steps=4), progress=False)
        capsys.readouterr()
        run = str(tmp_path / "run")
        for flags in ([], ["--ema"]):
            assert main(["eval", run, "--split", "validation", "--examples", "20", *flags]) == 0
        usual, averaged = capsys.readouterr().out.splitlines()
        assert usual != averaged
        model = longspan.load(run)
        average.load_average(model, run)
        data = longspan.data.load("digits")
        bits = longspan.train.bits(model, data, "validation", examples=20)
        assert averaged.startswith(f"{bits:.4f} bits/dim")
        assert main(["eval", str(tmp_path / "plain" / "run"), "--ema"]) == 2
        assert "has no average of weights; train with run.ema" in capsys.readouterr().err
        png = str(tmp_path / "a.png")
        assert main(["generate", run, "--count", "2", "--out", png, "--ema"]) == 0


@pytest.mark.parametrize("option", [{"fused": True}, {"logger": "csv"}, {"peak_tflops": 1.0}])
def test_options_leave_the_result(option, tmp_path):
    """A fused optimizer rounds differently; the others change no bit."""
    fit(TINY, tiny(tmp_path / "usual", steps=4), progress=False)
    fit(TINY, tiny(tmp_path / "other", steps=4, **option), progress=False)
    if "fused" not in option:
        assert weights(tmp_path / "usual") == weights(tmp_path / "other")
    models = [longspan.load(tmp_path / name / "run") for name in ("usual", "other")]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "other" / "run" / "tensorboard").exists() == ("logger" not in option)


def test_fused_reaches_the_optimizer(tmp_path, monkeypatch):
    made = []
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: made.append(k) or adamw(*a, **k))
    fit(TINY, tiny(tmp_path, steps=1, fused=True), progress=False)
    fit(TINY, tiny(tmp_path / "b", steps=1), progress=False)
    assert [options.get("fused") for options in made] == [True, None]


def test_each_block_is_compiled(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(Block, "compile", lambda self, **options: compiled.append(self))
    config = DecoderConfig(dim=8, depth=3, heads=2, feedforward=8, vocab=17, length=64)
    fit(config, tiny(tmp_path, steps=1, compile=True), progress=False)
    assert len(compiled) == 3
    with pytest.raises(ValueError, match="compile=True has no effect on stack='reversible'"):
        fit(
            DecoderConfig(dim=8, depth=2, heads=2, feedforward=8, vocab=17, length=64, stack="reversible"),
            tiny(tmp_path / "b", compile=True),
            progress=False,
        )


@pytest.mark.inductor
# Dynamo and inductor warn of what they do themselves.
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_train_alike(tmp_path):
    config = DecoderConfig(dim=8, depth=2, heads=2, feedforward=8, vocab=17, length=64, attention="linear")
    for name in ("usual", "compiled"):
        fit(config, tiny(tmp_path / name, steps=4, compile=name == "compiled"), progress=False)
    models = [longspan.load(tmp_path / name / "run") for name in ("usual", "compiled")]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)


class TestSpeed:
    def test_six_operations_for_each_weight_in_a_product(self):
        config = DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=17, length=64, attention="softmax")
        # Four square matrices and the two of the feed-forward network in each block, and the head.
        block = 4 * 8 * 8 + 2 * 8 * 16
        assert speed.flops_per_token(longspan.Decoder(config)) == 6 * (2 * block + 8 * 17)
        tied = DecoderConfig(**{**config.to_dict(), "tied": True})
        assert speed.flops_per_token(longspan.Decoder(tied)) == 6 * (2 * block + 8 * 17)
        thrice = DecoderConfig(**{**config.to_dict(), "stack": "universal(steps=3)"})
        assert speed.flops_per_token(longspan.Decoder(thrice)) == 6 * (3 * 2 * block + 8 * 17)

    def test_mfu_is_a_share_of_the_peak(self, tmp_path):
        fit(TINY, tiny(tmp_path, peak_tflops=0.5), progress=False)
        work = speed.flops_per_token(longspan.load(tmp_path / "run"))
        for row in rows(tmp_path):
            assert float(row["mfu"]) == pytest.approx(float(row["tokens_per_second"]) * work / 0.5e12)


class TestWandb:
    @pytest.fixture
    def package(self, monkeypatch):
        """A package that records what it is given."""
        fake = types.ModuleType("wandb")
        fake.__spec__ = object()
        fake.inits, fake.rows, fake.finished = [], [], 0

        class Run:
            def log(self, row, step):
                fake.rows.append((step, row))

            def finish(self):
                fake.finished += 1

        fake.init = lambda **options: fake.inits.append(options) or Run()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    def test_rows_go_to_one_run_that_a_resume_continues(self, tmp_path, package):
        fit(TINY, tiny(tmp_path, steps=4, logger="wandb"), progress=False)
        fit(TINY, tiny(tmp_path, steps=8, logger="wandb"), resume=True, progress=False)
        first, second = package.inits
        assert first["id"] == second["id"]
        assert (first["project"], first["name"], first["resume"]) == ("longspan", "run", "allow")
        assert first["config"]["run"]["batch"] == 5
        assert first["config"]["model"]["dim"] == TINY.dim
        assert [step for step, _ in package.rows] == [4, 8]
        assert package.finished == 2
        written = [float(row["loss"]) for row in rows(tmp_path)]
        assert [row["loss"] for _, row in package.rows] == written
        assert not (tmp_path / "run" / "tensorboard").exists()

    def test_a_missing_package_is_named_before_anything_is_written(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ImportError, match=r'wandb; pip install "\.\[wandb\]"'):
            fit(TINY, tiny(tmp_path, logger="wandb"), progress=False)
        assert not (tmp_path / "run").exists()
