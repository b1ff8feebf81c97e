"""The keys of JSON that the commands write, for runner/keys.md.

``KEYS`` has the meaning of each key. ``python tests/helpers/key_tables.py`` writes the page anew.
tests/project/test_key_tables.py checks that the page is current, and tests/runner/commands/test_json_keys.py that the
keys are those of an artifact and of the commands.

In a path, ``[]`` stands for each entry of a list and ``*`` for each name of an object whose keys are names: of methods,
files, packages. ``path`` writes them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from places import ROOT

PAGE = ROOT / "runner" / "keys.md"
SPREAD = {"median": "over the passes", "min": "the least", "max": "the largest"}
COUNTED = {"count": "how many", "bytes": "their bytes"}
STATS = {
    "prompt_tokens": "tokens of the prompt",
    "reused_prompt_tokens": "of these, tokens that the caches still held",
    "generation_tokens": "new tokens",
    "num_undrafted_steps": "rounds without a proposal",
    "num_drafts": "rounds with proposals, of the head or of prompt lookup",
    "num_draft_tokens": "proposals",
    "num_accepted_tokens": "accepted proposals",
    "num_lookup_drafts": "rounds whose proposals came from the text",
    "num_lookup_draft_tokens": "their proposals",
    "num_lookup_accepted_tokens": "of these, accepted ones",
    "mean_acceptance_length": "tokens of a round with proposals: 1 and the accepted ones",
    "acceptance_rate_per_position": "for each place in the chain, the share of rounds that accepted its proposal",
    "time_to_first_token_seconds": "of the prefill",
    "time_per_output_token_seconds": "of each later token",
    "prefill_tokens_per_second": "computed prompt tokens by the time of the prefill",
    "decode_tokens_per_second": "later tokens by their time",
    "methods.*.calls": "calls of a method",
    "methods.*.mean_ms": "mean milliseconds of a call",
    "loop_share": "share of the time outside the methods",
}
READING = {
    "changes": "the fields that this reading sets; {} for what the files say",
    "acceptance_length": "expected tokens of a round",
    "interval": "its 95% bounds",
    "by_position": "acceptance rate at each place in the chain",
    "by_position_intervals": "their 95% bounds",
    "first_accepted": "share of accepted first proposals",
    "tokens": "tokens that were tried",
}
TENSOR = {"dtype": "dtype", "shape": "shape, upper bounds", "dynamic": "true if the shape may be smaller"}


def below(prefix: str, keys: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.{key}": meaning for key, meaning in keys.items()}


RESULT = {
    "token_ids": "the new tokens, with the end token",
    "text": "their text; null without a tokenizer",
    "finish_reason": "`stop`, `length` or `abort`",
    "stop_reason": "the token or string that ended the text; left out if there is none",
    "seed": "of a sampled generation; left out in greedy decoding",
    "logprobs[].token_id": "with `--logprobs`: a new token",
    "logprobs[].logprob": "its log-probability",
    "logprobs[].top": "the most probable tokens, with the same two keys",
    **below("stats", STATS),
    "lossless.compared": "with `--verify-lossless`: tokens compared, including the first that differs",
    "lossless.method": "the method that computed the tokens again",
    "lossless.divergence": "the first token that differs, with its margin; null if none does",
}
LINE = {
    "line": "number of the prompt's line in the file, from 1 on",
    "id": "the prompt's own id; left out if it has none",
    "turn": "number of the turn, from 0 on",
    "request": "hash of the prompt and the options, by which a later run finds the line",
}
INSPECT = {
    "model": "path of the program",
    "files[].name": "a file of the artifact",
    "files[].bytes": "its size; null if it is missing",
    "files[].matches_record": "true if its sha256 is the recorded one, null if it was not compared",
    "metadata": "the constant methods by name (contract/); tensors as dtype and shape",
    "methods.*.rows": "the fewest rows of a call, `min`, and the most, `max`; null for a method that takes no rows",
    "methods.*.dynamic_length": "true if the number of rows varies",
    **below("methods.*.inputs[]", TENSOR),
    **below("methods.*.outputs[]", TENSOR),
    **below("methods.*.delegates.*", COUNTED),
    **below("methods.*.delegates.*.named_data", COUNTED),
    "methods.*.operators": "calls of each operator outside delegates",
    "methods.*.instructions": "instructions of the method",
    "methods.*.planned_memory[].bytes": "size of a memory that ExecuTorch plans",
    "methods.*.planned_memory[].device": "where it is",
    "methods.*.planned_memory[].mutable": "true for the memory of the caches",
    "methods.*.linears": "CUDA: quantized linears by kernel; null for a CPU",
    "mutable_buffers[].name": "a cache",
    "mutable_buffers[].dtype": "its dtype",
    "mutable_buffers[].shape": "its shape",
    "mutable_buffers[].bytes": "its size",
    "mutable_buffers[].memory_id": "the planned memory that it is in",
    "mutable_buffers[].offset": "where it is there",
    "mutable_buffers[].methods": "the methods that use it",
    "weights.file_bytes": "size of the program",
    "weights.program_bytes": "size of its graphs",
    **below("weights.delegates", COUNTED),
    **below("weights.constants", COUNTED),
    **below("weights.constants.by_dtype.*", COUNTED),
    **below("weights.constants.unused", COUNTED),
    **below("weights.named_data", COUNTED),
    **below("weights.initial_state", COUNTED),
    "weights.padding_bytes": "bytes between the parts",
    "fit": "the entry of `export.json`; left out if nothing was measured",
    "gpu_memory": "CUDA: the bytes that a run takes, by part",
}
BENCH = {
    "prompts": "how many prompts",
    "repeats": "passes over them",
    "options": "options of the generations",
    "decoding": "greedy or sampled, in words",
    "artifacts[].artifact": "path",
    "artifacts[].has_decode": "true if it has `decode`",
    "artifacts[].chain_len": "draft tokens of a round",
    "artifacts[].max_seq_len": "context in tokens",
    "artifacts[].has_logits": "true if methods return logits",
    "artifacts[].manifest": "as in `export.json`",
    "artifacts[].window": "rows of a usual verify window",
    "machine": "processor, cores and system",
    "versions": "installed packages",
    "ways[].artifact": "a measured configuration: its artifact",
    "ways[].chain_len": "its chain length; 0 is no speculation",
    "ways[].ngram": "true with prompt lookup",
    **below("ways[].tokens_per_second", SPREAD),
    **below("ways[].prefill_tokens_per_second", SPREAD),
    **below("ways[].decode_tokens_per_second", SPREAD),
    **below("ways[].time_to_first_token_ms", SPREAD),
    **below("ways[].time_per_output_token_ms", SPREAD),
    "ways[].round.ms": "milliseconds of a round",
    "ways[].round.methods.*.calls": "calls of a method in a round",
    "ways[].round.methods.*.ms_a_call": "milliseconds of a call",
    "ways[].round.methods.*.ms": "milliseconds of the method in a round",
    "ways[].round.loop_share": "share of the time outside the methods",
    "ways[].stats": "the keys of a result's `stats`, over all passes",
    "ways[].categories": "the same figures for each category of prompts",
    "ways[].ratio_to_no_speculation": "ratio of speeds: median, min, max; left out of the first entry",
    "ways[].divergence_from_no_speculation": "the first token that differs; null if none does",
    "ways[].ratio_to_first_artifact": "with `--compare`: the same for the other artifact",
    "ways[].divergence_from_first_artifact": "with `--compare`: the same for the other artifact",
    **below("step_ms.*", SPREAD),
    **below("step_ratios.*", SPREAD),
    "contexts": "lengths of `--contexts`",
}
PLAN = {
    "target": "name or family of the target",
    "backend": "`cuda`, `xnnpack` or `mlx`",
    "methods[].name": "a method that would be made",
    "methods[].min_len": "its fewest rows",
    "methods[].max_len": "its most rows",
    "taps": "layers whose input the head takes",
    "taps_are": "where that is said, in words",
    "chain_len": "draft tokens of a round",
    "verify_rows": "the most rows of a verify window",
    "max_seq_len": "context in tokens",
    "target_parameters": "numbers in the target's files",
    "target_bytes": "their bytes on disk",
    "draft_kind": "architecture of the head",
    "draft_dialect": "the trainer whose format its files have",
    "draft_parameters": "numbers in the head's files",
    "draft_bytes": "their bytes on disk",
    "draft_vocab_size": "ids that the head can propose",
    "shares_embedding": "true if the head takes the target's embedding",
    "artifact_bytes": "CPU: size of `model.pte`; null for CUDA",
    "run_bytes": "memory of a run, of the GPU or of `eagle3-run`",
    "export_bytes": "memory of the export; null if weights stay mapped",
    "export_seconds": "CPU: a guess of the seconds of the export on this machine; null for others",
    "fits": "CUDA: for each known GPU, true if a run fits; null for a CPU",
    "longest_context": "CUDA: tokens that each GPU holds; null for a CPU",
    "gpu_memory": "CUDA: memory of a run by part; null for a CPU",
    "twin": "as in the manifest",
    "repositories": "as in the manifest",
}
MANIFEST = {
    "format_version": "version of the artifact's format",
    "target": "name or family of the target",
    "model_type": "transformers' name of its architecture",
    "target_sha256": "of each file of its checkpoint",
    "draft": "repository or folder of the head; null without one",
    "draft_verifier": "the target that the head names",
    "draft_kind": "architecture of the head",
    "draft_dialect": "the trainer whose format its files have",
    "draft_sha256": "of each of its files",
    "taps": "layers whose input the head takes",
    "taps_are": "where that is said, in words",
    "qlinear": "form of the target's linears",
    "draft_qlinear": "form of the head's linears",
    "kv_cache": "CUDA: form of the caches of full attention",
    "backend": "`cuda`, `xnnpack` or `mlx`",
    "random_weights": "true if the weights are random",
    "packages": "versions that made it",
    "repositories": "name and commit of what came from the hub",
    "twin.target": "largest differences of a small copy from transformers, and its size",
    "twin.draft": "the same for a Gemma 4 assistant, else null",
    "qembedding": "CPU: form of the embedding",
    "group_size": "CPU, 4-bit linears: weights that share a scale",
    "split_k": "CPU, 4-bit linears: true if long ones are split",
}
RECORD = {
    "flags": "each flag of the export; null is the default",
    **below("manifest", MANIFEST),
    "check.prompts": "prompts of the check after the export; `check` is null if it was not made",
    "check.new_tokens": "tokens that it generated",
    "check.compared_with_eager": "true if they were compared with PyTorch's",
    "check.near_ties": "tokens that differ by rounding",
    "check.proposals_compared": "proposals compared with PyTorch's",
    "check.tolerance": "how far rounding may move logits, in their standard deviations",
    "check.mean_acceptance_length": "tokens of a round",
    "check.speculation_gain": "speed with speculation by speed without; null if the machine was busy",
    "check.step_ms": "milliseconds of single calls",
    "check.cpu_share": "CPU: CPU time of those calls by their time",
    "fit.verdict": "`fits`, another reading, or no pair; `fit` is null if the head was not measured",
    **below("fit.file", READING),
    **below("fit.best", READING),
    "fit.readings[]": "every tried reading, with the same keys",
    "fit.left_open": "fields that the files do not say",
    "fit.text": "the text that was tried, in words",
    "fit.seed": "of the text's choice",
    "fit.chain_len": "proposals of a tried round",
    "fit.streamed": "true if the target was computed layer by layer",
    "fit.chance": "share of the most frequent token",
    "fit.target_seconds": "of the target's computation",
    "fit.seconds": "of the whole measurement",
    "fit.best_chain_len": "the chain length that pays most by the bytes that are read",
    "stages[].stage": "a stage of the export",
    "stages[].seconds": "its time",
    "stages[].peak_mb": "the process's largest memory up to its end, in MB",
    "target_parameters": "numbers of the target, as loaded",
    "draft_parameters": "numbers of the head that are its own",
    "draft_bytes": "their memory, with the head's caches",
    "files.*.bytes": "size of a file of the artifact",
    "files.*.sha256": "its hash",
    "files.*.program.bytes": "size of the program's graphs",
    "files.*.program.sha256": "their hash",
}
KEYS = {
    "`eagle3-run --json`": RESULT,
    "each line of `eagle3-run --prompts`, besides these keys": LINE,
    "`eagle3-inspect --json`": INSPECT,
    "`eagle3-bench --json`": BENCH,
    "`eagle3-export --dry-run --json`": PLAN,
    "`export.json`, which `eagle3-export --json` prints": RECORD,
}
NAMED = {"methods", "files", "delegates", "by_dtype", "step_ms", "step_ratios"}
"""Keys whose objects have names as keys."""


def paths(found: dict[str, Any], known: dict[str, str], prefix: str = "") -> Iterator[str]:
    """Yield the paths of ``found``. What ``known`` describes as a whole is not entered."""
    for key, value in found.items():
        path = prefix + key
        if path in known or f"{path}[]" in known:
            yield path if path in known else f"{path}[]"
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for each in value:
                yield from paths(each, known, f"{path}[].")
        elif isinstance(value, dict) and key in NAMED and all(isinstance(each, dict) for each in value.values()):
            for each in value.values():
                yield from paths(each, known, f"{path}.*.")
        elif isinstance(value, dict):
            yield from paths(value, known, f"{path}.")
        else:
            yield path


def page() -> str:
    """Return the text of the page."""
    lines = ["# The keys of JSON", ""]
    lines.append(
        "What the commands print with `--json`, and what `export.json` holds. `[]` is each entry of a list, `*` each"
    )
    lines.append("name. `python tests/helpers/key_tables.py` writes this page.")
    for title, keys in KEYS.items():
        lines += ["", f"## {title}", "", "| key | meaning |", "| --- | --- |"]
        lines += [f"| `{key}` | {meaning} |" for key, meaning in keys.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
