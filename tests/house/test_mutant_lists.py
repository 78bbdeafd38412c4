"""Planted bugs as data: what survives, and what no longer applies, is said in words."""

import pytest

from attacks import mutants
from attacks.mutants import Mutant

HARMLESS = Mutant(
    "words", "spec.py", "the one small language", "one of the small languages", ["tests/model/test_spec.py::test_split"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutants")


def test_what_survives_is_told_with_its_tests(folder):
    said = mutants.survives(HARMLESS, folder)
    assert said == f"{HARMLESS.old!r} -> {HARMLESS.new!r} and all of tests/model/test_spec.py::test_split pass"


def test_what_a_test_sees_is_caught_and_taken_out_again(folder):
    mutant = HARMLESS._replace(old="if not all(specs):", new="if not any(specs):")
    assert mutants.survives(mutant, folder) is None
    assert (folder / "src/longspan/spec.py").read_text() == (mutants.ROOT / "src/longspan/spec.py").read_text()


def test_tests_that_crash_have_caught_it(folder):
    crash = HARMLESS._replace(old="if not all(specs):", new="import os\n    os.abort()\n    if not all(specs):")
    assert mutants.survives(crash, folder) is None


def test_no_test_is_no_catch(folder):
    said = mutants.survives(HARMLESS._replace(tests=["tests/model/test_spec.py::test_split[nothing]"]), folder)
    assert said is not None
    assert said.startswith("pytest ended with 4: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"old": "nowhere to be found"}, "'nowhere to be found' occurs 0 times"),
        ({"old": "specs"}, "'specs' occurs "),
        ({"file": "none.py"}, "'the one small language' occurs 0 times"),
        ({"old": "if not all(specs):", "new": "if not all(specs:"}, "'if not all(specs:' is no Python: "),
        ({"old": "return -value", "new": "return (-value)"}, "the change says the same"),
        ({"tests": []}, "names no test"),
        ({"tests": ["tests/test_none.py"]}, "there is no test tests/test_none.py"),
        (
            {"tests": ["tests/model/test_spec.py::test_splitting[1::2]"]},
            "there is no test tests/model/test_spec.py::test_splitting",
        ),
    ],
)
def test_what_does_not_apply_is_told(changes, reason):
    said = mutants.unfit([HARMLESS._replace(**changes)])
    assert said is None if reason is None else said is not None and f"words: {reason}" in said


def test_labels_are_of_one_mutant_each():
    assert mutants.unfit([HARMLESS, HARMLESS]) == "spec.py: words: there are two of that name"
