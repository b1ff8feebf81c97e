"""The survey of transformers' classes finds a result in one line for each class, and leaves what a person wrote."""

import pytest
from survey_targets import BEGIN, END, REFUSED, RIGHT, outcome, with_list


@pytest.mark.parametrize(
    ("model_type", "name", "what"),
    [
        ("mimo_v2_flash", "MiMoV2FlashForCausalLM", REFUSED),
        ("gemma4_unified_assistant", "Gemma4UnifiedAssistantForCausalLM", REFUSED),
        ("cwm", "CwmForCausalLM", RIGHT),
    ],
)
def test_a_class_works_or_is_refused_in_a_line(model_type, name, what):
    found = outcome(model_type, name)
    assert found.what == what, found.line
    assert "\n" not in found.line


def test_a_new_list_leaves_the_text_outside_of_its_markers():
    readme = f"# targets\n\n- by hand: before\n{BEGIN}\n- an old line\n{END}\n- by hand: behind\n"
    expected = f"# targets\n\n- by hand: before\n{BEGIN}\n- a new line\n{END}\n- by hand: behind\n"
    assert with_list(readme, "- a new line") == expected


@pytest.mark.parametrize("readme", [f"- a line\n{BEGIN}\n", f"- a line\n{END}\n"])
def test_a_text_without_both_markers_is_not_written_over(readme):
    with pytest.raises(ValueError, match="write both markers"):
        with_list(readme, "- a new line")
