"""The house: imports look down, and uninitialized memory in tests is never zero by luck."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longspan import ops

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "longspan"
LAB = ROOT / "lab" / "src" / "longspan_lab"

# From the ground up. A module may import from its own floor and from those below it; a package is on one floor whole.
FLOORS = (
    ("_utils",),
    ("patterns", "ops"),
    ("modules", "states"),
    ("attention", "data", "speech"),
    ("models",),
    ("generation", "train", "testing", "distributed"),
    ("compat", "adapt", "serving", "finetune", "linearize", "cli", "_api", "__init__", "__main__"),
)
LAB_FLOORS = (("_utils",), ("data", "speech"), ("bench",), ("experiments",), ("cli",), ("tools",), ("__init__",))
# Packages that `import longspan` must not need.
HEAVY = (
    "lightning",
    "matplotlib",
    "sklearn",
    "triton",
    "PIL",
    "pooch",
    "tensorboard",
    "gymnasium",
    "popgym",
    "minigrid",
    "kaldi_native_fbank",
)


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


parsed = functools.cache(ast.parse)  # several tests read the same files


def unit(path: Path, package: Path) -> str:
    """The module or package directly below ``package`` that a file belongs to."""
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, wherever it stands, those for type checkers included."""
    here = (package.name, *path.relative_to(package).parent.parts)
    tree = parsed(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((*here[: len(here) + 1 - node.level], node.module or "")) if node.level else node.module
            yield from ((node.lineno, f"{str(base).rstrip('.')}.{alias.name}") for alias in node.names)


def imported_units(path: Path, package: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, unit) of every import of the package's own; a name that is in no unit comes from ``__init__``."""
    for line, name in imports(path, package):
        first, *rest = name.split(".")
        if first == package.name:
            yield line, rest[0] if rest and rest[0] in known else "__init__"


def upward(package: Path, floors: tuple[tuple[str, ...], ...] = FLOORS) -> list[str]:
    """Every import that looks up, and every file that is on no floor."""
    floor = {unit: number for number, units in enumerate(floors) for unit in units}
    found, known = [], {unit(path, package) for path in sources(package)}
    for path in sources(package):
        where = path.relative_to(package).as_posix()
        own = unit(path, package)
        if own not in floor:
            found.append(f"{where} is on no floor; give {own!r} its place in FLOORS")
            continue
        for line, other in imported_units(path, package, known):
            if floor.get(other, -1) > floor[own]:
                found.append(f"{where}:{line} imports {other}, which is on a higher floor")
    return found


def imports_of_the_lab(package: Path) -> list[str]:
    """Every import of longspan_lab."""
    return [
        f"{path.relative_to(package).as_posix()}:{line} imports {name}"
        for path in sources(package)
        for line, name in imports(path, package)
        if name.split(".")[0] == LAB.name
    ]


def circles(package: Path) -> list[str]:
    """Units that import each other, directly or around a corner."""
    below: dict[str, set[str]] = {}
    known = {unit(path, package) for path in sources(package)}
    for path in sources(package):
        own = unit(path, package)
        below.setdefault(own, set()).update(o for _, o in imported_units(path, package, known) if o != own)
    reach = {name: set(others) for name, others in below.items()}
    for _ in below:
        reach = {name: others.union(*(reach.get(o, set()) for o in others)) for name, others in reach.items()}
    return sorted(name for name, others in reach.items() if name in others)


def rings(package: Path) -> list[str]:
    """Files that import each other, directly or around a corner; a folder counts as its __init__."""
    files = {".".join((package.name, *p.relative_to(package).with_suffix("").parts)): p for p in sources(package)}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    needs = {}
    for name, path in files.items():
        found = {dotted if dotted in files else dotted.rpartition(".")[0] for _, dotted in imports(path, package)}
        needs[name] = {other for other in found if other in files and other != name}
    # A file that needs no remaining file is in no cycle; what remains, reduced from both sides, is.
    while free := [name for name, others in needs.items() if not others]:
        needs = {name: others - set(free) for name, others in needs.items() if name not in free}
    while free := [name for name in needs if not any(name in others for others in needs.values())]:
        needs = {name: others for name, others in needs.items() if name not in free}
    return sorted(needs)


def modules_in_ops(package: Path) -> list[str]:
    """Uses of ``nn.Module`` classes by ops, which are pure functions: only ``torch.nn.functional`` is theirs."""
    found = []
    for path in sources(package / "ops"):
        names = [(line, name) for line, name in imports(path, package) if name.startswith("torch.nn")]
        tree = parsed(path.read_text(encoding="utf-8"))
        names += [
            (node.lineno, ast.unparse(node))
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.nn"
        ]
        found += [
            f"{path.name}:{line} uses {name}"
            for line, name in names
            if not name.startswith(("torch.nn.functional", "torch.nn.Parameter"))
        ]
    return found


BASES = {"Attention", "Patterned", "Cached", "Blockwise"}


def registering(package: Path) -> dict[str, int]:
    """Files with a class of ``Attention``, or of a base of several, that has a ``name``: how many each."""
    found: dict[str, int] = {}
    for path in sources(package):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.ClassDef) and BASES & {base.split("[")[0].split(".")[-1] for base in bases}:
                assigned = (target for child in node.body for target in _targets(child))
                if "name" in assigned:
                    where = path.relative_to(package).as_posix()
                    found[where] = found.get(where, 0) + 1
    return found


