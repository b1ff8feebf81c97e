"""DFlash heads equal golden numbers of other code: speculators, DeepSpec, JetSpec, SpecForge, and transformers for Muse
Glimmer (scripts/golden/make_{dflash,deepspec,zlab,domino,muse_glimmer}_golden.py)."""

import json
from types import SimpleNamespace

import pytest
import torch
from dflash_cases import CLOSE, Case
from dflash_formulas import Drafter
from dflash_heads import GOLDEN, SLIDING, TARGET, changed, z_lab
from draft_oracle import check_draft
from safetensors.torch import load_file
from torch import nn

from eagle3.export.draft.kinds import DFLASH
from eagle3.export.draft.loading import load_draft, unfilled
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.pairing import check_pair
from eagle3.export.planning.taps import choose_taps
from eagle3.targets.attention import EagerAttention

CASES = sorted(path.name for path in GOLDEN.iterdir())
DIALECTS = {"deepspec": "deepspec", "jetspec": "z-lab", "specforge": "z-lab", "muse": "muse-glimmer"}
DIALECTS |= {"domino_speculators": "speculators", "domino": "z-lab"}


@pytest.mark.parametrize("name", CASES)
def test_a_dflash_block_equals_the_trainers_after_seeding_chaining_and_rollbacks(name):
    """The block follows a chunk, then each accepted window, within a sliding window and beyond it. Rows of rejected
    tokens, and the block drafted after them, leave no trace."""
    case, start = Case(name), 0
    wrong = torch.randn(case.features.shape, generator=torch.Generator().manual_seed(1))
    check_pair(case.draft, TARGET, (1, 3, 4))
    assert case.draft.kind.lower() == name.split("_")[0]
    assert case.draft.dialect == next((dialect for mark, dialect in DIALECTS.items() if mark in name), "speculators")
    assert case.draft.chain_len == (4 if "domino" in name else case.draft.longest_chain)
    for number, anchor in enumerate(case.golden["anchors"].tolist()):
        case.check(number, *case.draft_behind(start, anchor))
        case.draft_behind(start, min(anchor + 3, 32), wrong)
        case.check(number, *case.draft_behind(start, anchor))
        start = anchor


@pytest.mark.parametrize("name", CASES)
def test_a_fused_round_does_not_attend_to_rows_of_a_rejected_window(name):
    """``accepted`` is the last accepted row; the rows after it hold rejected tokens."""
    case, start = Case(name), 0
    for number, anchor in enumerate(case.golden["anchors"].tolist()):
        end = min(anchor + case.chain_len, 32)
        tokens = case.golden["tokens"][:, start + 1 : end + 1]
        tokens = torch.nn.functional.pad(tokens, (0, end - start - tokens.shape[1]))
        features = case.features[:, start:end].clone()
        features[:, anchor - start :] = 7.0
        accepted = torch.tensor([anchor - start - 1])
        with torch.no_grad():
            found = case.head(tokens, features, torch.arange(start, end), accepted=accepted)
        case.check(number, *found)
        start = anchor


@pytest.mark.parametrize("name", CASES)
def test_fewer_proposals_are_the_first_ones_of_a_whole_block(name):
    case = Case(name, chain_len=2)
    case.check(4, *case.draft_behind(0, case.golden["anchors"][4]))
    assert case.draft_behind(0, 14)[0].shape[1] == 2


@pytest.mark.parametrize("name", CASES)
def test_the_formulas_of_dflash_equal_the_trainers_numbers(name):
    golden, tensors = load_file(GOLDEN / name / "golden.safetensors"), load_file(GOLDEN / name / "model.safetensors")
    config = json.loads((GOLDEN / name / "config.json").read_text())
    drafter = Drafter(config, read_draft(GOLDEN / name).layer, tensors, golden["embedding"], golden["lm_head"])
    features = drafter.fuse(list(golden["taps"][0].chunk(3, dim=-1)))
    for number, anchor in enumerate(golden["anchors"].tolist()):
        before, first = golden["tokens"][0, anchor - 1 : anchor + 1].tolist()
        logits, states = drafter(features[:anchor], first, before)
        torch.testing.assert_close(logits, golden["logits"][number, drafter.first_row :], **CLOSE)
        torch.testing.assert_close(states, golden["states"][number, drafter.first_row :], **CLOSE)


def test_the_anchor_replaces_the_missing_token_before_it():
    """No draft slot holds the first token. A token before the anchor exists only after a call of one row."""
    case, tensors = Case("xpress"), load_file(GOLDEN / "xpress" / "model.safetensors")
    config, golden = json.loads((GOLDEN / "xpress" / "config.json").read_text()), case.golden
    drafter = Drafter(config, case.draft.layer, tensors, golden["embedding"], golden["lm_head"])
    text = golden["tokens"][0].tolist()
    for anchor, before in ((1, None), (2, text[1]), (3, text[2])):
        logits, _ = case.draft_behind(anchor - 1, anchor)
        torch.testing.assert_close(logits[0], drafter(case.features[0, :anchor], text[anchor], before)[0], **CLOSE)


@pytest.mark.parametrize(("passes", "rows", "count"), [(2, 4, 2), (6, 4, 4), (6, 2, 2)])
def test_xpress_passes_beyond_the_last_row_are_left_out(passes, rows, count, tmp_path):
    draft = read_draft(changed(GOLDEN / "xpress", tmp_path / "head", {"num_jacobi_passes": passes}))
    assert unfilled(draft, 8, rows).refiner_head.passes == count


