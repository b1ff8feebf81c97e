"""Measures generation with neither prompt lookup nor the draft head, with each alone and with both, over texts that
repeat themselves and texts that do not.

    python scripts/bench/bench_lookup.py out [--new-tokens 128] [--passes 5] [--json]

Each prompt is run with all four variants in turn, in an order that rotates, so that a change of the machine's speed
affects all alike. A ratio compares two variants with the same prompt in the same pass. The printed ratios are medians
over prompts and passes, of tokens per second and of tokens per processor second of all threads, which other programs
disturb less. An artifact without a head has two variants.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from eagle3.runner import Model, Result, load
from eagle3.runner.bench.machine import machine
from eagle3.runner.cache.cached_tokens import common_prefix

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
FUNCTION = '''def {name}(self, value, default=None):
    """Return the {name} of value, or default."""
    if value is None:
        return default
    result = self._{name}.get(value)
    if result is None:
        result = self._make_{name}(value)
        self._{name}[value] = result
    return result

'''
ROW = '    {{"name": "{name}", "type": "string", "required": true, "default": null}},\n'
CASE = "    def test_{name}(self):\n        self.assertEqual({name}(1, 2), ({name}_result, None))\n\n"
WORDS = ("color", "width", "title", "owner", "label", "state", "order", "level")
NEITHER, HEAD, LOOKUP, BOTH = "neither", "head", "lookup", "both"


class Ways(NamedTuple):
    """The options of ``Model.generate`` for each variant."""

    chain_len: int
    ngram: bool


class Run(NamedTuple):
    result: Result
    seconds: float
    processor_seconds: float


def texts() -> dict[str, list[str]]:
    """Return prompts by kind: a file that is edited, rows that are filled in, tests that resemble each other; and the
    beginnings of ``prompts.jsonl``."""
    new = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return {
        "edit this file": [_file(first) for first in range(3)],
        "fill this JSON": ["fields = [\n" + _each(ROW, 5, first) for first in range(3)],
        "similar tests": ["class Tests(unittest.TestCase):\n" + _each(CASE, 4, first) for first in range(3)],
        "new text": new[:8],
    }


def _each(template: str, count: int, first: int) -> str:
    return "".join(template.format(name=WORDS[(first + at) % len(WORDS)]) for at in range(count))


def _file(first: int) -> str:
    """Return a prompt with the same functions twice, as for an edit; the second copy ends at its middle."""
    whole = _each(FUNCTION, 2, first)
    return f"# before\n{whole}# after\n{whole[: len(whole) // 2]}"


def ways_of(model: Model) -> dict[str, Ways]:
    chain_len = model.metadata.chain_len
    without = {NEITHER: Ways(0, False), LOOKUP: Ways(0, True)}
    return without | ({HEAD: Ways(chain_len, False), BOTH: Ways(chain_len, True)} if chain_len else {})


def measured(model: Model, new_tokens: int, passes: int) -> dict[str, list[dict[str, Run]]]:
    """Return for each kind of text the results of each prompt in each pass, by variant."""
    ways, found = ways_of(model), {kind: [] for kind in texts()}
    names = list(ways)
    for at in range(passes + 1):  # the first pass is the warm-up
        for kind, prompts in texts().items():
            for prompt in prompts:
                names = names[1:] + names[:1]
                results = {}
                for name in names:
                    model.forget()
                    wall, processor = perf_counter(), process_time()
                    result = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, **ways[name]._asdict())
                    results[name] = Run(result, perf_counter() - wall, process_time() - processor)
                if at:
                    found[kind].append(results)
        print(f"pass {at} of {passes}", file=sys.stderr)
    return found


def figures(found: list[dict[str, Run]]) -> dict[str, dict[str, float]]:
    """Return for each variant the tokens per second, the ratios to no speculation, the tokens per round, and the share
    of accepted tokens that the lookup proposed; for "both" also the ratios to the better of head and lookup."""
    table: dict[str, dict[str, float]] = {}
    for name in (way for way in (NEITHER, HEAD, LOOKUP, BOTH) if way in found[0]):
        stats = [runs[name].result.stats for runs in found]
        accepted = sum(each.num_accepted_tokens for each in stats)
        rounds = sum(each.num_drafts + each.num_undrafted for each in stats)
        table[name] = {
            "tokens_per_second": median(len(runs[name].result.token_ids) / runs[name].seconds for runs in found),
            "ratio": ratio(found, name, NEITHER, "seconds"),
            "processor_ratio": ratio(found, name, NEITHER, "processor_seconds"),
            "tokens_per_round": sum(each.generation_tokens for each in stats) / max(1, rounds),
            "by_lookup": sum(each.num_lookup_accepted_tokens for each in stats) / max(1, accepted),
        }
    if BOTH in table:
        for key, of in (("ratio", "seconds"), ("processor_ratio", "processor_seconds")):
            better = max((HEAD, LOOKUP), key=lambda name: table[name][key])
            table[BOTH][f"{key}_to_the_better"] = ratio(found, BOTH, better, of)
    return table


def ratio(found: list[dict[str, Run]], name: str, other: str, seconds: str) -> float:
    """Return the speed of one variant divided by that of another: the median over pairs of runs."""
    return median(getattr(runs[other], seconds) / getattr(runs[name], seconds) for runs in found)


def divergent(found: Mapping[str, list[dict[str, Run]]]) -> list[str]:
    """Return a line for each result whose tokens differ from those without speculation."""
    lines = []
    for kind, prompts in found.items():
        for runs in prompts:
            plain = runs[NEITHER].result.token_ids
            for name, run in runs.items():
                tokens = run.result.token_ids
                if tokens != plain:
                    at = common_prefix(tokens, plain)
                    lines.append(f"{kind}, {name}: differs from token {at} on: {tokens[at]}, {plain[at]}")
    return sorted(set(lines))


def as_markdown(tables: Mapping[str, dict[str, dict[str, float]]]) -> str:
    lines = ["| text | proposals by | tokens/s | ratio | by processor time | tokens a round | accepted by the lookup |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for kind, table in tables.items():
        for name, row in table.items():
            ratios = []
            for key in ("ratio", "processor_ratio"):
                better = row.get(f"{key}_to_the_better")
                ratios.append(f"{row[key]:.2f}" + (f" ({better:.3f} x the better)" if better else ""))
            lines.append(
                f"| {kind} | {name} | {row['tokens_per_second']:.0f} | {' | '.join(ratios)} | "
                f"{row['tokens_per_round']:.2f} | {row['by_lookup']:.0%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with load(asked.artifact) as model:
        found = measured(model, asked.new_tokens, asked.passes)
        backend = model.metadata.manifest.get("backend")
    tables, differing = {kind: figures(prompts) for kind, prompts in found.items()}, divergent(found)
    if asked.json:
        print(json.dumps({"machine": machine(backend), "tables": tables, "differing": differing}))
        return
    print(f"{as_markdown(tables)}\n\n{machine(backend)}, load {os.getloadavg()[0]:.1f}")
    print("\n".join(differing) or "all variants give the same tokens")


if __name__ == "__main__":
    main()
