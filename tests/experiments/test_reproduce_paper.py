"""Rows of the paper: their names, and our results for them."""

import json

from longspan_lab.experiments import images_report, paper
from longspan_lab.tools import reproduction


def test_a_reformer_of_x_rounds_is_the_publications_lsh_x():
    names = {"reformer(rounds=1)": "lsh-1", "reformer": "lsh-4", "reformer(chunk=8, rounds=7)": "lsh-7", "gla": "gla"}
    assert {name: paper.called(name) for name in names} == names
    assert [paper.recomputed(name) for name in ("softmax", "reformer", "linear", "gla")] == [True, True, False, False]
    row = {"curve": [[4, 2.0, 1.7]], "parameters": 12, "validation": 1.7, "test": 1.75}
    one, again = "reformer(rounds=1)", "reformer(rounds=1), prefix recomputed"
    result = {
        "settings": {"data": "mnist", "attentions": f"linear; {one}", "batches": []},
        "rows": [
            {"what": "training", "attention": one, **row},
            {
                "what": "images",
                "batch": 1,
                "seconds": {"linear": 2.0, one: 4.0, again: 8.0},
                "images_per_second": {"linear": 0.5, one: 0.25, again: 0.125},
            },
        ],
    }
    bits, speed, *_ = images_report.tables(result)
    assert [line[0] for line in bits[1:]] == [f"lsh-1, {one}", "lsh-4"]
    assert bits[1][1:] == ["12", "4", "2 s", "1.700", "1.700", "1.750", "0.745"]
    # The published speed is that of reading the prefix again.
    assert speed[1:] == [
        ["linear", "0.5", "142.8", "0.182"],
        [f"lsh-1, {one}", "0.25 (2x)"],
        [f"lsh-1, {again}", "0.125 (4x)", "0.68", "0.0217"],
        ["lsh-4", "not in this run", "0.27", "0.00893"],
    ]


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
