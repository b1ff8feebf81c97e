"""A head whose embedding or lm_head equals the target's bit for bit shares the target's."""

import json

import pytest
import torch
from dflash_heads import GOLDEN, changed
from draft_oracle import check_draft
from eager import eager_speculator

from eagle3.export.checkpoints.safetensors_file import save_header
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.export.report import draft_text

BOTH = ("embed_tokens", "lm_head")


@pytest.fixture
def pair(checkpoints, tmp_path):
    """A target's folder, and a function that makes a DSpark head for it with its own tables or copies of the
    target's."""

    def make(name: str, **given):
        model, folder = checkpoints(name)
        tables = {"embed_tokens.weight": model.get_input_embeddings().weight.data.clone()}
        tables["lm_head.weight"] = model.get_output_embeddings().weight.data.clone()
        head = changed(GOLDEN / "dspark_deepspec", tmp_path / "head", tensors=tables | given)
        return folder, head

    return make


def plan_of(name: str, folder, head, **flags):
    given = {"backend": "xnnpack", "checkpoint": folder, "draft": head, "output_dir": None, "max_seq_len": 64}
    given |= {"draft_qlinear": "none"}
    return make_plan(ExportConfig(name, **given | flags))


@pytest.mark.parametrize("name", ["llama3.1-8B", "gemma4-31B"])
def test_copies_of_the_targets_tables_are_left_out_without_changing_the_head(name, pair, monkeypatch):
    """The cases are an untied embedding without a scale, and a tied one with a scale."""
    folder, head = pair(name)
    plan = plan_of(name, folder, head)
    assert plan.draft.copies == BOTH and plan.draft.shares_lm_head and not plan.draft.has_embedding
    assert draft_text(plan).endswith("(its embed_tokens and lm_head: copies of the target's)")
    monkeypatch.setattr("eagle3.export.planning.plan.without_copies", lambda draft, *_: draft)
    whole = plan_of(name, folder, head)
    assert whole.draft.has_embedding and not whole.draft.copies
    assert plan.weight_bytes == whole.weight_bytes - 2 * 96 * 64 * 4
    assert check_draft(plan.draft, 3)["logits"] < 1e-4
    tokens, positions = torch.arange(9)[None], torch.arange(9)
    outputs = []
    for each in (plan, whole):
        draft = eager_speculator(each).draft
        with torch.no_grad():
            outputs.append(draft(tokens, torch.ones(1, 9, 64), positions)[0])
    assert torch.equal(*outputs)


def one_number_more(table):
    table[70, 3] += 1e-3  # a row outside the sample
    return table


@pytest.mark.parametrize(
    ("name", "change", "flags", "copies"),
    [
        ("lm_head.weight", one_number_more, {}, ("embed_tokens",)),
        ("embed_tokens.weight", torch.Tensor.double, {}, BOTH),
        ("lm_head.weight", torch.clone, {"draft_qlinear": "8da8w"}, ("embed_tokens",)),  # smaller than the target's
        ("lm_head.weight", torch.clone, {"qlinear": "8da8w", "draft_qlinear": "8da8w"}, BOTH),
    ],
)
def test_a_table_is_a_copy_if_all_its_numbers_and_its_size_in_the_export_are_equal(
    name, change, flags, copies, pair, checkpoints, monkeypatch
):
    monkeypatch.setattr("eagle3.export.draft.reading.SAMPLE", 8)  # rows, of the 96 of these tables
    model, _ = checkpoints("llama3.1-8B")
    owner = model.get_output_embeddings() if name == "lm_head.weight" else model.get_input_embeddings()
    folder, head = pair("llama3.1-8B", **{name: change(owner.weight.data.clone())})
    draft = plan_of("llama3.1-8B", folder, head, **flags).draft
    assert draft.copies == copies and draft.shares_lm_head == (copies == BOTH) and not draft.has_embedding


def test_checkpoints_with_headers_only_have_no_copies(pair, tmp_path):
    folder, head = pair("llama3.1-8B")
    for each in (folder, head):
        into = tmp_path / f"headers-{each.name}"
        into.mkdir()
        (into / "config.json").write_text((each / "config.json").read_text())
        raw = (each / "model.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        metadata = header.pop("__metadata__", None)
        tensors = {name: (item["shape"], item["dtype"]) for name, item in header.items()}
        save_header(into / "model.safetensors", tensors, metadata or {}, {})
    plan = plan_of("llama3.1-8B", tmp_path / f"headers-{folder.name}", tmp_path / "headers-head")
    assert not plan.draft.copies
