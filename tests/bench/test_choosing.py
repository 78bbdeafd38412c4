"""The chooser and the mechanisms page: every mechanism is there once, with the figures of the result."""

import csv
import json
import re

import pytest

import longspan
from longspan_lab.tools import choosing


def row(candidate, mode, length, seconds, **more):
    return {
        "candidate": candidate,
        "family": "linear",
        "causal": True,
        "mode": mode,
        "length": length,
        "seconds": seconds,
        **more,
    }


def grown(candidate, family, cost, declared, causal=True, **fitted):
    return {"candidate": candidate, "family": family, "causal": causal, "cost": cost, "declared": declared, **fitted}


@pytest.fixture
def result():
    """linear is faster than softmax from N 2048 on and its state stays; sac never is and grows as N^1.5; star sees
    whole sequences.
    """
    rows = []
    for n, fast, slow in ((1024, 2.0, 8.0), (16384, 4.0, 80.0)):
        for mode in ("forward", "forward+backward"):
            softmax = 1.0 if n == 1024 else 16.0
            rows += [
                row("softmax", mode, n, softmax, mb=9.0, ratio=1.0),
                row("linear", mode, n, fast, mb=3.5, ratio=softmax / fast),
                row("sac", mode, n, slow, mb=99.0, ratio=softmax / slow),
                row("star", mode, n, fast * 3, mb=5.0, ratio=softmax / fast / 3),
            ]
        rows += [
            row("softmax", "step", n, 0.25, state_bytes=n * 2048),
            row("linear", "step", n, 0.125, state_bytes=66560),
            row("sac", "step", n, 0.5, state_bytes=n * 3072),
        ]
    growth = [
        grown("softmax", "softmax", "N^2 D", 2.0, **{"forward": 1.9, "forward+backward": 1.95}),
        grown("star", "sparse", "N D", 1.0, causal=False, **{"forward": 1.0, "forward+backward": 1.2}),
        grown("linear", "linear", "N D^2", 1.0, **{"forward": 0.9, "forward+backward": 0.95}),
        grown("sac", "content", "N^2 D", 2.0, **{"forward": 1.4, "forward+backward": 1.5}),
    ]
    return {
        "benchmark": "members",
        "how": "one way",
        "machine": {"processor": "Z80", "cores": 1},
        "rows": rows,
        "options": {"lengths": [1024, 16384], "limit": 6.0, "rounds": 3, "backward": True},
        "growth": growth,
        "refused": [],
        "left_out": [{"candidate": "sac", "mode": "forward", "reason": "forward from N 32768 on: long"}],
    }


