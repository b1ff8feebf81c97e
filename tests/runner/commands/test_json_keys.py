"""runner/keys.md describes every key that the commands write for an artifact, and no other."""

import json

from commands import run_command
from key_tables import BENCH, INSPECT, LINE, PLAN, RECORD, RESULT, paths

from eagle3.export import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.export.report import plan_json
from eagle3.runner.commands.bench import main as bench_main
from eagle3.runner.commands.inspect import main as inspect_main
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.contract import EXPORT_RECORD

PROMPT = ("--prompt-tokens", "2,45,17", "--max-new-tokens", 4)


def check(found, known, optional=()):
    keys = set(paths(found, known))
    assert keys <= set(known), sorted(keys - set(known))
    assert keys | set(optional) == set(known), sorted(set(known) - keys)


def test_the_keys_of_results_are_described(artifact, tmp_path):
    sampled = run_command(
        run_main, artifact, *PROMPT, "--temperature", 0.5, "--logprobs", 1, "--verify-lossless", "--json"
    )
    check(json.loads(sampled.stdout), RESULT, ["stop_reason"])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def", "id": "a"}\n')
    run_command(
        run_main, artifact, "--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "out.jsonl", *PROMPT[2:]
    )
    line = json.loads((tmp_path / "out.jsonl").read_text())
    greedy = set(RESULT) - {each for each in RESULT if each.startswith(("logprobs", "lossless"))}
    check(line, RESULT | LINE, set(RESULT) - greedy | {"stop_reason", "seed"})


def test_the_keys_of_an_inspection_and_of_the_record_are_described(artifact):
    check(json.loads(run_command(inspect_main, artifact, "--json").stdout), INSPECT, ["gpu_memory"])
    grouped = [f"manifest.{name}" for name in ("group_size", "split_k")]
    check(json.loads((artifact / EXPORT_RECORD).read_text()), RECORD, grouped)


def test_the_keys_of_a_benchmark_are_described(artifact, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def"}\n')
    given = ("--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 8, "--repeats", 1, "--json")
    compared = [f"ways[].{name}_first_artifact" for name in ("ratio_to", "divergence_from")]
    check(json.loads(run_command(bench_main, artifact, *given).stdout), BENCH, compared)


def test_the_keys_of_a_dry_run_are_described(tmp_path):
    plan = make_plan(ExportConfig("gemma4-tiny", tmp_path / "out", backend="xnnpack"))
    check(plan_json(plan), PLAN, ["twin", "repositories"])  # which the command adds
