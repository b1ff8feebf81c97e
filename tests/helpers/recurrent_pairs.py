"""Random targets of every kind of layer with a state, and EAGLE-3 heads that are trained on the target's own text."""

from dataclasses import replace
from pathlib import Path

import torch
from family_configs import FAMILIES, SIZE, family_config
from mtp_heads import EXPERTS_OF_QWEN, RECURRENT
from random_checkpoints import save_random_draft
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.export.checks.fit.chains import Trials
from eagle3.export.checks.fit.target import Measured
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.targets.spec import states_of

STEPS = 25
"""Steps of training: enough for chains of two to three tokens, and too few for chains that never end."""
DELTA = SIZE | RECURRENT | {"num_hidden_layers": 3}
CONFIGS = {
    **{name: family_config(name) for name in FAMILIES if states_of(family_config(name))},
    "qwen3_5_text": AutoConfig.for_model("qwen3_5_text", **DELTA),
    "qwen3_5_moe_text": AutoConfig.for_model("qwen3_5_moe_text", **DELTA | EXPERTS_OF_QWEN),
    "qwen3_next": AutoConfig.for_model("qwen3_next", **DELTA | EXPERTS_OF_QWEN),
    "olmo_hybrid": AutoConfig.for_model("olmo_hybrid", **DELTA | {"linear_num_key_heads": 4}),
}


def recurrent_plan(name: str, folder: Path) -> tuple[Plan, torch.nn.Module]:
    """Save a random target of the family and a random head in ``folder``. Returns their plan and transformers'
    model."""
    config = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    randomize(model, seed=5)
    model.save_pretrained(folder / "target")
    taps = 0, config.num_hidden_layers - 1, config.num_hidden_layers
    draft = save_random_draft(folder / "draft", config, taps, draft_vocab=config.vocab_size)
    paths = {"checkpoint": folder / "target", "draft": draft, "output_dir": None}
    flags = {"backend": "xnnpack", "draft_qlinear": "none", "chain_len": 3, "max_seq_len": 190}
    return make_plan(ExportConfig("auto", **paths, **flags)), model


def trained(plan: Plan, measured: Measured) -> Plan:
    """Return the plan with its EAGLE-3 head trained on the measured texts, two tokens behind each of theirs."""
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    trials = Trials(reading, measured)
    head, pieces = trials.head(reading, 2), trials.pieces
    weights = list(head.parameters())
    held = {tensor.data_ptr() for _, tensor in trials.source.tensors()}
    assert all(weight.data_ptr() in held for weight in weights), "the source's tensors are trained"
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in weights], lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for seen in measured.seen:
            tokens, rows = seen.tokens[None], torch.arange(len(seen.tokens) - 2)
            feature = head.fuse(tuple(seen.states[tap][:, :-2] for tap in plan.taps))
            pieces.step = 0
            logits, feature = head(tokens[:, 1:-1], feature, rows)
            pieces.step, pieces.anchors = 1, rows[:-1]
            later, _ = head(tokens[:, 2:-1], feature[:, :-1], rows[1:])
            loss = cross_entropy(logits[0], tokens[0, 2:]) + cross_entropy(later[0], tokens[0, 3:]) / 2
            loss.backward()
        optimizer.step()
    head.requires_grad_(False)
    return replace(plan, draft=replace(plan.draft, source=trials.source))
