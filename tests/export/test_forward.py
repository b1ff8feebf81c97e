"""An artifact with ``forward`` runs in ExecuTorch's own runner, and its numbers equal the eager module's."""

import json
import subprocess
import sys

import pytest
import torch
from commands import fail_command, run_command
from family_exports import WITH_FORWARD, family_plan

from eagle3.export.cli import main as export_main
from eagle3.export.pipeline import load_speculator
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.commands.inspect import main as inspect_main
from eagle3.runner.contract import FORWARD
from eagle3.runner.hosts.executorch_host import ExecuTorchSession, load_llm_ops, load_runtime
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.generation import complete
from eagle3.runner.text.text import Text
from eagle3.targets.attention import EagerAttention

EXPORT = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", "--with-forward")
RUNNER = """
import json, sys
import executorch.extension.llm.custom_ops.custom_ops
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

asked, generations = json.load(open(sys.argv[1])), []
runner = TextLLMRunner(asked["model"], asked["tokenizer"])
for prompt in asked["prompts"]:
    generations.append([])
    runner.reset()
    config = GenerationConfig(echo=False, max_new_tokens=asked["max_new_tokens"], temperature=0.0)
    runner.generate(prompt, config, generations[-1].append)
json.dump(generations, open(sys.argv[1], "w"))
"""


@pytest.mark.whole
def test_executorchs_own_runner_gives_the_tokens_of_ours(family_exports, tmp_path):
    """ExecuTorch's runner has a process of its own, because it ends the process for some errors. The prompts have one
    token, fewer tokens than a chunk, one chunk, one token more, and several chunks."""
    out, asked = family_exports / "gemma4-31B" / "out", tmp_path / "asked.json"
    artifact, text = open_artifact(out), Text(out)
    longest = artifact.metadata.forward_len
    prompts = [("The quick brown fox jumps over it. " * 3)[:length] for length in (1, 7, longest, longest + 1, 70)]
    given = {"model": str(artifact.model), "tokenizer": str(artifact.tokenizer_file)}
    asked.write_text(json.dumps(given | {"prompts": prompts, "max_new_tokens": 40}))
    done = subprocess.run([sys.executable, "-c", RUNNER, asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    session, said = open_session(artifact), []
    for prompt in prompts:
        tokens = complete(session, text.encode(prompt), max_new_tokens=40).token_ids
        said.append([text.decode([token]) for token in tokens])  # one character per token
    assert json.loads(asked.read_text()) == said
    assert len({"".join(pieces) for pieces in said}) == len(prompts)


@pytest.mark.parametrize("name", WITH_FORWARD)
def test_forward_gives_the_eager_modules_logits_and_shares_the_targets_cache(name, family_exports):
    artifact = open_artifact(family_exports / name / "out")
    load_llm_ops(load_runtime())
    program = load_runtime().load_program(artifact.model)
    session, forward = ExecuTorchSession(program, artifact.metadata), program.load_method(FORWARD)
    speculator = load_speculator(family_plan(name, family_exports / name), EagerAttention, torch.float32)
    tokens = torch.randint(3, 96, (1, 64), generator=torch.Generator().manual_seed(3))
    for method, start, end in (
        (FORWARD, 0, 1),
        (FORWARD, 1, 2),
        (FORWARD, 2, 14),
        ("prefill", 14, 24),
        (FORWARD, 24, 25),
        ("target_verify", 25, 28),
        (FORWARD, 28, 40),
        (FORWARD, 40, 41),
    ):
        inputs = tokens[:, start:end].contiguous(), session.positions[start:end]
        (logits,) = forward.execute(inputs) if method == FORWARD else getattr(session, method)(*inputs)[2:]
        expected = getattr(speculator, method)(*inputs)[-1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_forward_is_described_in_metadata_and_inspect(family_exports):
    out = family_exports / "gemma4-31B" / "out"
    found = json.loads(run_command(inspect_main, out, "--json").stdout)
    method, constants = found["methods"][FORWARD], found["metadata"]
    assert method["rows"] == {"min": 1, "max": 16} and method["dynamic_length"]
    assert [entry["shape"] for entry in method["inputs"]] == [[1, 16], [16]]
    assert [(entry["dtype"], entry["shape"]) for entry in method["outputs"]] == [("float32", [1, 1, 96])]
    assert (constants["get_max_seq_len"], constants["get_max_context_len"]) == (16, 128)
    assert open_artifact(out).metadata.max_seq_len == 128


def test_forward_and_decode_in_one_export_are_refused(tmp_path):
    code, line = fail_command(export_main, *EXPORT, "--with-decode", "--output-dir", tmp_path / "out")
    assert code == 1 and "ExecuTorch's own runner" in line and "leave one of the two out" in line
    assert not (tmp_path / "out").exists()
