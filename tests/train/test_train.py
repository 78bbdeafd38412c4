"""Training: the pure functions of the step, what a run learns and leaves in its folder, and what it reports."""

import csv
import math

import pytest
import torch
import yaml

from longspan import data
from longspan.data import batch_indices
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, bits, fit, loop, objectives, rate
from longspan.train.config import step_seed
from longspan.train.evaluate import Share, default_batch_size, total
from longspan.train.report import COLUMNS, _short
from training_process import TINY, best_at, checkpoints, tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from beginning to end, to which interrupted ones are compared."""
    folder = tmp_path_factory.mktemp("whole")
    fit(TINY, tiny(folder), progress=False)
    return folder


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def test_step_seeds_differ_by_seed_index_and_rank():
    seeds = {step_seed(seed, index, rank) % 2**32 for seed in range(5) for index in range(50) for rank in range(3)}
    assert len(seeds) == 750


class TestBits:
    @pytest.fixture
    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Decoder(TINY)

    def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_levels(self, model, digits):
        torch.nn.init.zeros_(model.head.weight)
        assert bits(model, digits, "test", examples=11) == pytest.approx(math.log2(17), rel=1e-6)

    def test_is_the_mean_over_all_tokens_whatever_the_batch(self, model, digits):
        rows = digits.take("validation", torch.arange(digits.count("validation")))
        with torch.no_grad():
            chances = model.eval().likelihood.log_prob(model(model.shift(rows))[0], rows).double()
        for batch in (1, 7, 64, 1000):
            assert bits(model, digits, "validation", batch) == pytest.approx(-chances.mean().item() / math.log(2))

    def test_examples_are_evenly_spaced(self, model, digits):
        count = digits.count("test")
        rows = digits.take("test", torch.tensor([i * count // 3 for i in range(3)]))
        with torch.no_grad():
            chances = model.eval().likelihood.log_prob(model(model.shift(rows))[0], rows).double()
        assert bits(model, digits, "test", examples=3) == pytest.approx(-chances.mean().item() / math.log(2))

    def test_the_ranks_shares_make_the_whole(self, model, digits):
        parts = [total(model, digits, "test", 5, Share(11, rank, 3)) for rank in range(3)]
        torch.testing.assert_close(sum(parts), total(model, digits, "test", 5, Share(11)), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("training", [True, False])
    def test_dropout_is_off_and_the_mode_as_before(self, model, digits, training):
        model.train(training)
        assert bits(model, digits, "test", examples=3) == bits(model, digits, "test", examples=3)
        assert model.training is training

    def test_refuses(self, model, digits, monkeypatch):
        monkeypatch.setitem(digits.splits, "test", digits.splits["test"][:0])
        for split, batch, message in (
            ("validation", 0, "batch=0: must be >= 1"),
            ("tset", 64, "unknown split 'tset'"),
            ("test", 64, "split 'test' of digits has no examples"),
        ):
            with pytest.raises(ValueError, match=message):
                bits(model, digits, split, batch)

    def test_long_examples_come_in_small_batches(self):
        assert [default_batch_size(length) for length in (64, 784, 3072, 10**6)] == [64, 16, 4, 1]


class TestFolder:
    def test_config_and_checkpoints_say_what_gives_the_same_run(self, whole):
        recipe = yaml.safe_load((whole / "run" / "config.yaml").read_text())
        assert (DecoderConfig(**recipe["model"]), TrainConfig(**recipe["run"])) == (TINY, tiny(whole))
        header = checkpoint.read_config(checkpoint.resolve(whole / "run", prefer="last"))
        assert header["step"] == 11
        assert TrainConfig(**header["run"]) == tiny(whole)

    def test_metrics_hold_a_row_per_evaluation_and_per_ten_steps(self, whole):
        with (whole / "run" / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert tuple(rows[0]) == COLUMNS
        assert [int(row["step"]) for row in rows] == [4, 8, 10, 11]
        assert [bool(row["validation_bits"]) for row in rows] == [True, True, False, True]
        for row in rows:
            assert float(row["bits"]) == pytest.approx(float(row["loss"]) / math.log(2))
            assert float(row["learning_rate"]) == rate(tiny(whole), int(row["step"]) - 1)

    def test_tensorboard_has_events_and_nothing_is_a_pickle_of_lightning(self, whole):
        assert list((whole / "run" / "tensorboard").glob("events.*"))
        assert not list(whole.rglob("*.ckpt"))

    def test_result_is_the_best_models(self, tmp_path, digits):
        result = fit(TINY, tiny(tmp_path, steps=4), progress=False)
        model = checkpoint.load(tmp_path / "run")
        assert (result.folder, result.steps) == (tmp_path / "run", 4)
        for split in ("validation", "test"):
            assert result.bits[split] == pytest.approx(bits(model, digits, split, examples=7), rel=1e-9)

    def test_a_worse_one_does_not_become_the_best(self, tmp_path, monkeypatch):
        best_at(monkeypatch, 4)
        fit(TINY, tiny(tmp_path, steps=9, evaluate_every=1, keep=1), progress=False)
        with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
            scores = {int(row["step"]): float(row["validation_bits"]) for row in csv.DictReader(file)}
        assert min(scores, key=scores.__getitem__) == 4
        assert checkpoints(tmp_path) == ["step-00000004", "step-00000009"]
        assert checkpoint.resolve(tmp_path / "run").name == "step-00000004"


class TestTraining:
    def test_learns(self, tmp_path):
        run = tiny(tmp_path, steps=60, batch=32, evaluate_every=60, save_every=60, learning_rate=0.02)
        assert fit(TINY, run, progress=False).bits["test"] < math.log2(17) - 0.5

    def test_the_callers_random_numbers_are_left_alone(self, tmp_path):
        before = torch.get_rng_state()
        fit(TINY, tiny(tmp_path, steps=1), progress=False)
        assert torch.equal(torch.get_rng_state(), before)

    def test_same_run_same_bits_and_another_seed_others(self, tmp_path, whole):
        torch.manual_seed(5)
        fit(TINY, tiny(tmp_path), progress=False)
        assert weights(tmp_path) == weights(whole)
        fit(TINY, tiny(tmp_path / "b", seed=1), progress=False)
        assert weights(tmp_path / "b") != weights(whole)

    @pytest.mark.parametrize("fields", [{"optimizer": "radam"}, {"precision": "bf16"}, {"weight_decay": 0.9}])
    def test_options_change_the_result(self, tmp_path, whole, fields):
        fit(TINY, tiny(tmp_path, **fields), progress=False)
        assert weights(tmp_path) != weights(whole)
        dtypes = {p.dtype for p in checkpoint.load(tmp_path / "run").parameters()}
        assert dtypes == {torch.float32}

    def test_batches_are_those_of_the_order_from_any_start(self, digits):
        batches = iter(loop.Batches(objectives.NextToken(TrainConfig(seed=3, batch=5), digits), 7, 1, 2))
        for index in (7, 8, 9):
            found, tokens = next(batches)
            expected = digits.take("train", batch_indices(digits.count("train"), 3, index, 5, 1, 2))
            assert found == index
            assert torch.equal(tokens, expected)

    def test_the_optimizer_uses_the_rate(self, tmp_path, monkeypatch):
        used = []
        step = torch.optim.AdamW.step

        def watched(optimizer, *arguments, **keywords):
            result = step(optimizer, *arguments, **keywords)
            used.append([group["lr"] for group in optimizer.param_groups])
            return result

        monkeypatch.setattr(torch.optim.AdamW, "step", watched)
        run = tiny(tmp_path, steps=6, accumulate=2)
        fit(TINY, run, progress=False)
        assert used == [[rate(run, step)] * 2 for step in range(6)]

    def test_clip_bounds_the_gradient(self, tmp_path, monkeypatch):
        norms = []
        clip = loop.Task.configure_gradient_clipping

        def watched(task, *arguments, **keywords):
            clip(task, *arguments, **keywords)
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in task.parameters()]).item())

        monkeypatch.setattr(loop.Task, "configure_gradient_clipping", watched)
        fit(TINY, tiny(tmp_path, steps=3, clip=0.01), progress=False)
        fit(TINY, tiny(tmp_path / "b", steps=3, clip=0.0), progress=False)
        assert norms[:3] == pytest.approx([0.01] * 3, rel=1e-3)
        assert min(norms[3:]) > 0.1


class TestReport:
    def test_only_lines_without_a_terminal(self, tmp_path, capfd):
        fit(TINY, tiny(tmp_path))
        out, err = capfd.readouterr()
        assert out == ""
        opening, *lines = err.splitlines()
        assert opening.startswith("1,811 parameters, linear; digits: ")
        assert [line.split(":")[0] for line in lines[:-1]] == ["step 4", "step 8", "step 11"]
        assert "bits/dim" in lines[0]
        assert lines[-1].startswith("11 steps; best checkpoint: validation ")

    def test_silence(self, tmp_path, capfd):
        fit(TINY, tiny(tmp_path, steps=1), progress=False)
        assert capfd.readouterr() == ("", "")

    def test_large_numbers_are_short(self):
        assert [_short(n) for n in (7.0, 1234.0, 5.678e6)] == ["7", "1.23k", "5.68M"]
