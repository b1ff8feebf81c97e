"""The taps of an EAGLE head are those that its file names under any key; a file with two different sets is refused."""

import pytest
from dialect_files import IDS, write
from transformers import LlamaConfig

from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.taps import choose_taps

TARGET = LlamaConfig(hidden_size=64, vocab_size=96, num_hidden_layers=12)


def taps(folder):
    draft = read_draft(folder)
    return choose_taps(draft, TARGET, None, None).layers, [line for line in draft.warnings if "names its taps" in line]


@pytest.mark.parametrize(
    ("dialect", "keys", "says"),
    [
        ("specforge", {"eagle_config": {IDS: [1, 3, 5]}, IDS: [2, 4, 6]}, f"{IDS} is [2, 4, 6], eagle_config.{IDS} is"),
        ("speculators", {IDS: [2, 4, 6], "aux_hidden_state_layer_ids": [1, 3, 5]}, "aux_hidden_state_layer_ids is"),
        ("angelslim", {IDS: [2, 4, 6], "aux_hidden_states_layer_ids": [2, 4, 6][::-1]}, "is [6, 4, 2]"),
        ("deepspec", {"target_layer_ids": [0, 2, 3], IDS: [1, 3, 5]}, f"{IDS} is [1, 3, 5]"),
    ],
)
def test_two_different_sets_of_taps_are_refused_with_both(dialect, keys, says, tmp_path):
    with pytest.raises(ValueError) as refused:
        read_draft(write(tmp_path / "head", dialect, **keys))
    line = str(refused.value)
    assert "names taps twice" in line and says in line and "take out the ones" in line and "\n" not in line


@pytest.mark.parametrize(
    ("dialect", "keys", "chosen"),
    [
        ("angelslim", {IDS: [2, 4, 6], "aux_hidden_states_layer_ids": [1, 3, 5]}, (2, 4, 6)),
        ("sglang", {"eagle_config": {IDS: [1, 3, 5]}, "aux_hidden_state_layer_ids": [2, 4, 6]}, (2, 4, 6)),
    ],
)
def test_one_set_of_taps_may_be_named_twice(dialect, keys, chosen, tmp_path):
    assert taps(write(tmp_path / "head", dialect, **keys)) == (chosen, [])


@pytest.mark.parametrize(
    ("key", "meaning", "chosen"),
    [
        ("aux_hidden_states_layer_ids", "outputs", (2, 4, 7)),
        ("aux_hidden_state_layer_ids", "inputs", (1, 3, 6)),
    ],
)
def test_taps_under_another_systems_key_have_its_meaning_and_are_reported(key, meaning, chosen, tmp_path):
    layers, (line,) = taps(write(tmp_path / "head", "specforge", eagle_config={IDS: None}, **{key: [1, 3, 6]}))
    assert layers == chosen
    assert f"names its taps as {key} [1, 3, 6]" in line and f"taken as {meaning} of layers" in line
