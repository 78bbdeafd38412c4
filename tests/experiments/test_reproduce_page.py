"""The pages of results are what their script writes, from JSON files alone."""

import importlib.util
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


@pytest.fixture
def script():
    found = importlib.util.spec_from_file_location("reproduction_script", DOCS.parent / "tools" / "reproduction.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_pages_are_what_their_script_writes(script):
    texts = {path.stem: path.read_text(encoding="utf-8") for path in script.pages()}
    for stem, text in texts.items():
        assert script.written(text, stem) == text
    for name in EXPERIMENTS:
        assert f"<!-- {name}:begin -->" in texts[name]
        assert f"<!-- deviations:begin -->\n\n{EXPERIMENTS[name].differs}\n" in texts[name]
        assert f"(reproduction/{name}.md)" in texts["reproduction"]
    results = {path.stem for path in script.RESULTS.glob("*.json")}
    assert all(any(f"<!-- {name}:begin -->" in text for text in texts.values()) for name in results)
    spoilt = texts["capacity"].replace(";bound by rank |", ";bound by hand |")
    assert spoilt != texts["capacity"]
    assert script.written(spoilt, "capacity") == texts["capacity"]
    paper = texts["linear-transformer"]
    assert all(str(row.errors) in paper and str(row.epoch) in paper for row in published.SPEECH)


def test_a_page_without_a_verdict_is_refused(script, tmp_path):
    script.RESULTS = tmp_path
    (tmp_path / f"{min(EXPERIMENTS)}.md").write_text("# A title\n\nNothing else.\n")
    with pytest.raises(ValueError, match="Verdict"):
        list(script.verdicts())


def test_a_table_escapes_what_markdown_would_read(script):
    assert script.markdown([["a | b", "c"], ["  in", "1"], ["d_e"]]) == (
        "| a \\| b | c |\n| :--- | ---: |\n| &nbsp;&nbsp;&nbsp;in | 1 |\n| d\\_e |  |"
    )


def test_results_with_other_settings_keep_a_separate_name(tmp_path, script):
    script.OVERVIEW, script.RESULTS = tmp_path / "overview.md", tmp_path / "kept"
    script.RESULTS.mkdir()
    script.OVERVIEW.write_text("nothing to write\n")
    page = script.RESULTS / "scaling.md"
    page.write_text(
        "<!-- scaling:begin -->\n<!-- scaling:end -->\n<!-- scaling_few:begin -->\n<!-- scaling_few:end -->"
    )
    assert main(["reproduce", "scaling", "--quick"]) == 0
    script.main(["reproduce=few"])
    assert sorted(path.name for path in script.RESULTS.iterdir() if path != page) == [
        "scaling_few.json",
        "scaling_few.png",
    ]
    first, second = page.read_text().split("<!-- scaling:end -->")
    assert "`longspan reproduce scaling`" in first
    assert "scaling_few.png" not in first
    assert "(scaling_few.png)" in second
    assert "longspan reproduce scaling --quick" in second


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("mnist:some/where/mnist", "mnist:mnist"),
        ("ett:/a folder/ETTh1.csv", "ett:ETTh1.csv"),
        ("a:/b/c; text:x/y; text:stdlib", "a:c; text:y; text:stdlib"),
        ("linear; softmax(rotary=10000.0)", "linear; softmax(rotary=10000.0)"),
        (0.5, 0.5),
        ([1, 2], [1, 2]),
    ],
)
def test_folders_of_a_machine_are_not_on_the_pages(given, kept, script):
    assert script.anywhere(given) == kept
