"""Builds the native runner, its command and the test's own programs with CMake against the installed ExecuTorch."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import executorch
import pytest
from places import ROOT

NATIVE = ROOT / "runner" / "native"
HERE = ROOT / "tests" / "runner" / "native"
PROJECT = f"""
cmake_minimum_required(VERSION 3.19)
project(application CXX)
add_subdirectory("{NATIVE}" native)
add_executable(application "{HERE}/application.cpp")
target_link_libraries(application PRIVATE eagle3 eagle3_operators)
add_executable(internals "{HERE}/internals.cpp")
target_link_libraries(internals PRIVATE eagle3 eagle3_operators)
add_library(kernels SHARED "{HERE}/operators_library.cpp" $<TARGET_OBJECTS:eagle3_kernels>)
target_include_directories(kernels PRIVATE "{NATIVE}/operators")
"""


def build(folder: Path) -> Path:
    """Build the command, the tests' own programs, and the kernels as a library for ctypes. Returns the build folder.
    Skips the test if there is no compiler or no CMake."""
    for tool in ("g++", "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, which builds the native runner")
    (folder / "CMakeLists.txt").write_text(PROJECT)
    prefix = f"-DCMAKE_PREFIX_PATH={Path(executorch.__path__[0])}"
    for command in (
        ["cmake", "-S", folder, "-B", folder / "build", prefix],
        ["cmake", "--build", folder / "build", "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build"


class Kernels:
    """The kernels, called with tensors."""

    def __init__(self, built: Path):
        self._library = ctypes.CDLL(str(built / "libkernels.so"))
        self.versions = self._library.versions()

    def attend(self, out, query, key, value, start, mask, causal, scale, version=-1, threads=1) -> None:
        sizes = (*query.shape[:3], key.shape[2], query.shape[3], key.shape[1])
        given = (ctypes.c_int64 * 6)(*sizes), ctypes.c_int64(start), ctypes.c_bool(causal), ctypes.c_float(scale)
        self._library.attend(version, ctypes.c_int64(threads), *given, *map(pointer, (query, key, value, mask, out)))

    def delta_rule(self, out, state, query, key, value, decay, beta) -> None:
        heads = key.shape[0] * key.shape[1]
        sizes = (ctypes.c_int64 * 5)(heads, query.shape[1] // key.shape[1], *key.shape[2:], value.shape[3])
        tensors = (query, key, value, decay, beta, state, out)
        self._library.delta_rule(sizes, ctypes.c_bool(decay.dim() == 4), *map(pointer, tensors))


def pointer(tensor):
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())
