"""Puts compiled kernels into a wheel, where LONGSPAN_PREBUILT=1 asks for it: ``make wheel``.

Without it a wheel has no compiled code, serves every platform, and compiles its kernels on first use.
"""

import hashlib
import importlib
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import types
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
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version, build_data, artifact_path):
        shutil.rmtree(self.folder, ignore_errors=True)


def compile_all(kernels: Path, folder: Path) -> list[Path]:
    """The libraries and their list, written into ``folder``. Raises RuntimeError where that cannot be done here."""
    toolchain, prebuilt = modules(kernels, "toolchain"), modules(kernels, "prebuilt")
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", MACOS)
    try:
        compiler = toolchain.find_compiler()
        if prebuilt.THREADED and toolchain.is_clang(compiler):
            raise RuntimeError("a wheel for Linux needs g++, since clang's OpenMP runtime is not torch's; set CXX=g++")
        libraries = [folder / f"{level}.so" for level in prebuilt.LEVELS.get(platform.machine(), {})]
        for library in libraries:
            toolchain.compile(compiler, library, f"-march={library.stem}", openmp=prebuilt.THREADED)
    except toolchain.Unavailable as error:
        raise RuntimeError(f"the kernels could not be compiled: {error}") from error
    sums = folder / prebuilt.LIST
    sums.write_text("".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in libraries))
    return [*libraries, sums]


def modules(kernels: Path, name: str) -> types.ModuleType:
    """A module of the kernels' folder without its package, which needs torch; the build has none."""
    package = types.ModuleType("longspan_kernels")
    package.__path__ = [str(kernels)]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{name}")


def platform_tag() -> str:
    """This system, as a wheel's name has it: linux_x86_64; auditwheel finds the oldest glibc that serves too."""
    if sys.platform == "darwin":
        return f"macosx_{MACOS.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
