"""Fixtures: random checkpoints of every family, and the shipped one exported for real."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from commands import run_command
from random_checkpoints import random_model
from transformers import Gemma4ForCausalLM

from eagle3.export.cli import main as export_main
from eagle3.runner.artifact import open_artifact, open_session
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Target name to (transformers model, its folder), saved as transformers saves it."""
    made = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = random_model(name)
            model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return make


@pytest.fixture
def eager_target(checkpoints):
    """Target name to a fresh eager ``TapTarget`` over the random checkpoint."""

    def load(name: str, max_seq_len: int = 128):
        model, folder = checkpoints(name)
        return TARGETS[name].module().load(folder, model.config, max_seq_len, torch.float32, EagerAttention)

    return load


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    """gemma4-tiny exported to the CPU by the command itself, with decode: the artifact's folder."""
    folder = tmp_path_factory.mktemp("export") / "out"
    run_command(
        export_main, "--target-model", "gemma4-tiny", "--backend", "xnnpack", "--with-decode", "--output-dir", folder
    )
    return folder


CUDA_EXPORT = pytest.StashKey[tuple[subprocess.Popen, Path]]()


def pytest_collection_finish(session):
    """Lowering for CUDA takes minutes on one core: it begins with the first test, beside the others."""
    if session.config.option.collectonly or not any("cuda_artifact" in item.fixturenames for item in session.items):
        return
    folder = Path(tempfile.mkdtemp()) / "cuda"
    command = [sys.executable, "-m", "eagle3.export.cli", "--target-model", "gemma4-tiny", "--output-dir", str(folder)]
    command += [] if torch.cuda.is_available() else ["--cuda-arch", "sm_90"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    session.config.stash[CUDA_EXPORT] = started, folder


def pytest_sessionfinish(session):
    started, folder = session.config.stash.get(CUDA_EXPORT, (None, None))
    if started is not None:
        started.kill()
        shutil.rmtree(folder.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def cuda_artifact(request):
    """gemma4-tiny lowered for sm_90 by the command itself, kernels compiled for real: the artifact's folder."""
    started, folder = request.config.stash[CUDA_EXPORT]
    printed, _ = started.communicate()
    assert started.returncode == 0, printed
    return folder


@pytest.fixture(scope="session")
def session(artifact):
    return open_session(open_artifact(artifact))


@pytest.fixture(scope="session")
def reference():
    """transformers' own model of the shipped target, in float32."""
    checkpoint = TARGETS["gemma4-tiny"].checkpoint
    return Gemma4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
