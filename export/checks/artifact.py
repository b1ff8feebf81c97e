"""Checks a finished artifact: runs a few prompts through it, in a process of its own.

It compares the artifact's tokens with those of the eager module that the export traced, position by position, and its
first proposals with the eager draft head's. Features must be finite. It reports the gain of
speculation, or, if hardly any proposal is accepted, the likely causes.

Compares the finished artifact's first proposals after a prompt with those of the eager head.

A wrongly lowered head changes no token of the text, since the target decides each. The only symptom is that proposals
are rejected, so this comparison looks at the proposals themselves.
"""

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checks.fit.readings import NO_PAIR
from eagle3.export.checks.fit.target import why_not_measured
from eagle3.export.checks.gain import Rounds, gain_lines, gain_record
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.draft.kinds import MTP
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.rope_reading import FILE, IGNORED_BASE
from eagle3.export.lowering.backend import StandIn, load_backend
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.runner.artifact.near_ties import NEAR_TIE, near_tie
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.contract import DRAFT_DECODE, PREFILL
from eagle3.runner.system.command import calm_stderr
from eagle3.runner.system.machine import free_memory, size_text

TEXTS = ("def fibonacci(n):\n", "The capital of France is", "Write a short story about the sea.\n")
NEW_TOKENS = 32
LONGEST_PROMPT = 1100  # tokens: more than one chunk of prefill, but not so many that a large model takes minutes
TIE_ROWS = 64
"""The number of tokens of each prompt that are used to measure the tolerance for quantized activations."""
WIDEST_TIE = 0.5
"""The largest tolerance, in standard deviations of the logits. A wrong token's logit lies further than this below the
best one."""
COPIES = 2
"""The largest number of copies of the weights in memory while an artifact runs: one mapped, and one packed by
XNNPACK."""
HOPELESS = 0.05
"""The acceptance rate of the first proposals below which the head is likely read wrongly: a wrong tap or norm gives
about 1%, a poor head 30% or more."""


@dataclass(frozen=True)
class Outcome:
    """The result of the check. ``record`` goes into ``export.json``. ``warning`` has a line for each thing to try, and
    is empty if all is well. ``gain`` has the lines on the gain of speculation."""

    record: dict[str, Any]
    warning: tuple[str, ...]
    gain: tuple[str, ...] = ()


@torch.no_grad()
def measured_tie(speculator: Eagle3Speculator, plan: Plan) -> float:
    """Return the tolerance for near-ties of this model with its recipe, in standard deviations of the logits.

    Where activations are quantized or in bfloat16, small rounding differences grow, until logits differ by as much as
    the low precision itself moves them. That depends on the model, so it is measured: the largest difference between
    logits with such and with exact activations, over all rows and tokens. For trained weights it is bounded by
    ``WIDEST_TIE``; with random weights it may be any size.
    """
    backend, most, moved = load_backend(plan.config.backend), plan.method(PREFILL).max_len, 0.0
    tie = near_tie(plan.qlinear)
    if tie == NEAR_TIE and backend.dtype == torch.float32:
        return tie
    with calm_stderr():
        for prompt in sample_prompts(plan.checkpoint, plan):
            tokens = torch.tensor([prompt[:TIE_ROWS]])
            quantized = _logits(speculator, tokens, most)
            with backend.exact_activations(speculator):
                exact = _logits(speculator, tokens, most)
            moved = max(moved, float(((quantized - exact).abs().amax(-1) / quantized.std(-1)).max()))
    if backend.dtype != torch.float32:  # tokens are compared with exact logits; rounding moves both logits of a tie
        moved *= 2
    return max(tie, moved if plan.config.random_weights else min(moved, WIDEST_TIE))


