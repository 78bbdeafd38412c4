"""``longspan reproduce``: experiments go on where they stopped, and their results say where they come from."""

import importlib.util
import json
import re
import shlex
import subprocess
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from longspan.cli.entry import INTERRUPTED, OK, WRONG, main
from longspan.cli.parser import kebab
from longspan_lab.cli import reproduce
from longspan_lab.experiments import EXPERIMENTS, experiment, lra_cost, page, provenance, runner, scaling
from longspan_lab.experiments.experiment import Place
from support.experiments import unwatched

# test_reproduce_images.py has the images in whole.
HERE = [name for name, one in EXPERIMENTS.items() if all(map(importlib.util.find_spec, one.needs))]
WHOLE = [name for name in HERE if name != "images"]
# Those with a device setting.
ON_A_GPU = [name for name in HERE if any(field.name == "device" for field in fields(EXPERIMENTS[name].quick))]
# What is timed is never the same twice.
TIMED = ("language", "lra", "scaling", "segments", "speech")
REPEATABLE = [pytest.param(name, marks=[pytest.mark.slow] * (name == "spans")) for name in WHOLE if name not in TIMED]


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """Nothing is drawn, which takes longer than everything else together."""
    monkeypatch.setattr(runner, "picture", lambda *_: None)


@pytest.fixture(autouse=True)
def unweighed(monkeypatch):
    """Memory is weighed in processes, which take longer than everything else together."""
    monkeypatch.setattr(scaling, "weighed", lambda settings, name, length: 0.5)
    monkeypatch.setattr(lra_cost, "weighed", lambda shape, batch, device: 0.5)


def ran(*words: str, code: int = OK) -> dict:
    """The JSON of ``longspan reproduce``."""
    assert main(["reproduce", *words, "--quick", "--debug"]) == code
    folder = words[words.index("--out") + 1] if "--out" in words else "reproduce"
    return json.loads(Path(folder, f"{words[0]}.json").read_text(encoding="utf-8"))


def test_a_disk_that_is_full_when_all_is_measured(monkeypatch, capsys):
    def full(path, *_):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(runner, "picture", full)
        ran("approximation", code=WRONG)
    kept = f"{Path('reproduce', 'approximation')}.json; the same command goes on from there"
    first, last = capsys.readouterr().err.splitlines()[-1].split("; ", 1)
    assert first == f"longspan: error: {Path('reproduce', 'approximation')}.png: No space left on device"
    assert last.endswith(f" points are in {kept}")
    ran("approximation")
    assert {path.suffix for path in Path("reproduce").iterdir()} == {".json", ".md", ".png"}


@pytest.mark.parametrize("name", WHOLE)
def test_an_experiment_in_whole(name, capsys):
    result = ran(name)
    one = EXPERIMENTS[name]
    assert [{key: row[key] for key in point} for row, point in zip(result["rows"], one.points(one.quick), strict=True)]
    assert set(result["settings"]) == {field.name for field in fields(one.quick)}
    (machine,) = result["machines"]
    assert {"processor", "cores", "threads", "torch"} <= set(machine)
    assert result["scale"] == "quick"
    assert result["longspan"] == result["versions"]["longspan"]
    assert result["versions"]["torch"] == torch.__version__
    assert set(one.needs) <= set(result["versions"])
    assert result["commit"] == provenance.commit()
    assert result["data"] == one.data(one.quick)
    out, err = capsys.readouterr()
    assert not err
    assert f"Files: {Path('reproduce', name)}.json" in out
    shown = " ".join(out.split())  # without line breaks
    assert one.source in shown
    assert all(f"{setting} " in shown for setting in result["settings"])
    with Image.open(f"reproduce/{name}.png") as image:
        picture = np.asarray(image.convert("L"))
    assert min(picture.shape) > 300
    assert len(np.unique(picture)) > 20
    files = sorted(path.name for path in Path("reproduce").iterdir() if path.name != f"{name}-work")
    assert files == [f"{name}.json", f"{name}.md", f"{name}.png"]
    written = Path(f"reproduce/{name}.md").read_text(encoding="utf-8")
    assert written == page.fragment(one, result, [f"{name}.png"])
    assert written.startswith(f"![{name}]({name}.png)\n\n```text\n")
    assert f"Command: longspan reproduce {name} --quick\n" in written
    assert one.differs in written
    assert page.show(one, result) in written


