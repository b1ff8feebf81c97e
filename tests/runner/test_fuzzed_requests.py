"""Any file of prompts and any options either run, or are refused in one line before they run."""

import json
from dataclasses import replace

from batch_prompts import PROMPTS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted import VOCABULARY, scripted_metadata
from scripted_logits import LogitsSession, random_logits
from torch import arange

from eagle3.runner.commands.batch import check_prompt
from eagle3.runner.model import Model
from eagle3.runner.options import Options
from eagle3.runner.text.prompts import FIELDS, IDS, OPTIONS, Fault, read_lines, read_prompts

LIMIT = 600  # characters of a line

numbers = st.one_of(
    st.integers(-3, 2 * VOCABULARY),
    st.integers(),
    st.floats(),
    st.sampled_from([2**63, 2**63 - 1, 10**400, 1e-9, 1e9, 1.0, 0.0, -0.0]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5), st.sampled_from(["", "a", "\ufffd", "\ud800"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("3"), inner, max_size=3),
    max_leaves=6,
)
sensible = {
    "max_new_tokens": st.integers(1, 12),
    "temperature": st.sampled_from([0, 0.5, 1, 2.0]),
    "top_k": st.integers(0, 2 * VOCABULARY),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1, exclude_max=True),
    "seed": st.integers(0, 2**63 - 1),
    "repetition_penalty": st.floats(0.1, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1).map(str), st.floats(-9, 9), max_size=3),
    "min_tokens": st.integers(0, 1),
    "stop": st.just([]),
    "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, VOCABULARY),
}
options = st.dictionaries(st.sampled_from(OPTIONS), values, max_size=4) | st.fixed_dictionaries({}, optional=sensible)
mixed = st.builds(lambda good, bad: good | bad, st.fixed_dictionaries({}, optional=sensible), options)


def model() -> Model:
    metadata = replace(scripted_metadata(), has_logits=True)
    ids, logits = arange(VOCABULARY), random_logits(5, 13, VOCABULARY)[0]
    return Model(metadata, lambda: LogitsSession(metadata, logits, logits[:7], ids))


def is_one_line(error: Exception) -> bool:
    return "\n" not in str(error) and 0 < len(str(error)) < LIMIT


def test_the_fuzzed_options_include_every_option():
    assert {*sensible, "structured_outputs"} == set(OPTIONS)  # a grammar needs a tokenizer: test_structured.py


@settings(max_examples=250, deadline=None)
@given(mixed)
@example({"stop": None})
@example({"stop_token_ids": 5})
@example({"logprobs": VOCABULARY + 1})
@example({"top_k": VOCABULARY, "temperature": 1})
@example({"logit_bias": {"3": 1, "03": 2}})
def test_any_options_run_or_are_refused_in_one_line(given):
    fresh = model()
    try:
        stream = fresh.stream([3, 1, 4], **{"max_new_tokens": 5} | given)
    except ValueError as error:
        assert is_one_line(error), error
        return
    tokens = [token for piece in stream for token in piece.token_ids]
    result = stream.result
    assert result.token_ids == tokens and result.finish_reason in ("stop", "length")
    assert fresh.replay(result).divergence is None
    json.dumps(result.as_json())


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({}, optional=sensible))
def test_valid_options_are_accepted(given):
    Options.of(**given).check(replace(scripted_metadata(), has_logits=True))


entries = st.builds(
    lambda one, more, own: one | more | own,
    st.sampled_from([*PROMPTS[:1], {"turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "a"}]}, {}]),
    st.dictionaries(st.sampled_from([*FIELDS, *IDS, "category", "x"]), values, max_size=2),
    options,
)
lines = st.one_of(
    st.binary(max_size=30),
    entries.map(lambda entry: json.dumps(entry).encode()),
    values.map(lambda value: json.dumps(value).encode()),
    st.builds(lambda entry, cut: json.dumps(entry).encode()[:cut], entries, st.integers(0, 40)),
    st.sampled_from([b"", b" \t", b"\xef\xbb\xbf", b"9" * 5000, b'{"id": NaN, "prompt": "a"}', b"\x00"]),
    st.integers(100, 5000).map(lambda depth: b"[" * depth + b"]" * depth),
    st.integers(100, 2000).map(lambda depth: b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"),
    st.integers(100, 2000).map(lambda depth: b'{"prompt": "a", "stop": ' + b"[" * depth + b"]" * depth + b"}"),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(lines, max_size=4).map(b"\n".join))
def test_any_file_of_prompts_is_read_or_refused_in_one_line(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(data)
    try:
        found = read_lines(file)
    except ValueError as error:
        assert is_one_line(error) and "has no prompts" in str(error)
        assert not data.removeprefix(b"\xef\xbb\xbf").strip()
        return
    numbers = [number for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    assert [each.line for each in found] in (numbers, numbers[1:])  # a byte order mark alone is a blank line
    faults = [each for each in found if isinstance(each, Fault)]
    try:
        assert read_prompts(file) == found and not faults
    except ValueError as error:
        assert str(error) == f"{file} line {faults[0].line}: {faults[0].reason}"
    for each in found:
        if isinstance(each, Fault):
            assert "\n" not in each.reason and each.reason
            continue
        try:
            check_prompt(model(), each, False, None, each.own_options({"seed": 3}))
        except ValueError as error:
            assert is_one_line(error), error
        except FileNotFoundError as error:  # a prompt of text without a tokenizer
            assert each.tokens is None and is_one_line(error)
