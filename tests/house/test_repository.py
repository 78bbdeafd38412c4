"""The repository's own files: workflows, issue forms, the citation and the package's metadata agree with each other."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")

pytestmark = pytest.mark.whole


def load(path):
    """The content of a YAML file; every key occurs once."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=Strict)


class Strict(yaml.SafeLoader):
    """Refuses a key that is written twice, of which YAML would keep the last."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{self.name}: a key is there twice in line {node.start_mark.line + 1}"
        return super().construct_mapping(node, deep)


def steps(path):
    """All steps of a workflow."""
    return [step for job in load(path)["jobs"].values() for step in job.get("steps", ())]


def matrix(path, job):
    return load(path)["jobs"][job]["strategy"]["matrix"]["include"]


def version(text):
    return tuple(map(int, text.split(".")))


def oldest(name):
    """The least version in the requirement ``name>=...`` of the package."""
    (found,) = [line for line in PROJECT["dependencies"] if re.match(rf"{name}\b", line)]
    return version(found.partition(">=")[2])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_complete(path):
    content = load(path)
    assert content["name"] == path.stem
    assert content[True]  # YAML's reading of the key `on`
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
        else:
            assert job["runs-on"], name
            assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        needed = job.get("needs", [])
        assert {needed} if isinstance(needed, str) else set(needed) <= set(content["jobs"])
    for step in steps(path):
        if action := step.get("uses"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+(\.\d+)*|release/v\d+)", action)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_of_a_workflow_exist(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for step in steps(path):
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
            assert target in targets


def test_the_matrix_has_every_supported_python_and_the_oldest_torch():
    cells = matrix(GITHUB / "workflows" / "tests.yml", "tests")
    listed = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert [cell["python"] for cell in cells if "torch" not in cell] == listed
    assert listed[0] == PROJECT["requires-python"].removeprefix(">=")
    (old,) = [cell for cell in cells if "torch" in cell]
    assert old["python"] == listed[0]
    assert version(old["torch"])[:2] == oldest("torch")
    # The step that chooses it changes this line.
    assert re.search(r"^torch==\d", CONSTRAINTS, re.MULTILINE)
    assert sum(bool(cell.get("rest")) for cell in cells) == 1


def test_other_jobs_use_a_supported_python():
    for path in WORKFLOWS:
        for step in steps(path):
            chosen = step.get("with", {}).get("python-version")
            if chosen and "{" not in chosen:
                assert f"Programming Language :: Python :: {chosen}" in PROJECT["classifiers"]


def test_a_release_takes_what_the_wheels_workflow_uploads():
    uploads = [step["with"]["name"] for step in steps(GITHUB / "workflows" / "wheels.yml") if "upload-" in str(step)]
    (download,) = [step["with"] for step in steps(GITHUB / "workflows" / "release.yml") if "download-" in str(step)]
    assert uploads
    assert all(name.startswith(download["pattern"].rstrip("*")) for name in uploads)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_valid(path):
    form = load(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert len(names) == len(set(names))
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_citation_is_that_of_the_package():
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == PROJECT["name"]
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert all({"type", "title", "authors"} <= set(reference) for reference in citation["references"])


def test_links_of_the_repository_pages_exist():
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{name}: {target}"


def test_no_address_of_a_package_registry_is_written():
    """Everybody's pip knows which index it uses; an address here would override it or go out of date."""
    address = re.compile(r"index-url[ =]+\S*://|://\S+/simple\b|://\S*pypi", re.IGNORECASE)
    for path in [
        *GITHUB.rglob("*.*"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.txt"),
        *ROOT.glob("*.md"),
        ROOT / "Makefile",
    ]:
        if path.is_file():
            assert not address.search(path.read_text(encoding="utf-8")), path
