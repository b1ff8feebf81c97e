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
CHECK = "from eagle3.runner.hosts.one_host import check_only_host; check_only_host(torch={})"


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


@pytest.mark.parametrize("host", [True, False])
def test_a_process_without_a_host_accepts_either(host):
    assert says(CHECK.format(host)) == ""


def test_executorch_as_host_after_pytorch_is_refused(other_host):
    assert says(LOAD_TORCH + CHECK.format(True)) == ""
    assert "ExecuTorch cannot run a CUDA artifact" in (said := says(LOAD_TORCH + CHECK.format(False)))
    assert "libraries would call libtorch_cpu.so" in said and "one --runtime per process" in said


def test_pytorch_as_host_after_executorch_is_refused(other_host):
    load = LOAD_OTHER.format(other_host)
    assert says(load + CHECK.format(False)) == ""
    assert "PyTorch cannot run a CUDA artifact" in (said := says(load + LOAD_TORCH + CHECK.format(True)))
    assert "libaoti_cuda_shims.so" in said
