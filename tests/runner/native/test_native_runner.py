"""The native runner says what the Python runner says: tokens, rounds, refusals."""

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from native_runs import check_equal, run

from eagle3.export import ExportConfig, export
from eagle3.runner import load
from eagle3.runner.contract import EXPORT_RECORD, MODEL_FILE
from eagle3.runner.loop.lossless import replay

SAMPLED = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
]


def source_tokens(model, count):
    """The first ``count`` tokens of a module of the standard library, which gemma4-tiny has not seen in training."""
    return model.text.encode(Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()[:20000])[:count]


def test_greedy_tokens_and_rounds_are_those_of_the_python_runner(built, model, artifact):
    lengths = 1, 8, 9, 500, 1010
    rounds = [check_equal(built, model, artifact, [source_tokens(model, n)], max_new_tokens=64) for n in lengths]
    assert sum(rounds) > 40
    for chain_len in (0, 1, "auto"):
        options = {"chain_len": chain_len, "max_new_tokens": 40, "ignore_eos": True}
        check_equal(built, model, artifact, [source_tokens(model, 30)], **options)


@pytest.mark.parametrize("seed", range(10))
def test_sampled_tokens_are_those_of_the_python_runner(built, model, artifact, seed):
    options = SAMPLED[seed % len(SAMPLED)] | {"seed": seed * 0x0123456789ABCDEF % 2**63, "max_new_tokens": 48}
    length = 20 + seed if seed else 500  # whose new tokens lie on both sides of position 512, where new keys begin
    check_equal(built, model, artifact, [source_tokens(model, length)], **options)


def test_a_dialogue_takes_up_its_prefix_as_in_python(built, model, artifact):
    prompts, text = [], source_tokens(model, 40)
    for turn in range(3):
        prompts.append(list(text))
        reply = model.generate(text, max_new_tokens=20, ngram=False).token_ids
        text = text + reply + source_tokens(model, 90 + 20 * turn)[70:]
    prompts += [prompts[0], prompts[1][:50] + [5, 6, 7]]  # an older turn, and another continuation
    check_equal(built, model, artifact, prompts, max_new_tokens=20)
    check_equal(built, model, artifact, prompts, max_new_tokens=20, temperature=0.8, seed=3)


def test_an_application_cancels_and_continues(built, model, artifact):
    prompt = source_tokens(model, 30)
    done = subprocess.run([built / "application", artifact, *map(str, prompt)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    continued, cut, whole = done.stdout.splitlines()
    model.forget()
    expected = model.generate(prompt, max_new_tokens=40, ngram=False).token_ids
    assert [int(each) for each in continued.split()] == [int(each) for each in whole.split()] == expected
    reason, reused = cut.split()
    assert reason == "abort" and int(reused) > len(prompt)  # the cut rounds stay in the caches


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([1] * 5000, {}),
        ([3, 999999], {}),
        ([3], {"chain_len": 9}),
        ([3], {"max_new_tokens": 0}),
        ([3], {"temperature": -1.0}),
        ([3], {"temperature": 1.0, "top_k": -1}),
        ([3], {"temperature": 1.0, "top_p": 0.0}),
        ([3], {"temperature": 1.0, "min_p": 1.0}),
    ],
)
def test_prompts_and_options_are_refused_in_the_same_words(built, model, artifact, prompt, options):
    with pytest.raises(ValueError) as refused:
        model.generate(prompt, **options)
    code, results, error = run(built, artifact, [prompt], **options)
    mine, theirs = (re.sub(r"is -?[\d.]+,", "is N,", text.strip()) for text in (error, f"Error: {refused.value}"))
    assert code == 1 and not results and mine == theirs  # Python prints 0.0 where C++ prints 0


def changed(artifact, folder, before: bytes, after: bytes) -> Path:
    """A copy of the program in which ``before`` reads ``after``, of the same length."""
    program = (artifact / MODEL_FILE).read_bytes()
    assert before in program and len(before) == len(after)
    (folder / MODEL_FILE).write_bytes(program.replace(before, after))
    return folder / MODEL_FILE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"format_version": 8', b'"format_version": 9'),
        (b"get_chain_len", b"get_chain_lem"),
        (b"draft_decode", b"draft_decade"),
    ],
)
def test_a_program_of_another_kind_is_refused_in_the_same_words(built, artifact, tmp_path, before, after):
    path = changed(artifact, tmp_path, before, after)
    with pytest.raises(Exception) as refused:
        load(path)
    code, _, error = run(built, path, [[3]])
    assert code == 1 and error.strip() == f"Error: {refused.value}"


def test_files_that_are_no_program_are_refused_in_the_same_words(built, tmp_path):
    (tmp_path / "text.pte").write_text("no program at all")
    for path in (tmp_path, tmp_path / "text.pte"):
        with pytest.raises(Exception) as refused:
            load(path)
        code, _, error = run(built, path, [[3]])
        assert code == 1 and error.strip() == f"Error: {refused.value}"


