"""The page "Which attention should I use?": every mechanism is on it once, and its figures are those of the result."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import longspan
from longspan.bench import members

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def script():
    found = importlib.util.spec_from_file_location("choosing_script", DOCS.parent / "tools" / "choosing.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


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


def test_the_figures_of_the_page_are_those_of_the_result(script):
    """Nothing is typed in by hand: the page is what its script writes, and every block of it is there."""
    text = script.PAGE.read_text(encoding="utf-8")
    path = script.RESULTS / script.MACHINE / f"{script.NAME}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert script.written(text, found) == text
    assert script.written(re.sub(r"\d x", "9 x", text.replace(" ms |", " s |")), found) == text
    assert all(f"<!-- {name}:begin -->" in text for name in (*script.BLOCKS, *script.GROUPS))


def test_every_mechanism_stands_in_one_family(script):
    text = script.PAGE.read_text(encoding="utf-8")
    tables = text[text.index("## Every mechanism") : text.index("## Does it grow")]
    links = re.findall(r"^\| \[`(\w+)`\]\(mechanisms/", tables, flags=re.MULTILINE)
    measured = json.loads((script.RESULTS / script.MACHINE / f"{script.NAME}.json").read_text(encoding="utf-8"))
    missing = script.unmeasured(measured)
    assert sorted([*links, *missing]) == longspan.list_mechanisms()
    assert all(f"{script.link(name)}" in text[text.index("not measured yet: ") :] for name in missing)
    assert {script.group(name) for name in longspan.list_mechanisms()} == {*script.GROUPS}
    assert [script.group(name) for name in ("kda", "gla", "local", "softmax")] == [
        "delta",
        "decays",
        "patterns",
        "softmax",
    ]


def test_lists_are_sorted_by_what_was_measured(script, result):
    found = script.Figures(result)
    names = ["softmax", "sac", "linear", "star"]
    assert found.best(names, "forward+backward", "seconds") == ["linear", "star", "softmax", "sac"]
    assert found.best(names, "forward+backward", "mb", 2) == ["linear", "star"]
    # star has no step.
    assert found.best(names, "step", "state_bytes") == ["linear", "softmax", "sac"]
    assert [found.constant(name) for name in names] == [False, False, True, False]
    assert script.causal(found).count("\n") == 2
    assert "[`linear`](mechanisms/linear.md#linear) | 4 s | 4 s | 4x | 4x | 3.5 MB | 65 kB | 125 ms |" in (
        script.causal(found)
    )
    assert re.findall(r"`(\w+)`", script.bidirectional(found)) == ["star"]
    assert re.findall(r"`(\w+)`", script.decoding(found)) == ["linear", "softmax"]


def test_a_crossing_is_told_at_the_next_measured_length(script, result):
    lines = script.length(script.Figures(result)).splitlines()[2:]
    assert [re.sub(r"\(.*?\)", "", line) for line in lines] == [
        "| at 1,024 tokens | - | - |",
        "| at 16,384 tokens | [`linear`], [`star`] | [`linear`], [`star`] |",
        "| at no measured length | [`sac`] | [`sac`] |",
    ]


def test_an_exponent_that_misses_the_declared_one_is_told(script, result):
    text = script.grown(script.Figures(result))
    assert re.findall(r"`(\w+)`", text) == ["sac"]
    assert "| $N^2 D$ | N^2 | N^1.40 | N^1.50 |" in text
    assert script.grown(script.Figures({**result, "growth": []})) == "No exponent is off by more than 0.25."


def test_a_family_has_the_columns_of_the_command_and_the_factor(script, result):
    head, _, line = script.family(script.Figures(result), "content").splitlines()
    assert head.startswith(f"| {' | '.join(members.table(result)[0][1:])} |")
    assert line.endswith("| 0.2x / 0.2x |")
    assert "[`star`](mechanisms/sparse.md#star), bidirectional" in script.family(script.Figures(result), "patterns")


def test_a_run_is_copied_and_the_page_written(script, result, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    script.PAGE.write_text("a\n<!-- left:begin -->\n<!-- left:end -->\nb\n")
    folder = tmp_path / "run"
    folder.mkdir()
    for ending, text in ((".json", json.dumps(result)), (".csv", "x"), (".png", "y")):
        (folder / f"members{ending}").write_text(text)
    script.main([str(folder)])
    assert sorted(path.name for path in (tmp_path / "results" / script.MACHINE).iterdir()) == [
        "every.csv",
        "every.json",
        "every.png",
    ]
    assert "* `sac`: forward from N 32768 on: long" in script.PAGE.read_text()
    script.main([f"{folder}=budget"])
    place = tmp_path / "results" / script.MACHINE
    assert {path.name for path in place.glob("every_budget*")} == {"every_budget.csv", "every_budget.json"}
    assert re.findall(r"`(\w+)`", script.budget(None)) == ["softmax", "star", "linear", "sac"]
    assert script.link("local(window=8)") == "[`local(window=8)`](mechanisms/sparse.md#local)"
    script.PAGE.write_text("<!-- lift:begin -->\n<!-- lift:end -->\n")
    with pytest.raises(ValueError, match="nothing writes 'lift'; known: where, length"):
        script.main([])


def test_lengths_that_were_measured_again_take_their_place(script, result, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    script.PAGE.write_text("<!-- where:begin -->\n<!-- where:end -->\n")
    result["machine"] |= {"threads": 1, "torch": "2"}
    first = script.Figures(result).lengths[0]
    rows = [{**row, "seconds": row["seconds"] / 4} for row in result["rows"] if row["length"] == first]
    again = {**result, "options": {**result["options"], "lengths": [first]}, "rows": rows}
    for name, one in (("run", result), ("again", again)):
        (tmp_path / name).mkdir()
        for ending, text in ((".json", json.dumps(one)), (".csv", "x"), (".png", "y")):
            (tmp_path / name / f"members{ending}").write_text(text)
    script.main([f"{tmp_path / 'run'}+{tmp_path / 'again'}"])
    place = tmp_path / "results" / script.MACHINE
    before, after = script.Figures(result), script.Figures(json.loads((place / "every.json").read_text()))
    assert after.at.keys() == before.at.keys()
    for key, row in before.at.items():
        assert after.at[key]["seconds"] == row["seconds"] / (4 if key[2] == first else 1)
    # linear takes 2/4 and 4 seconds at 1024 and 16384 tokens
    assert after.growth["linear"]["forward+backward"] == pytest.approx(0.75)
    assert "step" not in after.growth["linear"]  # as before
    assert (place / "every.csv").read_text().startswith("candidate,")
    assert (place / "every.png").read_bytes()[:4] == b"\x89PNG"
    assert f"with `--lengths {first}`" in script.PAGE.read_text()


def test_forecasters_are_sent_to_what_has_the_smallest_error(script):
    lines = script.forecasts(None).splitlines()[2:]
    errors = {line.split(" | ")[0][2:]: [float(cell) for cell in line.strip("| ").split(" | ")[1:]] for line in lines}
    first, *others = errors
    assert first == "linear map, ridge"
    assert all(a < b for other in others for a, b in zip(errors[first], errors[other], strict=True))
    found = json.loads((script.TASKS / "forecast.json").read_text(encoding="utf-8"))
    (row,) = [row for row in found["rows"] if (row["model"], row["horizon"]) == ("informer", 168)]
    assert errors["`informer`"][found["settings"]["horizons"].index(168)] == round(row["mse"], 3)
    day = errors["the last day again"]
    assert all(a < b for name in ("`informer`", "`softmax`") for a, b in zip(day, errors[name], strict=True))
    assert "**Forecasts of time series**: `informer`" not in script.PAGE.read_text(encoding="utf-8")


def test_tasks_are_those_of_the_experiments(script):
    found = json.loads((script.TASKS / "mqar.json").read_text(encoding="utf-8"))
    pairs, dims = found["settings"]["pairs"][-1], found["settings"]["dims"]
    lines = script.recall(None).splitlines()
    assert lines[0] == f"| {pairs} pairs to remember | {' | '.join(f'width {dim}' for dim in dims)} |"
    best = max(row["accuracy"][-1] for row in found["rows"] if (row["spec"], row["dim"]) == ("linear", dims[0]))
    (line,) = [line for line in lines if line.startswith("| `linear` |")]
    assert line.split(" | ")[1].startswith(f"{100 * best:.1f} %, ")
    tasks = script.tasks(None)
    image = json.loads((script.TASKS / "images.json").read_text(encoding="utf-8"))
    linear = next(row for row in image["rows"] if row.get("attention") == "linear")
    assert f"| draw mnist | `linear` | {linear['test']:.3f} bits per dim after" in tasks
    assert "| copy 63 symbols | `softmax` | loss " in tasks
