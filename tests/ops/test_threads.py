"""Native kernels with threads and forked processes: no deadlock, and correct results."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import longspan
from longspan import backend
from longspan.ops.native.build import openmp, toolchain
from longspan.ops.native.call import available

pytestmark = pytest.mark.skipif(not available("linear"), reason="no native kernels here")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="it forks, or reads /proc")

try:
    COMPILER, REASON = toolchain.find_compiler(), ""
except toolchain.Unavailable as error:
    COMPILER, REASON = [], str(error)
needs_compiler = pytest.mark.skipif(bool(REASON), reason=REASON)

SECONDS = 120  # until a process counts as hanging

# Every script has calls that use several threads, and their results.
CALLS = """
import os, signal, sys, threading, time
import torch
import longspan
from longspan import backend
from longspan.ops.native import build
from longspan.ops.native.build import openmp

torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(64, 8, 1, 32, generator=generator) for _ in range(3))
state = torch.rand(64, 8, 32, 33, generator=generator)
whole = [torch.randn(2, 4, 500, 32, generator=generator) for _ in range(3)]

spare = [state.clone() for _ in range(3)]  # torch itself cannot copy in a forked child, where it has several threads

def step(state):
    with torch.no_grad(), backend("native"):
        return longspan.linear_attention(q, k, v, state=state, return_state=True, donate=True)[0]

def gradient():
    leaves = [t.clone().requires_grad_() for t in whole]
    return torch.autograd.grad(longspan.linear_attention(*leaves).sum(), leaves)[0]

def check(found, right):
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)

right, slope = step(state.clone()), gradient()

def in_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(40)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
"""


def script(text):
    code = CALLS + textwrap.dedent(text) + "print('all right')\n"
    # Newer Pythons warn about every fork of a process with threads. This test shows that it is safe here.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all right\n")


def test_threads_at_once():
    generator = torch.Generator().manual_seed(0)
    calls = []
    for _ in range(8):
        q, k, v = (torch.randn(64, 8, 1, 32, generator=generator) for _ in range(3))
        calls.append((q, k, v, torch.rand(64, 8, 32, 33, generator=generator)))

    def step(operands):
        q, k, v, state = operands
        with torch.no_grad():
            return longspan.linear_attention(q, k, v, state=state, return_state=True)

    with backend("native"):
        expected = [step(operands) for operands in calls]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                for found, right in zip(pool.map(step, calls), expected, strict=True):
                    assert torch.equal(found[0], right[0])
                    assert torch.equal(found[1], right[1])


@pytest.mark.full
def test_forked_children():
    """One thread in each. torch's own operations need it too: DataLoader sets it in its workers, and here the last."""
    script("""
        assert openmp.threads() == 2

        def alone():
            assert torch.get_num_threads() == 2
            assert openmp.threads() == 1
            check(step(spare.pop()), right)

        def with_a_thread_and_a_child():
            found = []
            thread = threading.Thread(target=lambda: found.append(step(spare.pop())))
            thread.start()
            thread.join()
            check(found[0], right)
            in_child(alone)

        def whole_sequences():
            torch.set_num_threads(1)
            check(gradient(), slope)

        for work in (alone, with_a_thread_and_a_child, whole_sequences):
            in_child(work)
            check(step(state.clone()), right)
    """)


@pytest.mark.full
def test_workers_of_a_data_loader():
    script("""
        class Steps(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return step(state.clone()), gradient()

        loader = torch.utils.data.DataLoader(Steps(), num_workers=2, multiprocessing_context="fork", timeout=60)
        for _ in range(2):
            for outputs, slopes in loader:
                check(outputs[0], right)
                check(slopes[0], slope)
        check(step(spare.pop()), right)
    """)


@pytest.mark.full
def test_a_fork_while_the_kernels_are_loaded():
    script("""
        build._found.clear()
        started = threading.Event()

        def slow(unit):
            started.set()
            time.sleep(5)
            raise build.Unavailable("it is late")

        load, build.load = build.load, slow
        thread = threading.Thread(target=build.loaded, args=("linear/step",))
        thread.start()
        started.wait()
        build.load = load

        in_child(lambda: check(step(spare.pop()), right))
        thread.join()
    """)


@pytest.mark.full
@needs_linux
def test_one_pool_of_threads():
    """torch and the kernels share one OpenMP runtime."""
    script("""
        with open("/proc/self/maps") as file:
            runtimes = {line.split()[-1] for line in file if "omp" in os.path.basename(line.split()[-1])}
        kernels = build.find("linear/forward")
        if "clang" not in kernels.origin:
            assert runtimes == {os.path.realpath(openmp.share())}, runtimes
            with open(kernels.path, "rb") as file:
                assert b"libgomp" not in file.read()  # they name none, and take what is there
    """)


@pytest.mark.full
@needs_linux
@needs_compiler
def test_the_runtime_of_torch_becomes_visible(tmp_path):
    """Whatever its file is called, and whether or not torch itself shows it to others."""
    runtime, source = tmp_path / "lib" / "libtorch_cpu.so", tmp_path / "runtime.cpp"
    runtime.parent.mkdir()
    source.write_text('extern "C" void GOMP_parallel() {}\nextern "C" void longspan_was_here() {}\n')
    toolchain.run([*COMPILER, "-shared", "-fPIC", str(source), "-o", str(runtime)])
    script(f"""
        import ctypes
        torch.__file__ = {str(tmp_path / "__init__.py")!r}
        openmp.share.cache_clear()
        assert not hasattr(ctypes.CDLL(None), "longspan_was_here")
        assert openmp.share() == {str(runtime)!r}
        assert hasattr(ctypes.CDLL(None), "longspan_was_here")
    """)


def test_torch_without_openmp_has_none_to_share(monkeypatch):
    monkeypatch.setattr(torch, "__file__", os.path.join(os.sep, "nowhere", "torch", "__init__.py"))
    assert openmp.share.__wrapped__() == ""