@pytest.mark.parametrize("passes", [2, None])
def test_missing_keys_of_an_xpress_have_speculators_defaults(passes, tmp_path):
    keys = {"num_jacobi_passes": passes, "xpress_mlp_ratio": None, "xpress_rank": None, "sample_from_anchor": None}
    draft = read_draft(changed(GOLDEN / "xpress", tmp_path / "head", keys))
    assert (draft.variant.rank, draft.variant.mlp_ratio, draft.first_row) == (256, 2, 1)
    assert draft.variant.passes == (passes or 6)


# --- z-lab's own files


def test_a_head_in_z_labs_form_gives_the_same_states(tmp_path):
    golden = load_file(GOLDEN / "dflash_full" / "golden.safetensors")
    draft = read_draft(z_lab(tmp_path / "head", own={"output_multiplier": 0.5, "final_logit_softcapping": 2.0}))
    assert (draft.kind, draft.dialect, draft.chain_len, draft.shares_lm_head) == (DFLASH, "z-lab", 4, True)
    assert choose_taps(draft, TARGET, None, None).layers == (1, 3, 4)  # an id means the output of its layer
    embedding, lm_head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
    embedding.weight = nn.Parameter(golden["embedding"])
    target = SimpleNamespace(embed_tokens=embedding, embed=embedding, lm_head=lm_head)
    head = load_draft(draft, 40, torch.float32, EagerAttention, target, 4)
    features = head.fuse(golden["taps"].chunk(3, dim=-1))
    with torch.no_grad():
        logits, states = head(golden["tokens"][:, 1:7], features[:, :6], torch.arange(6))
    torch.testing.assert_close(states[0], golden["states"][2, 1:], **CLOSE)
    capped = 2 * torch.tanh(golden["states"][2, 1:] @ lm_head.weight.T * 0.5 / 2)
    torch.testing.assert_close(logits[0], capped, **CLOSE)


@pytest.mark.parametrize(
    ("source", "own", "factor"),
    [
        ("dflash_full", {}, 9.0),
        ("dflash_full", {"input_embedding_scale": 1.0}, 1.0),
        ("dflash_full", {"input_embedding_scale": 3.0}, 3.0),
        ("dflash2", {}, 1.0),
    ],
)
def test_z_labs_first_heads_scale_the_embedding_like_the_target(source, own, factor, tmp_path):
    """The heads are for Gemma 4, which scales its embedding by the square root of its width. DFlash2's code does not
    scale it."""
    config = json.loads((GOLDEN / source / "config.json").read_text())
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    own = own | {key: config[key] for key in sizes if key in config}
    names = {"architectures": ["DFlash2DraftModel"]} if source == "dflash2" else {}
    draft = read_draft(z_lab(tmp_path / "head", GOLDEN / source, own=own, **names))
    embedding, lm_head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
    seen = []
    target = SimpleNamespace(embed_tokens=embedding, embed=lambda ids: 9 * embedding(ids), lm_head=lm_head)
    head = load_draft(draft, 40, torch.float32, EagerAttention, target, 4)
    head.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        head(torch.tensor([[5, 6]]), torch.zeros(1, 2, 64), torch.arange(2))
    torch.testing.assert_close(seen[0][0, 0], factor * embedding.weight[6])
    assert check_draft(draft, 3)["states"] < 1e-4


@pytest.mark.parametrize(
    ("keys", "causal"),
    [
        ({}, (True, False)),  # rows of sliding layers attend backwards only
        ({"is_causal": False}, (False, False)),
        ({"is_causal": True}, (True, True)),
        ({"own": {"causal_head": True}}, (True, True)),  # JetSpec's
        ({"own": {"causal_head": True, "causal": False}}, (False, False)),
    ],
)
def test_sliding_layers_of_z_labs_heads_equal_their_formulas(keys, causal, tmp_path):
    draft = read_draft(z_lab(tmp_path / "head", **SLIDING | keys))
    assert tuple(each.causal for each in draft.attends) == causal
    compared = check_draft(draft, 3)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4 and compared["tokens"] > 14


@pytest.mark.parametrize(
    ("source", "keys", "tokens", "first"),
    [
        ("dspark", {}, 5, 0),  # without the key, as many proposals as the block has rows
        ("dspark", {}, 4, 1),  # from a version that did not train the anchor's row
        ("dspark", {"sample_from_anchor": True}, 4, 0),
        ("xpress", {}, 4, 1),
        ("dspark_deepspec", {}, None, 0),
        ("dspark_deepspec", {"sample_from_anchor": False}, None, 1),
        ("dflash_deepspec", {"dspark_bonus_anchor": True}, None, 1),
        ("dspark_specforge", {"sample_from_anchor": False}, None, 1),
        ("dflash_jetspec", {}, None, 1),
        ("dflash_jetspec", {"sample_from_anchor": True}, None, 0),
    ],
)
def test_the_first_proposing_row_is_the_first_trained_row(source, keys, tokens, first, tmp_path):
    """The formulas determine the same row."""
    said = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}
    named = {"sample_from_anchor": None} | keys | ({"speculators_config": said} if tokens else {})
    draft = read_draft(changed(GOLDEN / source, tmp_path / "head", named))
    assert draft.first_row == first and draft.chain_len == (tokens or 5 - first)
    compared = check_draft(draft, 3)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4
