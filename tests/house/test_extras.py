"""What an installation has: a version, recipes, extras that leave torch alone and are asked for all at once."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import longspan
from longspan._utils import optional_deps
from longspan.cli import entry
from longspan.train import recipes

ROOT = Path(__file__).parents[2]
PROJECT, LAB = (
    tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in (ROOT, ROOT / "lab")
)


@pytest.fixture
def bare(monkeypatch):
    """A machine with longspan-lab and without any other optional package."""
    for package in optional_deps.EXTRAS.keys() - {"longspan_lab"}:
        monkeypatch.setitem(sys.modules, package, None)


COMMANDS = {
    "demo": ("missing for the demo: lightning, tensorboard, sklearn, matplotlib, PIL", ".[data,plot,train]"),
    "bench limits": ("missing for the benchmarks: matplotlib, PIL", ".[data,plot]"),
    "reproduce approximation": ("missing for the experiments: matplotlib, PIL", ".[data,plot]"),
    "reproduce memory": (
        "missing for the experiments: matplotlib, PIL, gymnasium, popgym, minigrid",
        '.[data,plot]" "./lab[reinforcement]',
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_all_missing_packages_before_it_makes_a_folder(command, bare, tmp_path, capsys):
    what, wanted = COMMANDS[command]
    assert entry.main([*command.split(), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f'{what}; pip install "{wanted}" in a clone' in said
    assert list(tmp_path.iterdir()) == []


WITHOUT = """
import importlib.metadata, importlib.util, sys
sys.argv = ["longspan"]
sys.modules["longspan_lab"] = None
importlib.metadata.entry_points = lambda **_: ()
from longspan.cli import main
assert main(["--help"]) == 0
for name in sys.stdin.read().split():
    assert main([name, "--help"]) == 2
