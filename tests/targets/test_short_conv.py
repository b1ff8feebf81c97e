"""Targets with short convolutions: every split of a text into calls gives transformers' own states, rejected rows leave
nothing behind."""

import json
import random
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from commands import fail_command, run_command
from family_configs import family_config
from published_checkpoints import save_sparse
from transformers import AutoModelForCausalLM, Lfm2Config

from eagle3.export.checkpoints import open_source
from eagle3.export.cli import main as export_main
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.planning.memory import cache_bytes, state_bytes, target_caches
from eagle3.export.twin.randomize import randomize
from eagle3.runner.loop.cached_tokens import still_held
from eagle3.targets import TARGETS, decoder_layers, spec
from eagle3.targets.attention import EagerAttention
from eagle3.targets.recurrent import Ring

WINDOW, CONTEXT = 16, 160
TOLERANCE = 3e-5  # of rounding, in standard deviations of the logits


@pytest.fixture(scope="module", params=["lfm2", "lfm2_moe", "lfm3"])
def pair(request, tmp_path_factory):
    """transformers' model, and the target over the same weights, whose rings hold two windows of 16."""
    config = family_config(request.param)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    randomize(model, 0)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tensors = open_source(folder).tensors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "CONVOLUTION_WINDOW", WINDOW)
        return model, decoder_layers.load(tensors, config, CONTEXT, torch.float32, EagerAttention)


def difference(model, target, calls) -> float:
    """Make calls (a text and the position where the call begins), and return the largest difference of logits and
    states from transformers' forward of the whole text, in standard deviations."""
    worst, taps = 0.0, tuple(range(len(target.layers)))
    for text, start in calls:
        with torch.no_grad():
            whole = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
            state, tapped = target(torch.tensor([text[start:]]), torch.arange(start, len(text)), taps)
            found = [target.logits(state), *tapped]
        for ours, theirs in zip(found, (whole.logits, *whole.hidden_states), strict=False):
            gap = (ours[0] - theirs[0, start:]).abs().amax() / theirs.std()
            worst = max(worst, float(gap.nan_to_num(nan=torch.inf)))
    return worst


def fresh(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(96) for _ in range(count)]


def walk(steps: int = 60, seed: int = 1):
    """The calls of a runner: prompts in chunks, windows of which any number of rows is accepted, single rows, and
    another text behind any position that the rings still hold."""
    dice, kept, highest = random.Random(seed), [], -1
    for step in range(steps):
        kind = "prompt" if not step or len(kept) > 120 else dice.choice(["window"] * 6 + ["one", "turn", "prompt"])
        start = len(kept)
        if kind == "prompt":
            kept, start, highest = fresh(dice, dice.randrange(1, 60)), 0, -1
        elif kind == "turn":
            start = dice.choice([at for at in range(1, start + 1) if still_held(at, WINDOW, highest)])
            kept = kept[:start] + fresh(dice, dice.randrange(1, 30))
        elif kind == "window":
            rows = fresh(dice, dice.randrange(2, 9))
            highest = max(highest, start + len(rows) - 1)
            yield kept + rows, start
            kept = kept + rows[: dice.randrange(0, len(rows) + 1)]
            continue
        else:
            kept = kept + fresh(dice, 1)
        while start < len(kept):
            end = min(len(kept), start + dice.randrange(1, WINDOW + 1))
            highest = max(highest, end - 1)
            yield kept[:end], start
            start = end


def test_every_split_of_a_text_into_calls_gives_transformers_states(pair):
    dice = random.Random(3)
    text = fresh(dice, 6)
    for count in range(6):
        for ends in combinations(range(1, 6), count):
            starts = (0, *ends)
            calls = [(text[:end], start) for start, end in zip(starts, (*ends, 6), strict=True)]
            assert difference(*pair, calls) < TOLERANCE, starts


def test_every_call_of_a_runner_gives_transformers_states(pair):
    assert difference(*pair, walk()) < TOLERANCE


def test_what_memory_held_before_the_first_call_is_not_read(pair):
    _, target = pair
    for module in target.modules():
        if isinstance(module, Ring):
            module.rows.fill_(float("nan"))
    assert difference(*pair, walk(steps=8, seed=4)) < TOLERANCE


def test_the_rings_are_counted(monkeypatch):
    config = family_config("lfm2")
    whole = [state_bytes(TARGETS["auto"], config, length, torch.float32) for length in (100, 101)]
    assert whole[1] - whole[0] == 3 * 64 * 4  # a ring of the whole context: channels of three layers in float32
    monkeypatch.setattr(spec, "CONVOLUTION_WINDOW", WINDOW)
    ring = [state_bytes(TARGETS["auto"], config, length, torch.float32) for length in (100, 101)]
    assert ring[0] == ring[1] == 3 * (2 * WINDOW + 2) * 64 * 4
    assert cache_bytes(target_caches(TARGETS["auto"], config, 100, torch.float32)) == 2 * 2 * 16 * 100 * 4


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with the shapes of LFM2 1.2B."""
    folder = tmp_path_factory.mktemp("published")
    attending = [2, 5, 8, 10, 12, 14]
    config = Lfm2Config(hidden_size=2048, num_hidden_layers=16, full_attn_idxs=attending, block_ff_dim=12288)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    shapes = {name: (tuple(value.shape), "BF16", 2) for name, value in shapes.items() if name != "lm_head.weight"}
    save_sparse(folder / "model.safetensors", shapes)
    return folder


def flags(folder, backend: str) -> tuple:
    return ("--target-model", "lfm2-1.2B", "--checkpoint", folder, "--draft", "none", "--backend", backend, "--dry-run")


def test_lfm2_in_its_published_shape_is_planned(published):
    done = run_command(export_main, *flags(published, "xnnpack"), "--random-weights", "--json")
    facts = json.loads(done.stdout)
    assert 1.16e9 < facts["target_parameters"] < 1.18e9
    assert facts["methods"][0] == {"name": "prefill", "min_len": 9, "max_len": 512}
    assert facts["twin"]["target"]["logits"] < 1e-4
    assert state_bytes(TARGETS["auto"], Lfm2Config.from_pretrained(published), 4096, torch.float32) == 10 * 1026 * 8192


def test_a_backend_without_convolutions_refuses_them_in_a_line(published, monkeypatch):
    monkeypatch.setitem(BACKENDS, "cuda", replace(BACKENDS["cuda"], states=frozenset()))
    _, line = fail_command(export_main, *flags(published, "cuda"), "--random-weights")
    assert "the target (lfm2) has layers with a short convolution" in line and "type --backend xnnpack" in line
