"""The pieces of a text stream join to the result of decoding at once, cut where a stop string begins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from eagle3.runner.text.text import Text, TextStream
from eagle3.targets import TARGETS

SAMPLES = ["def main():\n    return 1\n\n\nx = 2", "naïve – “quoted” \U0001f40d\n", "\n\n\n", " lead and trail  "]
PIECES = ["▁", "▁▁▁", "▁def", "▁a", "a", "b", "ab", "é", "(", ".", "\ufffd"]
SENTENCEPIECE = {  # as Llama 2, Gemma and T5 decode
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(prepend_scheme="always"),
}


def sentencepiece(name: str) -> Tokenizer:
    """Return a tokenizer with special tokens (0 to 2), bytes (3 to 258) and PIECES (from 259 on)."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE({token: id for id, token in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in vocabulary[:3]])
    tokenizer.decoder = SENTENCEPIECE[name]
    return tokenizer


@pytest.fixture(scope="module")
def text():
    return Text(TARGETS["gemma4-tiny"].checkpoint)


@pytest.fixture(scope="module")
def texts(text, tmp_path_factory):
    """A map from a name to a tokenizer and to ids that give every kind of text."""
    found = {"shipped": (text, sorted({0, 1, 2, 3, 5000}.union(*(text.encode(sample) for sample in SAMPLES))))}
    in_bytes = [3 + byte for byte in "é\U0001f40d\n \xff".encode()]
    for name in SENTENCEPIECE:
        folder = tmp_path_factory.mktemp(name)
        sentencepiece(name).save(str(folder / "tokenizer.json"))
        found[name] = Text(folder), [0, 1, 2, 5000, *in_bytes, *range(259, 259 + len(PIECES))]
    return found


def test_no_piece_of_a_text_has_a_partial_character(text):
    for sample in SAMPLES:
        stream = TextStream(text)
        pieces = [stream.push([token]) for token in text.encode(sample)] + [stream.finish()]
        assert "".join(pieces) == sample and not any("\ufffd" in piece for piece in pieces)


def test_an_encoded_prompt_begins_with_bos(text):
    assert text.encode("x")[0] == 2


# --- against the plain definition


def plainly(text: Text, ids: list[int], stops: list[str]) -> tuple[str, str | None, int]:
    """Return the text, the stop string that ended it, and the number of its ids, by decoding everything at every id."""
    for count in range(1, len(ids) + 1):
        whole = text.decode(ids[:count])
        places = [(whole.find(stop), len(stop), stop) for stop in stops if stop in whole]
        if places:
            start, _, stop = min(places)
            return whole[:start], stop, count
    return text.decode(ids), None, len(ids)


def streamed(text: Text, parts: list[list[int]], stops: list[str]) -> tuple[str, str | None, int]:
    stream = TextStream(text, stops)
    shown = "".join(stream.push(part) for part in parts)
    return shown + stream.finish(), stream.stopped, stream.kept


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["shipped", *SENTENCEPIECE])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_text_stream_equals_decoding_at_once_cut_at_the_first_stop_string(name, texts, data):
    text, pool = texts[name]
    parts = data.draw(st.lists(st.lists(st.sampled_from(pool), max_size=5), max_size=12))
    ids = sum(parts, [])
    whole = text.decode(ids).replace("\ufffd", "")
    places = st.integers(0, len(whole))
    slices = st.tuples(places, places).map(lambda place: whole[min(place) : max(place)])
    stops = data.draw(st.lists(slices | st.text("\n aé\U0001f40d", max_size=3), max_size=3))
    stops = [stop for stop in stops if stop]
    assert streamed(text, parts, stops) == plainly(text, ids, stops)


# --- stop strings


def test_only_text_that_could_become_a_stop_string_is_held_back(text):
    stream = TextStream(text, ["\n\nclass", "return x"])
    ids = text.encode("def f(x):\n    return x + 1\n\n\nx = 2\n\n")[1:]
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += stream.push([token])
        if stream.stopped:
            break
        whole = text.decode(ids[:count])
        held = [size for size in range(8) if whole.endswith(("\n\nclass"[:size], "return x"[:size]))]
        assert shown == whole[: len(whole) - max(held)]
    assert (shown, stream.stopped, stream.finish()) == ("def f(x):\n    ", "return x", "")


def test_ids_after_a_stop_string_are_ignored_and_the_completing_one_counts(text):
    ids = text.encode("a = 1\n\n\nb = 2")
    stream = TextStream(text, ["\n\n\n"])
    assert stream.push(ids) == "a = 1"
    assert text.decode(ids[: stream.kept]).startswith("a = 1\n\n\n")
    assert "\n\n\n" not in text.decode(ids[: stream.kept - 1])
    kept = stream.kept
    assert (stream.push(ids), stream.finish(), stream.kept, stream.stopped) == ("", "", kept, "\n\n\n")


@pytest.mark.parametrize(
    ("stop", "words"),
    [("", "empty"), ("a\ud800", "not Unicode"), ("\ufffd", r"U\+FFFD"), (3, "3 is no text")],
)
def test_an_invalid_stop_string_is_refused(text, stop, words):
    with pytest.raises(ValueError, match=words):
        TextStream(text, ["x", stop])


def test_a_single_stop_string_may_be_given_without_a_list(text):
    assert streamed(text, [text.encode("x = 1; y")], "1;") == ("x = ", "1;", 5)


# --- cost


class Counting(Text):
    longest = 0

    def decode(self, ids, skip_special=True):
        self.longest = max(self.longest, len(ids))
        return super().decode(ids, skip_special)


@pytest.mark.parametrize("stop", [(), ["\n\n\n", " zzz"]], ids=["plain", "stop strings"])
def test_decoding_a_late_token_costs_no_more_than_an_early_one(stop):
    text = Counting(TARGETS["gemma4-tiny"].checkpoint)
    stream = TextStream(text, stop)
    stream.push(text.encode("naïve = 1; " * 300))
    assert text.longest <= 4  # one token of context and the last bytes of a character


@pytest.mark.parametrize("begin", ["", "<a>"])
@pytest.mark.parametrize("size", [1, 3, 50])
def test_stop_strings_do_not_count_in_the_reasoning(text, begin, size):
    for said, whole in (
        (begin + "x. y.</a>\n\nz. y", begin + "x. y.</a>\n\nz"),
        (begin + "x. y.</a", begin + "x. y.</a"),
        ("<b>. y", "<b>. y" if begin == "" else "<b>"),
        (" \n", " \n"),
    ):
        stream = TextStream(text, (".", "\n\n"), reasoning=(begin, "</a>"))
        ids = text.encode(said)
        pieces = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)] + [stream.finish()]
        assert "".join(pieces) == whole and (stream.stopped == ".") == (whole != said)