def cells(text):
    """The cells of a Markdown table's rows."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()[2:]]


def test_the_pages_and_files_are_what_the_script_writes():
    found = json.loads((choosing.RESULTS / choosing.MACHINE / f"{choosing.NAME}.json").read_text(encoding="utf-8"))
    texts = [path.read_text(encoding="utf-8") for path in (choosing.CHOOSER, choosing.PAGE, choosing.README)]
    for text in texts:
        assert choosing.written(text, found) == text
        emptied = re.sub(r"(:begin -->\n).*?(<!-- \w+:end -->)", r"\1\2", text, flags=re.DOTALL)
        assert choosing.written(emptied, found) == text
    assert all(any(f"<!-- {name}:begin -->" in text for text in texts) for name in choosing.BLOCKS)
    for name, rows in choosing.CSV.items():
        text = (choosing.TABLES / f"{name}.csv").read_text(encoding="utf-8")
        assert text == choosing.rows_csv(rows(choosing.Figures(found)))
        assert f"({choosing.TABLES.name}/{name}.csv)" in texts[1]
    assert (choosing.TABLES / choosing.PICTURE).exists()


def test_every_mechanism_is_in_the_table():
    measured = json.loads((choosing.RESULTS / choosing.MACHINE / f"{choosing.NAME}.json").read_text(encoding="utf-8"))
    table = choosing.every(choosing.Figures(measured))
    links = re.findall(r"^\| \[`(\w+)`\]\(", table, flags=re.MULTILINE)
    missing = choosing.unmeasured(measured)
    assert sorted([*links, *missing]) == longspan.list_mechanisms()
    assert all(choosing.link(name) in choosing.missing(choosing.Figures(measured)) for name in missing)
    assert {choosing.group(name) for name in longspan.list_mechanisms()} == {*choosing.KINDS}
    assert all(choosing.group(default) == name for name, (_, _, default) in choosing.KINDS.items())


def test_a_run_is_copied_and_the_pages_written(result, tmp_path, monkeypatch):
    at = places(tmp_path, monkeypatch)
    folder = tmp_path / "run"
    run(folder, result)
    choosing.main(str(folder))
    assert sorted(path.name for path in at.iterdir()) == ["every.csv", "every.json", "every.png"]
    assert "| [`linear`](" in choosing.PAGE.read_text()
    with (choosing.TABLES / "left_out.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"mechanism": "sac", "reason": "forward from N 32768 on: long"}]
    assert (choosing.TABLES / choosing.PICTURE).read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(choosing, "draw", lambda *_: None)  # which takes seconds
    choosing.main(f"{folder}=budget")
    assert {path.name for path in at.glob("every_budget*")} == {"every_budget.csv", "every_budget.json"}
    assert {one["mechanism"] for one in choosing.budget(None)} == {"softmax", "star", "linear", "sac"}
    assert choosing.link("local(window=8)") == "[`local(window=8)`](../reference/mechanisms/sparse.md#local)"
    choosing.PAGE.write_text("<!-- lift:begin -->\n<!-- lift:end -->\n")
    with pytest.raises(ValueError, match=r"'lift'.*every, defaults"):
        choosing.main()


def places(tmp_path, monkeypatch):
    """Pages and folders of a test -> the folder of the machine."""
    for name, place in (("RESULTS", "results"), ("TABLES", "tables"), ("PAGE", "page.md"), ("CHOOSER", "chooser.md")):
        monkeypatch.setattr(choosing, name, tmp_path / place)
    monkeypatch.setattr(choosing, "README", tmp_path / "readme.md")
    choosing.README.write_text("")
    choosing.PAGE.write_text("a\n<!-- every:begin -->\n<!-- every:end -->\nb\n")
    choosing.CHOOSER.write_text("<!-- where:begin -->\n<!-- where:end -->\n")
    return tmp_path / "results" / choosing.MACHINE


def run(folder, result):
    """The files that ``longspan bench members`` writes."""
    folder.mkdir()
    for ending, text in ((".json", json.dumps(result)), (".csv", "x"), (".png", "y")):
        (folder / f"members{ending}").write_text(text)


def test_a_later_run_of_some_lengths_replaces_their_figures(result, tmp_path, monkeypatch):
    place = places(tmp_path, monkeypatch)
    monkeypatch.setattr(choosing, "draw", lambda *_: None)  # which takes seconds
    result["machine"] |= {"threads": 1, "torch": "2"}
    first = choosing.Figures(result).lengths[0]
    rows = [{**row, "seconds": row["seconds"] / 4} for row in result["rows"] if row["length"] == first]
    again = {**result, "options": {**result["options"], "lengths": [first]}, "rows": rows}
    for name, one in (("run", result), ("again", again)):
        run(tmp_path / name, one)
    choosing.main(f"{tmp_path / 'run'}+{tmp_path / 'again'}")
    before, after = choosing.Figures(result), choosing.Figures(json.loads((place / "every.json").read_text()))
    assert after.at.keys() == before.at.keys()
    for key, row in before.at.items():
        assert after.at[key]["seconds"] == row["seconds"] / (4 if key[2] == first else 1)
    # linear takes 2/4 and 4 seconds at 1024 and 16384 tokens
    assert after.growth["linear"]["forward+backward"] == pytest.approx(0.75)
    assert "step" not in after.growth["linear"]  # as before
    assert (place / "every.csv").read_text().startswith("candidate,")
    assert (place / "every.png").read_bytes()[:4] == b"\x89PNG"
    assert f"--lengths {first}`" in choosing.CHOOSER.read_text()


def test_a_later_run_adds_mechanisms(result):
    later = {
        "rows": [row("softmax", "forward", 1024, 7.0), row("mamba", "forward", 1024, 1.0, ratio=7.0)],
        "growth": [
            grown("softmax", "softmax", "N^2 D", 2.0, forward=2.0),
            grown("mamba", "gated", "N D", 1.0, forward=1.0),
        ],
        "left_out": [{"candidate": "mamba", "mode": "step", "reason": "long"}],
    }
    found = choosing.Figures(choosing.added(result, later))
    assert found.value("mamba", "forward", "ratio", 1024) == 7.0
    assert found.value("softmax", "forward", "seconds", 1024) == 1.0
    assert found.result["added"] == ["mamba"]
    assert "Those of `mamba` come from a later run" in choosing.where(choosing.Figures({**found.result}))
    assert len(found.result["left_out"]) == 2
    later["rows"][1]["ratio"] = 8.0
    twice = choosing.added(found.result, later)
    assert choosing.Figures(twice).value("mamba", "forward", "ratio", 1024) == 8.0
    assert [one["candidate"] for one in twice["growth"]].count("mamba") == 1
    assert twice["added"] == ["mamba"]
