"""Fresh mutants: what the operators change, which tests are chosen, and what is reported."""

import ast
import json

import pytest

from attacks import _operators, mutate

SOURCE = '''
"""Docstring with 3 numbers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .a import b

MOST = 3


def f(x: int | None, y=-1, *, causal: bool = True):
    """Another 1."""
    if x is None and not y:
        raise ValueError(f"x={x + 1} must not be {1 < 2}")
    x = x.masked_fill(y, 0.0)
    x += 1
    print(x, causal)
    return g(x[1:], y, dim=-1, mask=y) - x if y < 2 else x
'''


def results():
    return {(change.operator, change.old): change.new for change in _operators.changes(SOURCE)}


@pytest.mark.parametrize(
    ("operator", "old", "new"),
    [
        ("comparison", "y < 2", "y > 2"),
        ("comparison", "x is None", "x is not None"),
        ("arithmetic", "g(x[1:], y, dim=-1, mask=y) - x", "g(x[1:], y, dim=-1, mask=y) + x"),
        ("swapped operands", "g(x[1:], y, dim=-1, mask=y) - x", "x - g(x[1:], y, dim=-1, mask=y)"),
        ("and/or", "x is None and (not y)", "x is None or not y"),
        ("dropped condition", "x is None and (not y)", "x is None"),
        ("dropped not", "not y", "y"),
        ("constant", "3", "2"),
        ("constant", "-1", "-2"),
        ("constant", "True", "False"),
        ("constant", "0.0", "1.0"),
        ("dropped call", "x.masked_fill(y, 0.0)", "x"),
        ("dropped statement", "x = x.masked_fill(y, 0.0)", "pass"),
        ("dropped statement", "print(x, causal)", "pass"),
        ("swapped arguments", "print(x, causal)", "print(causal, x)"),
        ("swapped arguments", "g(x[1:], y, dim=-1, mask=y)", "g(y, x[1:], dim=-1, mask=y)"),
        ("dropped argument", "g(x[1:], y, dim=-1, mask=y)", "g(x[1:], y, dim=-1)"),
        ("slice", "1:", ":"),
        ("assignment", "x += 1", "x = 1"),
        ("one branch", "g(x[1:], y, dim=-1, mask=y) - x if y < 2 else x", "x"),
    ],
)
def test_operators(operator, old, new):
    found = [c.new for c in _operators.changes(SOURCE) if (c.operator, c.old) == (operator, old)]
    if old == "x is None and (not y)" and operator == "dropped condition":
        assert found == ["not y", "x is None"]
    assert new in found


def test_a_check_is_dropped_whole():
    (change,) = [c for c in _operators.changes(SOURCE) if c.operator == "dropped check"]
    assert "if False:\n        raise ValueError" in _operators.applied(SOURCE, change)


def test_messages_annotations_and_docstrings_are_left_alone():
    texts = [change.old for change in _operators.changes(SOURCE)]
    assert not {"x + 1", "1 < 2", "int | None", "TYPE_CHECKING"} & set(texts)
    assert not [text for text in texts if "Docstring" in text or "Another" in text]


def test_each_change_is_one_and_is_named_with_its_place():
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    for change in _operators.changes(SOURCE):
        after = _operators.applied(SOURCE, change)
        assert after.splitlines() != before
        assert change.function == ("f" if change.line > 10 else "")
        assert 8 < change.line < 20


def test_samples_repeat_and_have_different_results():
    first, again, other = (_operators.sample(SOURCE, seed, 12) for seed in (1, 1, 2))
    key = [(c.place, c.new) for c in first]
    assert key == [(c.place, c.new) for c in again] != [(c.place, c.new) for c in other]
    assert len({_operators.applied(SOURCE, c) for c in first}) == 12
    assert len(_operators.sample("x = 1 < 2", 0, 100)) == len(_operators.changes("x = 1 < 2")) == 6


