"""Every bad input gives one error line with the fault, exit code 1 or 2, and no half-written output."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import fail_command, run_command
from random_checkpoints import save_random_draft
from safetensors.torch import load_file, save_file

from eagle3.export.cli import main as export_main
from eagle3.runner.commands.bench import main as bench_main
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.system.machine import slowness
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]
EXPORT = ("--target-model", "gemma4-tiny", "--backend", "xnnpack")


def export_fails(tmp_path, *args, base=EXPORT) -> tuple[int, str]:
    """Run an export that fails, and check that it leaves the output folder empty."""
    outcome = fail_command(export_main, *base, "--output-dir", tmp_path / "place" / "out", *args)
    place = tmp_path / "place"
    assert not place.exists() or list(place.iterdir()) == []
    return outcome


@pytest.fixture
def copied(tmp_path):
    """A function that copies the shipped target or draft, so that a test can damage it."""

    def copy(which: str) -> Path:
        return Path(shutil.copytree(getattr(TINY, which), tmp_path / f"copied-{which}"))

    return copy


def tiny_config():
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(TINY.checkpoint)


@pytest.mark.parametrize(
    ("flag", "typed", "meant"),
    [
        ("--target-model", "gema4-tiny", "gemma4-tiny"),
        ("--cuda-arch", "sm90", "sm_90"),
        ("--draft", "peagel", "peagle"),
        ("--draft", "non", "none"),
        ("--backend", "cpu", "xnnpack"),
        ("--backend", "GPU", "cuda"),
    ],
)
def test_the_error_for_a_mistyped_name_suggests_the_closest_one(flag, typed, meant, tmp_path):
    _, line = export_fails(tmp_path, flag, typed)
    assert f"Did you mean {meant!r}?" in line


def test_an_unknown_target_is_a_usage_error_that_lists_the_known(tmp_path):
    code, line = export_fails(tmp_path, base=("--target-model", "zzzzzz", "--backend", "xnnpack"))
    assert code == 2 and all(name in line for name in TARGETS) and "Did you mean" not in line


@pytest.mark.parametrize(("which", "size"), [("checkpoint", 4), ("checkpoint", 500_000), ("draft", 1000)])
def test_truncated_and_missing_weights_are_named(which, size, copied, tmp_path):
    file = copied(which) / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(size)
    code, line = export_fails(tmp_path, f"--{which}", file.parent)
    assert code == 1
    assert str(file) in line and "truncated" in line
    file.unlink()
    code, line = export_fails(tmp_path, f"--{which}", file.parent)
    assert code == 1 and str(file) in line


@pytest.mark.parametrize(
    ("which", "path"),
    [("checkpoint", "../no/where"), ("checkpoint", "org/file.gguf"), ("draft", "models/a/b"), ("draft", "a.gguf")],
)
def test_an_argument_that_is_neither_a_path_nor_a_hub_name_is_refused_as_such(which, path, tmp_path):
    said = "GGUF heads are not read" if (which, path[-5:]) == ("draft", ".gguf") else "of the Hugging Face hub"
    code, line = export_fails(tmp_path, f"--{which}", path)
    assert (code, said in line) == (1, True), line


def respoil(file: Path, change) -> None:
    """Save a safetensors file again after ``change`` has edited its tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


LAST_MLP = "model.layers.5.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(LAST_MLP), "lacks layers.5.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({LAST_MLP: torch.zeros(64, 64)}), "[64, 64]"),
        (lambda tensors: tensors.update({LAST_MLP: tensors[LAST_MLP].to(torch.float8_e4m3fn)}), "quantized"),
    ],
)
def test_a_target_with_a_missing_misshapen_or_quantized_tensor_is_refused(change, says, copied, tmp_path):
    folder = copied("checkpoint")
    respoil(folder / "model.safetensors", change)
    code, line = export_fails(tmp_path, "--checkpoint", folder)
    assert (code, says in line) == (1, True), line


@pytest.mark.parametrize(
    ("field", "value", "says"), [("hidden_size", 192, ("576", "256", "pair")), ("vocab_size", 3000, ("3000", "2048"))]
)
def test_a_draft_for_another_target_is_refused(field, value, says, tmp_path):
    config = tiny_config()
    setattr(config, field, value)
    code, line = export_fails(tmp_path, "--draft", save_random_draft(tmp_path / "draft", config))
    assert code == 1 and all(each in line for each in says)


@pytest.mark.parametrize(
    ("layers", "convention", "says"),
    [("1,3", "input", "3 taps"), ("1,3,7", "input", "6 layers"), ("3,1,5", "input", "6 layers")]
    + [("1,3,6", "output", "6 layers")],
)
def test_taps_that_the_head_or_the_target_does_not_have_are_refused(layers, convention, says, tmp_path):
    code, line = export_fails(tmp_path, "--aux-layers", layers, "--aux-convention", convention)
    assert (code, says in line) == (1, True)


