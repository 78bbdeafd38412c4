"""What holds in every test: uninitialized memory is never zero by luck, and tests that need a device say so."""

import functools
import importlib.util
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan._utils import progress

# Laws and helpers that several files share have assertions too.
pytest.register_assert_rewrite("ops.laws", "ops.families", "support")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes side by side, each with as many threads as there are processors, would only wait for each other; the
    # same holds for those that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton reads this when it decorates a kernel. Tests of kernels then run on the CPU; other tests never see Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Commands that tests start print nothing about kernels that they compile first.
os.environ.setdefault("LONGSPAN_QUIET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start what runs in the background so, and the commands that tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The marker that each folder's tests get: python -m pytest -m compat
AREAS = {
    "laws": ("attention", "testing"),
    "ops": ("ops", "patterns", "states", "modules"),
    "compat": ("compat",),
    "cli": ("cli", "_utils"),
    "train": ("train", "models", "generation", "data", "speech"),
    "experiments": ("experiments", "bench"),
    "gpu": ("gpu",),
    "serving": ("serving",),
    "docs": ("house",),
}
AREA = {folder: area for area, folders in AREAS.items() for folder in folders}
# Optional packages without which a folder has no tests.
NEEDS = {
    "bench": ("matplotlib",),
    "experiments": ("matplotlib", "sklearn", "lightning"),
    "serving": ("httpx", "uvicorn", "starlette", "prometheus_client", "openai"),
}
# Files with fixtures that take long to set up: the tests of each run in one process, which sets them up once.
TOGETHER = {
    f"tests/{name}.py"
    for name in (
        "bench/test_bench_profile",
        "cli/test_demo",
        "gpu/test_fake_device",
        "house/test_docs",
        "models/test_sequence_parallel",
        "ops/test_aarch64",
        "train/test_async_checkpoints",
        "train/test_auxiliary",
        "train/test_carry",
        "train/test_finetune",
        "train/test_fsdp",
        "train/test_learned",
        "train/test_linearize",
        "train/test_resume",
        "train/test_sequence_parallel_runs",
        "train/test_target",
    )
}
# Beginnings of paths: the laboratory, and files whose tests take seconds each. None is in the fast tier.
LATER = tuple(
    f"tests/{name}"
    for name in """
        bench/ experiments/ cli/test_demo.py cli/test_transcribe.py compat/test_accelerate_launch.py
        compat/test_hub_trainer.py compat/test_hybrid_coverage.py compat/test_onnx.py
        data/test_download.py generation/test_engine_states.py gpu/test_decoding.py gpu/test_fake_device.py
        gpu/test_forms_on_cuda.py gpu/test_triton_compiled.py gpu/test_triton_convolution.py gpu/test_triton_decay.py
        gpu/test_triton_delta.py gpu/test_triton_linear.py gpu/test_triton_step.py house/test_attacks.py
        house/test_examples.py house/test_newcomer.py house/test_notebooks.py models/test_sequence_parallel.py
        models/test_shipped.py models/test_shipped_text.py ops/test_instruction_sets.py serving/test_faults.py
        serving/test_lm_eval.py serving/test_machine.py serving/test_sessions.py speech/test_shipped_digits.py
        testing/test_device_laws.py train/test_auxiliary.py train/test_finetune.py train/test_fsdp.py
        train/test_learned.py train/test_linearize.py train/test_sequence_parallel_runs.py
        train/test_together.py train/test_train_tokens.py
    """.split()
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("fast", "rest", "all"),
        default="all",
        help="fast: a case of each test that is not marked full; rest: the other cases; all (default): both",
    )


def _late(path: Path) -> bool:
    return path.relative_to(Path(__file__).parents[1]).as_posix().startswith(LATER)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tier does not import what it leaves out, and no tier what lacks its packages."""
    folder = "".join(collection_path.relative_to(Path(__file__).parents[1]).parts[1:2])
    absent = [name for name in NEEDS.get(folder, ()) if importlib.util.find_spec(name) is None]
    return True if absent or (config.getoption("--tier") == "fast" and _late(collection_path)) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process one test at a time, or all tests of a file in ``TOGETHER``."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            return file if file in TOGETHER else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by folder, keep those of the tier, and skip those whose hardware or compiler is absent."""
    root = Path(__file__).parent
    for item in items:
        item.add_marker(AREA[item.path.relative_to(root).parts[0]])
        if _late(item.path):
            item.add_marker(pytest.mark.full)
    fast = _few(items, 1, by=_test)
    if not torch.cuda.is_available():
        interpreted = [item for item in items if item.get_closest_marker("interpreted")]
        for item in set(interpreted) - _few(interpreted, 2, by=_group):
            item.add_marker(pytest.mark.slow)
    if (tier := config.getoption("--tier")) != "all":
        kept = [item for item in items if (item in fast) == (tier == "fast")]
        config.hook.pytest_deselected(items=[item for item in items if (item in fast) != (tier == "fast")])
        items[:] = kept
    named = os.environ.get("CXX")
    compiler = any(map(shutil.which, [named] if named else ["c++", "g++", "clang++"]))
    skips = {
        "cuda": None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a GPU"),
        "inductor": None if compiler else pytest.mark.skip(reason="needs a C++ compiler"),
    }
    for item in items:
        for marker, skip in skips.items():
            if skip and item.get_closest_marker(marker):
                item.add_marker(skip)


def _few(items: list[pytest.Item], most: int, by: Callable[[pytest.Item], str]) -> set[pytest.Item]:
    """Of each group of cases that are not marked ``full``, up to ``most``, evenly spread over all of them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("full"):
            cases.setdefault(by(item), []).append(item)
    chosen = set()
    for found in cases.values():
        few = min(len(found), most) if not found[0].get_closest_marker("whole") else len(found)
        chosen.update(found[i * len(found) // few] for i in range(few))
    return chosen


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _group(item: pytest.Item) -> str:
    """The cases of one test, or of a law those of one kind of operation."""
    test = _test(item)
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    family = params.get("family")
    # Only those of tests/ops/families.py are objects.
    if not hasattr(family, "package"):
        return test
    return f"{test}[{family.name if 'row' in params else family.package}"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch has one thread, as all training runs that are compared to the bit must."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spoil(tensor: Tensor) -> Tensor:
    """Overwrite with what no computation survives unnoticed: NaN, or the far end of an integer's range."""
    # Inside a traced autograd.Function Dynamo knows no layouts; what it traces is strided.
    if tensor.dtype == torch.bool or (not torch.compiler.is_compiling() and tensor.layout != torch.strided):
        return tensor
    integer = not (tensor.is_floating_point() or tensor.is_complex())
    with torch.no_grad():
        if not integer:
            return tensor.fill_(float("nan"))
        limits = torch.iinfo(tensor.dtype)
        return tensor.fill_(limits.min or limits.max)


def spoiled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``make``, with its result spoilt."""

    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        return spoil(make(*args, **kwargs))

    return wrapper


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_zero_by_luck() -> Iterator[None]:
    # What makes tensors elsewhere remembers at its first use which functions make tensors: these, not the wrappers.
    with torch.device("meta"):
        torch.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, spoiled(getattr(torch, name)))
        patch.setattr(Tensor, "new_empty", spoiled(Tensor.new_empty))
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor cannot place the writes that spoil fresh memory in tests."""
    for place, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(place, name, getattr(place, name).__wrapped__)


@pytest.fixture(scope="session", autouse=True)
def _no_line_is_due_however_slow_the_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "EVERY", math.inf)
        yield


@pytest.fixture(scope="session")
def blocks() -> Callable[[Path, str], list[str]]:
    """``blocks(page, language)``: the fenced blocks of a Markdown page in that language, in order."""

    def read(page: Path, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

    return read


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a separate folder; lines are as long as they like."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started for memory."""
    from support.bench import weigh_nothing

    weigh_nothing(monkeypatch)


@pytest.fixture
def restored() -> Iterator[None]:
    """Nothing of transformers stays replaced after a test."""
    yield
    # A test that has replaced something has imported this.
    if (on_cpu := sys.modules.get("longspan.compat.transformers")) is not None:
        on_cpu.restore()
