"""``longspan reproduce all`` runs each experiment, skips finished ones, reports failures and writes one page."""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from longspan.cli.entry import INTERRUPTED, OK, main
from longspan_lab.experiments import EXPERIMENTS, every
from longspan_lab.experiments.experiment import Buildable, Experiment, setting
from longspan_lab.experiments.runner import missing

DOCS = Path(__file__).parents[2] / "docs" / "results" / "reproduction"
REAL = dict(EXPERIMENTS)


@dataclass(frozen=True)
class Settings(Buildable):
    count: int = setting(2, "points")
    data: str = setting("none", "toy or none")


def toy(measured: list, data: str = "none", **fields) -> Experiment:
    """An experiment of two points, which notes what it measures; with data it needs a folder of them."""

    def checked(settings: Settings) -> dict[str, str]:
        kind, _, folder = settings.data.partition(":")
        if kind != "none" and not folder:
            raise ValueError("cannot download toys")
        return {kind: folder and (Path(folder) / "sum").read_text()}

    def measure(settings: Settings, point: dict, place) -> dict:
        measured.append(point["at"])
        return {"square": point["at"] ** 2}

    def draw(plt, result):
        figure, axis = plt.subplots(figsize=(2, 2))
        axis.plot([row["square"] for row in result["rows"]])
        return figure

    settings = Settings(data=data)
    return Experiment(
        about="squares",
        scales={"laptop": settings},
        quick=settings,
        data=checked,
        measure=measure,
        draw=draw,
        points=lambda settings: [{"at": at} for at in range(1, settings.count + 1)],
        tables=lambda result: [[["squares"], *([str(row["square"])] for row in result["rows"])]],
        source="Pythagoras",
        differs="Nothing does.",
    )._replace(**fields)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A list that fills with what is measured; ``first`` and ``second`` are all experiments that there are."""
    monkeypatch.chdir(tmp_path)
    for name in REAL:
        monkeypatch.delitem(EXPERIMENTS, name)
    found: list = []
    monkeypatch.setitem(EXPERIMENTS, "first", toy(found))
    monkeypatch.setitem(EXPERIMENTS, "second", toy(found))
    return found


def ran(capsys, *words: str, code: int = OK) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["reproduce", "all", "--out", "out", *words]) == code
    return capsys.readouterr()


def test_each_runs_once_and_the_page_has_all(measured, capsys):
    out, err = ran(capsys)
    assert measured == [1, 2, 1, 2]
    assert err.splitlines() == ["first (1 of 2): begins", "second (2 of 2): begins"]
    assert out.splitlines() == ["first: done", "second: done", f"Page: {Path('out', 'reproduction.md')}"]
    page = Path("out/reproduction.md").read_text(encoding="utf-8")
    assert "`longspan reproduce all --scale laptop --out FOLDER` wrote this page." in page
    for name in ("first", "second"):
        assert {f"{name}.json", f"{name}.png", f"{name}.md"} <= {path.name for path in Path("out").iterdir()}
        assert re.search(rf"\| `{name}` \| squares \| [-:\d]+ \| \[below\]\(#{name}\) \|", page)
        assert f"## {name}\n\n{Path(f'out/{name}.md').read_text(encoding='utf-8').rstrip()}\n" in page
    # A second run skips everything and leaves the page unchanged.
    out, err = ran(capsys)
    assert measured == [1, 2, 1, 2]
    assert err.splitlines() == ["first (1 of 2): done before", "second (2 of 2): done before"]
    assert out.startswith("first: done before\nsecond: done before\n")
    assert Path("out/reproduction.md").read_text(encoding="utf-8") == page


def test_the_page_tells_what_each_and_all_took_by_the_clock(measured, capsys):
    ran(capsys)
    for name, seconds in (("first", 3601.4), ("second", 0.0)):
        path = Path(f"out/{name}.json")
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert 0 <= kept["clock_seconds"] < 60
        path.write_text(json.dumps(kept | {"clock_seconds": seconds}), encoding="utf-8")
    ran(capsys)
    page = Path("out/reproduction.md").read_text(encoding="utf-8")
    assert "| `first` | squares | 1:00:01 | [below](#first) |" in page
    assert "| `second` | squares | - | [below](#second) |" in page
    assert " 1:00:01 " in page


def test_what_is_done_is_drawn_again_from_its_json_alone(measured, capsys, monkeypatch):
    ran(capsys)
    for end in ("png", "md"):
        Path(f"out/first.{end}").unlink()
    Path("out/second.md").unlink()
    Path("out/reproduction.md").unlink()

    def none(settings):
        raise ValueError("no data here")

    for name in ("first", "second"):
        monkeypatch.setitem(EXPERIMENTS, name, EXPERIMENTS[name]._replace(data=none))
    ran(capsys)
    assert all(Path(f"out/{name}.{end}").exists() for name in ("first", "second") for end in ("png", "md"))
    assert "## second" in Path("out/reproduction.md").read_text(encoding="utf-8")
    assert len(measured) == 4


def test_what_cannot_run_does_not_end_the_others(measured, capsys, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "first", toy(measured, data="toy"))
    out, err = ran(capsys, code=1)
    assert measured == [1, 2]
    assert "first cannot run: cannot download toys\n" in err
    assert out.splitlines()[:2] == ["first: cannot run: cannot download toys", "second: done"]
    assert "| `first` | squares |  | cannot download toys |" in Path("out/reproduction.md").read_text(encoding="utf-8")
    # With a folder that has them it can.
    Path("data/toy").mkdir(parents=True)
    Path("data/toy/sum").write_text("0af", encoding="utf-8")
    out, _ = ran(capsys, "--data", "data")
    assert out.splitlines()[:2] == ["first: done", "second: done before"]
    result = json.loads(Path("out/first.json").read_text(encoding="utf-8"))
    assert (result["settings"]["data"], result["data"]) == (f"toy:{Path('data', 'toy')}", {"toy": "0af"})


def test_a_missing_package_is_reported_and_a_bug_is_not_hidden(measured, capsys, monkeypatch):
    def refuse(error):
        def measure(*_):
            raise error

        monkeypatch.setitem(EXPERIMENTS, "first", toy(measured)._replace(measure=measure))

    refuse(ImportError('this needs scipy: pip install "longspan[train]"'))
    out, _ = ran(capsys, code=1)
    assert out.startswith('first: cannot run: this needs scipy: pip install "longspan[train]"\nsecond: done\n')
    refuse(ImportError("cannot import name 'x'"))
    with pytest.raises(ImportError, match="cannot import name"):
        main(["reproduce", "all", "--out", "other"])


def test_an_interruption_keeps_what_was_measured_and_the_same_command_goes_on(measured, capsys, monkeypatch):
    whole = toy(measured)

    def interrupted(settings, point, place):
        if len(measured) == 3:
            raise KeyboardInterrupt
        return whole.measure(settings, point, place)

    monkeypatch.setitem(EXPERIMENTS, "second", whole._replace(measure=interrupted))
    _, err = ran(capsys, code=INTERRUPTED)
    assert f"interrupted: 1 of 2 points are in {Path('out', 'second')}.json; the same command goes on from there" in err
    page = Path("out/reproduction.md").read_text(encoding="utf-8")
    assert "## first" in page
    assert "| `second` | squares |  | not measured |" in page
    monkeypatch.setitem(EXPERIMENTS, "second", whole)
    ran(capsys)
    assert measured == [1, 2, 1, 2]
    assert "## second" in Path("out/reproduction.md").read_text(encoding="utf-8")


def test_some_of_them_and_those_that_have_the_scale(measured, capsys, monkeypatch):
    ran(capsys, "--only", "second")
    assert measured == [1, 2]
    assert not Path("out/first.json").exists()
    ran(capsys, "--skip", " first , second")
    assert measured == [1, 2]
    one = EXPERIMENTS["second"]
    monkeypatch.setitem(EXPERIMENTS, "second", one._replace(scales={**one.scales, "paper": Settings(count=3)}))
    _, err = ran(capsys, "--scale", "paper", "--out", "large")
    assert measured == [1, 2, 1, 2, 3]
    assert err == "second (1 of 1): begins\n"
    ran(capsys, "--quick", "--out", "small")
    assert measured == [1, 2, 1, 2, 3, 1, 2, 1, 2]


def test_the_time_that_is_left_is_said_and_corrected_by_what_was_measured(measured, capsys, monkeypatch):
    now, measure = [0.0], EXPERIMENTS["first"].measure

    def slow(*arguments):
        now[0] += 600.0
        return measure(*arguments)

    monkeypatch.setattr(every, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for name, minutes in (("first", 40.0), ("second", 20.0)):
        monkeypatch.setitem(EXPERIMENTS, name, EXPERIMENTS[name]._replace(minutes=minutes, measure=slow))
    # 60 minutes of processor time at the usual pace; then 20 at the half, which is what the first one took.
    _, err = ran(capsys)
    assert err.splitlines() == [
        "first (1 of 2): takes about 28:00; about 42:00 left in all",
        "second (2 of 2): takes about 10:00; about 10:00 left in all",
    ]


def test_what_is_measured_already_takes_no_time(measured, capsys, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "first", toy(measured, minutes=40.0))
    ran(capsys)
    path = Path("out/first.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**result, "rows": result["rows"][:1]}), encoding="utf-8")
    assert every.minutes("first", "laptop", Path("out"), None) == 20.0
    assert every.minutes("second", "laptop", Path("out"), None) == 0.0
    assert every.minutes("first", "quick", Path("out"), None) == 0.0
    # Of other settings nothing is there.
    assert len(missing(path, EXPERIMENTS["first"], Settings(count=2, data="other"))) == 2
    path.write_text("no JSON", encoding="utf-8")
    assert len(missing(path, EXPERIMENTS["first"], Settings())) == 2


def test_data_are_taken_from_a_folder_by_their_bare_names(tmp_path):
    for kind in ("toy", "none"):
        (tmp_path / kind).mkdir()
    one = toy([])
    for given, placed in (
        ("toy", f"toy:{tmp_path / 'toy'}"),
        ("toy:elsewhere", "toy:elsewhere"),
        ("mnist", "mnist"),
        ("toy; mnist;none", f"toy:{tmp_path / 'toy'}; mnist; none:{tmp_path / 'none'}"),
    ):
        assert one.with_data(Settings(data=given), tmp_path) == Settings(data=placed)
        assert one._replace(takes=()).with_data(Settings(data=given), tmp_path) == Settings(data=given)


# What is read from files that somebody has, or that are downloaded.
KINDS = ("an4", "cifar10", "ett", "fsdd", "imdb", "mnist", "protein")


@pytest.mark.parametrize("name", REAL)
def test_what_needs_files_is_taken_from_a_folder(name, tmp_path):
    for kind in KINDS:
        (tmp_path / kind).mkdir()
    settings = REAL[name].settings("laptop")
    placed = REAL[name].with_data(settings, tmp_path)
    for one in fields(settings):
        given = str(getattr(settings, one.name))
        words = [word.strip() for word in given.split(";")]
        expected = "; ".join(f"{word}:{tmp_path / word}" if word in KINDS else word for word in words)
        assert str(getattr(placed, one.name)) == (expected if set(words) & set(KINDS) else given)


@pytest.mark.parametrize("name", REAL)
def test_the_minutes_of_an_experiment_are_those_of_its_result(name):
    path = DOCS / f"{name}.json"
    if not path.exists():
        pytest.skip("not measured at the scale of a laptop yet")
    result = json.loads(path.read_text(encoding="utf-8"))
    # Machines differ; by more than twice, somebody has changed the experiment.
    assert 0.5 < REAL[name].minutes * 60 / result["cpu_seconds"] < 2
