"""The tutorials are notebooks that run, and whose saved outputs are those of a complete run without errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
PACKAGES = {"2-digits": ("sklearn",), "3-hybrid-lm-on-cpu": ("transformers", "peft")}
MOST = 300_000  # bytes of a notebook, pictures included

pytestmark = pytest.mark.whole


def cells(path, kind):
    """The sources of the cells of a kind, in order."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """All code cells in one namespace, in a process without a display, since one of them replaces functions."""
    for package in ("matplotlib", *PACKAGES.get(path.stem, ())):
        pytest.importorskip(package)
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells(path, "code")), encoding="utf-8")
    paths = {"PYTHONPATH": str(Path(longspan.__file__).parents[1]), "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_are_those_of_one_complete_run(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    # Warnings name folders of the machine that ran it.
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert path.stat().st_size < MOST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid(path):
    nbformat = pytest.importorskip("nbformat")
    content = nbformat.read(path, as_version=4)
    nbformat.validate(content)
    assert content.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_exist(path):
    for cell in cells(path, "markdown"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", "".join(cell["source"])):
            assert (TUTORIALS / target).exists(), target


def test_every_notebook_is_in_the_table_of_contents():
    index = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    assert [path.stem for path in NOTEBOOKS if f"\n{path.stem}\n" not in index] == []