def test_a_program_of_another_size_than_recorded_is_refused_in_the_same_words(built, artifact, tmp_path):
    shutil.copytree(artifact, tmp_path / "cut")
    with (tmp_path / "cut" / MODEL_FILE).open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(ValueError) as refused:
        load(tmp_path / "cut")
    code, _, error = run(built, tmp_path / "cut", [[3]])
    assert code == 1 and error.strip() == f"Error: {refused.value}"


def test_few_accepted_proposals_are_noted_in_the_same_words(built, model, artifact, tmp_path):
    prompt, options = source_tokens(model, 30), {"max_new_tokens": 80, "ignore_eos": True}
    shutil.copytree(artifact, tmp_path / "out")
    record = json.loads((artifact / EXPORT_RECORD).read_text())
    record["check"]["mean_acceptance_length"] = 19.5
    (tmp_path / "out" / EXPORT_RECORD).write_text(json.dumps(record))
    with load(tmp_path / "out") as other:
        result = other.generate(prompt, ngram=False, **options)
        assert result.stats.num_drafts >= 20 and other.acceptance_note(result)
        _, _, noted = run(built, tmp_path / "out", [prompt], **options)
        assert noted.strip() == other.acceptance_note(result)
    for others in ({"max_new_tokens": 10}, {"chain_len": 1}, {"temperature": 0.8, "seed": 1}):
        code, _, noted = run(built, tmp_path / "out", [prompt], **(options | others))
        assert code == 0 and noted == ""
    (tmp_path / "out" / EXPORT_RECORD).write_text(json.dumps(record | {"check": None}))  # with --no-check
    for unmeasured in (artifact, tmp_path / "out"):
        code, _, noted = run(built, unmeasured, [prompt], **options)
        assert code == 0 and noted == ""


def test_a_missing_operator_is_named(built, artifact, tmp_path):
    path = changed(artifact, tmp_path, b"llama::custom_sdpa", b"llama::custom_sdpb")
    code, _, error = run(built, path, [[3]])
    assert code == 1 and error.startswith(f"Error: {path}: a method does not load (") and error.count("\n") == 1
    assert "llama::custom_sdpb.out" in error


def test_caches_that_are_not_shared_are_refused(built, artifact):
    command = [built / "native" / "eagle3-native", artifact, "--check-caches"]
    assert subprocess.run(command).returncode == 0
    done = subprocess.run([*command, "--separate-arenas"], capture_output=True, text=True)
    assert done.returncode == 1 and "caches of their own" in done.stderr and "share_memory_arenas" in done.stderr


def test_the_command_links_neither_libtorch_nor_python(built):
    if shutil.which("ldd") is None:
        pytest.skip("ldd is not installed")
    linked = subprocess.run(["ldd", built / "native" / "eagle3-native"], capture_output=True, text=True).stdout
    assert "libexecutorch.so" in linked and not re.search(r"\b(libtorch|libc10|libpython)|not found", linked)


def test_all_kinds_of_artifacts_give_the_tokens_of_the_python_runner(built, family_exports):
    """Heads with a cache and without, that propose one token a call or all; experts, sinks, recurrent layers, windows;
    with ``speculate`` and without."""
    for folder in sorted(family_exports.iterdir()):
        artifact = folder / "out"
        with load(artifact) as model:
            prompt = [(7 * i + i * i) % model.metadata.vocab_size for i in range(14)]
            rest = model.metadata.max_seq_len  # to the last slot of the context
            check_equal(built, model, artifact, [prompt, prompt[:11]], max_new_tokens=rest, ignore_eos=True)
            if model.metadata.has_logits:
                check_equal(built, model, artifact, [prompt], max_new_tokens=20, temperature=0.8, seed=5)


@pytest.mark.whole
def test_with_8_bit_activations_texts_differ_at_near_ties_alone(built, tmp_path):
    """A rounding difference may change an 8-bit code, so either runner may choose the other of two nearly equal
    tokens."""
    flags = {"qlinear": "8da4w", "check": False, "fit": False}
    export(ExportConfig("gemma4-tiny", tmp_path / "out", backend="xnnpack", **flags))
    with load(tmp_path / "out") as model:
        source = source_tokens(model, 1600)
        prompts = [source[start : start + 20] for start in range(0, 1500, 100)]
        code, results, errors = run(built, tmp_path / "out", prompts, max_new_tokens=48)
        assert code == 0, errors
        texts = [result["token_ids"] for result in results]
        for prompt, text in zip(prompts, texts, strict=True):
            found = replay(model.session, prompt, text).divergence  # one row at a time, by the Python runner
            assert found is None or found.near_tie
        model.forget()
        expected = [model.generate(prompt, ngram=False, max_new_tokens=48).token_ids for prompt in prompts]
        assert sum(map(list.__eq__, texts, expected)) >= 11