def test_a_lossy_proposal_method_is_refused(tmp_path):
    draft = save_random_draft(tmp_path / "draft", tiny_config())
    config = json.loads((draft / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["accept_tolerance"] = 0.1
    (draft / "config.json").write_text(json.dumps(config))
    line = export_fails(tmp_path, "--draft", draft)[1]
    assert "accept_tolerance" in line and "lossy" in line


def test_a_checkpoint_of_another_target_family_is_refused(tmp_path, checkpoints):
    _, folder = checkpoints("llama3.1-8B")
    code, line = export_fails(tmp_path, "--checkpoint", folder)
    assert code == 1
    assert "llama" in line and "--target-model llama3.1-8B" in line


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--chain-len", 16, "16"),
        ("--max-seq-len", "4k", "'4k' is no whole number: type 16 or more."),
    ],
)
def test_a_value_outside_of_a_flags_range_is_a_usage_error(flag, value, says, tmp_path):
    code, line = export_fails(tmp_path, flag, value)
    assert code == 2 and flag in line and says in line


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--max-seq-len", 2000, "1024"),
        ("--max-prefill", 65, "9 to 64"),
        ("--cuda-arch", "sm_90", "xnnpack"),
        ("--qlinear", "default", "xnnpack"),
    ],
)
def test_errors_for_lengths_and_flags_that_do_not_fit_say_which_values_do(flag, value, says, tmp_path):
    code, line = export_fails(tmp_path, flag, value)
    assert code == 1
    assert flag in line and says in line


AT_ONCE = [
    (("eagle3.export.cli", *EXPORT, "--draft", "9"), "--draft 9: gemma4-tiny has 4 heads"),
    (("eagle3.export.cli", "--target-model", "qwen3-8B", "--draft", "12"), "--draft 12: qwen3-8B has 11 heads"),
    (("eagle3.export.cli", *EXPORT, "--max-seq-len", "2000"), "type --max-seq-len 1024 or less"),
    (("eagle3.export.cli", "--checkpoint", "/nowhere", "--dry-run"), "--checkpoint /nowhere is not a folder"),
    (("eagle3.export.cli", "--target-model", "phi4", "--backend", "xnnpack"), "no draft head is known for phi4"),
    (("eagle3.export.fit_command", "gemma4-tiny", "1", "nowhere"), "--draft nowhere is not a folder"),
    (("eagle3.export.fit_command", "gema4-tiny", "1"), "TARGET gema4-tiny is no name"),
    (("eagle3.runner.commands.run", "nowhere", "--prompt", "a"), "nowhere is missing"),
    (("eagle3.runner.commands.inspect", "nowhere"), "nowhere is missing"),
    (("eagle3.runner.commands.bench", "nowhere", "--prompts", __file__), "nowhere is missing"),
    (("eagle3.runner.serve.cli", "nowhere"), "nowhere is missing"),
]
"""Commands with a wrong path or number, and what their error says."""


def test_wrong_paths_and_numbers_are_refused_before_torch_and_transformers_are_imported():
    code = f"""
import importlib, json, sys
from click.testing import CliRunner
found = []
for module, *args in {[list(command) for command, _ in AT_ONCE]!r}:
    result = CliRunner().invoke(importlib.import_module(module).main, args)
    heavy = [name for name in ("torch", "transformers", "executorch") if name in sys.modules]
    found.append((result.exit_code, result.stderr, heavy))
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for (code, line, heavy), (command, says) in zip(json.loads(done.stdout), AT_ONCE, strict=True):
        assert code in (1, 2) and heavy == [] and says in line, (command, line, heavy)


def test_a_library_call_prints_no_warning_of_libraries_and_makes_no_folder_that_stays_if_it_is_killed(tmp_path):
    code = """
import os, tempfile
from pathlib import Path
from eagle3.export import ExportConfig, prepare
from eagle3.export.hub.sources import find_sources
config = ExportConfig("gemma4-tiny", Path("out"), backend="xnnpack", dry_run=True)
with find_sources(config).local():
    assert os.listdir(tempfile.gettempdir()) == []
prepare(config)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and line.startswith("twin check"), done.stderr


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, artifact):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    args = (*EXPORT, "--output-dir", tmp_path / "out")
    assert "--overwrite" in fail_command(export_main, *args)[1]
    assert "notes.txt" in fail_command(export_main, *args, "--overwrite")[1]
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    before = (artifact / "export.json").read_bytes()
    assert "--overwrite" in fail_command(export_main, *EXPORT, "--output-dir", artifact)[1]
    assert "1024" in fail_command(export_main, *args[:-1], artifact, "--overwrite", "--max-seq-len", 2000)[1]
    assert (artifact / "export.json").read_bytes() == before


