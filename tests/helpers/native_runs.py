"""Runs the native runner and compares it with the Python runner."""

import json
import subprocess


def run(built, artifact, prompts, **options):
    """Run the command. Returns (exit code, results, stderr)."""
    flags = []
    for name, value in options.items():
        given = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        flags += ["--" + name.replace("_", "-"), *([] if value is True else [given])]
    for prompt in prompts:
        flags += ["--prompt-tokens", ",".join(map(str, prompt))]
    command = [built / "native" / "eagle3-native", artifact, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


SAME = ("prompt_tokens", "reused_prompt_tokens", "generation_tokens")
ROUNDS = ("num_undrafted_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
ROUNDS += ("acceptance_rate_per_position",)
"""Counts that show a fault that leaves the tokens right: a wrong draft slot costs acceptance only."""


def check_equal(built, model, artifact, prompts, **options) -> int:
    """Check that both runners give the same tokens in the same rounds, for prompts one after the other. Returns the
    number of rounds."""
    model.forget()
    expected = [model.generate(prompt, ngram=False, **options) for prompt in prompts]
    code, results, errors = run(built, artifact, prompts, **options)
    assert code == 0, errors
    adaptive = options.get("chain_len") == "auto"  # whose lengths depend on measured times
    for mine, theirs in zip(results, expected, strict=True):
        assert mine["token_ids"] == theirs.token_ids, (options, len(theirs.prompt_token_ids))
        assert mine["finish_reason"] == theirs.finish_reason and mine.get("stop_reason") == theirs.stop_reason
        counts = theirs.stats.counts()
        keys = SAME if adaptive else SAME + ROUNDS
        assert {key: mine["stats"][key] for key in keys} == {key: counts[key] for key in keys}, options
        calls = {name: each["calls"] for name, each in mine["stats"]["methods"].items()}
        assert adaptive or calls == dict(theirs.stats.method_calls)
    return sum(mine["stats"]["num_drafts"] for mine in results)
