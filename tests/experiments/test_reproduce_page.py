"""The pages of results are what their script writes, from JSON files alone, with the rows of the paper."""

import json

import pytest

from longspan.cli.entry import main
from longspan_lab.experiments import EXPERIMENTS, paper, published, scaling
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


def test_a_page_without_a_verdict_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    (tmp_path / f"{min(EXPERIMENTS)}.md").write_text("# A title\n\nNothing else.\n")
    with pytest.raises(ValueError, match="Verdict"):
        list(reproduction.verdicts())


def test_a_table_escapes_what_markdown_would_read():
    assert reproduction.markdown([["a | b", "c"], ["  in", "1"], ["d_e"]]) == (
        "| a \\| b | c |\n| :--- | ---: |\n| &nbsp;&nbsp;&nbsp;in | 1 |\n| d\\_e |  |"
    )


def test_results_with_other_settings_keep_a_separate_name(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "OVERVIEW", tmp_path / "overview.md")
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path / "kept")
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


def test_a_reformer_of_x_rounds_is_the_publications_lsh_x():
    names = {"reformer(rounds=1)": "lsh-1", "reformer": "lsh-4", "reformer(chunk=8, rounds=7)": "lsh-7", "gla": "gla"}
    assert {name: paper.called(name) for name in names} == names
    assert [paper.recomputed(name) for name in ("softmax", "reformer", "linear", "gla")] == [True, True, False, False]


def test_a_row_of_the_paper_has_what_every_result_found_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    assert reproduction.generated("mnist", "lsh-1") == ("open", "open")
    one, four = "reformer(rounds=1)", "reformer(chunk=29, rounds=4)"
    training = {"what": "training", "curve": [[50, 1.0, 2.5], [2000, 9.0, 2.0]]}
    rows = [
        {**training, "attention": one, "test": 1.2345},
        {**training, "attention": four, "test": 1.5},
        {"what": "images", "batch": 8, "images_per_second": {one: 2.5, f"{one}, prefix recomputed": 0.25, four: 9.0}},
    ]
    for name, data in (("images_lsh", "mnist:x"), ("images_other", "cifar10")):
        result = {"settings": {"data": data}, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert reproduction.generated("mnist", "lsh-1") == (
        "1.234 after 2,000 steps",
        "2.5, batch 8, from a state; 0.25, batch 8, prefix recomputed",
    )
    assert reproduction.generated("cifar10", "lsh-4") == ("1.500 after 2,000 steps", "9, batch 8, from a state")
    assert any(
        "| lsh-1, mnist | 0.745 | 0.68 | 46.0 | 19.2 | 1.234 after" in line for line in reproduction.of_the_paper()
    )
