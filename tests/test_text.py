"""Text streams out whole: the pieces join to what decoding at once gives, and no piece has half a character."""

import pytest

from eagle3.runner.text import Text, TextStream
from eagle3.targets import TARGETS

SAMPLES = ["def main():\n    return 1\n\n\nx = 2", "naïve – “quoted” \U0001f40d\n", "\n\n\n", " lead and trail  "]


@pytest.fixture(scope="module")
def text():
    return Text(TARGETS["gemma4-tiny"].checkpoint)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_pieces_join_to_the_whole(text, sample, size):
    ids, stream = text.encode(sample), TextStream(text)
    pieces = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)] + [stream.finish()]
    assert "".join(pieces) == sample
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_begins_with_bos(text):
    assert text.encode("x")[0] == 2


def test_a_text_that_ends_within_a_character_keeps_all_before_it(text):
    ids = text.encode("x = 1  # na\u00efve \U0001f40d")[:-1]
    stream = TextStream(text)
    shown = "".join(stream.push([token]) for token in ids)
    assert shown == "x = 1  # na\u00efve "
    assert shown + stream.finish() == text.decode(ids)
