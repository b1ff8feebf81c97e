"""Targets with recurrent layers give transformers' own logits for all calls of a runner. Rejected rows leave no trace,
and each fault put in by hand is found."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.export.checkpoints import open_source
from eagle3.export.twin.randomize import randomize
from eagle3.targets import decoder_layers
from eagle3.targets.attention import EagerAttention
from eagle3.targets.gated_delta import GatedDeltaState, token_by_token
from eagle3.targets.recurrent import RecurrentPositions, Ring, window_masks
from eagle3.targets.spec import ROLLBACK_ROWS

SIZE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FAMILIES = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": EXPERTS,
    "qwen3_next": EXPERTS,
    "olmo_hybrid": {"linear_num_key_heads": 4},
}
TOLERANCE, FAULTY = 3e-4, 1e-2
"""Bounds in standard deviations of the logits: the most that rounding moves one of thousands (transformers' own two
rules differ by 1e-4), and the least that a fault has to."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """transformers' model, and the target with the same weights."""
    config = AutoConfig.for_model(request.param, **SIZE | FAMILIES[request.param])
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    randomize(model, 0)
    folder = tmp_path_factory.mktemp(request.param)
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
        return [dice.randrange(96) for _ in range(count)]

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


@pytest.mark.first(1)
def test_recurrent_targets_give_transformers_logits_for_every_call_of_a_runner(pair):
    assert walk(*pair) < TOLERANCE


@pytest.mark.first(1)
def test_recurrent_targets_continue_from_any_accepted_part_of_any_window(pair):
    """All numbers of rows of a window and all numbers of accepted rows are tried, one after the other."""
    model, target = pair
    generator = torch.Generator().manual_seed(3)
    wanted = torch.randint(0, 96, (1, 400), generator=generator)
    with torch.no_grad(), token_by_token(model):
        expected = model(wanted, use_cache=False).logits[0]
        target(wanted[:, :20], torch.arange(20), ())
        at = 20
        for rows in range(2, ROLLBACK_ROWS + 1):
            for accepted in range(0, rows + 1, 3):
                window = wanted[:, at : at + rows].clone()
                window[:, accepted:] = (window[:, accepted:] + 1) % 96
                state, _ = target(window, torch.arange(at, at + rows), ())
                found = target.logits(state)[0, :accepted]
                torch.testing.assert_close(found, expected[at : at + accepted], atol=1e-3, rtol=1e-3)
                at += accepted


def test_a_call_before_the_committed_position_gives_nan(pair):
    _, target = pair
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        target(torch.zeros(1, 30, dtype=torch.long), torch.arange(30), ())
        target(tokens, torch.arange(30, 34), ())
        refused, _ = target(tokens, torch.arange(25, 29), ())
        assert refused.isnan().all()
        after, _ = target(tokens, torch.arange(32, 36), ())  # and moves nothing
        assert not after.isnan().any()
        ahead, _ = target(tokens, torch.arange(60, 64), ())
        assert ahead.isnan().all()


def test_uninitialized_states_of_recurrent_layers_are_not_read(pair):
    model, target = pair
    for module in target.modules():
        if isinstance(module, Ring):
            module.rows.fill_(float("nan"))
        elif isinstance(module, GatedDeltaState):
            for name in ("state", "saved", "saved_conv"):
                getattr(module, name).fill_(float("nan"))
        elif isinstance(module, RecurrentPositions):
            module.committed.fill_(77)
            module.saved.fill_(5)
    assert walk(model, target, steps=8, seed=4) < TOLERANCE


def committed_short(monkeypatch):
    original = RecurrentPositions.rows

    def rows(self, input_pos):
        found = original(self, input_pos)
        live = found.live.clone()
        live[-1] = False
        return found._replace(live=live)

    monkeypatch.setattr(RecurrentPositions, "rows", rows)


def committed_twice(monkeypatch):
    """Fault: committed changes are applied again."""
    original = RecurrentPositions.rows

    def rows(self, input_pos):
        found = original(self, input_pos)
        return found._replace(live=found.before >= 0)

    monkeypatch.setattr(RecurrentPositions, "rows", rows)


def rejected_rows_commit(monkeypatch):
    original = RecurrentPositions.advance

    def advance(self, rows):
        valid = original(self, rows)
        if rows.from_saved is None:
            self.committed.add_(1)
        return valid

    monkeypatch.setattr(RecurrentPositions, "advance", advance)


def ring_too_short(monkeypatch):
    monkeypatch.setattr(Ring, "_slots", lambda self, positions: (positions + self.slots) % (self.slots - 1))


