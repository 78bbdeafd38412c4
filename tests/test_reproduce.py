"""``longspan reproduce``: experiments go on where they stopped, and their parts obey the laws that they stand on."""

import json
import runpy
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("matplotlib", reason="the experiments draw: pip install longspan[plot]")

from PIL import Image

from longspan.cli import INTERRUPTED, OK, WRONG, main
from longspan.commands import reproduce
from longspan.ops import random_features
from longspan.reproduce import EXPERIMENTS, approximation, capacity, experiment, published, retrieval

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """Nothing is drawn, which takes longer than everything else together."""
    monkeypatch.setattr(experiment, "picture", lambda *_: None)


def numbers(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ran(*words: str, code: int = OK) -> dict:
    """The JSON of ``longspan reproduce``."""
    assert main(["reproduce", *words, "--quick", "--debug"]) == code
    folder = words[words.index("--out") + 1] if "--out" in words else "reproduce"
    return json.loads(Path(folder, f"{words[0]}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_in_whole(name, capsys):
    result = ran(name)
    one = EXPERIMENTS[name]
    assert [{key: row[key] for key in point} for row, point in zip(result["rows"], one.points(one.quick), strict=True)]
    assert set(result["settings"]) == {field.name for field in fields(one.quick)}
    (machine,) = result["machines"]
    assert {"processor", "cores", "threads", "torch"} <= set(machine)
    assert result["longspan"]
    out, err = capsys.readouterr()
    assert not err
    assert f"Files: {Path('reproduce', name)}.json" in out
    assert one.source in out
    assert all(f"{setting} " in out for setting in result["settings"])
    with Image.open(f"reproduce/{name}.png") as image:
        picture = np.asarray(image.convert("L"))
    assert min(picture.shape) > 300
    assert len(np.unique(picture)) > 20
    assert sorted(path.name for path in Path("reproduce").iterdir()) == [f"{name}.json", f"{name}.png"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_was_interrupted_goes_on_with_the_same_numbers(name, monkeypatch, capsys, undrawn):
    whole, one, measured = ran(name, "--out", "whole"), EXPERIMENTS[name], []

    def interrupted(settings, point):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point)
        return one.measure(settings, point)

    monkeypatch.setitem(EXPERIMENTS, name, one._replace(measure=interrupted))
    capsys.readouterr()
    assert main(["reproduce", name, "--quick"]) == INTERRUPTED
    count = len(whole["rows"])
    assert (
        f"interrupted: 2 of {count} points are in {Path('reproduce', name)}.json; the same" in capsys.readouterr().err
    )
    kept = json.loads(Path(f"reproduce/{name}.json").read_text(encoding="utf-8"))["rows"]
    assert kept == whole["rows"][:2]

    def counted(settings, point):
        measured.append(point)
        return one.measure(settings, point)

    monkeypatch.setitem(EXPERIMENTS, name, one._replace(measure=counted))
    assert ran(name)["rows"] == whole["rows"]
    assert len(measured) == count
    # And once more: nothing is left to measure.
    assert ran(name)["rows"] == whole["rows"]
    assert len(measured) == count


@pytest.mark.parametrize("one", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_figures_depend_on_the_settings_and_the_point_alone(one):
    for point in one.points(one.quick):
        torch.manual_seed(1)
        first = one.measure(one.quick, point)
        torch.manual_seed(2)
        assert one.measure(one.quick, point) == first


def test_an_interruption_before_the_first_point_says_so(monkeypatch, capsys, undrawn):
    def interrupted(settings, point):
        raise KeyboardInterrupt

    monkeypatch.setitem(EXPERIMENTS, "capacity", EXPERIMENTS["capacity"]._replace(measure=interrupted))
    assert main(["reproduce", "capacity", "--quick"]) == INTERRUPTED
    assert "before the first point was done; the same command" in capsys.readouterr().err


MISTAKES = {
    "approximatoin": "unknown experiment 'approximatoin' (did you mean 'approximation'?); known: ",
    "": "name",
    "capacity --kinds dfpf1": "unknown kind 'dfpf1' (did you mean 'dpfp1'?); known: dpfp1, dpfp2",
    "capacity --kind linear": "unknown option '--kind' (did you mean '--kinds'?); known: --help, --keys, --kinds",
    "capacity --replacing softmax": "replacing=softmax: the delta rule needs a fixed feature map, which",
    "capacity --keys 60,x": "--keys=60,x: expected numbers, separated by commas: 60,100",
    "capacity --keys 1": "keys=1 must be at least 2",
    "capacity --repeated ,": "--repeated=,: expected numbers",
    "capacity --steps 0": "steps=0 must be at least 1",
    "capacity --rate 0": "rate=0.0 must be positive",
    "approximation --features 15": "features=15 must be even: most maps make two of each row",
    "approximation --features 0": "features=0 must be at least 2",
    "approximation --estimators cosine": "unknown estimator 'cosine'; known: hyperbolic, positive, trigonometric",
    "approximation --angles 190": "angles=190 must be at most 180 degrees",
    "approximation --spreads 0": "spreads=0.0 must be positive",
    "approximation --draws 1": "draws=1 must be at least 2",
    "approximation --length 0": "length=0 must be at least 1",
    "approximation --size x": "--size: expected int, got x; see longspan reproduce approximation --help",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(line, capsys):
    assert main(["reproduce", *line.split()]) == WRONG
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert MISTAKES[line] in err
    assert not Path("reproduce").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {**r, "settings": {**r["settings"], "draws": 99}}, "was made with draws=99; choose another folder"),
        (lambda r: {**r, "settings": {**r["settings"], "angles": [1, 2]}}, "was made with angles=1,2; choose"),
        (lambda r: {**r, "settings": {**r["settings"], "more": 3}}, "was made with more=3; choose"),
        (lambda r: {**r, "longspan": "0.0.1"}, "was made with longspan=0.0.1; choose"),
        (lambda r: [], "holds no approximation experiment; choose another folder with --out"),
    ],
)
def test_results_of_something_else_are_not_continued(change, message, capsys, undrawn):
    path = Path("reproduce/approximation.json")
    text = json.dumps(change(ran("approximation")))
    path.write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert main(["reproduce", "approximation", "--quick"]) == WRONG
    assert message in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == text


def test_an_experiment_remembers_every_machine_that_took_part(monkeypatch, undrawn):
    first, path = ran("capacity"), Path("reproduce/capacity.json")
    path.write_text(json.dumps({**first, "rows": first["rows"][:-1]}), encoding="utf-8")
    monkeypatch.setattr(experiment.guard, "machine", lambda: {"processor": "another", "load": 0.1})
    assert ran("capacity")["machines"] == [*first["machines"], {"processor": "another"}]
    # One that found nothing left to measure took no part.
    monkeypatch.setattr(experiment.guard, "machine", lambda: {"processor": "a third"})
    assert len(ran("capacity")["machines"]) == 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_setting_is_a_documented_flag(name, capsys):
    assert main(["reproduce", name, "--help"]) == OK
    shown = capsys.readouterr().out
    for field in fields(EXPERIMENTS[name].full):
        assert f"--{field.name}" in shown
    assert all(action.help for action in reproduce.subparser(name)._actions)


def test_random_numbers_depend_on_the_names_alone():
    def first(*names):
        return torch.rand(3, generator=experiment.generator(*names)).tolist()

    assert first(0, {"a": 1, "b": 2}) == first(0, {"b": 2, "a": 1})
    assert len({tuple(first(*names)) for names in ((0, "a"), (1, "a"), (0, "b"), (0, "a", "b"))}) == 4


# Retrieval


def test_the_answer_is_the_value_that_came_last():
    sequences = retrieval.Sequences(torch.tensor([[2, 0, 2, 1]]), torch.tensor([[3, 1, 0, 2]]))
    assert retrieval.answers(sequences, 4).tolist() == [[1, 2, 0, -1]]


def test_without_replacement_nothing_comes_twice():
    keys, values = retrieval.draw(5, 13, 13, False, numbers())
    for symbols in (*keys, *values):
        assert sorted(symbols.tolist()) == list(range(13))
    assert len({tuple(row.tolist()) for row in (*keys, *values)}) == 10


def test_with_replacement_every_symbol_is_as_likely_as_any():
    drawn = torch.cat([t.flatten() for t in retrieval.draw(200, 100, 5, True, numbers())])
    shares = torch.bincount(drawn, minlength=5) / drawn.numel()
    # Four standard deviations of a share.
    assert (shares - 0.2).abs().max() < 4 * (0.2 * 0.8 / drawn.numel()) ** 0.5


def written_out(model: retrieval.Retriever, sequences: retrieval.Sequences) -> torch.Tensor:
    """What a Retriever returns for one sequence, token by token: (S,S)."""
    phi, normalise = model.kind.features, lambda x: x / x.sum()
    queries = model.embedding @ model.query
    memory, total = torch.zeros(phi(queries).shape[1], model.symbols), 0.0
    for key, value in zip(*(symbols[0].tolist() for symbols in sequences), strict=True):
        k = phi(model.embedding[key] @ model.key + model.key_of_value[value])
        v = F.one_hot(torch.tensor(value), model.symbols).float()
        if model.delta:
            rate = (model.embedding[key] @ model.rate + model.rate_of_value[value]).sigmoid()
            memory = memory + rate * torch.outer(normalise(k), v - normalise(k) @ memory)
        else:
            memory, total = memory + torch.outer(k, v), total + k
    if model.delta:
        return torch.stack([normalise(q) @ memory for q in phi(queries)])
    return torch.stack([q @ memory / (q @ total + retrieval.EPS) for q in phi(queries)])


@pytest.mark.parametrize("rule", retrieval.RULES)
@pytest.mark.parametrize("kind", ["linear", "dpfp1", "dpfp3"])
def test_a_retriever_is_its_recurrence(kind, rule):
    model = retrieval.Retriever(7, 5, kind, rule, numbers())
    sequences = retrieval.draw(2, 11, 7, True, numbers(1))
    expected = torch.stack(
        [written_out(model, retrieval.Sequences(*(t[i : i + 1] for t in sequences))) for i in (0, 1)]
    )
    torch.testing.assert_close(model(sequences, numbers()), expected)
    right = retrieval.answers(sequences, 7)
    errors = [
        (expected[b, s] - F.one_hot(right[b, s], 7)).square().sum() / 2
        for b in range(2)
        for s in range(7)
        if right[b, s] >= 0
    ]
    torch.testing.assert_close(model.loss(sequences, numbers()), torch.stack(errors).mean())


def test_softmax_and_favor_retrieve_by_their_weights():
    sequences = retrieval.draw(1, 7, 7, False, numbers(1))
    values = F.one_hot(sequences.values[0], 7).float()
    for kind in ("softmax", "favor64-kept"):
        model = retrieval.Retriever(7, 5, kind, "sum", numbers())
        q = model.embedding @ model.query
        k = (model.embedding @ model.key)[sequences.keys[0]] + model.key_of_value[sequences.values[0]]
        if kind == "softmax":
            weights = (q @ k.T / 5**0.5).exp()
        else:
            weights = random_features.estimate(q / 5**0.25, k / 5**0.25, model.rows, random_features.hyperbolic)
        expected = weights / weights.sum(-1, keepdim=True) @ values
        torch.testing.assert_close(model(sequences, numbers())[0], expected, rtol=1e-3, atol=1e-3)


def test_only_favor_as_published_draws_rows_in_every_call():
    sequences = retrieval.draw(1, 7, 7, False, numbers(1))
    for kind in retrieval.KINDS:
        model = retrieval.Retriever(7, 5, kind, "sum", numbers())
        same = model(sequences, numbers(1)).equal(model(sequences, numbers(2)))
        assert same == (kind not in ("favor64", "favor128", "favor512"))
        assert same == capacity.same(kind)


def test_a_retriever_without_a_feature_map_refuses_the_delta_rule():
    with pytest.raises(ValueError, match="the delta rule needs a fixed feature map, which softmax has not"):
        retrieval.Retriever(7, 5, "softmax", "delta", numbers())
    with pytest.raises(ValueError, match="unknown rule 'adds'; known: delta, sum"):
        retrieval.Retriever(7, 5, "linear", "adds", numbers())


@pytest.mark.parametrize("kind", [name for name, kind in retrieval.KINDS.items() if kind.features])
def test_the_number_of_features_is_what_it_is_said_to_be(kind):
    features = retrieval.KINDS[kind].features
    assert features is not None
    assert capacity.capacity(kind, 8) == features(torch.randn(3, 8, generator=numbers())).shape[-1]


def test_an_untrained_memory_of_zeros_is_at_chance():
    model = retrieval.Retriever(5, 4, "dpfp1", "delta", numbers())
    with torch.no_grad():
        model.query.zero_()
    assert model.loss(retrieval.draw(3, 10, 5, True, numbers()), numbers()).item() == pytest.approx(0.5)


# Capacity


@pytest.mark.parametrize("features", [1, 3, 6, 7, 20])
def test_no_weights_of_low_rank_beat_the_bound(features):
    found = [
        (torch.eye(7) - a @ b).square().sum().item() / 14
        for a, b in (
            (torch.linalg.qr(a).Q, torch.linalg.qr(a).Q.T) if i else (a / features, a.T)
            for i, a in enumerate(torch.rand(2, 7, min(features, 7), generator=numbers()))
        )
    ]
    assert min(found) >= capacity.bound(features, 7) - 1e-6
    # A projection on as many keys reaches it.
    assert found[1] == pytest.approx(capacity.bound(features, 7), abs=1e-6)


def test_training_stores_as_many_associations_as_there_are_features():
    """On a small scale what the experiment shows on a large one: C keys without a loss, and a bound beyond."""
    settings = replace(capacity.QUICK, steps=600, rate=1e-2, tests=3, queries=32)
    losses = {}
    for keys in (6, 24):
        point = {"keys": keys, "replaced": False, "rule": "sum", "kind": "dpfp1"}
        losses[keys] = capacity.measure(settings, point)["loss"]
    assert losses[6] < 0.01
    assert capacity.bound(16, 24) - 1e-6 < losses[24] < 0.3


def test_the_delta_rule_corrects_what_the_sum_cannot():
    settings = replace(capacity.QUICK, steps=600, rate=1e-2, tests=5, queries=32)
    found = {
        rule: capacity.measure(settings, {"keys": 5, "replaced": True, "rule": rule, "kind": "dpfp1"})
        for rule in retrieval.RULES
    }
    assert found["delta"]["loss"] < 0.03 < 0.1 < found["sum"]["loss"]


def test_published_figures_are_of_kinds_that_are_there():
    for row in published.CAPACITY:
        assert row.kind in retrieval.KINDS
        assert row.rule in retrieval.RULES
        assert all(0 <= loss <= 0.5 for loss in row.losses.values())
        assert published.capacity(row.replaced, row.rule, row.kind) == row.losses
    assert published.capacity(True, "sum", "softmax") == {}
    assert len({row[:3] for row in published.CAPACITY}) == len(published.CAPACITY)


# Approximation


@pytest.mark.parametrize("estimator", approximation.ESTIMATORS)
def test_independent_rows_have_the_variance_of_the_formula(estimator):
    settings = replace(approximation.QUICK, pairs=20000, angles=(0, 40, 90, 135, 180))
    row = approximation.measure(settings, {"features": 8, "estimator": estimator, "rows": "iid"})
    for measured, error, formula in zip(row["kernel"], row["kernel_se"], row["formula"], strict=True):
        assert abs(measured - formula) <= 4 * error + 1e-12


@pytest.mark.parametrize("estimator", approximation.ESTIMATORS)
def test_orthogonal_rows_are_no_worse(estimator):
    settings = replace(approximation.QUICK, pairs=5000)
    iid, orthogonal = (
        approximation.measure(settings, {"features": 8, "estimator": estimator, "rows": rows})
        for rows in approximation.ROWS
    )
    for i, angle in enumerate(settings.angles):
        noise = 4 * (iid["kernel_se"][i] + orthogonal["kernel_se"][i])
        assert orthogonal["kernel"][i] <= iid["kernel"][i] + noise, angle


def test_pairs_have_length_1_and_their_angles():
    q, k = approximation.pairs(replace(approximation.QUICK, size=5))
    torch.testing.assert_close(q.norm(dim=-1), torch.ones_like(q[..., 0]))
    torch.testing.assert_close(k.norm(dim=-1), torch.ones_like(q[..., 0]))
    cosines = (q * k).sum(-1)[:, 0]
    torch.testing.assert_close(cosines, torch.tensor(approximation.QUICK.angles).double().deg2rad().cos())


def test_the_error_of_the_output_shrinks_with_the_root_of_the_features():
    settings = replace(approximation.QUICK, length=29, draws=30, pairs=2)
    few, many = (
        approximation.measure(settings, {"features": count, "estimator": "hyperbolic", "rows": "iid"})
        for count in (32, 2048)
    )
    (before,), (after,) = few["output"], many["output"]
    assert 20 < before / after < 200  # of the square, with 64 times as many features


# The page


def test_the_figures_of_the_page_are_those_of_the_results():
    """Nothing is typed in by hand: the page is what its script writes."""
    script = runpy.run_path(str(DOCS / "reproduce.py"), run_name="reproduce")
    text = script["PAGE"].read_text(encoding="utf-8")
    assert script["page"](text) == text
    assert all(f"<!-- {path.stem}:begin -->" in text for path in script["RESULTS"].glob("*.json"))
    spoilt = text.replace("bound by rank", "bound by hand")
    assert spoilt != text
    assert script["page"](spoilt) == text
