"""The stages of ``gpu_run.py``: each returns its steps, by name. A step returns its facts, or raises NotRun or Wrong.

probe       how fast the card copies, and how fast it reads weights once, by loads and by bulk copies
tournament  every kernel of few rows and its variants: right, then alone, then in the order of 60 layers
unpack      Gemma 4 31B in both layouts of weights
rounds      a round of each, by CUDA graphs, and without them kernel by kernel
pairs       the tokens of small pairs, and of gemma4-tiny in both layouts, against their modules' (gpu_expected.py)
prefill     chunks of 128 and 1,024 tokens with each layout of Gemma 4 31B
soak        gemma4-tiny for thousands of rounds: the same greedy texts, JSON by a schema, no growth of memory
"""

import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import gpu_tournament
import torch
from gpu_carry import is_whole, unpack_artifact
from gpu_cubins import Cubins, Driver
from gpu_probe import read_speeds
from gpu_rounds import A_ROUND, Facts, NotRun, copied, measure_prefill, measure_round
from gpu_run import EXPECTED, LAYOUTS, PAIRS, SMALL, Record, unpacked
from gpu_tournament import Tournament
from gpu_variants import VARIANTS, Variant
from proposed import proposed

from eagle3.runner import load
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.generation import complete
from eagle3.runner.model import Model

GRAPHS = "by CUDA graphs"
Steps = dict[str, Callable[[], Facts]]


class Wrong(Exception):
    """A result is wrong, and the GPU can be used further; the message is the fault. ``facts``: those of the step."""

    def __init__(self, fault: str, facts: Facts | None = None):
        super().__init__(fault)
        self.facts = facts or {}


@dataclass(frozen=True)
class Given:
    """The folder of what was made, the folder for what is unpacked, and the steps so far."""

    folder: Path
    work: Path
    record: Record

    def unpacked(self, name: str) -> Path:
        check_gpu()
        try:
            return unpacked(self.folder, self.work, name)
        except ValueError as error:
            raise NotRun(error) from error

    def small(self, name: str) -> Path:
        """Return the unpacked artifact of a small pair."""
        artifact = self.unpacked(SMALL) / name
        if not artifact.is_dir():
            raise NotRun(f"{SMALL} has no {name}")
        return artifact

    def wide(self, layout: str) -> Path:
        """Return the unpacked artifact of Gemma 4 31B in a layout."""
        check_gpu()
        artifact = self.work / "wide" / layout
        if not is_whole(artifact):
            raise NotRun(f"Gemma 4 31B in {layout} was not unpacked")
        return artifact


def check_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotRun("this needs an NVIDIA GPU and PyTorch's CUDA build, and found none")


# --- The card, and the kernels alone


def probe(given: Given) -> Steps:
    def copy() -> Facts:
        check_gpu()
        return {"device": torch.cuda.get_device_name(), "a copy moves, TB/s": round(copied() / 1e12, 3)}

    def read() -> Facts:
        check_gpu()
        if not (code := given.folder / "read_probe.cubin").is_file():
            raise NotRun(f"{code.name} is missing")
        return read_speeds(code)

    return {"copy": copy, "read": read}


def tournament(given: Given) -> Steps:
    """Its own steps, of which those of a variant need it to be right."""
    folder = given.unpacked("tournament.tar.xz")
    torch.empty(1, device="cuda")  # creates a context
    cubins = Cubins(folder, Driver(), lambda: torch.cuda.current_stream().cuda_stream)
    found = Tournament(cubins, cubins.linears, gpu_tournament.DEVICE)

    def right(variant: Variant) -> Facts:
        faults = found.right(variant)
        if wrong := {name: fault for name, fault in faults.items() if fault}:
            raise Wrong("; ".join(f"{name}: {fault}" for name, fault in wrong.items()))
        return {"right": len(faults)}

    def timed(step: Callable[..., Facts], variant: Variant) -> Facts:
        if given.record.facts("tournament", f"right, {variant.name}") is None:
            raise NotRun("it is not right")
        return step(variant)

    def prefill() -> Facts:
        facts = found.prefill()
        if wrong := {name: of["error"] for name, of in facts.items() if "error" in of}:
            raise Wrong(f"errors, as shares of the largest output: {wrong}", facts)
        return facts

    def choice() -> Facts:
        times = (given.record.facts("tournament", f"alone, {each.name}") or {} for each in VARIANTS)
        return gpu_tournament.choice({name: us for each in times for name, us in each.items()})

    steps: Steps = {f"right, {each.name}": partial(right, each) for each in VARIANTS}
    steps |= {"gaps": found.gaps}
    steps |= {f"alone, {each.name}": partial(timed, found.alone, each) for each in VARIANTS}
    several = [each for each in VARIANTS if each.format == "int4"]
    steps |= {f"layers, {each.name}": partial(timed, found.layers, each) for each in several}
    return steps | {"prefill": prefill, "choice": choice}