@pytest.mark.parametrize("name", REPEATABLE)
def test_what_was_interrupted_goes_on_with_the_same_numbers(name, monkeypatch, capsys, undrawn):
    """The numbers depend on the settings and the point alone, not on torch's generator."""
    one, measured, at = EXPERIMENTS[name], [], Place(Path("whole"), unwatched)
    points = list(one.points(one.quick))
    torch.manual_seed(1)
    whole = [point | one.measure(one.quick, point, at) for point in points]
    torch.manual_seed(2)

    def interrupted(settings, point, place):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point)
        return one.measure(settings, point, place)

    monkeypatch.setitem(EXPERIMENTS, name, one._replace(measure=interrupted))
    assert main(["reproduce", name, "--quick"]) == INTERRUPTED
    count = len(points)
    assert (
        f"interrupted: 2 of {count} points are in {Path('reproduce', name)}.json; the same" in capsys.readouterr().err
    )

    def counted(settings, point, place):
        measured.append(point)
        return one.measure(settings, point, place)

    monkeypatch.setitem(EXPERIMENTS, name, one._replace(measure=counted))
    for _ in range(2):  # The second time nothing is left to measure.
        assert ran(name)["rows"] == json.loads(json.dumps(whole))
        assert len(measured) == count


def test_an_interruption_before_the_first_point_is_reported(monkeypatch, capsys, undrawn):
    def interrupted(settings, point, place):
        raise KeyboardInterrupt

    monkeypatch.setitem(EXPERIMENTS, "capacity", EXPERIMENTS["capacity"]._replace(measure=interrupted))
    assert main(["reproduce", "capacity", "--quick"]) == INTERRUPTED
    assert "before the first point was done; the same command" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["capacity", "copy", "forecast", "lengths", "lra", "memory", "ponder", "protein", "transfer"]
)
def test_a_training_that_diverges_is_an_error_and_writes_no_figure(name, capsys):
    assert main(["reproduce", name, "--quick", "--rate", "1e19"]) == WRONG
    assert re.search("error: the loss became (nan|inf) .*; a lower --rate may help\n$", capsys.readouterr().err)
    assert "NaN" not in Path(f"reproduce/{name}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {**r, "settings": {**r["settings"], "draws": 99}}, "was made with draws=99; choose another folder"),
        (lambda r: {**r, "settings": {**r["settings"], "angles": [1, 2]}}, "was made with angles=1,2; choose"),
        (lambda r: {**r, "settings": {**r["settings"], "more": 3}}, "was made with more=3; choose"),
        (lambda r: {**r, "longspan": "0.0.1"}, "was made with longspan=0.0.1; choose"),
        (lambda r: {**r, "data": {"digits": "0" * 64}}, "was made with data.digits=0000"),
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
    monkeypatch.setattr(provenance.here, "machine", lambda: {"processor": "another", "load": 0.1})
    assert ran("capacity")["machines"] == [*first["machines"], {"processor": "another"}]
    # One that found nothing left to measure took no part.
    monkeypatch.setattr(provenance.here, "machine", lambda: {"processor": "a third"})
    assert len(ran("capacity")["machines"]) == 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_setting_is_a_documented_flag(name, capsys):
    assert main(["reproduce", name, "--help"]) == OK
    shown = capsys.readouterr().out
    for field in fields(EXPERIMENTS[name].scales["laptop"]):
        assert kebab(f"--{field.name}") in shown
    assert all(action.help for action in reproduce.subparser(name)._actions)


def test_random_numbers_depend_on_the_names_alone():
    def first(*names):
        return torch.rand(3, generator=experiment.generator(*names)).tolist()

    assert first(0, {"a": 1, "b": 2}) == first(0, {"b": 2, "a": 1})
    assert len({tuple(first(*names)) for names in ((0, "a"), (1, "a"), (0, "b"), (0, "a", "b"))}) == 4


# Scales


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_the_scale_of_a_laptop_and_settings_of_one_kind(name):
    one = EXPERIMENTS[name]
    assert set(one.scales) in ({"laptop"}, {"laptop", "gpu"}, {"laptop", "gpu", "paper"}, {"laptop", "paper"})
    assert {type(settings) for settings in one.scales.values()} == {type(one.quick)}
    assert one.differs.endswith(".")


@pytest.mark.parametrize("words", [["--scale", "paper"], ["--scale=paper"]])
def test_a_scale_chooses_the_defaults_of_the_flags(words):
    args = reproduce.parser().read(["copy", *words, "--dim", "24"])
    assert (args.dim, args.steps, args.scale) == (24, EXPERIMENTS["copy"].scales["paper"].steps, "paper")


def test_the_command_of_a_result_has_its_settings_again():
    words = ["mqar", "--specs", "linear; rfa(gate=True)", "--dims", "4,8", "--rates", "0.01"]
    one, args = EXPERIMENTS["mqar"], reproduce.parser().read(words)
    settings = {field.name: reproduce._value(args, field.name, one.quick) for field in fields(one.quick)}
    line = page.command(one, {"experiment": "mqar", "scale": "laptop", "settings": settings})
    assert shlex.split(line) == ["longspan", "reproduce", "mqar", "--scale", "laptop", *words[1:]]
    # Whatever a later version makes of its defaults, the line names what differs from them.
    older = {"experiment": "mqar", "settings": json.loads(json.dumps(asdict(one.scales["laptop"])))}
    assert page.command(one, older) == "longspan reproduce mqar --scale laptop"
    # Flags are spelt as they are everywhere.
    copy = {"experiment": "copy", "settings": asdict(EXPERIMENTS["copy"].scales["laptop"]) | {"drop_at": 7}}
    assert page.command(EXPERIMENTS["copy"], copy) == "longspan reproduce copy --scale laptop --drop-at 7"


# Where results come from


def git(folder: Path, *words: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_checkout_with_a_mark_for_changes(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1\n", encoding="utf-8")
    assert provenance.commit(package) == ""
    git(tmp_path, "init")
    # A package that is not tracked is somebody else's.
    assert provenance.commit(package) == ""
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.commit(package) == head
    (tmp_path / "notes.txt").write_text("outside\n", encoding="utf-8")
    assert provenance.commit(package) == head
    (package / "b.py").write_text("2\n", encoding="utf-8")
    assert provenance.commit(package) == f"{head}+"
    # A change in either of two packages marks both.
    other = tmp_path / "other"
    other.mkdir()
    assert provenance.commit(package, other) == ""
    (other / "a.py").write_text("1\n", encoding="utf-8")
    git(tmp_path, "add", "other", "package")
    git(tmp_path, "commit", "-m", "two")
    assert provenance.commit(package, other) == git(tmp_path, "rev-parse", "HEAD")
    (other / "a.py").write_text("2\n", encoding="utf-8")
    assert provenance.commit(package, other).endswith("+")


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == ""


NEW = ("scale", "commit", "versions", "data")


def test_a_result_of_before_is_shown_and_continued(monkeypatch, undrawn):
    """Files that lack what later versions write down say so, and what they hold stays."""
    monkeypatch.setattr(provenance, "commit", lambda: "first")
    first, one = ran("capacity"), EXPERIMENTS["capacity"]
    old = {key: value for key, value in first.items() if key not in NEW}
    shown = page.show(one, old)
    assert "Scale: not recorded. Commit: not recorded." in shown
    assert "Versions: not recorded." in shown
    assert "Data, sha256: not recorded." in shown
    Path("reproduce/capacity.json").write_text(json.dumps(old), encoding="utf-8")
    # Nothing is left to measure, so nothing is known of what was.
    assert ran("capacity") == old
    Path("reproduce/capacity.json").write_text(json.dumps({**old, "rows": old["rows"][:-1]}), encoding="utf-8")
    monkeypatch.setattr(provenance, "commit", lambda: "second")
    now = ran("capacity")
    assert now["commit"] == "not recorded, second"
    assert now["versions"]["torch"] == f"not recorded, {torch.__version__}"
    assert now["rows"] == first["rows"]


def test_what_several_commits_measured_names_them_all(monkeypatch, undrawn):
    monkeypatch.setattr(provenance, "commit", lambda: "first")
    first, path = ran("capacity"), Path("reproduce/capacity.json")
    for commit, expected in (("second", "first, second"), ("first", "first, second"), ("", "first, second, none")):
        found = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**found, "rows": first["rows"][:-1]}), encoding="utf-8")
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        assert ran("capacity")["commit"] == expected


