"""What the README and the pages show is true: commands and examples run, links lead somewhere, figures are measured."""

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import longspan
from longspan_lab.tools import figures

ROOT = Path(__file__).parents[2]
README, DOCS, SOURCE = ROOT / "README.md", ROOT / "docs", ROOT / "src" / "longspan"
PAGES = [page for page in (README, *sorted(DOCS.rglob("*.md"))) if "```console" in page.read_text(encoding="utf-8")]
# The tests need the set-up already, and the demo has a separate test.
SETUP = re.compile(r"make \w+|python3 -m venv |\.venv/bin/|source ")


def commands(console: list[str]) -> list[str]:
    """The lines behind a prompt."""
    return [line[2:] for block in console for line in block.splitlines() if line.startswith("$ ")]


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run one ``longspan`` command of this environment in ``folder``."""
    program, *arguments = shlex.split(command)
    assert Path(program).name == "longspan", f"{command!r} is neither set-up nor a longspan command"
    script = Path(sys.executable).with_name("longspan")
    return subprocess.run([script, *arguments], cwd=folder, capture_output=True, text=True, check=False)


FACTS = {
    "steps": 200,
    "bits_per_dim": {"linear": 1.23456, "softmax": 1.2, "histogram": 2.0},
    "training_seconds": {"linear": 30.0, "softmax": 40.0},
    "images_per_second": {"linear": 5000.0, "softmax_cached": 4000.0, "softmax_recompute": 100.5},
    "state_bytes": {"linear": 1024, "softmax": 2048},
    "lengths": {
        "how": "one layer",
        "rows": [
            {"candidate": "softmax", "length": 256, "seconds": 0.0125, "state_bytes": 2**20},
            {"candidate": "softmax", "length": 4096, "state_bytes": 2**24},
            {"candidate": "linear", "length": 4096, "seconds": 1.5, "state_bytes": 66560},
        ],
    },
    "shipped": {"images_per_second": 2.5},
    "layer": {
        "title": "a layer",
        "tokens": 1024,
        "prefill": {"transformers": 0.9, "longspan": 0.3},
        "training step": {"transformers": 3.0, "longspan": 0.5},
    },
    "machine": {"cores": 2, "torch": "2.13.0"},
    "seconds": 121.5,
    "processor_seconds": 202.0,
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page == README else [], id=page.name) for page in PAGES]
)
def test_commands_run(page, blocks, tmp_path):
    for command in commands(blocks(page, "console")):
        if not SETUP.match(command):
            result = run(command, tmp_path)
            assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def test_lines_without_make_are_those_that_make_runs(blocks):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # Neither a make around these tests nor its variables may change the plan.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))
    }
    plan = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo", "test"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    shown = [line for line in commands(blocks(README, "console")) if SETUP.match(line)]
    assert shown
    assert [line for line in shown if not line.startswith(("make ", "source ")) and line not in plan] == []
    assert plan[-1] == ".venv/bin/python -m pytest -n logical --tier fast"


EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.whole
@pytest.mark.parametrize("example", EXAMPLES, ids=map(str, range(len(EXAMPLES))))
def test_python_in_the_readme_runs(example, restored):
    if "transformers" in example:
        pytest.importorskip("transformers")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.demo
def test_demo_runs_and_its_figures_fit_its_page(tmp_path):
    result = run("longspan demo --out demo", tmp_path)
    assert result.returncode == 0, result.stderr
    for name in (*figures.PICTURES, "samples_softmax.png", "demo.csv"):
        assert (tmp_path / "demo" / name).stat().st_size > 0
    facts = json.loads((tmp_path / "demo" / "demo.json").read_text(encoding="utf-8"))
    assert figures.render(facts)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")],
    ids=lambda path: path.relative_to(SOURCE).as_posix(),
)
def test_examples_in_docstrings_run(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__):
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0


@pytest.mark.parametrize("name", [n for n in longspan.__all__ if not inspect.ismodule(getattr(longspan, n))])
def test_every_public_name_has_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(longspan, name))


@pytest.mark.parametrize(
    "page", [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name
)
def test_what_a_page_links_to_is_there(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    for link in (*links, *re.findall(r'(?:src|srcset)="([^":]+)"', text)):
        made = "mechanisms" in link or link.endswith(("files.md", "cli.md", "configs.md"))  # by docs/conf.py
        assert made or (page.parent / link).exists(), link


def test_figures_of_the_demo_are_measured():
    if not (figures.IMAGES / "demo.json").exists():
        pytest.skip("no demo has been recorded yet: longspan demo --out demo")
    text = figures.PAGE.read_text(encoding="utf-8")
    assert figures.place(text, figures.render(json.loads((figures.IMAGES / "demo.json").read_text()))) == text


def test_pictures_are_drawn_by_commands(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    monkeypatch.setattr(figures, "DRAWN", {"one.png": "generate mnist --count 1"})
    figures.main("--draw")
    charts = [
        f"{name}{width}{dark}.png"
        for name in ("time-and-state", "hybrids")
        for width in ("", "-narrow")
        for dark in ("", "-dark")
    ]
    for name in ("one.png", *charts):
        assert (tmp_path / name).stat().st_size > 0


def test_figures_become_cells():
    lines = figures.render(FACTS).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    named = {row[0]: row[1:] for row in cells}
    assert named["test bits per pixel"] == ["1.235", "1.200"]
    assert named["images per second"] == ["5,000", "4,000"]
    assert named["prefill"] == ["900 ms", "300 ms", "3.0x"]
    assert ["softmax", "12.5", "-"] in cells
    assert ["linear", "-", "1,500"] in cells
    assert ["linear", "-", "65 KiB"] in cells
    text = " ".join(lines)
    assert all(part in text for part in ("cores 2", "torch 2.13.0", "122 s", "202 s", "2.000 bits"))


def test_a_skipped_layer_has_no_table():
    text = figures.render({**FACTS, "layer": {"skipped": "transformers is not installed"}})
    assert "prefill" not in text


@pytest.mark.parametrize("key", ["bits_per_dim", "images_per_second", "shipped"])
def test_missing_figures_are_named(key):
    with pytest.raises(ValueError, match=f"no number {key}"):
        figures.render({name: value for name, value in FACTS.items() if name != key})


def test_figures_are_copied_and_placed(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "PAGE", tmp_path / "demo.md")
    monkeypatch.setattr(figures, "IMAGES", tmp_path / "images")
    demo = tmp_path / "demo"
    demo.mkdir()
    (demo / "demo.json").write_text(json.dumps(FACTS))
    for name in figures.PICTURES:
        (demo / name).write_bytes(name.encode())
    figures.PAGE.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    figures.main(str(demo / "demo.json"))
    first = figures.PAGE.read_text()
    assert first == f"before\n{figures.BEGIN}\n{figures.render(FACTS)}\n{figures.END}\nafter\n"
    assert all((tmp_path / "images" / name).read_bytes() == name.encode() for name in figures.PICTURES)
    figures.main()
    assert figures.PAGE.read_text() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/demo.json"], r"cannot read nowhere.demo\.json: .*longspan demo"),
        (["a", "b"], "usage: python -m longspan_lab.tools"),
    ],
)
def test_figures_from_nowhere_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        figures.main(*arguments)


@pytest.mark.parametrize("text", ["none", "<!-- demo:begin -->", "<!-- demo:end --> <!-- demo:begin -->"])
def test_a_page_without_markers_is_refused(text):
    with pytest.raises(ValueError, match="needs the markers"):
        figures.place(text, "")