def check_artifact(
    folder: Path, plan: Plan, speculator: Eagle3Speculator | None, verdict: str | None = None
) -> Outcome:
    """Run the artifact on prompts and compare its tokens with those of ``speculator``, the eager module that the export
    traced. With None, which means that this machine cannot compute the eager module, no tokens are compared.
    ``verdict`` is that of the head's measurement, None if it was not measured.

    Raises ValueError if the artifact does not run, returns NaN or an infinity, or gives a wrong token.
    """
    prompts = sample_prompts(folder, plan)
    backend = load_backend(plan.config.backend)
    stand_in = backend.stand_in()
    tried = _tried(folder, prompts, stand_in)
    difference = None
    if stand_in is not None and speculator is not None:
        difference = stand_in.compare(open_artifact(folder), speculator)
    generations = tried["generations"]
    ties, same, most = 0, 0, plan.method(PREFILL).max_len
    tie = near_tie(plan.qlinear) if speculator is None else measured_tie(speculator, plan)
    allowed = tie if stand_in is None else NEAR_TIE  # a stand-in computes in float32
    draft_tie = allowed if near_tie(plan.draft_qlinear) == NEAR_TIE else WIDEST_TIE
    rounds_off = backend.dtype != torch.float32
    if speculator is not None:
        for prompt, generation in zip(prompts, generations, strict=True):
            # ExecuTorch's ops write log lines when they are called eagerly
            with calm_stderr(), backend.exact_activations(speculator) if rounds_off else nullcontext():
                said = (generation.get(name) for name in ("token_ids", "by_fused_rounds", "by_lookup"))
                for fresh in {tuple(tokens): tokens for tokens in said if tokens is not None}.values():
                    ties += compare_tokens(speculator, prompt, fresh, most, allowed)
                if plan.has_draft:
                    same += compare_proposals(speculator, plan, prompt, generation["window"], draft_tie) or 0
    stats = [generation["stats"] for generation in generations]
    drafts = sum(each["num_drafts"] for each in stats)
    accepted = sum(each["num_accepted_tokens"] for each in stats)
    rates = [
        sum(each["num_drafts"] * rate for each in stats if (rate := _rate(each, position))) / max(1, drafts)
        for position in range(plan.chain_len)
    ]
    record = {
        "prompts": len(prompts),
        "new_tokens": sum(len(generation["token_ids"]) for generation in generations),
        "compared_with_eager": speculator is not None,
        "near_ties": ties,
        "proposals_compared": same,
        "tolerance": round(tie, 4),
        "mean_acceptance_length": round(1 + accepted / drafts, 3) if drafts else 1.0,
    }
    if difference is not None:
        record["largest_difference"] = difference
    if drafts < 10 or plan.config.random_weights:
        return Outcome(record, ())
    hopeless = tuple(likely_causes(plan, folder, rates[0], verdict)) if rates[0] < HOPELESS else ()
    if stand_in is not None:  # its times say nothing about the machine that will run the artifact
        return Outcome(record, hopeless)
    on_cpu = BACKENDS[plan.config.backend].gpu is None
    rounds = Rounds(rates, tried["step_ms"], plan.proposals, tried["cpu_share"] if on_cpu else None)
    record |= gain_record(rounds)
    if hopeless:
        return Outcome(record, hopeless)
    entry = BACKENDS[plan.config.backend]
    fast_rows = entry.fast_rows.get(plan.qlinear, entry.window_rows[0])
    return Outcome(record, (), tuple(gain_lines(rounds, fast_rows)))


def _rate(stats: dict[str, Any], position: int) -> float:
    rates = stats["acceptance_rate_per_position"] or []
    return rates[position] if position < len(rates) else 0.0


def why_not(folder: Path) -> str | None:
    """Return a line that says how much memory is lacking to run the artifact beside the export that made it; None if
    there is enough."""
    takes = COPIES * sum(path.stat().st_size for path in folder.iterdir())
    free = free_memory()
    if free is not None and takes > free:
        return f"it would take about {size_text(takes)} beside the export, but only {size_text(free)} are free"
    return None


