"""Versions of PyTorch and related packages other than the installed ones work, or are refused in one line."""

import importlib.metadata
import importlib.util
import os
import shutil
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch._higher_order_ops import triton_kernel_wrap
from transformers import LlamaConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils import ModelOutput

from eagle3.export.lowering.cuda.graph import shortcuts
from eagle3.export.output.contents import package_versions
from eagle3.export.patching.toolchain import cuda_home
from eagle3.export.twin.comparison import TOLERANCE
from eagle3.export.twin.target import compare, make_twin, without_images
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.hosts import opening, torch_host_checks
from eagle3.runner.hosts.executorch_host import load_llm_ops
from eagle3.runner.hosts.opening import open_session
from eagle3.targets import spec_for
from eagle3.targets.decoder_layers import past_name


def test_the_kernel_analysis_is_found_under_its_name_in_pytorch_2_11(monkeypatch):
    monkeypatch.delattr(triton_kernel_wrap, "identify_accessed_tensors")
    writes = SimpleNamespace(calls=0)

    def identify_mutated_tensors(kernel, kwargs, tma_descriptor_metadata):
        writes.calls += 1
        return ["OUT", "PARTS", "ARRIVED"]

    monkeypatch.setattr(triton_kernel_wrap, "identify_mutated_tensors", identify_mutated_tensors, raising=False)
    spec = importlib.util.spec_from_file_location("shortcuts_there", shortcuts.__file__)
    there = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(there)
    with there.counters_unchanged(), there.analyzed_once():
        for _ in range(2):
            found = triton_kernel_wrap.identify_mutated_tensors("kernel", {"OUT": torch.zeros(1)}, {})
            assert found == ["OUT", "PARTS"]
    assert writes.calls == 1 and triton_kernel_wrap.identify_mutated_tensors is identify_mutated_tensors


def test_the_cuda_toolkit_is_found_through_a_wrapper_script_of_nvcc(monkeypatch, tmp_path):
    toolkit = cuda_home()
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {toolkit / "bin" / "nvcc"} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for variable, value in {"CUDA_HOME": tmp_path, "PATH": f"{script.parent}:{os.environ['PATH']}"}.items():
        with monkeypatch.context() as context:
            context.setenv(variable, str(value))
            assert cuda_home() == toolkit.resolve()
    script.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("sh")))
    if not os.path.exists("/usr/local/cuda"):
        with pytest.raises(FileNotFoundError, match="nvcc with CUDA's headers is neither among"):
            cuda_home()


def test_a_source_tree_without_package_metadata_has_a_version_text(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", nothing)
    assert set(package_versions().values()) == {"not installed"}
    assert CliRunner().invoke(run_main, ["--version"], prog_name="eagle3-run").output.endswith("not installed\n")


def test_a_cuda_artifact_runs_although_the_custom_ops_do_not_load(host_artifact, monkeypatch):
    def refuse(library):
        raise OSError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    bare = SimpleNamespace(operator_registry=SimpleNamespace(operator_names=[]))
    with pytest.raises(
        ValueError, match=r"do not load with PyTorch .* \(undefined symbol: _ZN3c10\): type pip install"
    ):
        load_llm_ops(bare)
    monkeypatch.setattr(opening, "load_llm_ops", lambda runtime: load_llm_ops(bare))
    session = open_session(open_artifact(host_artifact))
    assert session.prefill(torch.arange(1, 21)[None], session.positions[:20]).ids.shape == (1, 1)
    session.close()


@pytest.mark.parametrize(("version", "hosts"), [("2.10.1", False), ("2.11.0+cu130", True), ("2.14.0", False)])
def test_an_unknown_pytorch_version_is_refused_as_host(monkeypatch, version, hosts):
    monkeypatch.setattr(torch, "__version__", version)
    if hosts:
        torch_host_checks.check_torch()
        return
    with pytest.raises(ValueError, match=rf"PyTorch {version} hosts no CUDA artifact, 2.11 to 2.13 do: type pip"):
        torch_host_checks.check_torch()


@dataclass
class MultimodalOutput(ModelOutput):
    image_outputs: torch.Tensor | None = None


class Taking(torch.nn.Module):
    """A model with the interface of transformers from 5.24 on."""

    def forward(self, tokens, cache=None, **given):
        return tokens


class TakingPast(torch.nn.Module):
    """A model with the interface of transformers before 5.24."""

    def forward(self, tokens, past_key_values=None, **given):
        return tokens


def test_the_cache_argument_has_the_name_that_transformers_accepts_without_a_warning():
    assert (past_name(Taking()), past_name(TakingPast())) == ("cache", "past_key_values")
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert compare(spec_for("auto", "llama"), make_twin(config), seed=0).difference <= TOLERANCE


def test_the_output_of_a_text_model_without_an_image_field_is_accepted():
    model = torch.nn.Identity()
    without_images(model)
    lacking, having = MoeCausalLMOutputWithPast(), MultimodalOutput(image_outputs=torch.ones(1))
    assert model(lacking).image_outputs is None and lacking.to_tuple() == ()
    assert torch.equal(model(having).image_outputs, torch.ones(1))
