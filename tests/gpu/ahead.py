"""Compiles Triton kernels ahead of time for a CUDA GPU, without one.

``TRITON_INTERPRET=1``, which the tests of values set, turns ``@triton.jit`` functions into Python. So a separate
process without it compiles, one for any number of kernels:

    builds = compiled_all([request("longspan.ops.triton.linear:sums_kernel", pointers, constants, capability=80)])
    assert builds[0].stack <= 64

``python ahead.py`` reads requests as JSON from standard input and prints the results as JSON.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LIMITS = {80: 166_912, 90: 232_448}  # bytes of shared memory that a block may use
TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int64": "*i64", "bool": "*i1"}


class Request(NamedTuple):
    """One kernel and how to compile it; see ``request``."""

    kernel: str
    pointers: dict[str, str]
    constants: dict[str, Any]
    tuples: dict[str, list[Any]]
    floats: list[str]
    multiples: list[str]
    capability: int
    options: dict[str, Any]


class Build(NamedTuple):
    """A compiled kernel: registers a thread, bytes of stack (spills) a thread, bytes of shared memory, the PTX text."""

    kernel: str
    registers: int
    stack: int
    shared: int
    ptx: str

    def count(self, instruction: str) -> int:
        """Return how many times an instruction, such as ``wgmma.mma_async`` or ``cp.async``, is in the PTX."""
        return len(re.findall(rf"^\s*(?:@%p\d+ )?{re.escape(instruction)}\b", self.ptx, re.MULTILINE))


def request(
    kernel: str,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    tuples: Mapping[str, Sequence[Any]] | None = None,
    floats: Sequence[str] = (),
    multiples: Sequence[str] = ("_b", "_h", "_n"),
    capability: int = 90,
    **options: Any,
) -> Request:
    """Return a request for ``compiled_all``.

    Args:
        kernel: ``module:name`` of a function with ``@triton.jit``.
        pointers: The type of each pointer, such as ``*bf16``. Pointers are taken as multiples of 16 bytes.
        constants: Values of ``tl.constexpr`` parameters, of integers that are 1 (strides of the last dimension, which
            Triton makes constants) and of pointers that are None.
        tuples: The elements of parameters that are tuples: names of integers, or their values where these are 1, types
            of pointers, None, or further tuples.
        floats: Names of parameters that are float32 numbers. All others are int32.
        multiples: Names, or their ends, of integers known to be multiples of 16, as Triton finds out at each call.
        capability: 80 for sm_80 or 90 for sm_90.
        options: ``num_warps``, ``num_stages`` and others of a launch.
    """
    parts = {name: list(elements) for name, elements in (tuples or {}).items()}
    return Request(kernel, dict(pointers), dict(constants), parts, list(floats), list(multiples), capability, options)


def compiled(kernel: str, pointers: Mapping[str, str], constants: Mapping[str, Any], **how: Any) -> Build:
    """Compile one kernel; arguments as in ``request``. ``compiled_all`` saves the start of a process for each."""
    return compiled_all([request(kernel, pointers, constants, **how)])[0]


def compiled_all(requests: Sequence[Request]) -> list[Build]:
    """Compile kernels in one process. Raises RuntimeError with its messages if one does not compile."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        run = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps([r._asdict() for r in requests]),
            capture_output=True,
            text=True,
            env=environment,
        )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return [Build(**found) for found in json.loads(run.stdout.splitlines()[-1])]


def _types(element: Any) -> Any:
    if isinstance(element, list):
        return tuple(map(_types, element))
    return "constexpr" if not isinstance(element, str) else element if element.startswith("*") else "i32"


def _leaves(element: Any, place: tuple[int, ...]) -> list[tuple[tuple[int, ...], Any]]:
    if not isinstance(element, list):
        return [(place, element)]
    return [leaf for i, part in enumerate(element) for leaf in _leaves(part, (*place, i))]


def _build(wanted: Request) -> Build:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = wanted.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    signature, attributes = {}, {}
    constants = {(kernel.arg_names.index(key),): value for key, value in wanted.constants.items()}
    for i, parameter in enumerate(kernel.arg_names):
        if parameter in wanted.constants:
            signature[parameter] = "constexpr"
            continue
        if parameter in wanted.tuples:
            signature[parameter] = _types(wanted.tuples[parameter])
            for place, element in _leaves(wanted.tuples[parameter], (i,)):
                if not isinstance(element, str):
                    constants[place] = element
                elif element.startswith("*") or element.endswith(tuple(wanted.multiples)):
                    attributes[place] = [["tt.divisibility", 16]]
            continue
        number = "fp32" if parameter in wanted.floats else "i32"
        signature[parameter] = wanted.pointers.get(parameter, number)
        if parameter in wanted.pointers or parameter.endswith(tuple(wanted.multiples)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    if strange := (wanted.constants | wanted.pointers | wanted.tuples).keys() - set(kernel.arg_names):
        raise ValueError(f"{wanted.kernel} has no parameter {', '.join(sorted(strange))}")
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", wanted.capability, 32)
    built = triton.compile(source, target=target, options=wanted.options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        (binary := Path(folder) / "kernel.cubin").write_bytes(built.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no REG and STACK: {text}")
    # Triton asks for shared memory at the launch, so the file itself states none.
    return Build(wanted.kernel, int(usage[1]), int(usage[2]), built.metadata.shared, built.asm["ptx"])


if __name__ == "__main__":
    print(json.dumps([_build(Request(**wanted))._asdict() for wanted in json.load(sys.stdin)]))
