"""What a pattern is worth: equal costs, the same start for all, and differences taken seed by seed."""

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="the experiments draw: pip install longspan[plot]")
pytest.importorskip("lightning", reason="the models are trained: pip install longspan[train]")
pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install longspan[train]")

from longspan.cli.entry import main
from longspan.models.decoder import Decoder
from longspan_lab.experiments import pattern


def test_a_model_has_the_pattern_and_sees_no_later_key():
    settings = pattern.EXPERIMENT.quick
    for name in settings.names():
        model = Decoder(settings.config(name, 17, 64))
        (attention,) = model.stack.attentions()
        assert repr(attention.key_pattern) == repr(pattern.patterns.causal() & pattern.patterns.parse(name))


def test_the_sizes_of_the_laptop_cost_the_same():
    keys = {}
    for name in pattern.Settings().names():
        seen = pattern.patterns.causal() & pattern.patterns.parse(name)
        keys[name] = seen.dense(784).sum().item() / 784
    band, column, every = keys.values()
    assert column <= band < every / 10
    assert column > 0.95 * band


def test_a_run_measures_and_tells_differences_by_seed(capsys, tmp_path):
    assert main(["reproduce", "pattern", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "band(4) | columns(8)" in shown
    assert (tmp_path / "pattern.png").stat().st_size > 10_000
    rows = [
        {"seed": seed, "pattern": name, "keys": 3.0, "curve": [[1, 2.0]], "test": test}
        for name, tests in (("band(8)", (2.0, 2.5, 3.0)), ("band(4) | columns(8)", (1.9, 2.3, 2.7)))
        for seed, test in enumerate(tests)
    ]
    settings = {**vars(replace(pattern.EXPERIMENT.quick)), "seeds": [0, 1, 2]}
    ((head, first, second),) = pattern.tables({"settings": settings, "rows": rows})
    assert head[3:] == ["less than the first", "standard errors"]
    assert first == ["band(8)", "3.0", "2.5000", "", ""]
    # Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, error 0.1 / sqrt 3.
    assert second == ["band(4) | columns(8)", "3.0", "2.3000", "+0.2000", "+3.5"]
    ((_, _, alone),) = pattern.tables({"settings": settings, "rows": [row for row in rows if row["seed"] == 1]})
    assert alone[3:] == ["+0.2000", "one seed"]