def sample_prompts(folder: Path, plan: Plan) -> list[list[int]]:
    """Return the token ids of short texts and of one that takes several chunks; random ids if there is no tokenizer."""
    room = plan.max_seq_len - NEW_TOKENS
    longest = min(plan.method(PREFILL).max_len + 5, LONGEST_PROMPT, room)
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        prompts = [tokenizer.encode(text).ids for text in TEXTS]
        together = tokenizer.encode("".join(TEXTS)).ids
        prompts.append(together * (longest // max(1, len(together)) + 1))
    else:
        generator = torch.Generator().manual_seed(0)
        lengths = (5, 12, 30, longest)
        prompts = [torch.randint(plan.target_config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    most = max(1, longest)
    return [prompt[:most] for prompt in prompts if prompt]


def _tried(folder: Path, prompts: list[list[int]], stand_in: StandIn | None = None) -> dict[str, Any]:
    asked = json.dumps({"prompts": prompts, "max_new_tokens": NEW_TOKENS})
    command = [sys.executable, "-m", "eagle3.runner.loop.smoke_run", str(folder)]
    command += ["--methods", stand_in.methods] if stand_in else []
    done = subprocess.run(command, input=asked, capture_output=True, text=True, errors="replace")
    if done.returncode < 0:
        raise ValueError(
            f"the artifact ends the process that runs it ({signal.Signals(-done.returncode).name}): {_HOW}"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise ValueError(f"the artifact does not run: {lines[-1].removeprefix('Error: ')}: {_HOW}")
    return json.loads(done.stdout)


_HOW = "no artifact was written; --no-check writes it all the same, for an inspection"


@torch.no_grad()
def compare_tokens(
    speculator: Eagle3Speculator, prompt: list[int], fresh: list[int], most_rows: int, tie: float = NEAR_TIE
) -> int:
    """Compare each new token with the eager target's greedy token after the same tokens. Returns how many differ by a
    near-tie. Raises ValueError for a token that differs by more."""
    tokens = torch.tensor([prompt + fresh[:-1]])
    logits = _logits(speculator, tokens, most_rows)[len(prompt) - 1 :]
    said, best = logits.gather(1, torch.tensor(fresh)[:, None])[:, 0], logits.max(-1)
    margins = (best.values - said) / logits.std(-1)
    differs = (margins > tie).nonzero()[:, 0].tolist()
    if differs:
        at = differs[0]
        raise ValueError(
            f"the artifact gives token {fresh[at]} at position {len(prompt) + at}, the eager module gives "
            f"{int(best.indices[at])} (by {float(margins[at]):.2g} of the logits' spread): the lowering changed "
            f"what the model computes: {_HOW}"
        )
    return int((best.indices != torch.tensor(fresh)).sum())


def _logits(speculator: Eagle3Speculator, tokens: Tensor, most_rows: int) -> Tensor:
    """Return the logits [T, vocab_size] of every position, computed in chunks."""
    parts = []
    for start in range(0, tokens.shape[1], most_rows):
        rows = tokens[:, start : start + most_rows]
        state, _ = speculator.target(rows, torch.arange(start, start + rows.shape[1]), ())
        parts.append(speculator.target.logits(state)[0].float())
    return torch.cat(parts)


def likely_causes(plan: Plan, folder: Path, rate: float, verdict: str | None = None) -> list[str]:
    """Return lines for a head of which hardly any proposal is accepted: the likely causes, most frequent first, each
    with the flag to type. If the measurement tried all readings and found no pair, no flag helps."""
    said = (
        f"hardly any proposal is accepted ({rate:.1%} of the first ones): the text is right, but speculation gains "
        "nothing"
    )
    if verdict == NO_PAIR:
        return [f"{said}: the head is untrained, or of another target"]
    draft, config = plan.draft, plan.config
    taps = ",".join(map(str, plan.taps))
    lines = [f"{said}. Likely causes, the most frequent first:"]
    other = "input" if "outputs" in plan.chosen_taps.origin else "output"
    if plan.taps and draft.kind != MTP:
        lines.append(f"  the taps ({taps}): if the head counts layer {other}s, type --aux-convention {other}")
    if plan.taps and draft.aux_layers is None and config.aux_layers is None:
        lines.append(
            "  the checkpoint names no taps and the default was taken: type --aux-layers with those of its training"
        )
    if draft.verifier:
        lines.append(f"  the target: the head was trained for {draft.verifier}, and this target is {plan.checkpoint}")
    elif draft.folder != plan.checkpoint:  # the head is not a layer of the target itself
        lines.append(f"  the target: the head does not name its target, and this target is {plan.checkpoint}")
    if isinstance(draft, EagleDescription):
        said = str(draft.norm_before_residual).lower()
        other = str(not draft.norm_before_residual).lower()
        lines.append(f"  norm_before_residual ({said}): type --norm-before-residual {other}")
        base = draft.layer.rope_parameters["rope_theta"]
        lines.append(
            f"  the RoPE's base ({base:.10g}), which some trainers do not take from the file: type --draft-rope-theta "
            + (f"{IGNORED_BASE:.10g}" if base != IGNORED_BASE else f"{FILE}, if config.json has another rope_theta")
        )
    if not (folder / "tokenizer.json").is_file():
        lines.append("  the prompts: there is no tokenizer.json, so they were random ids")
    if verdict is None and why_not_measured(plan, asked=True) is None:
        lines.append(f"to measure which of them it is: eagle3-fit {plan.checkpoint} {draft.folder}")
    return lines


@torch.no_grad()
def compare_proposals(
    speculator: Eagle3Speculator, plan: Plan, prompt: list[int], window: list[int], tie: float
) -> int | None:
    """Compare the proposals in ``window``, the first verify window after ``prompt``, with the eager head's. The
    window's first row is the token after ``prompt``.

    Returns how many proposals agree, up to the first near-tie. Returns None for a prompt of several chunks, and if
    nothing was proposed. Raises ValueError if a proposal's logit lies further than ``tie`` below the best one, in
    standard deviations of the logits.
    """
    draft, rows = plan.draft, len(prompt)
    if len(window) < 2 or rows > min(
        plan.method(PREFILL).max_len, plan.method(DRAFT_DECODE).max_len if draft.has_cache else rows
    ):
        return None
    positions = torch.arange(rows)
    state, taps = speculator.target(torch.tensor([prompt]), positions, speculator.taps)
    feature = speculator.feature(state, taps, positions)
    tokens = torch.tensor([prompt[1:] + window[:1]])
    if not draft.has_cache:
        tokens, feature, positions = tokens[:, -1:], feature[:, -1:], positions[-1:]
    same, slot = 0, rows - 1
    while same < len(window) - 1:
        logits, feature = speculator.draft(tokens, feature, positions, last=True)
        for row in logits[0, : len(window) - 1 - same]:
            if not _is_best(speculator, row, window[1 + same], rows + same, tie):
                return same
            same += 1
        slot += draft.has_cache
        tokens, feature, positions = torch.tensor([[window[same]]]), feature[:, -1:], torch.tensor([slot])
    return same


def _is_best(speculator: Eagle3Speculator, logits: Tensor, proposed: int, position: int, tie: float) -> bool:
    """Return True if the proposal is the eager head's best token, and False for a near-tie."""
    ids = speculator.draft.ids_in_target()
    column = proposed if ids is None else int((ids == proposed).nonzero()[0])
    best = logits.argmax()
    scored = logits[logits > logits.min()].float()  # some kinds give the same low logit to all but a few candidates
    behind = float((logits[best] - logits[column]) / scored.std())
    if behind > tie:
        wanted = int(best) if ids is None else int(ids[best])
        raise ValueError(
            f"the artifact's draft proposes token {proposed} after position {position}, the eager head proposes "
            f"{wanted} (by {behind:.2g} of the logits' spread): the lowering changed what the draft head computes"
        )
    return column == int(best)
