"""The pages of results are what their script writes, from JSON files alone."""

import pytest

pytest.importorskip("matplotlib", reason="the experiments draw: pip install longspan[plot]")

from longspan.cli.entry import main
from longspan_lab.experiments import EXPERIMENTS, published, scaling
from longspan_lab.tools import reproduction


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Memory is weighed in processes.
    monkeypatch.setattr(scaling, "weighed", lambda settings, name, length: 0.5)


def test_the_pages_are_what_their_script_writes():
    texts = {path.stem: path.read_text(encoding="utf-8") for path in reproduction.pages()}
    for stem, text in texts.items():
        assert reproduction.written(text, stem) == text
    for name in EXPERIMENTS:
        assert f"<!-- {name}:begin -->" in texts[name]
        assert f"<!-- deviations:begin -->\n\n{EXPERIMENTS[name].differs}\n" in texts[name]
        assert f"(reproduction/{name}.md)" in texts["reproduction"]
    results = {path.stem for path in reproduction.RESULTS.glob("*.json")}
    assert all(any(f"<!-- {name}:begin -->" in text for text in texts.values()) for name in results)
    spoilt = texts["capacity"].replace(";bound by rank |", ";bound by hand |")
    assert spoilt != texts["capacity"]
    assert reproduction.written(spoilt, "capacity") == texts["capacity"]
    paper = texts["linear-transformer"]
    assert all(str(row.errors) in paper and str(row.epoch) in paper for row in published.SPEECH)


def test_a_page_without_a_verdict_is_refused(tmp_path):
    reproduction.RESULTS = tmp_path
    (tmp_path / f"{min(EXPERIMENTS)}.md").write_text("# A title\n\nNothing else.\n")
    with pytest.raises(ValueError, match="Verdict"):
        list(reproduction.verdicts())


def test_a_table_escapes_what_markdown_would_read():
    assert reproduction.markdown([["a | b", "c"], ["  in", "1"], ["d_e"]]) == (
        "| a \\| b | c |\n| :--- | ---: |\n| &nbsp;&nbsp;&nbsp;in | 1 |\n| d\\_e |  |"
    )


def test_results_with_other_settings_keep_a_separate_name(tmp_path):
    reproduction.OVERVIEW, reproduction.RESULTS = tmp_path / "overview.md", tmp_path / "kept"
    reproduction.RESULTS.mkdir()
    reproduction.OVERVIEW.write_text("nothing to write\n")
    page = reproduction.RESULTS / "scaling.md"
    page.write_text(
        "<!-- scaling:begin -->\n<!-- scaling:end -->\n<!-- scaling_few:begin -->\n<!-- scaling_few:end -->"
    )
    assert main(["reproduce", "scaling", "--quick"]) == 0
    reproduction.main("reproduce=few")
    assert sorted(path.name for path in reproduction.RESULTS.iterdir() if path != page) == [
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
def test_folders_of_a_machine_are_not_on_the_pages(given, kept):
    assert reproduction.anywhere(given) == kept
