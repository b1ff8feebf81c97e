"""Metadata reads back as it was written, and a runner refuses formats that it does not know."""

from dataclasses import replace

import pytest
import torch
from scripted import scripted_metadata

from eagle3.runner.contract import NEWEST_VERSION, Metadata, MissingMetadata, format_version

PLAIN = replace(scripted_metadata(eos_ids=(1, 5)), manifest={"format_version": 1})


def read(constants) -> Metadata:
    outputs = {name: value if isinstance(value, list) else [value] for name, value in constants.items()}
    return Metadata.read(set(constants), outputs.__getitem__)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"proposals": 3, "draft_sliding_window": 0},
        {"has_draft_cache": False, "draft_sliding_window": 0},
        {"has_logits": True, "draft_sliding_window": 12, "draft_ids": torch.tensor([0, 4, 9])},
        {"forward_len": 7},
    ],
)
def test_metadata_reads_back_as_it_was_written(changes):
    written = replace(PLAIN, **changes)
    found = read(written.constant_methods())
    assert found == written
    assert found.draft_ids is written.draft_ids


def test_with_forward_lengths_have_the_names_of_executorchs_runner():
    assert PLAIN.constant_methods()["get_max_seq_len"] == 64
    assert "get_max_context_len" not in PLAIN.constant_methods()
    constants = replace(PLAIN, forward_len=7).constant_methods()
    assert (constants["get_max_seq_len"], constants["get_max_context_len"]) == (7, 64)
    assert read(constants).max_seq_len == 64


def test_each_addition_has_a_format_version_and_a_later_version_is_refused():
    plain = {"proposals": 1, "has_logits": False, "has_forward": False, "has_speculate": False}
    assert format_version(**plain) == 1
    assert format_version(**plain | {"proposals": 3}) == 2
    assert format_version(**plain | {"has_logits": True}) == format_version(**plain | {"has_forward": True}) == 3
    assert format_version(**plain | {"has_speculate": True}) == 4
    assert format_version(**plain, has_draft_cache=False) == 5
    assert format_version(**plain, has_draft_cache=False, has_draft=False) == 6
    assert format_version(**plain, has_draft=False, has_states=True) == 7
    assert format_version(**plain, has_states=True, has_sessions=True) == 8
    later = replace(PLAIN, manifest={"format_version": NEWEST_VERSION + 1})
    with pytest.raises(ValueError, match="has format version 9, this runner reads 1 to 8: export it again"):
        read(later.constant_methods())


def test_a_missing_constant_is_named_unless_it_was_added_later():
    constants = PLAIN.constant_methods()
    del constants["get_sliding_window"]
    with pytest.raises(MissingMetadata, match="no constant method 'get_sliding_window'"):
        read(constants)
