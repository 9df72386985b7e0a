"""Installs the stand-in, and refuses where a real sgl_kernel belongs: beside a CUDA device or another sgl_kernel.

Where a C++ compiler is found, attention and linear layers of a few rows are built too (*.cpp); without one, torch's
own do, slower.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "eyas_cpu_engine.pth"
SOURCES = (Path("sgl_kernel/attention.cpp"), Path("sgl_kernel/linear.cpp"))
LIBRARY = Path("sgl_kernel/libeyas_cpu.so")
# OpenMP's library is the one that torch has loaded by then.
FLAGS = ("-O3", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi")
RIVALS = ("sglang-kernel", "sgl-kernel")


def cuda_devices(load=ctypes.CDLL) -> int:
    """The CUDA devices that this machine's driver sees; 0 where there is no driver."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def installed(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def refusal(devices=cuda_devices, version_of=installed) -> str | None:
    """Why the stand-in must not be installed here, as one sentence with the fix; None where it may."""
    for rival in RIVALS:
        version = version_of(rival)
        if version is not None:
            return (
                f"eyas-cpu-engine: {rival} {version} is installed and is the real sgl_kernel, which this stand-in "
                f"would shadow: leave eyas-cpu-engine out, or first run: pip uninstall {rival}"
            )
    count = devices()
    if count > 0:
        return (
            f"eyas-cpu-engine: this machine has {count} CUDA device(s), where SGLang needs its own kernels, not this "
            "CPU stand-in: run: pip install sglang-kernel"
        )
    return None


def build_native(out: Path, compiler: str | None = None) -> bool:
    """Compile SOURCES into `out`. False, with a line that says so, where no compiler can."""
    compiler = compiler or os.environ.get("CXX", "c++")
    try:
        argv = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(out)]
        subprocess.run(argv, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[:1]
        print(f"eyas-cpu-engine: torch does all the work, {compiler} did not compile ours: {said}", file=sys.stderr)
        return False
    return True


class BuildPy(build_py):
    """Also puts the compiled library and the .pth beside the modules; an empty build folder leaves none renamed."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        Path(self.build_lib).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PTH, Path(self.build_lib) / PTH)
        self._built = [PTH]
        if build_native(Path(self.build_lib) / LIBRARY):
            self._built.append(str(LIBRARY))

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), *(str(Path(self.build_lib) / name) for name in self._built)]


if __name__ == "__main__":
    reason = refusal()
    if reason is not None:
        sys.exit(reason)
    setup(cmdclass={"build_py": BuildPy})
