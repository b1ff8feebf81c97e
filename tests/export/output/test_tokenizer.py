"""An artifact's tokenizer gives the ids of transformers, which reads more than ``tokenizer.json``."""

import json

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle3.export.output.contents import copy_tokenizer
from eagle3.export.output.tokenizer import write_tokenizer
from eagle3.runner.text.text import Text
from eagle3.targets import TARGETS

WORDS = ("eBay", "NaOH", " isn", "'t", "123", "Hello", "helloWorld")
TEXTS = ("eBay sells NaOH", "isn't 123", "a<s>b</s>c<x>d", " HelloWorld 日本")
SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "transformers_version": "4.55.0"}


def checkpoint(folder, fields: dict, beside: dict, change=lambda tokenizer: None):
    """Write a byte-level BPE of over 100,000 tokens, as Mistral's. ``fields`` are those of tokenizer_config.json;
    ``beside`` maps names of other JSON files to their contents."""
    vocabulary, merges = {char: id for id, char in enumerate(bytes_to_unicode().values())}, []
    for word in WORDS:
        pieces = list("".join(bytes_to_unicode()[byte] for byte in word.encode()))
        while len(pieces) > 1:
            if (pieces[0], pieces[1]) not in merges:
                merges.append((pieces[0], pieces[1]))
            pieces[:2] = [pieces[0] + pieces[1]]
            vocabulary.setdefault(pieces[0], len(vocabulary))
    vocabulary |= {f"<filler {id}>": id for id in range(len(vocabulary), 100_500)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), whole])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    change(tokenizer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | fields
    for name, value in {"tokenizer_config.json": fields, **beside}.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


X = {"100502": {"content": "<x>", "special": True, "normalized": False}}
CHANGES_IDS = {
    "fix_mistral_regex": ({"fix_mistral_regex": True}, {"config.json": MISTRAL}),
    "added_tokens_decoder": ({"added_tokens_decoder": X}, {}),
    "extra_special_tokens": ({"extra_special_tokens": {"x_token": "<x>"}}, {}),
    "special_tokens_map": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<x>"]}}),
    "tokenizer_class": ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}),
}


def artifact(source, folder) -> tuple[Text, list[str]]:
    folder.mkdir()
    copy_tokenizer(source, folder)
    lines = list(write_tokenizer(source, folder))
    return Text(folder), lines


def is_as_in_transformers(text: Text, source) -> bool:
    reference = AutoTokenizer.from_pretrained(source, local_files_only=True)
    for each in TEXTS:
        assert text.encode(each) == reference(each)["input_ids"], each
        turns = [{"role": "user", "content": each}]
        assert text.encode_messages(turns) == reference.apply_chat_template(turns, return_dict=False)
    return True


@pytest.mark.first(3)
@pytest.mark.parametrize("case", CHANGES_IDS)
def test_fields_beside_the_tokenizer_change_ids_as_in_transformers(case, tmp_path):
    source = checkpoint(tmp_path / "source", *CHANGES_IDS[case])
    alone = Text(source)
    text, lines = artifact(source, tmp_path / "artifact")
    assert [alone.encode(each) for each in TEXTS] != [text.encode(each) for each in TEXTS]
    assert is_as_in_transformers(text, source)
    if case in ("fix_mistral_regex", "tokenizer_class"):  # the other cases change the ids of one token alone
        assert "transformers makes other ids than tokenizer.json alone" in lines[0] and len(lines) == 1


def limited(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)


NOT_IN_THE_FILE = [
    ({}, limited),
    ({"split_special_tokens": True}, lambda tokenizer: None),
    ({"add_bos_token": True, "add_eos_token": True}, lambda tokenizer: None),  # which transformers ignores here
]


@pytest.mark.first(1)
@pytest.mark.parametrize(("fields", "change"), NOT_IN_THE_FILE)
def test_text_is_neither_cut_nor_padded_and_special_tokens_are_split_if_asked(fields, change, tmp_path):
    source = checkpoint(tmp_path / "source", fields, {}, change)
    text, lines = artifact(source, tmp_path / "artifact")
    assert is_as_in_transformers(text, source) and lines == []


def test_a_tokenizer_that_transformers_takes_as_it_is_is_copied(tmp_path):
    source = TARGETS["gemma4-tiny"].checkpoint
    _, lines = artifact(source, tmp_path / "artifact")
    assert lines == []
    assert (tmp_path / "artifact" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_transformers_does_not_load_is_said(tmp_path):
    own_code = {"auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}, "tokenizer_class": "Own"}
    source = checkpoint(tmp_path / "source", own_code, {})
    text, lines = artifact(source, tmp_path / "artifact")
    assert text.encode("123") and len(lines) == 1
    assert lines[0].startswith("Warning: transformers does not load the tokenizer") and "are not applied" in lines[0]
