"""A process has one host of CUDA artifacts, because libraries find the functions that were loaded first."""

import subprocess
import sys

import pytest

from eagle3.runner.hosts.one_host import SHARED

LOAD_TORCH = """
import ctypes, torch
from pathlib import Path
ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
"""
LOAD_OTHER = "import ctypes; ctypes.CDLL({!r}, mode=ctypes.RTLD_GLOBAL)\n"
CHECK = "from eagle3.runner.hosts.one_host import check_only_host; check_only_host(torch={})\n"


@pytest.fixture(scope="module")
def other_host(tmp_path_factory):
    """A library with the global functions of ExecuTorch's host."""
    source = tmp_path_factory.mktemp("host") / "shims.cpp"
    library = source.with_name("libaoti_cuda_shims.so")
    source.write_text(f'extern "C" int {SHARED}(void*, void**) {{ return 0; }}')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    return str(library)


def says(code: str) -> str:
    """Return the last line that a process prints to stderr."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [""])[-1]


def test_executorch_as_host_after_pytorch_is_refused():
    either = CHECK.format(True) + CHECK.format(False)  # accepted while there is no host
    assert says(either + LOAD_TORCH + CHECK.format(True)) == ""
    said = says(LOAD_TORCH + CHECK.format(False))
    assert "ExecuTorch cannot run a CUDA artifact" in said
    assert "libraries would call libtorch_cpu.so" in said and "one --runtime per process" in said


def test_pytorch_as_host_after_executorch_is_refused(other_host):
    said = says(LOAD_OTHER.format(other_host) + CHECK.format(False) + LOAD_TORCH + CHECK.format(True))
    assert "PyTorch cannot run a CUDA artifact" in said and "libaoti_cuda_shims.so" in said
