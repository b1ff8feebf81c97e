"""The exported gemma4-tiny gives the tokens of transformers and the numbers of the eager module."""

import json
import subprocess
import sys

import pytest
import torch
from commands import run_command
from eager import eager_speculator

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.runner.artifact.pte import read_constants, read_pte
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.contract import DECODE, METHODS, MODEL_FILE, READ_STATE, WRITE_STATE
from eagle3.runner.hosts.executorch_host import load_runtime
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.generation import complete


@pytest.fixture(scope="module")
def speculator():
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, backend="xnnpack"))
    return eager_speculator(plan)


def some_tokens(length, seed=0):
    return torch.randint(4, 2048, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def transformers_greedy(reference, prompt, count):
    given = torch.tensor([prompt])
    out = reference.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.first(1)
@pytest.mark.parametrize("length", [9, 1, 64, 65, 400])
def test_tokens_equal_transformers_greedy_tokens(length, session, reference):
    prompt = some_tokens(length, seed=length)
    result = complete(session, prompt, max_new_tokens=80)
    assert result.token_ids == transformers_greedy(reference, prompt, 80)


def test_generation_ends_with_the_context(session, reference):
    prompt = some_tokens(990, seed=3)
    result = complete(session, prompt, max_new_tokens=200)
    assert result.token_ids == transformers_greedy(reference, prompt, 34)[: len(result.token_ids)]
    assert len(prompt) + len(result.token_ids) == 1024 or result.finish_reason == "stop"


def test_without_speculation_and_with_every_chain_length_the_tokens_are_the_same(session):
    prompt = some_tokens(20, seed=5)
    plain = complete(session, prompt, max_new_tokens=60, chain=0).token_ids
    for chain_len in (1, 2, 3):
        assert complete(session, prompt, max_new_tokens=60, chain=chain_len).token_ids == plain


def test_the_same_loop_over_the_eager_module_accepts_the_same_proposals(session, speculator):
    prompt = some_tokens(40, seed=9)
    ours = complete(session, prompt, max_new_tokens=60)
    eager = complete(EagerSession(speculator, session.metadata), prompt, max_new_tokens=60)
    assert ours.token_ids == eager.token_ids
    assert ours.stats.counts() == eager.stats.counts()


def test_every_method_gives_the_eager_modules_numbers_for_every_window(session, speculator):
    eager = EagerSession(speculator, session.metadata)
    prompt, position = torch.tensor([some_tokens(64, seed=1)]), torch.arange(64)
    for rows in (9, 33, 64):
        ids, feature, logits = session.prefill(prompt[:, :rows], position[:rows])
        expected_ids, expected, expected_logits = eager.prefill(prompt[:, :rows], position[:rows])
        assert ids.tolist() == expected_ids.tolist()
        torch.testing.assert_close((feature, logits), (expected, expected_logits), atol=1e-4, rtol=1e-4)
        for slots in (rows, 1, 4):
            tokens = torch.tensor([some_tokens(slots, seed=2)])
            id_, state, draft_logits = session.draft_decode(tokens, feature[:, :slots], position[:slots])
            expected_id, expected_state, expected_draft_logits = eager.draft_decode(
                tokens, feature[:, :slots], position[:slots]
            )
            assert id_.tolist() == expected_id.tolist()
            torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(draft_logits, expected_draft_logits, atol=1e-4, rtol=1e-4)
    for rows in (2, 3, 4):
        window, input_pos = torch.tensor([some_tokens(rows, seed=rows)]), torch.arange(64, 64 + rows)
        ids, feature, logits = session.target_verify(window, input_pos)
        expected_ids, expected, expected_logits = eager.target_verify(window, input_pos)
        assert ids.tolist() == expected_ids.tolist()
        torch.testing.assert_close((feature, logits), (expected, expected_logits), atol=1e-4, rtol=1e-4)


def test_writing_over_a_rejected_window_leaves_no_trace_of_it(session):
    prompt = torch.tensor([some_tokens(64, seed=11)])
    window, wrong = torch.tensor([some_tokens(4, seed=12)]), torch.tensor([some_tokens(4, seed=13)])
    at = torch.arange(64, 68)
    session.prefill(prompt, torch.arange(64))
    ids, feature, logits = session.target_verify(window, at)
    session.target_verify(wrong, at)
    again_ids, again, _ = session.target_verify(window, at)
    assert ids.tolist() == again_ids.tolist()
    assert torch.equal(feature, again)


def test_json_has_tokens_text_and_statistics_and_stdout_the_text(artifact):
    args = ("--prompt", "class Reader:\n    def __init__(self, stream):\n", "--max-new-tokens", 40)
    record = json.loads(run_command(run_main, artifact, *args, "--json").stdout)
    assert set(record) == {"token_ids", "text", "finish_reason", "stats"}
    assert record["finish_reason"] in ("stop", "length") and record["text"]
    plain = run_command(run_main, artifact / "model.pte", *args)
    assert plain.stdout.rstrip("\n") == record["text"].rstrip("\n")
    assert "mean acceptance length" in plain.stderr


def test_the_draft_head_is_accepted_as_often_as_it_was_trained_to_be(session, reference):
    """Check the acceptance rate. With a wrong tap or vocabulary map it would be about 1%; this head was trained to more
    than two tokens per round."""
    stats = complete(session, transformers_greedy(reference, some_tokens(9), 100), max_new_tokens=300).stats
    assert stats.mean_acceptance_length > 2


def test_constants_read_from_the_program_equal_those_of_the_runtime(artifact):
    """Compare with the program itself, since the runtime's bindings return no tensor to a PyTorch of another
    version."""
    program = load_runtime().load_program(artifact / MODEL_FILE)
    found, methods = read_constants(artifact / MODEL_FILE)
    assert methods == {*METHODS, DECODE, READ_STATE, WRITE_STATE} and set(found) == program.method_names - methods
    for name, values in found.items():
        given = program.load_method(name).execute(())
        assert len(given) == len(values)
        for one, other in zip(values, given, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one, other) and one.dtype == other.dtype if torch.is_tensor(one) else one == other


def test_opening_an_artifact_executes_nothing_and_imports_no_compiler(artifact):
    code = (
        "import sys; from pathlib import Path; from executorch.runtime import Program\n"
        "Program.load_method = None\n"
        "from eagle3.runner.artifact.opening import open_artifact; from eagle3.runner.artifact.pte import read_pte\n"
        "metadata = open_artifact(Path(sys.argv[1])).metadata; read_pte(Path(sys.argv[1]) / 'model.pte')\n"
        "print(metadata.draft_ids.shape, [name for name in sys.modules if name.startswith('executorch.exir.')])"
    )
    head = "from eagle3.runner.hosts.executorch_host import load_runtime; load_runtime()\n"
    done = subprocess.run([sys.executable, "-c", head + code, artifact], capture_output=True, text=True)
    assert done.stdout == "torch.Size([1024]) []\n", done.stderr


def test_a_damaged_program_is_refused_with_one_line(artifact, tmp_path):
    whole = (artifact / MODEL_FILE).read_bytes()
    damaged = tmp_path / MODEL_FILE
    root = int.from_bytes(whole[:4], "little")
    damaged.write_bytes(whole[:root] + b"\xff" * 64 + whole[root + 64 :])
    for read in (read_constants, read_pte):
        with pytest.raises(ValueError, match="is damaged"):
            read(damaged)