# --- Gemma 4 31B


def unpack(given: Given) -> Steps:
    def one(layout: str) -> Facts:
        check_gpu()
        packed, artifact = given.folder / "wide" / f"{layout}.tar.xz", given.work / "wide" / layout
        if is_whole(artifact):
            return {"is": "there"}
        if not packed.is_file():
            raise NotRun(f"{packed.name} is missing")
        others = [other for each in LAYOUTS if each != layout and is_whole(other := given.work / "wide" / each)]
        unpack_artifact(packed, artifact, others)
        return {"files": len(list(artifact.iterdir()))}

    return {layout: partial(one, layout) for layout in LAYOUTS}


def rounds(given: Given) -> Steps:
    def by_graphs(layout: str) -> Facts:
        return measure_round(given.wide(layout), "auto")

    def by_kernels(layout: str) -> Facts:
        return measure_round(given.wide(layout), "off")

    def compared() -> Facts:
        facts = {each: given.record.facts("rounds", f"{each}, {GRAPHS}") for each in LAYOUTS}
        times = {each: of[A_ROUND] for each, of in facts.items() if of}
        if len(times) < 2:
            raise NotRun("fewer than two artifacts were timed")
        first = next(iter(times.values()))
        return {each: [taken, round(taken / first, 3)] for each, taken in times.items()}

    steps: Steps = {}
    for layout in LAYOUTS:
        steps |= {f"{layout}, {GRAPHS}": partial(by_graphs, layout), f"{layout}, kernels": partial(by_kernels, layout)}
    return steps | {"compared": compared}


def prefill(given: Given) -> Steps:
    return {layout: lambda layout=layout: measure_prefill(given.wide(layout)) for layout in LAYOUTS}


# --- Small pairs

NEAR_TIE = 0.075
"""The margin, in standard deviations of the logits, within which kernels with different rounding may choose either
token."""
LEAST = 0.5
"""The least share of equal proposals. Proposals of a random head are often near-ties; those of two different heads
would be equal about once in V, the size of the vocabulary."""


def pairs(given: Given) -> Steps:
    return {name: lambda name=name: compare(given.small(name)) for name in PAIRS}


def compare(artifact: Path) -> Facts:
    """Compare the tokens of an artifact with those of its module. Raises Wrong if they differ by more than a near-tie,
    or if too few proposals are equal."""
    session = open_session(open_artifact(artifact), "torch")
    try:
        lines = list(compared(session, json.loads((artifact / EXPECTED).read_text())))
    finally:
        session.close()
    said = [line for line, _ in lines]
    if any(is_wrong for _, is_wrong in lines):
        raise Wrong("; ".join(said))
    return {"prompts": said}


