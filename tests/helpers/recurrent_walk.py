"""The calls that a runner makes to a target with recurrent layers, compared with transformers' forward of the whole
text."""

import random

import torch
from transformers import AutoModelForCausalLM

from eagle3.export.checkpoints import open_source
from eagle3.export.twin.randomize import randomize
from eagle3.targets import decoder_layers
from eagle3.targets.attention import EagerAttention
from eagle3.targets.recurrent import RecurrentPositions, RecurrentState, Ring
from eagle3.targets.spec import ROLLBACK_ROWS
from eagle3.targets.state_mixers import token_by_token

VOCABULARY = 96


def saved_pair(config, folder):
    """Return transformers' model with random weights, and the target with the same weights, which are saved in
    ``folder``."""
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    randomize(model, 0)
    model.save_pretrained(folder)
    tensors = open_source(folder).tensors()
    return model, decoder_layers.load(tensors, config, 512, torch.float32, EagerAttention)


def walk(model, target, steps: int = 40, seed: int = 1) -> float:
    """Call ``target`` as a runner does, and return the largest difference of logits from transformers' forward of the
    whole text, in their standard deviations.

    The calls: prompts in chunks, windows of which any number of rows is accepted, single rows, a call made twice,
    another prompt, and another text after the state that the last chunk saved.
    """
    dice, worst = random.Random(seed), 0.0

    def fresh(count: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(count)]

    def run(text: list[int], start: int) -> None:
        nonlocal worst
        with torch.no_grad(), token_by_token(model):
            expected = model(torch.tensor([text]), use_cache=False).logits[0, start:]
            state, _ = target(torch.tensor([text[start:]]), torch.arange(start, len(text)), ())
            found = target.logits(state)[0]
        difference = float(((found - expected).abs().amax() / expected.std()).nan_to_num(nan=torch.inf))
        worst = max(worst, difference)

    def prefill(text: list[int], start: int) -> None:
        while start < len(text):
            left = len(text) - start
            long = left > 2 * ROLLBACK_ROWS + 4
            end = start + dice.randrange(ROLLBACK_ROWS + 2, left - ROLLBACK_ROWS - 1) if long else len(text)
            run(text[:end], start)
            start = end

    kept: list[int] = []
    saved = 0
    for step in range(steps):
        kind = (
            "prompt"
            if not step or len(kept) > 300
            else dice.choice(["window"] * 6 + ["one", "twice", "turn", "prompt"])
        )
        if kind == "prompt":
            kept = fresh(dice.randrange(ROLLBACK_ROWS + 2, 90))
            prefill(kept, 0)
            saved = len(kept) - ROLLBACK_ROWS
        elif kind == "turn":
            kept = kept[:saved] + fresh(dice.randrange(ROLLBACK_ROWS + 2, 50))
            prefill(kept, saved)
            saved = len(kept) - ROLLBACK_ROWS
        elif kind == "one":
            run(kept + fresh(1), len(kept))  # rejected
            kept = kept + fresh(1)
            run(kept, len(kept) - 1)
        else:
            window = fresh(dice.randrange(2, ROLLBACK_ROWS + 1))
            for _ in range(1 + (kind == "twice")):
                run(kept + window, len(kept))
            kept += window[: dice.randrange(0, len(window) + 1)]
    return worst


def walk_windows(model, target) -> float:
    """Try all numbers of rows of a window with several numbers of accepted rows, one after the other. Returns the
    largest difference of logits of accepted rows, in standard deviations."""
    wanted, worst = torch.randint(0, VOCABULARY, (1, 400), generator=torch.Generator().manual_seed(3)), 0.0
    with torch.no_grad(), token_by_token(model):
        expected = model(wanted, use_cache=False).logits[0]
        target(wanted[:, :20], torch.arange(20), ())
        at = 20
        for rows in range(2, ROLLBACK_ROWS + 1):
            for accepted in range(0, rows + 1, 3):
                window = wanted[:, at : at + rows].clone()
                window[:, accepted:] = (window[:, accepted:] + 1) % VOCABULARY
                state, _ = target(window, torch.arange(at, at + rows), ())
                found = target.logits(state)[0, :accepted]
                if accepted:
                    worst = max(worst, float((found - expected[at : at + accepted]).abs().max() / expected.std()))
                at += accepted
    return worst


def uninitialized(target) -> None:
    """Fill the memory that the recurrent layers have not written with NaN, and its positions with any numbers."""
    for module in target.modules():
        if isinstance(module, Ring):
            module.rows.fill_(float("nan"))
        elif isinstance(module, RecurrentState):
            for name in ("state", "saved", "saved_conv"):
                getattr(module, name).fill_(float("nan"))
        elif isinstance(module, RecurrentPositions):
            module.committed.fill_(77)
            module.saved.fill_(5)


def nan_outside_of_the_states(target) -> None:
    """Assert that calls before the committed position, or too far behind it, give NaN and move nothing."""
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        target(torch.zeros(1, 30, dtype=torch.long), torch.arange(30), ())
        target(tokens, torch.arange(30, 34), ())
        refused, _ = target(tokens, torch.arange(25, 29), ())
        assert refused.isnan().all()
        after, _ = target(tokens, torch.arange(32, 36), ())
        assert not after.isnan().any()
        ahead, _ = target(tokens, torch.arange(60, 64), ())
        assert ahead.isnan().all()
