"""A processor that NumPy's wheels do not start on is named in a line; no other is refused."""

from pathlib import Path

import pytest
from commands import fail_command

from eagle3.runner import instructions, load
from eagle3.runner.cli import main as run_main
from eagle3.runner.instructions import X86_64_V2, lacking_instructions

KVM64 = "fpu de pse tsc msr pae cx8 apic sep cmov clflush mmx fxsr sse sse2 syscall nx lm pni cx16 hypervisor"
OLD = f"processor\t: 0\nflags\t\t: {KVM64}\nbugs\t\t:\n"
NEHALEM = f"processor\t: 0\nflags\t\t: {' '.join(X86_64_V2)}\nvmx flags\t: vnmi\n\n{OLD}"
ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes crc32 cpuid\n"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Another processor, and another NumPy for the processes of this one."""

    def make(cpuinfo: str, numpy: str) -> None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        (tmp_path / "numpy.py").write_text(numpy)
        monkeypatch.setattr(instructions, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


def test_what_is_lacking_is_read_from_the_first_processor_of_x86_alone(tmp_path):
    for text, lacking in ((OLD, ["ssse3", "sse4_1", "sse4_2", "popcnt", "lahf_lm"]), (NEHALEM, []), (ARM, [])):
        (tmp_path / "cpuinfo").write_text(text)
        assert lacking_instructions(tmp_path / "cpuinfo") == lacking
    assert lacking_instructions(tmp_path / "of another system") == []


def test_commands_and_library_name_what_numpy_dies_of(machine):
    machine(OLD, KILLED)
    code, line = fail_command(run_main, "no-artifact", "--prompt", "x")
    assert (code, "ssse3, sse4_1" in line, "pip install 'numpy<2.4'" in line) == (1, True, True)
    with pytest.raises(ValueError, match="ssse3, sse4_1"):
        load(Path("no-artifact"))


@pytest.mark.parametrize(("cpuinfo", "numpy"), [(OLD, ""), (NEHALEM, KILLED), (ARM, KILLED)])
def test_a_processor_that_lacks_nothing_or_has_a_numpy_that_starts_goes_on(machine, cpuinfo, numpy):
    machine(cpuinfo, numpy)
    assert "no-artifact is missing" in fail_command(run_main, "no-artifact", "--prompt", "x")[1]