@pytest.mark.first(1)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_stopped_leaves_nothing_that_looks_finished(how, tmp_path):
    command = [sys.executable, "-m", "eagle3.export.cli", *EXPORT, "--output-dir", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not any(tmp_path.iterdir()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(how)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how], stderr
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in stderr
    left = [path.name for path in tmp_path.iterdir()]
    assert all(name == ".out.partial" for name in left)
    if how != signal.SIGKILL:
        assert left == []


def test_a_dry_run_writes_nothing_and_reads_no_weights(tmp_path, monkeypatch):
    from eagle3.export.checkpoints import SafetensorsFolder

    read = SafetensorsFolder.tensors

    def read_twins_alone(self):
        assert self.path not in (TINY.checkpoint, TINY.draft)
        return read(self)

    monkeypatch.setattr(SafetensorsFolder, "tensors", read_twins_alone)
    out = run_command(export_main, *EXPORT, "--output_dir", tmp_path / "out", "--dry-run", "--json")
    plan = json.loads(out.stdout)
    assert plan["twin"]["target"]["logits"] < 1e-4
    assert plan["taps_are"] == "hidden_states 1, 3, 5 (1,3,5 of config.json, read as inputs of layers)"
    assert [method["name"] for method in plan["methods"]] == ["prefill", "target_verify", "draft_decode", "speculate"]
    assert plan["methods"][0] == {"name": "prefill", "min_len": 9, "max_len": 64}
    assert plan["target_parameters"] > 5_000_000
    assert 0.25e9 < plan["run_bytes"] < 0.35e9  # 290 MB were measured
    assert 0.5 < plan["export_seconds"] / (21 * slowness()) < 2
    assert not (tmp_path / "out").exists()


# --- running


@pytest.mark.parametrize("command", [run_main, bench_main])
def test_a_missing_file_of_prompts_is_a_usage_error(command, artifact, tmp_path):
    code, line = fail_command(command, artifact, "--prompts", tmp_path / "nope.jsonl")
    assert code == 2 and "--prompts" in line and "nope.jsonl' does not exist" in line


def test_an_invalid_prompt_is_refused_in_one_line(artifact, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert fail_command(run_main, artifact)[0] == 2
    assert fail_command(run_main, artifact, "--prompt-tokens", "1,x")[0] == 2
    assert "empty" in fail_command(run_main, artifact, "--prompt-file", empty)[1]
    assert "empty" in fail_command(run_main, artifact, "--prompt-tokens", "")[1]
    assert "2048 is outside the vocabulary" in fail_command(run_main, artifact, "--prompt-tokens", "5,2048")[1]
    assert "chain length 4" in fail_command(run_main, artifact, "--prompt", "a", "--chain-len", 4)[1]


def test_a_path_that_is_no_artifact_is_refused_in_one_line(artifact, tmp_path):
    assert "is missing" in fail_command(run_main, tmp_path, "--prompt", "a")[1]
    foreign = tmp_path / "model.pte"
    foreign.write_bytes(b"PK\x03\x04" + bytes(2000))
    assert "no ExecuTorch program" in fail_command(run_main, tmp_path, "--prompt", "a")[1]
    whole = (artifact / "model.pte").read_bytes()
    for size in (6, 5000, len(whole) - 1000):
        foreign.write_bytes(whole[:size])
        code, line = fail_command(run_main, tmp_path, "--prompt-tokens", "5,6,7")
        assert (code, str(foreign) in line) == (1, True), line


def test_a_program_without_our_metadata_is_refused_with_the_missing_name(tmp_path):
    from executorch.exir import to_edge

    program = to_edge(torch.export.export(torch.nn.Linear(4, 4), (torch.zeros(1, 4),)))
    (tmp_path / "model.pte").write_bytes(program.to_executorch().buffer)
    code, line = fail_command(run_main, tmp_path, "--prompt-tokens", "1")
    assert (code, "get_max_seq_len" in line) == (1, True)


def test_without_a_tokenizer_token_ids_still_run(artifact, tmp_path):
    shutil.copy(artifact / "model.pte", tmp_path / "model.pte")
    assert "--prompt-tokens" in fail_command(run_main, tmp_path, "--prompt", "a")[1]
    out = run_command(run_main, tmp_path, "--prompt-tokens", "5,6,7", "--max-new-tokens", 5, "--json")
    assert json.loads(out.stdout)["text"] is None
