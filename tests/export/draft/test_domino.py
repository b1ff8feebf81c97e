"""Domino heads are read as their trainers write them, and contradictory ones are refused. test_dflash.py compares their
numbers with the trainers'."""

import json
import shutil

import pytest
from dflash_cases import Case
from dflash_heads import GOLDEN, TARGET, changed
from refusals import refusal
from safetensors.torch import load_file, save_file

from eagle3.export.draft.kinds import DOMINO
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.pairing import check_pair

OWN = json.loads((GOLDEN / "domino" / "config.json").read_text())["dflash_config"]


def read_whole(folder):
    draft = read_draft(folder)
    check_pair(draft, TARGET, (1, 3, 4))
    return draft


def renamed(name: str, folder, prefix: str):
    """Write a copy of a golden head in which the names of GRU and bias begin with ``prefix``."""
    shutil.copytree(GOLDEN / name, folder)
    tensors = load_file(folder / "model.safetensors")
    ends = {each: each[each.index(part) :] for each in tensors for part in ("prefix_gru", "embed_proj") if part in each}
    assert len(ends) == 4
    tensors = {prefix + ends[each] if each in ends else each: tensor for each, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("named", "prefix"),
    [("DFlashDraftModel", ""), ("DominoDraftModel", "logit_head."), ("DFlashDraftModel", "model.logit_head.")],
)
def test_a_domino_is_read_by_its_projector_type_whatever_its_class_and_prefix(named, prefix, tmp_path):
    """SpecForge names the class after Domino, the authors and ModelOpt after DFlash. Early checkpoints had a
    ``logit_head``."""
    head = changed(renamed("domino", tmp_path / "named", prefix), tmp_path / "head", {"architectures": [named]})
    case = Case(head)
    assert read_whole(head).kind == DOMINO
    case.check(2, *case.draft_behind(0, 6))


def test_specforges_class_name_alone_identifies_a_domino(tmp_path):
    own = {key: value for key, value in OWN.items() if key != "projector_type"}
    assert read_whole(changed(GOLDEN / "domino", tmp_path / "head", {"dflash_config": own})).kind == DOMINO


def test_missing_keys_of_a_domino_have_speculators_defaults(tmp_path):
    keys = dict.fromkeys(("shift_label", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"))
    draft = read_draft(changed(GOLDEN / "domino_speculators", tmp_path / "head", keys))
    assert (draft.first_row, draft.variant.first, draft.variant.size, draft.variant.rank) == (0, 1, 1024, 256)


def test_a_dominos_anchor_row_proposes_only_with_shifted_labels():
    shifted, other = read_draft(GOLDEN / "domino"), read_draft(GOLDEN / "domino_unshifted")
    assert (shifted.first_row, shifted.longest_chain, shifted.variant.first) == (0, 5, 1)
    assert (other.first_row, other.longest_chain, other.variant.first) == (1, 4, 2)


@pytest.mark.parametrize(
    ("own", "keys", "says"),
    [
        ({"projector_type": "dspark"}, {}, "projector_type is 'dspark', which is not supported in a Domino head"),
        (
            {"projector_type": "causal_v5"},
            {"architectures": ["DFlashDraftModel"]},
            "projector_type is 'causal_v5', an unsupported head of the DFlash family",
        ),
        (
            {},
            {"architectures": ["DFlash2DraftModel"]},
            "projector_type is 'domino', which is not supported in a DFlash2 head",
        ),
        ({"projector_type": None}, {"architectures": ["DFlashDraftModel"]}, "shift_label is true in a DFlash head"),
        ({"shift_label": None}, {}, "has no shift_label"),
        ({"pure_draft_prefix_len": 5}, {}, "pure_draft_prefix_len is 5, but a block proposes 5 tokens"),
        ({"gru_hidden_dim": 16}, {}, "weight_ih_l0.weight is [72, 64], but config.json implies [48, 64]"),
        ({"emb_dim": 9}, {}, "emb_dim is 8, but 9 in dflash_config"),
        ({"output_multiplier": 0.5}, {}, "output_multiplier is 0.5, a key that no code for Domino has"),
    ],
)
def test_a_domino_configuration_that_contradicts_itself_or_the_tensors_is_refused(own, keys, says, tmp_path):
    head = changed(GOLDEN / "domino", tmp_path / "head", {"dflash_config": OWN | own} | keys)
    assert says in refusal(read_whole, head)


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        (
            "domino_speculators",
            {"shift_label": False},
            "the Domino of speculators would attend to the tokens that it proposes",
        ),
        ("domino_speculators", {"sample_from_anchor": False}, "shift_label is True, but sample_from_anchor is not"),
    ],
)
def test_a_domino_of_speculators_that_contradicts_itself_is_refused(name, keys, says, tmp_path):
    assert says in refusal(read_whole, changed(GOLDEN / name, tmp_path / "head", keys))
