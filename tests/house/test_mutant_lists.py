"""Planted bugs as data: what survives and what no longer applies is reported in words."""

import ast
import collections

import pytest

from attacks import _edits, mutants
from attacks.mutants import Mutant

TEST = "tests/_utils/test_spec.py::test_split"
MUTANT = Mutant("words", "_utils/spec.py", "split", "not all(specs)", "not any(specs)", [TEST])
SMALL = "def split(text):\n    specs = text.split(';')  # a comment\n    if not all(specs):\n        raise ValueError\n"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A project of one module and one test, which needs no torch."""
    root, package = tmp_path / "project", tmp_path / "project" / "src" / "longspan"
    (root / "tests" / "_utils").mkdir(parents=True)
    (package / "_utils").mkdir(parents=True)
    (package / "_utils" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "_utils" / "spec.py").write_text(SMALL)
    (root / "tests/_utils/test_spec.py").write_text(
        "import pytest\nfrom longspan._utils import spec\n\n"
        "def test_split():\n    with pytest.raises(ValueError):\n        spec.split('a;')\n"
    )
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setattr(mutants, "PACKAGES", (package,))
    return tmp_path


def test_a_survivor_is_reported_with_its_tests(small):
    said = mutants.survives(MUTANT._replace(new="not (all(specs) and True)"), small)
    assert said == f"'not all(specs)' -> 'not (all(specs) and True)' and all of {TEST} pass"


def test_a_mutant_is_caught_and_taken_out_again(small):
    assert mutants.survives(MUTANT, small) is None
    assert (small / "src/longspan/_utils/spec.py").read_text() == SMALL


def test_tests_that_crash_have_caught_it(small):
    assert mutants.survives(MUTANT._replace(new="(__import__('os').abort() or not all(specs))"), small) is None


def test_no_test_is_no_catch(small):
    said = mutants.survives(MUTANT._replace(tests=[f"{TEST}[nothing]"]), small)
    assert said is not None
    assert said.startswith("pytest ended with 4: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"old": "not   all( (specs) )"}, None),
        ({"old": "specs == nowhere"}, "'specs == nowhere' occurs 0 times in split()"),
        ({"old": "specs"}, "'specs' occurs "),
        ({"function": "none", "file": "none.py"}, "there is no file none.py"),
        ({"function": "none"}, "there is no function or class 'none'"),
        ({"new": "not all(specs"}, "'not all(specs' is no Python: "),
        ({"new": "(not all((specs)))"}, "the change has no effect"),
        ({"tests": []}, "names no test"),
        ({"tests": ["tests/test_none.py"]}, "there is no test tests/test_none.py"),
        (
            {"tests": ["tests/_utils/test_spec.py::test_splitting[1::2]"]},
            "there is no test tests/_utils/test_spec.py::test_splitting",
        ),
    ],
)
def test_a_mutant_that_does_not_apply_is_reported(changes, reason):
    said = mutants.unfit([MUTANT._replace(**changes)])
    assert said is None if reason is None else said is not None and f"words: {reason}" in said


def test_labels_are_unique():
    assert mutants.unfit([MUTANT, MUTANT]) == "_utils/spec.py: words: two mutants have this label"


@pytest.mark.parametrize("file", ["config/spec.py", "gone/elsewhere.py"])
def test_a_file_that_has_moved_is_found(file):
    """By its name, or by the function with the expression in it."""
    path, text = mutants.changed(MUTANT._replace(file=file))
    assert path == mutants.PACKAGES[0] / "_utils" / "spec.py"
    assert "if not any(specs):" in text


def test_a_test_that_has_moved_is_found():
    assert mutants.found("tests/gone/test_spec.py::test_split") == TEST


def test_every_part_of_the_package_has_mutants():
    parts = collections.Counter("/".join(mutant.file.split("/")[:2]) for mutant in mutants.LIST)
    assert len(mutants.LIST) <= 50
    assert sum(not mutant.file.endswith(".py") for mutant in mutants.LIST) <= 10
    ops = ("linear", "gated", "sparse", "buckets", "compress", "softmax", "convolution")
    compat = ("transformers", "fla", "fast_transformers")
    for part in (*(f"ops/{name}" for name in ops), *(f"compat/{name}" for name in compat), "compat/onnx.py"):
        assert parts[part] >= 1, part
    for part in (
        "states",
        "attention",
        "models",
        "generation",
        "train",
        "data",
        "patterns",
        "speech",
        "testing",
        "cli",
    ):
        assert sum(mutant.file.startswith(f"{part}/") for mutant in mutants.LIST) >= 1, part


SOURCE = """
class A:
    def f(self, x, y):
        def g(z):
            return z - y
        z = x - y
        self.n += 1
        return g(z) + (x-y)

    @property
    def n(self): return 1

    @n.setter
    def n(self, value): self.m = value - 1
"""


def edited(function, old, new):
    return ast.unparse(_edits.replaced(ast.parse(SOURCE), function, old, new))


def test_expressions_are_replaced_in_one_function():
    assert "return z + y" in edited("A.f.g", "z - y", "z + y")
    assert "self.m = value\n" in edited("A.n", "value - 1", "value") + "\n"
    with pytest.raises(ValueError, match=r"'x - y' occurs 2 times in A\.f\(\)"):
        edited("A.f", "x - y", "x + y")


def test_statements_are_replaced_and_removed():
    assert "z = x + y\n        self.n = 1" in edited("A.f", "z = x - y\nself.n += 1", "z = x + y\nself.n = 1")
    assert "self.n" not in edited("A.f", "self.n += 1", "pass")


def test_a_name_that_is_assigned_is_no_expression():
    assert "z = x - y" in edited("A.f", "g(z)", "g(0)")
    assert _edits.scopes(ast.parse("def f():\n    z = 1\n    return z"), "f")
    tree = ast.parse("def f():\n    z = 1\n    return z")
    assert ast.unparse(_edits.replaced(tree, "f", "z", "2")) == "def f():\n    z = 1\n    return 2"
    assert ast.unparse(tree) == "def f():\n    z = 1\n    return z"
