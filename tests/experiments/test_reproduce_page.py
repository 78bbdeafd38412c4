"""The page of results is what its script writes, from JSON files alone."""

import importlib.util
import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the experiments draw: pip install longspan[plot]")

from longspan.cli.entry import main
from longspan.experiments import EXPERIMENTS, published, scaling

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Memory is weighed in processes.
    monkeypatch.setattr(scaling, "weighed", lambda settings, name, length: 0.5)


def test_the_figures_of_the_page_are_those_of_the_results():
    """Nothing is typed in by hand: the page is what its script writes."""
    script = runpy.run_path(str(DOCS.parent / "tools" / "reproduction.py"), run_name="reproduction")
    text = script["PAGE"].read_text(encoding="utf-8")
    assert script["written"](text) == text
    assert all(f"<!-- {name}:begin -->" in text for name in EXPERIMENTS)
    spoilt = text.replace("bound by rank", "bound by hand")
    assert spoilt != text
    assert script["written"](spoilt) == text
    assert all(str(row.errors) in text and str(row.epoch) in text for row in published.SPEECH)
    assert script["_measured"](None) == "open"
    assert script["_measured"]({"scale": "gpu", "commit": "", "longspan": "0.1.0"}) == "scale gpu, longspan 0.1.0"


def test_results_with_other_settings_are_kept_under_a_name_of_their_own(tmp_path):
    found = importlib.util.spec_from_file_location("reproduction_script", DOCS.parent / "tools" / "reproduction.py")
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    script.PAGE, script.RESULTS = tmp_path / "page.md", tmp_path / "kept"
    script.PAGE.write_text(
        "<!-- scaling:begin -->\n<!-- scaling:end -->\n<!-- scaling_few:begin -->\n<!-- scaling_few:end -->"
    )
    assert main(["reproduce", "scaling", "--quick"]) == 0
    script.main(["reproduce=few"])
    assert sorted(path.name for path in script.RESULTS.iterdir()) == ["scaling_few.json", "scaling_few.png"]
    first, second = script.PAGE.read_text().split("<!-- scaling:end -->")
    assert "Not measured yet: `longspan reproduce scaling`" in first
    assert "![scaling_few](kept/scaling_few.png)" in second
    assert "longspan reproduce scaling --quick" in second


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("mnist:some/where/mnist", "mnist:mnist"),
        ("ett:/a folder/ETTh1.csv", "ett:ETTh1.csv"),
        ("a:/b/c; text:x/y; text:stdlib", "a:c; text:y; text:stdlib"),
        ("linear; softmax(rotary=10000.0)", "linear; softmax(rotary=10000.0)"),
        (0.5, 0.5),
        ([1, 2], [1, 2]),
    ],
)
def test_folders_of_a_machine_do_not_come_into_the_page(given, told):
    script = runpy.run_path(str(DOCS.parent / "tools" / "reproduction.py"), run_name="reproduction")
    assert script["anywhere"](given) == told