def _targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
    elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        yield node.target.id


def run_python(code: str) -> str:
    """What a fresh interpreter prints, which imports what this one does, with every warning an error."""
    environment = os.environ | {"PYTHONPATH": str(Path(ops.__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def tree(tmp_path):
    """A function that plants ``path: text`` files as a package of our name."""

    def plant(**files: str) -> Path:
        package = tmp_path / "longspan"
        for name, text in files.items():
            path = package / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return package

    return plant


@pytest.mark.full
def test_imports_look_down():
    assert upward(PACKAGE) == []
    assert upward(LAB, LAB_FLOORS) == []


def test_the_product_imports_nothing_of_the_lab():
    assert imports_of_the_lab(PACKAGE) == []


def test_units_do_not_import_each_other_in_a_circle():
    assert circles(PACKAGE) == circles(LAB) == []


def test_no_circle_among_files():
    assert rings(PACKAGE) == rings(LAB) == []


def test_ops_are_pure_functions():
    assert modules_in_ops(PACKAGE) == []


def test_one_mechanism_is_one_file_in_attention():
    found = registering(PACKAGE)
    assert found
    assert all(count == 1 for count in found.values()), found
    assert all(Path(where).parent == Path("attention") for where in found), found


def test_every_mechanism_is_compared_with_its_paper():
    """In its own file, or by a case worked out by hand: a mechanism that obeys every law may still be another one."""
    folder = ROOT / "tests" / "attention"
    cases = (folder / "test_limits.py").read_text(encoding="utf-8").partition("\nHANDS = (")[2]
    by_hand = set(re.findall(r'"(\w+)', cases))
    names = {Path(where).stem for where in registering(PACKAGE)}
    state_spaces = (folder / "test_state_spaces.py").read_text(encoding="utf-8")
    by_hand |= {name for name in names if f"\ndef test_{name}_is_" in state_spaces}
    assert sorted(name for name in names - by_hand if not (folder / f"test_{name}.py").is_file()) == []


@pytest.mark.full
@pytest.mark.parametrize("module", ["longspan", "longspan.cli", "longspan_lab.experiments"])
def test_importing_needs_nothing_heavy(module):
    loaded = json.loads(run_python(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"))
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)
    assert "torch._dynamo" not in loaded, "its import takes seconds; see ops.constant and Buildable"


@pytest.mark.full
def test_experiments_build_no_model_before_they_run():
    """Their settings are made by the import, and look at models when they are asked; see Buildable."""
    run_python(
        "import longspan, torch\n"
        "def built(*_, **__): raise AssertionError('a model')\n"
        "torch.nn.Module.__init__ = built\n"
        "import longspan_lab.experiments"
    )


def test_a_constant_is_marked_as_torch_marks_it():
    ours, theirs = ops.mark_dynamo_constant(lambda: 0), torch.compiler.assume_constant_result(lambda: 0)
    assert vars(ours) == vars(theirs) != {}


@pytest.mark.full
def test_every_module_imports_and_registers_what_its_source_lists():
    listed = run_python(
        "import importlib, pkgutil, longspan\n"
        "for module in pkgutil.walk_packages(longspan.__path__, 'longspan.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "from longspan.attention import REGISTRY\n"
        "print(*sorted(cls.__module__ for cls in REGISTRY.values()), sep='\\n')"
    ).split()
    files = sorted(f"longspan.{where.removesuffix('.py').replace('/', '.')}" for where in registering(PACKAGE))
    assert listed == files


# A check -> files of a package, and the beginning of what it finds; None: nothing.
LAZY = "from typing import TYPE_CHECKING\nfrom . import _utils\nif TYPE_CHECKING:\n    from . import cli"
RING = {"a": "from . import b", "b": "from .c import x", "c": "from . import a", "d": "from . import a", "e": ""}
CIRCLE = {"models": "from .generation import a", "generation": "from .data import b", "data": "from . import models"}
DOWN = {"cli": "from .models import f", "models": "from . import _utils", "_utils": ""}
FUNCTIONAL = "import torch\nimport torch.nn.functional as F\ntorch.nn.functional.relu\nfrom torch.nn import functional"
PLANTED = [
    *(
        (upward, {"models": "class Decoder: ...", "attention__in__wrong": line}, "attention/wrong.py:")
        for line in (
            "from ..models import Decoder",
            "from .. import models",
            "from longspan.models import Decoder",
            "import longspan.models",
            "def late():\n    from ..models import Decoder",
        )
    ),
    (
        upward,
        {"__init__": "from ._utils import parse", "models": "from . import build"},
        "models.py:1 imports __init__",
    ),
    (upward, {"novelty": ""}, "novelty.py is on no floor"),
    (upward, {"cli": "from .models import f", "models": LAZY, "_utils": ""}, "models.py:4 imports cli"),
    (upward, {"__init__": "from . import cli", **DOWN}, None),
    (imports_of_the_lab, {"cli": "import longspan_lab"}, "cli.py:1"),
    (imports_of_the_lab, {"cli": "def late():\n    from longspan_lab.bench import guard"}, "cli.py:2"),
    (circles, CIRCLE, "data"),
    (rings, {f"ops__in__{name}": text for name, text in RING.items()}, "longspan.ops.a"),
    *(
        (modules_in_ops, {"ops__in__wrong": line}, "wrong.py:")
        for line in ("from torch import nn", "import torch.nn as nn", "from torch.nn import Linear")
    ),
    (modules_in_ops, {"ops__in__wrong": "import torch\ntorch.nn.Linear"}, "wrong.py:2"),
    (modules_in_ops, {"ops__in__right": FUNCTIONAL}, None),
]
WHOLE = {circles: ["data", "generation", "models"], rings: [f"longspan.ops.{name}" for name in "abc"]}


@pytest.mark.parametrize(("check", "files", "found"), PLANTED)
def test_what_is_planted_is_found(tree, check, files, found):
    first, *rest = check(tree(**{"__init__": "", "_utils": ""} | files)) or [None]
    assert (first or "").startswith(found or "")
    assert bool(first) == bool(found)
    assert rest == WHOLE.get(check, [None])[1:]


@pytest.mark.parametrize("fact", ["name = 'x'", "name, cost = 'x', 'N'", "name: str = 'x'"])
def test_a_planted_registration_is_found(tree, fact):
    text = f"class X(base.Attention):\n    {fact}\nclass Y(Attention):\n    name: str"
    assert registering(tree(model=text)) == {"model.py": 1}


MAKERS = {
    "empty": lambda like: torch.empty(like.shape, dtype=like.dtype),
    "empty_like": lambda like: torch.empty_like(like),
    "new_empty": lambda like: like.new_empty(like.shape),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_uninitialized_numbers_are_nan(make, dtype):
    assert make(torch.zeros(7, 3, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("dtype", "value"), [(torch.int64, -(2**63)), (torch.int32, -(2**31)), (torch.uint8, 255)])
def test_uninitialized_integers_are_at_the_end_of_their_range(make, dtype, value):
    assert (make(torch.zeros(7, dtype=dtype)) == value).all()


def test_uninitialized_memory_keeps_its_kind():
    assert torch.empty(0).shape == (0,)
    assert torch.empty(5, dtype=torch.bool).dtype == torch.bool
    assert torch.empty(3, device="meta").is_meta
    assert torch.empty(3, requires_grad=True).requires_grad


def test_compiled_code_meets_the_same_memory():
    def half_written(x):
        y = torch.empty_like(x)
        y[:2] = x[:2]
        return y

    result = torch.compile(half_written, fullgraph=True, backend="aot_eager")(torch.ones(3))
    assert result[:2].tolist() == [1.0, 1.0]
    assert result[2].isnan()
