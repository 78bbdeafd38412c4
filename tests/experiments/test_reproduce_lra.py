"""The Long Range Arena: every mechanism has a size that fits, one model is around all, and results tell the truth."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import longspan
from longspan_lab.bench.candidates import Refused
from longspan_lab.data.arena import Batch
from longspan_lab.experiments import lra, lra_cost, lra_models, lra_published, lra_report
from longspan_lab.experiments.experiment import Place
from longspan_lab.experiments.lra_models import Classifier, Shape
from support.experiments import NOWHERE, unwatched


def small(spec: str = "softmax", length: int = 24, towers: int = 1, **sizes: int) -> Shape:
    usual = {"dim": 8, "depth": 2, "heads": 2, "feedforward": 8, "vocab": 11, "classes": 3}
    return Shape(**{"spec": spec, "length": length, "towers": towers} | usual | sizes)


def batch(length: int = 24, towers: int = 1, rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (rows, towers, length), generator=generator)
    return Batch(tokens, None, torch.arange(rows) % 3)


@pytest.mark.parametrize("name", longspan.list_mechanisms())
@pytest.mark.parametrize("length", [24, 90])
def test_every_mechanism_fits_and_learns_from_a_step(name, length):
    model = Classifier(small(lra_models.sized(name, length), length), 0)
    mask = torch.arange(length) < torch.tensor([length, length - 5, 2])[:, None, None]
    loss = model.loss(batch(length)._replace(mask=mask))
    loss.backward()
    model.update()
    assert loss.isfinite()
    assert model.embedding.tokens.weight.grad.abs().sum() > 0
    assert model.stack.causal == ("bidirectional" not in longspan.attention.registry.mechanism(name).directions)


def test_sizes_are_parts_of_the_length():
    assert set(lra_models.SIZES) <= set(longspan.list_mechanisms())
    assert lra_models.sized("linformer", 256) == "linformer(length=256, slots=32)"
    assert lra_models.sized("axial", 256) == "axial(width=16)"
    # What is spelled out stays.
    assert lra_models.sized("linformer(length=9)", 256) == "linformer(length=9)"


def test_padding_plays_no_part():
    model = Classifier(small(), 0).double().eval()
    whole = batch(16)
    padded = torch.cat([whole.tokens, torch.full((3, 1, 8), 7)], 2)
    mask = (torch.arange(24) < 16).expand(3, 1, 24)
    torch.testing.assert_close(model(padded, mask), model(whole.tokens), rtol=1e-12, atol=1e-12)


def test_two_sequences_are_read_alone_and_compared():
    model = Classifier(small(towers=2), 0).double().eval()
    tokens = batch(towers=2).tokens
    seen = {}
    model.head.register_forward_hook(lambda _, inputs, __: seen.update(pooled=inputs[0]))
    model(tokens)
    one = Classifier(small(), 0).double().eval()
    one.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head")}, strict=False)
    one.head = torch.nn.Identity()
    e, f = (one(tokens[:, i : i + 1]) for i in range(2))
    torch.testing.assert_close(seen["pooled"], torch.cat([e, f, e * f, e - f], 1), rtol=1e-12, atol=1e-12)


def test_centres_of_routing_move_and_picks_of_sac_earn_the_likelihood():
    model = Classifier(small("routing(clusters=2, window=8)"), 0)
    before = model.stack.attentions()[0].sums.clone()
    model.loss(batch()).backward()
    assert torch.equal(model.stack.attentions()[0].sums, before)
    model.update()
    assert not torch.equal(model.stack.attentions()[0].sums, before)
    assert not model.counted
    sac = Classifier(small("sac(edges=2)", towers=2), 0)
    sac.loss(batch(towers=2)).backward()
    assert all(p.grad.abs().sum() > 0 for p in sac.stack.attentions()[0].predictor.parameters())


class TestTrainings:
    settings = replace(
        lra.EXPERIMENT.quick, examples=40, tests=20, image_steps=150, dim=16, heads=2, batch=20, rate=1e-2
    )
    point = {"what": "training", "task": "image", "mechanism": "softmax"}  # noqa: RUF012

    def test_something_is_learned(self, tmp_path):
        # Of forty digits, which are learned by heart, and tested on themselves.
        place = Place(tmp_path / "work", unwatched)
        task = self.settings.load("image")
        same = replace(task, splits=dict.fromkeys(task.splits, task.splits["train"]))
        settings = replace(self.settings, seed=1)
        object.__setattr__(settings, "load", lambda _: same)
        row = lra.measure(settings, self.point, place)
        assert row["accuracy"] > 0.8
        assert row["majority"] == 0.1
        assert row["tests"] == 40
        assert [look["step"] for look in row["curve"]] == [100, 150]
        assert lra_report.learned(row)
        assert not [*place.folder.iterdir()]

    def test_points_end_with_what_wants_a_quiet_machine(self):
        found = lra.points(lra.Settings())
        kinds = [point["what"] for point in found]
        assert kinds == sorted(kinds, reverse=True)
        assert {p["mechanism"] for p in found if p["what"] == "cost"} == set(longspan.list_mechanisms())
        trained = {p["mechanism"] for p in found if p["what"] == "training" and p["task"] == "listops"}
        assert trained == set(longspan.list_mechanisms())
        assert {p["mechanism"] for p in found if p.get("task") == "text"} == set(lra.FEW)
        assert {row.mechanism for row in lra_published.TABLE} <= trained


class TestCosts:
    @pytest.mark.slow
    def test_memory_grows_with_the_matrix(self):
        """Of two heads and two blocks at 1024 tokens: 4 MB a head and block for the weights alone."""
        sizes = {"length": 1024, "dim": 8, "vocab": 256}
        found = {
            name: lra_cost.weighed(small(lra_models.sized(name, 1024), **sizes), 1, "cpu")
            for name in ("talking_heads", "linear")
        }
        assert found["talking_heads"] > 16
        assert found["linear"] < found["talking_heads"] / 2

    def test_memory_is_measured_with_two_threads(self):
        """Not as in a child of a process whose threads have computed, which waits for them for ever."""
        code = (
            "import torch; torch.set_num_threads(2); from longspan_lab.experiments import lra_cost, lra_models;"
            "print(lra_cost.weighed(lra_models.Shape('linear', 32, 1, 2, 64, 256, 512, 1, 2), 4, 'cpu'))"
        )
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=True
        )
        assert float(done.stdout) > 0

    def test_a_step_moves_the_weights(self):
        made = []
        original = lra_cost.Classifier

        def kept(*arguments):
            made.append(original(*arguments))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lra_cost, "Classifier", kept)
            step = lra_cost.stepping(small(), 2, 24, "cpu")
        before = made[0].head[0].weight.clone()
        step()
        assert not torch.equal(made[0].head[0].weight, before)

    def test_missing_data_are_an_error(self, monkeypatch):
        def fails(*_):
            raise Refused("its process ended with code -9: killed, perhaps for want of memory")

        monkeypatch.setattr(lra_cost, "weighed", fails)
        row = lra.measure(lra.EXPERIMENT.quick, {"what": "cost", "mechanism": "softmax"}, NOWHERE)
        assert row["refused"].startswith("its process ended")
        monkeypatch.setattr(lra_cost, "weighed", lambda *_: 2.5)
        row = lra.measure(lra.EXPERIMENT.quick, {"what": "cost", "mechanism": "softmax"}, NOWHERE)
        assert row["mb"] == 2.5
        assert row["steps_per_second"] > 0


class TestReport:
    def test_ranks_that_are_shared(self):
        assert lra_report.agreement([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
        assert lra_report.agreement([1.0, 2.0, 2.0], [3.0, 1.0, 2.0]) == pytest.approx(-0.8660254)