def ring_of_the_window_alone(monkeypatch):
    """Fault: the convolution's rows before the oldest live row are overwritten."""
    monkeypatch.setattr(Ring, "_slots", lambda self, positions: (positions + ROLLBACK_ROWS) % (ROLLBACK_ROWS // 2))


def decay_after_the_update(monkeypatch):
    original = GatedDeltaState._behind

    def behind(self, state, key, update, decay):
        return original(self, state, key, update * decay.exp().unsqueeze(-1), decay)

    monkeypatch.setattr(GatedDeltaState, "_behind", behind)


def undecayed_changes(monkeypatch):
    def behind(self, state, key, update, decay):
        key = self._for_values(key).transpose(1, 2)
        return state * decay.sum(-1).exp()[:, None, None] + torch.bmm(key, update)

    monkeypatch.setattr(GatedDeltaState, "_behind", behind)


def convolution_one_off(monkeypatch):
    original = GatedDeltaState.with_earlier

    def with_earlier(self, mixed, rows):
        return original(self, mixed, rows._replace(before=rows.before - 1))

    monkeypatch.setattr(GatedDeltaState, "with_earlier", with_earlier)


def convolution_of_the_live_rows_alone(monkeypatch):
    """Fault: the saved state's convolution rows are not used."""
    original = GatedDeltaState.with_earlier

    def with_earlier(self, mixed, rows):
        if rows.from_saved is not None:
            rows = rows._replace(from_saved=torch.zeros_like(rows.from_saved))
        return original(self, mixed, rows)

    monkeypatch.setattr(GatedDeltaState, "with_earlier", with_earlier)


def saved_state_of_another_turn(monkeypatch):
    original = GatedDeltaState.forward

    def forward(self, *given):
        saved = self.saved.clone()
        out = original(self, *given)
        self.saved.copy_(saved)
        return out

    monkeypatch.setattr(GatedDeltaState, "forward", forward)


def saved_state_never_taken(monkeypatch):
    original = GatedDeltaState.forward

    def forward(self, *given):
        *others, rows = given
        if rows.from_saved is not None:
            rows = rows._replace(from_saved=torch.zeros_like(rows.from_saved))
        return original(self, *others, rows)

    monkeypatch.setattr(GatedDeltaState, "forward", forward)


def first_state_not_forgotten(monkeypatch):
    original = RecurrentPositions.rows
    monkeypatch.setattr(
        RecurrentPositions,
        "rows",
        lambda self, input_pos: original(self, input_pos)._replace(started=torch.ones(1, dtype=torch.bool)),
    )


def updates_without_the_rows_before(monkeypatch):
    """Fault: the triangular system of a window is replaced by the unit matrix."""
    original = GatedDeltaState._window

    def window(self, query, key, value, decay, beta, state, masks):
        alone = window_masks(torch.arange(1))
        parts = [
            original(self, *(each[:, row : row + 1] for each in (query, key, value, decay, beta)), state, alone)
            for row in range(key.shape[1])
        ]
        return tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))

    monkeypatch.setattr(GatedDeltaState, "_window", window)


def state_of_the_window_kept(monkeypatch):
    """Fault: rows that may be rejected change the state."""
    original = GatedDeltaState._window

    def window(self, query, key, value, decay, beta, state, masks):
        out, update = original(self, query, key, value, decay, beta, state, masks)
        state.copy_(self._behind(state, key, update, decay))
        return out, update

    monkeypatch.setattr(GatedDeltaState, "_window", window)


def keys_of_the_next_head(monkeypatch):
    monkeypatch.setattr(GatedDeltaState, "_for_values", lambda self, heads: heads.repeat(2, 1, 1))


def chunk_keeps_one_row_less(monkeypatch):
    original = GatedDeltaState._keep

    def keep(self, positions, key, update, decay):
        original(self, positions[1:], key[:, 1:], update[:, 1:], decay[:, 1:])

    monkeypatch.setattr(GatedDeltaState, "_keep", keep)


FAULTS = [
    committed_short,
    committed_twice,
    rejected_rows_commit,
    ring_too_short,
    ring_of_the_window_alone,
    decay_after_the_update,
    undecayed_changes,
    convolution_one_off,
    convolution_of_the_live_rows_alone,
    saved_state_of_another_turn,
    saved_state_never_taken,
    first_state_not_forgotten,
    updates_without_the_rows_before,
    state_of_the_window_kept,
    keys_of_the_next_head,
    chunk_keeps_one_row_less,
]


@pytest.mark.first(1)
@pytest.mark.parametrize("put_in", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("pair", ["qwen3_5_text"], indirect=True)
def test_each_fault_put_into_recurrent_layers_is_found(pair, put_in, monkeypatch):
    put_in(monkeypatch)
    assert walk(*pair) > FAULTY