@pytest.fixture
def small(tmp_path):
    """A project of two modules, which needs no torch."""
    files = {
        "src/longspan/__init__.py": "",
        "src/longspan/ops/__init__.py": "",
        "src/longspan/ops/steps.py": "def step(x):\n    while x > 3:\n        x = x - 1\n    return x\n",
        "src/longspan/other.py": "def half(x):\n    return x // 2\n",
        "src/longspan/unused.py": "x = 1\n",
        "tests/ops/test_steps.py": (
            "from longspan.ops import steps\n\n\ndef test_step():\n    assert steps.step(5) == 3\n"
        ),
        "tests/test_halves.py": "from longspan.other import half\n\n\ndef test_half():\n    assert half(5) in (2, 1)\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["ops/steps.py", "src/longspan/ops/steps.py", "longspan.ops.steps", "ops.steps"])
def test_modules_are_found_by_path_or_name(small, name):
    assert mutate.find(name, small) == small / "src/longspan/ops/steps.py"


def test_a_package_is_its_init(small):
    assert mutate.find("ops", small) == small / "src/longspan/ops/__init__.py"


@pytest.mark.parametrize("name", ["nothing", "tests/test_halves.py", "../other.py"])
def test_other_files_are_refused(small, name):
    with pytest.raises(ValueError, match="no module"):
        mutate.find(name, small)


def test_tests_are_chosen_by_name_and_by_imports(small):
    package = small / "src/longspan"
    assert mutate.default_tests(package / "ops/steps.py", small) == ["tests/ops/test_steps.py"]
    assert mutate.default_tests(package / "other.py", small) == ["tests/test_halves.py"]
    assert mutate.default_tests(package / "ops/__init__.py", small) == ["tests/ops/test_steps.py"]
    with pytest.raises(ValueError, match=r"no test is named after longspan\.unused or imports it: pass --tests"):
        mutate.default_tests(package / "unused.py", small)


@pytest.mark.slow
def test_a_mechanism_has_its_laws():
    chosen = mutate.default_tests(mutate.find("attention/gla.py", mutate.ROOT), mutate.ROOT)
    assert "tests/attention/test_gla.py" in chosen
    assert "tests/attention/test_attention.py::test_law[padding-gla(rank=3, expand_v=1.5)]" in chosen


@pytest.mark.slow
def test_survivors_and_endless_mutants_are_reported(small, capsys, monkeypatch):
    monkeypatch.setattr(mutate, "ROOT", small)
    wanted = {"x + 1", "x >= 3", "x - 2"}
    text = (small / "src/longspan/ops/steps.py").read_text()
    chosen = [c for c in _operators.changes(text) if c.new in wanted or (c.old, c.new) == ("1", "2")]
    monkeypatch.setattr(_operators, "sample", lambda *_: chosen)
    kept = small / "result.json"
    assert mutate.main(["ops/steps.py", "--timeout", "5", "--json", str(kept)]) == 0
    rows = json.loads(kept.read_text())["mutants"]
    assert {row["new"]: row["status"] for row in rows} == {"x >= 3": "detected", "x + 1": "timeout", "2": "survived"}
    out = capsys.readouterr().out
    assert "survived: line 3 in step, constant:\n  - 1\n  + 2\n2 of 3 mutants detected\n" in out
    assert "by" in rows[0]
    assert (small / "src/longspan/ops/steps.py").read_text() == text


@pytest.mark.slow
def test_tests_that_fail_already_are_refused(small, capsys, monkeypatch):
    monkeypatch.setattr(mutate, "ROOT", small)
    (small / "tests/test_halves.py").write_text("def test_half():\n    assert False\n")
    assert mutate.main(["other.py", "--tests", "tests/test_halves.py"]) == 2
    assert "the tests do not pass without a mutant: tests/test_halves.py::test_half" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ops/steps.py", "--count", "0"], ["nothing"], ["unused.py"]])
def test_mistakes_are_one_line_and_code_2(small, capsys, monkeypatch, words):
    monkeypatch.setattr(mutate, "ROOT", small)
    assert mutate.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