assert "torch" not in sys.modules
"""


def test_without_the_lab_its_commands_say_what_installs_them():
    lab = [name for name, (module, _) in entry.COMMANDS.items() if module == entry.LAB]
    assert lab == ["demo", "compare", "bench", "reproduce"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], input=" ".join(lab), capture_output=True, text=True, check=False
    )
    line = "longspan: error: longspan {} is a command of longspan-lab; pip install ./lab in a clone of longspan\n"
    assert done.stderr == "".join(map(line.format, lab))
    assert done.returncode == 0
    core, more = done.stdout.split("commands of longspan-lab, which is not installed")
    assert re.findall(r"^  ([a-z]+) +[A-Z]", core, re.MULTILINE) == [name for name in entry.COMMANDS if name not in lab]
    assert re.findall(r"^  ([a-z]+) +[A-Z]", more, re.MULTILINE)[: len(lab)] == lab


def test_only_what_is_missing_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape('missing for a plot: matplotlib; pip install ".[plot]"')):
        optional_deps.need("a plot", "PIL", "matplotlib")


def test_each_package_is_in_the_extra_that_is_said_to_bring_it():
    named = {"sklearn": "scikit-learn", "PIL": "pillow", "kaldi_native_fbank": "kaldi-native-fbank"}
    named |= {"prometheus_client": "prometheus-client", "lm_eval": "lm-eval"}
    for package, extra in optional_deps.EXTRAS.items():
        if extra == "lab":
            assert (package.replace("_", "-"), optional_deps.LAB[extra]) == (LAB["name"], "./lab")
            continue
        project = LAB if extra in optional_deps.LAB else PROJECT
        asked = {re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"][extra]}
        assert named.get(package, package) in asked


def test_no_extra_chooses_the_users_torch():
    """A line that a message recommends must not replace a torch with CUDA by another one."""
    for project in (PROJECT, LAB):
        for lines in (project["dependencies"], *project["optional-dependencies"].values()):
            assert [line for line in lines if re.match(r"torch\b", line)] in ([], ["torch>=2.6"])
    assert [line for line in PROJECT["dependencies"] if line.startswith("torch")] == ["torch>=2.6"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = [line for line in lines if line and not line.startswith("#")]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", pinned)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = re.findall(r"-m pip install (.*)", makefile)
    assert [line for line in lines if " torch " in line or "-e" in line.split()] != []
    assert all(line.startswith("-c constraints.txt ") for line in lines if " torch " in line or "-e" in line.split())


def test_every_extra_has_a_row_on_the_page_of_installation():
    rows = re.findall(r"^\| `([a-z]+)` \|", (ROOT / "docs" / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(PROJECT["optional-dependencies"]) | set(LAB["optional-dependencies"]) <= set(rows)


def test_both_distributions_have_one_version_and_one_license():
    assert longspan.__version__ == LAB["version"] == PROJECT["version"]
    (line,) = LAB["dependencies"]
    assert line.endswith(f"=={PROJECT['version']}")
    assert (ROOT / "lab" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_lab_brings_the_commands_that_the_product_announces():
    points = {
        name: f"{LAB['name'].replace('-', '_')}.cli.{name}"
        for name, (module, _) in entry.COMMANDS.items()
        if module == entry.LAB
    }
    assert LAB["entry-points"][entry.GROUP] == points
    assert all(callable(entry.load(name).run) for name in points)


@pytest.mark.full
def test_without_an_installation_the_version_is_unknown():
    code = (
        "import importlib.metadata as m\n"
        "def absent(name): raise m.PackageNotFoundError(name)\n"
        "m.version = absent\n"
        "from longspan._utils.version import VERSION; print(VERSION)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "unknown"


def test_recipes_are_found_by_name_and_files_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"adaptive_span", "dates", "digits", "labels", "mnist", "mnist_paper", "cifar10", "poems", "text"} == set(
        recipes.names()
    )
    assert recipes.find("digits") == Path(longspan.__file__).parent / "train" / "recipes" / "digits.yaml"
    Path("digits").write_text("run: {steps: 3}")
    assert recipes.find("digits") == Path("digits")
    with pytest.raises(
        ValueError,
        match="cannot read 'digts': No such file; .*adaptive_span, ci",
    ):
        recipes.find("digts")


@pytest.mark.parametrize("words", [["--config", "digits"], ["--config=digits"]])
def test_train_takes_a_recipe_by_name(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert entry.main(["train", *words, "--run.steps", "7", "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    recipe = yaml.safe_load(recipes.find("digits").read_text(encoding="utf-8"))
    assert shown["model"] | recipe["model"] == shown["model"]
    assert shown["run"] | recipe["run"] | {"steps": 7} == shown["run"]
    assert list(tmp_path.iterdir()) == []


def in_the_wheel(folder):
    """The files of the wheel that is built in a folder."""
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(folder))
    return {file.distribution_path for file in builder.recurse_included_files()}


def test_no_file_is_in_both_wheels():
    """The wheel of the product has all of its package and no file of the lab, and that of the lab has the rest."""
    product, lab = in_the_wheel(ROOT), in_the_wheel(ROOT / "lab")
    for names, folder in ((product, ROOT / "src"), (lab, ROOT / "lab" / "src")):
        assert names == {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and path.parts[-2] != "__pycache__"
        }
    assert {name.split("/")[0] for name in product} == {"longspan"}
    assert {name.split("/")[0] for name in lab} == {"longspan_lab"}


@pytest.fixture
def hook():
    """The build's own script, as a module."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
def test_a_wheel_is_tagged_as_auditwheel_grants(hook, monkeypatch):
    machine = os.uname().machine
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    assert hook.platform_tag([]) == f"linux_{machine}"
    monkeypatch.undo()
    pytest.importorskip("auditwheel")
    # A library of Python's own, which was built to run on many systems or on this one.
    library = next(Path(sysconfig.get_path("platlib")).glob("numpy/_core/_multiarray_umath*.so"))
    assert re.fullmatch(rf"(manylinux_2_\d+|linux)_{machine}", hook.granted([library], f"linux_{machine}"))


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
def test_the_tag_is_read_from_the_output_of_auditwheel(hook, monkeypatch, tmp_path):
    library = tmp_path / "x86-64.so"
    library.write_bytes(b"elf")
    said = 'probe.whl is consistent with the following\nplatform tag: "manylinux_2_27_x86_64".\n'
    seen = []

    def run(words, **options):
        seen.extend(zipfile.ZipFile(words[-1]).namelist())
        return subprocess.CompletedProcess(words, 0, said, "")

    monkeypatch.setattr(hook.subprocess, "run", run)
    assert hook.granted([library], "linux_x86_64") == "manylinux_2_27_x86_64"
    assert "probe/x86-64.so" in seen
    said = "no ELF executable"
    with pytest.raises(RuntimeError, match="auditwheel does not say where the kernels load: no ELF"):
        hook.granted([library], "linux_x86_64")
