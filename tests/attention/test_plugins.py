"""Mechanisms of other packages: lookup, imports and error messages."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import longspan
from longspan import testing
from longspan.attention import plugins
from longspan.attention.base import REGISTRY
from longspan.attention.registry import mechanism
from longspan.cli import entry

MODULE = '''
import longspan
from longspan.attention.linear import Linear


class Foreign(longspan.Attention):
    """Half of linear attention."""

    name, paper, cost, family = "{name}", "0000.00000", "N D^2", "linear"
    citation, states = ("Nobody", "Nothing", 2000), Linear.states

    def __init__(self, dim: int, heads: int, *, causal: bool = True, share: float = 0.5):
        super().__init__(dim, heads, causal=causal)
        self.share, self.inner = share, Linear(dim, heads, causal=causal)

    def start(self, batch, capacity):
        return self.inner.start(batch, capacity)

    def attend(self, x, state):
        y, state = self.inner(x, state)
        return self.share * y, state
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of modules that longspan has not loaded; registered mechanisms are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.setattr(plugins, "_brought", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    before, modules = dict(REGISTRY), set(sys.modules)
    yield tmp_path
    REGISTRY.clear()
    REGISTRY.update(before)
    for name in set(sys.modules) - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def announced(folder, monkeypatch):
    """A function that installs a package: a module and its entry point."""

    def install(module: str, text: str) -> None:
        (folder / f"{module}.py").write_text(text)
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nmine = {module}\n")
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        assert importlib.metadata.version(module) == "1.0"

    return install


def test_an_unknown_name_is_looked_up_in_other_packages(announced):
    announced("foreign_module", MODULE.format(name="foreign"))
    assert longspan.build("linear", 8, 2).spec == "linear"
    assert "foreign_module" not in sys.modules
    assert longspan.build("foreign(share=0.25)", 8, 2).spec == "foreign(share=0.25)"
    assert longspan.mechanism_examples("foreign") == ("foreign",)
    assert "foreign" in longspan.list_mechanisms()


LOOKUPS = {
    "names": longspan.list_mechanisms,
    "cases": testing.cases,
    "mechanism": lambda: mechanism("foreign"),
    "examples": lambda: longspan.mechanism_examples("foreign"),
    "subject": lambda: testing.Subject("linear; foreign"),
}


@pytest.mark.parametrize("look_up", LOOKUPS.values(), ids=LOOKUPS)
def test_every_lookup_finds_it(announced, look_up):
    announced("foreign_module", MODULE.format(name="foreign"))
    look_up()
    assert "foreign" in REGISTRY


@pytest.mark.full
def test_a_stack_a_checkpoint_and_the_commands_find_it(announced, folder, capsys):
    announced("foreign_module", MODULE.format(name="foreign"))
    config = longspan.EncoderConfig(dim=8, depth=2, heads=2, feedforward=8, attention="linear; foreign(share=0.25)")
    model = longspan.Encoder(config)
    longspan.save(model, folder / "saved")
    # As in a new process, where the module registers it.
    del REGISTRY["foreign"], sys.modules["foreign_module"]
    plugins._loaded = False
    assert longspan.load(folder / "saved").config == config
    for words in (["list"], ["cite", "foreign"], ["show", "linear; foreign", "--json"]):
        del REGISTRY["foreign"], sys.modules["foreign_module"]
        plugins._loaded = False
        assert entry.main(words) == 0
    assert "Half of linear attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (MODULE.format(name="linear"), "ValueError: two attentions are named 'linear'"),
    ],
)
def test_a_broken_package_is_a_warning_that_names_it(announced, text, reason):
    announced("broken_module", text)
    with pytest.warns(RuntimeWarning, match=f"mine = 'broken_module' of the package broken_module: {reason}"):
        assert "linear" in longspan.list_mechanisms()
    # The warning comes once.
    assert "linear" in longspan.list_mechanisms()


@pytest.mark.full
def test_importing_longspan_imports_no_other_package(announced, folder):
    announced("foreign_module", "print('imported')\n" + MODULE.format(name="foreign"))
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import longspan; longspan.build('gla', 8, 2); print('so')"
    code += "; print('foreign' in longspan.list_mechanisms())"
    source = str(Path(longspan.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.split() == ["so", "imported", "True"]


def test_a_module_that_is_named_is_imported(folder, capsys):
    (folder / "near.py").write_text(MODULE.format(name="near"))
    (folder / "far.py").write_text(MODULE.format(name="far"))
    assert entry.main(["show", "--import", "near", "near; far", "--json", "--import=far"]) == 0
    assert '"near"' in capsys.readouterr().out
    assert entry.main(["--import", "near", "list"]) == 0
    assert "\nnear " in capsys.readouterr().out
    assert plugins.brought() == ("near", "far")


def test_an_interrupted_training_prints_the_modules_it_needs(folder, capsys, monkeypatch):
    def interrupted(config, run, *, resume):
        Path(run.out).mkdir()
        Path(run.out, "config.yaml").touch()
        raise KeyboardInterrupt("interrupted at step 3; continue with resume=True")

    monkeypatch.setattr("longspan.train.fit", interrupted)
    (folder / "near.py").write_text(MODULE.format(name="near"))
    assert entry.main(["train", "--import", "near", "--model.attention", "near", "--run.out", "r"]) == 130
    assert "longspan train --import near --config r/config.yaml --resume" in capsys.readouterr().err


@pytest.mark.full
def test_subprocesses_import_the_same_modules(folder):
    (folder / "near.py").write_text(MODULE.format(name="near"))
    assert plugins.again() == ""
    plugins.bring("near")
    code = plugins.again() + "import longspan; print(longspan.build('near', 8, 2).spec)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "near\n"


MISTAKES = {
    "list --import": "--import '': expected the name of a module, such as my_package.attention",
    "list --import my.py/": "--import 'my.py/': expected the name of a module",
    "list --import=nothing_there": "--import nothing_there: ModuleNotFoundError: No module named 'nothing_there'",
    "list --import failing": "--import failing: ZeroDivisionError: division by zero",
    "list --import leaving": "--import leaving: SystemExit: 0",
    "list -- --import near": "unrecognized arguments: -- --import near",
    "show qqq": "unknown name 'qqq'; known: ",
    "check qqq": plugins.HINT,
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_cannot_be_imported_is_one_line_and_code_2(line, folder, capsys):
    (folder / "failing.py").write_text("1 / 0")
    (folder / "leaving.py").write_text("raise SystemExit(0)")
    assert entry.main(line.split()) == entry.WRONG
    out, err = capsys.readouterr()
    assert not out
    assert MISTAKES[line] in err
    assert err.count("\n") == 1


def test_the_error_for_an_unknown_mechanism_names_the_import_option():
    for call in (lambda: longspan.build("qqq(a=1)", 8, 2), lambda: longspan.mechanism_examples("qqq")):
        with pytest.raises(ValueError, match=r"'qqq'; known: .*--import MODULE"):
            call()
