"""Puts compiled kernels into a wheel, if LONGSPAN_PREBUILT=1 is set: ``make wheel``.

Without it a wheel has no compiled code, serves every platform, and compiles its kernels on first use.
"""

import hashlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
import zipfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src", "longspan", "ops", "native")
MACOS = "11.0"  # the first for arm64


class Prebuilt(BuildHookInterface):
    """One library for each instruction set of this kind of processor, and a list of their checksums."""

    folder = ""

    def initialize(self, version, build_data):
        if os.environ.get("LONGSPAN_PREBUILT") != "1" or version == "editable":
            return
        self.folder = tempfile.mkdtemp()
        prebuilt = modules(Path(self.root, KERNELS), "prebuilt")
        files = compile_all(Path(self.root, KERNELS), Path(self.folder))
        # hatchling puts each file where it would be in the source tree.
        place = KERNELS.relative_to("src") / prebuilt.FOLDER.name
        build_data["force_include"].update({str(file): (place / file.name).as_posix() for file in files})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(files)}"

    def finalize(self, version, build_data, artifact_path):
        shutil.rmtree(self.folder, ignore_errors=True)


def compile_all(kernels: Path, folder: Path) -> list[Path]:
    """The libraries and their list, written into ``folder``. Raises RuntimeError where that cannot be done here."""
    toolchain, prebuilt = modules(kernels, "toolchain"), modules(kernels, "prebuilt")
    instruction_sets = modules(kernels, "instruction_sets")
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", MACOS)
    try:
        compiler = toolchain.find_compiler()
        if prebuilt.THREADED and toolchain.is_clang(compiler):
            raise RuntimeError("a wheel for Linux needs g++, since clang's OpenMP runtime is not torch's; set CXX=g++")
        flags = {folder / f"{one.name}.so": one.flags for one in instruction_sets.built()}
        for library, machine in flags.items():
            toolchain.compile(compiler, library, machine, openmp=prebuilt.THREADED)
    except toolchain.Unavailable as error:
        raise RuntimeError(f"the kernels could not be compiled: {error}") from error
    sums = folder / prebuilt.LIST
    sums.write_text("".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in flags))
    return [*flags, sums]


def modules(kernels: Path, name: str) -> types.ModuleType:
    """A module of the kernels' folder without its package, which needs torch; the build has none."""
    package = types.ModuleType("longspan_kernels")
    package.__path__ = [str(kernels / "build")]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{name}")


def platform_tag(libraries: list[Path]) -> str:
    """The systems on which these libraries load, as a wheel's name has it.

    On Linux what auditwheel grants, such as manylinux_2_27_x86_64; without auditwheel this machine's kind alone, which
    package indexes refuse: linux_x86_64.
    """
    if sys.platform == "darwin":
        return f"macosx_{MACOS.replace('.', '_')}_{platform.machine()}"
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return granted(libraries, tag) if importlib.util.find_spec("auditwheel") else tag


def granted(libraries: list[Path], tag: str) -> str:
    """Return the output of auditwheel for a wheel of these libraries alone, built for the systems of ``tag``."""
    parts = {f"probe/{library.name}": library.read_bytes() for library in libraries}
    parts["probe-0.dist-info/METADATA"] = b"Metadata-Version: 2.1\nName: probe\nVersion: 0\n"
    parts["probe-0.dist-info/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n".encode()
    parts["probe-0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in parts).encode()
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder, f"probe-0-py3-none-{tag}.whl")
        with zipfile.ZipFile(wheel, "w") as file:
            for name, content in parts.items():
                file.writestr(name, content)
        said = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True, check=False
        )
    found = re.search(r'platform\s+tag:\s+"(\w+)"', said.stdout)
    if found is None:
        raise RuntimeError(f"auditwheel does not say where the kernels load: {said.stdout + said.stderr}")
    return found[1]