def compared(session: Session, expected: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield a line about each prompt, and True if a token differs by more than a near-tie or too few proposals are
    equal. Fused rounds and the three methods are both run."""
    fuses = session.has_speculate
    for each in expected:
        parted, rounds, short = [], [], False
        for fused in (True, False) if fuses else (False,):
            session.has_speculate = fused
            with proposed(session) as made:
                found = complete(session, each["prompt"], max_new_tokens=len(each["token_ids"]), stop_ids=[])
            short |= len(found.token_ids) != len(each["token_ids"])
            parted.append(first_difference(found.token_ids, each["token_ids"], each["margins"]))
            rounds.append(found.stats.counts() == each["stats"])
            same, every = equal_proposals(each["proposals"], made)
        session.has_speculate = fuses
        places = [place for place in parted if place]
        other = short or any(margin > NEAR_TIE for _, margin in places) or (not places and same < LEAST * every)
        said = "another number of tokens" if short else "tokens equal"
        said = f"parts at token {places[0][0]}, where the margin is {places[0][1]}" if places else said
        said += f", rounds {'equal' if all(rounds) else 'differ'}, {each['stats']['num_accepted_tokens']} accepted"
        yield f"{said}, {same} of {every} proposals equal", other


def first_difference(ours: list[int], theirs: list[int], margins: list[float]) -> tuple[int, float] | None:
    """Return the index of the first difference and the margin of ``theirs`` there, None if there is none."""
    places = (place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    place = next(places, None)
    return None if place is None else (place, round(margins[place], 4))


def equal_proposals(expected: list[list[int]], found: list[list[int]]) -> tuple[int, int]:
    """Return the number of equal proposals and the number of all. A proposal that one side lacks is not equal."""
    calls = zip_longest(expected, found, fillvalue=[])
    both = [pair for ours, theirs in calls for pair in zip_longest(ours, theirs)]
    return sum(one == other for one, other in both), len(both)


# --- Many rounds

ROUNDS, BEFORE, SECONDS, TOKENS = 10_000, 1_000, 30, 64
"""The most rounds of a soak, those after which memory is measured first, since caches of compiled code have grown, its
most seconds, and the tokens of a text."""
MOST = {"GPU": 16.0, "host": 64.0}
"""The most MiB by which memory may grow."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
SCHEMA["additionalProperties"] = False
PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"


def soak(given: Given) -> Steps:
    return {layout: lambda layout=layout: soaked(given.small(f"tiny-{layout}")) for layout in LAYOUTS}


def soaked(artifact: Path) -> Facts:
    """Generate until ``ROUNDS`` are done or ``SECONDS`` are over. Raises Wrong if a greedy text changes, a text by the
    schema is not JSON, or memory grows."""
    asked = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:8]]
    first, rounds, before = {}, 0, None
    with load(artifact, runtime="torch") as model:
        end = time.monotonic() + SECONDS
        while rounds < ROUNDS and time.monotonic() < end:
            for prompt in asked:
                text, more = generated(model, prompt, rounds)
                if first.setdefault(prompt, text) != text:
                    raise Wrong(f"after {rounds:,} rounds the greedy text of {prompt[:40]!r} is another one")
                rounds += more
            if before is None and rounds >= min(BEFORE, ROUNDS):
                before = memory()
        after = memory()
    grown = {name: round(size - before[name], 1) for name, size in after.items()} if before else {}
    if wrong := [f"{name} {size} MiB" for name, size in grown.items() if size > MOST[name]]:
        raise Wrong(f"memory grew in {rounds:,} rounds: {', '.join(wrong)}")
    return {"rounds": rounds, "grown, MiB": grown}


def generated(model: Model, prompt: str, seed: int) -> tuple[str, int]:
    """Return the greedy text of a prompt, and the rounds that it, a sampled text and one by ``SCHEMA`` took."""
    plain: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
    greedy = model.generate(prompt, **plain)
    sampled = model.generate(prompt, **plain, temperature=0.8, top_p=0.95, seed=seed)
    by_schema = model.generate(prompt, max_new_tokens=TOKENS, structured_outputs={"json": SCHEMA})
    try:
        json.loads(by_schema.text)
    except ValueError:
        raise Wrong(f"the text by the schema is {by_schema.text!r}") from None
    return greedy.text, sum(each.stats.num_drafts + each.stats.num_undrafted for each in (greedy, sampled, by_schema))


def memory() -> dict[str, float]:
    """Return the MiB that this process holds of the host's memory, and that are taken on the GPU if there is one."""
    gc.collect()
    held = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert held is not None
    found = {"host": int(held[1]) / 1024}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["GPU"] = (total - free) / (1 << 20)
    return found


STAGES: dict[str, Callable[[Given], Steps]] = {
    "probe": probe, "tournament": tournament, "unpack": unpack, "rounds": rounds, "pairs": pairs, "prefill": prefill,
    "soak": soak,
}  # fmt: skip
