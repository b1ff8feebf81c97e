"""The native runner, cross-compiled for aarch64 and run by an emulator, gives the tokens of this machine.

It needs ``apt-get install g++-aarch64-linux-gnu qemu-user`` and ExecuTorch's libraries for aarch64, whose folder
``executorch`` the environment variable ``EAGLE3_AARCH64_EXECUTORCH`` names::

    pip download --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 executorch
    python -m zipfile -e executorch-*_aarch64.whl wheel
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from native_build import NATIVE

LIBRARIES = Path("/usr/aarch64-linux-gnu")
TOOLS = ("cmake", "qemu-aarch64", "aarch64-linux-gnu-g++")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The beginning of a command that runs the cross-compiled runner."""
    runtime = os.environ.get("EAGLE3_AARCH64_EXECUTORCH")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or runtime is None:
        pytest.skip(f"needs {', '.join(missing) or 'EAGLE3_AARCH64_EXECUTORCH'} (see {Path(__file__).name})")
    folder = tmp_path_factory.mktemp("aarch64")
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={TOOLS[2]}")
    for line in (
        ["cmake", "-S", NATIVE, "-B", folder, *system, f"-DCMAKE_PREFIX_PATH={runtime}"],
        ["cmake", "--build", folder, "-j2"],
    ):
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    found = f"LD_LIBRARY_PATH={runtime}/lib:{LIBRARIES}/lib"
    return ["qemu-aarch64", "-L", LIBRARIES, "-cpu", "cortex-a76", "-E", found, folder / "eagle3-native"]


@pytest.mark.whole
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
def test_the_tokens_and_rounds_on_aarch64_are_those_of_this_machine(command, model, artifact, options):
    prompt = [(7 * i + i * i) % model.metadata.vocab_size for i in range(90)]  # two chunks
    flags = [f"--{name}={value}".split("=") for name, value in options.items()]
    given = ["--prompt-tokens", ",".join(map(str, prompt)), "--max-new-tokens", "32", *sum(flags, [])]
    done = subprocess.run([*command, artifact, "--json", *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mine = json.loads(done.stdout)
    model.forget()
    theirs = model.generate(prompt, ngram=False, max_new_tokens=32, **options)
    assert mine["token_ids"] == theirs.token_ids
    assert mine["stats"]["num_drafts"] == theirs.stats.num_drafts