# The place of a point


def test_a_place_keeps_what_it_is_given(tmp_path):
    place = Place(tmp_path / "work", unwatched)
    assert place.load("a") is None
    assert not place.folder.exists()
    place.save("a", {"step": 3, "weights": {"w": torch.arange(3)}})
    place.save("b", {"step": 4})
    kept = place.load("a")
    assert kept is not None
    assert kept["step"] == 3
    assert kept["weights"]["w"].tolist() == [0, 1, 2]
    assert sorted(path.name for path in place.folder.iterdir()) == ["a.pt", "b.pt"]
    (place.folder / "b.pt").write_text("something else", encoding="utf-8")
    with pytest.raises(ValueError, match=r"b\.pt is corrupt or foreign; delete it"):
        place.load("b")


def test_what_a_point_kept_of_an_unknown_run_is_not_continued(capsys):
    Path("reproduce/capacity-work").mkdir(parents=True)
    assert main(["reproduce", "capacity", "--quick"]) == WRONG
    assert "capacity-work belongs to a capacity.json that is not there; delete it or" in capsys.readouterr().err


def test_a_gpu_is_asked_for_only_where_there_is_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ON_A_GPU:
        assert main(["reproduce", name, "--quick", "--device", "cuda"]) == WRONG
        assert "device=cuda: torch sees no GPU here; --device cpu measures on the processor" in capsys.readouterr().err
        assert main(["reproduce", name, "--quick", "--device", "tpu"]) == WRONG
        assert "unknown device 'tpu' (did you mean 'cpu'?); known: cpu, cuda" in capsys.readouterr().err
    assert not list(Path("reproduce").iterdir())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_A_GPU)
def test_each_runs_on_a_gpu(name):
    assert main(["reproduce", name, "--quick", "--device", "cuda"]) == OK


@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_can_go_to_a_gpu_has_a_scale_that_does(name):
    devices = {scale: settings.device for scale, settings in EXPERIMENTS[name].scales.items()}
    assert devices.pop("laptop") == "cpu"
    assert "cuda" in devices.values()
