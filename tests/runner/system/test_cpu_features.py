"""A processor that lacks the features of a package's wheels is refused in one line; no other one is refused."""

import os
from pathlib import Path

import pytest
from commands import fail_command

from eagle3.runner import load
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.system import cpu_features

X86, ARM = cpu_features.NEEDS
KVM64 = "flags\t\t: fpu tsc msr cx8 cmov mmx fxsr sse sse2 syscall nx lm pni cx16 hypervisor\n"
NEHALEM = f"processor\t: 0\nflags\t\t: {' '.join(X86.names)}\nvmx flags\t: vnmi\n\n{KVM64}"
CORTEX_A72 = "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU part\t: 0xd08\n"
CORTEX_A76 = "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 atomics fphp asimddp\n"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
RUN = "no-artifact", "--prompt", "x"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that replaces /proc/cpuinfo for this process, and a package by one that crashes for its children."""

    def make(cpuinfo: str, package: str | None = None) -> None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(cpu_features, "CPUINFO", tmp_path / "cpuinfo")
        if package:
            (tmp_path / f"{package}.py").write_text(DIES)
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))

    return make


@pytest.mark.parametrize(
    ("cpuinfo", "package", "said"),
    [(KVM64, "numpy", "no ssse3, sse4_1, sse4_2, popcnt, lahf_lm"), (CORTEX_A72, "executorch", "no atomics")],
)
def test_a_command_names_the_cpu_features_that_a_package_lacks(machine, cpuinfo, package, said):
    machine(cpuinfo, package)
    code, line = fail_command(run_main, *RUN)
    assert (code, said in line, package in line) == (1, True, True)
    with pytest.raises(ValueError, match=said.split(",")[0]):
        load(Path("no-artifact"))


@pytest.mark.parametrize(("cpuinfo", "package"), [(NEHALEM, "numpy"), (CORTEX_A76, "executorch"), ("", "numpy")])
def test_a_processor_with_all_features_needs_no_trial_import(machine, cpuinfo, package):
    machine(cpuinfo, package)
    assert "no-artifact is missing" in fail_command(run_main, *RUN)[1]


def test_packages_built_without_the_features_are_not_refused(machine):
    machine(KVM64)
    assert "no-artifact is missing" in fail_command(run_main, *RUN)[1]


def test_cpu_features_are_not_checked_on_another_system(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_features, "CPUINFO", tmp_path / "none")
    cpu_features.check_cpu_features()


@pytest.mark.parametrize(
    ("lines", "lacks"),
    [
        ("flags\t\t: fma avx2 f16c\nflags\t\t: fma avx2 f16c\n", True),
        ("flags\t\t: fma avx2 avx512f avx512_vnni\n", False),
        ("Features\t: fp asimd atomics\n", False),
        ("", False),
    ],
)
def test_an_x86_processor_without_avx512_is_recognized(lines, lacks, tmp_path):
    (tmp_path / "cpuinfo").write_text(lines)
    assert cpu_features.lacks_avx512(tmp_path / "cpuinfo") == lacks
