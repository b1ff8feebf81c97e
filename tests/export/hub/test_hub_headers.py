"""A dry run of names on the hub fetches few bytes, and its plan equals that of the complete files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import fail_command, run_command
from executorch.extension.llm.export.quant import QuantConfig
from hub_commands import CPU, TARGET, fetched, flags
from huggingface_hub import constants
from mxfp4_checkpoints import mxfp4_checkpoint
from published import HEADS, gemma4_config, random_weight
from published_checkpoints import GOLDEN, packed, save_head
from safetensors.torch import load_file, save_file
from stand_in_hub import StandInHub, commit_of
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.safetensors_file import HeaderAlone, needs_values
from eagle3.export.cli import main as export_main
from eagle3.export.draft.reading import read_draft
from eagle3.export.hub.sources import find_sources
from eagle3.export.planning.plan import make_plan
from eagle3.export.report import plan_json
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]


def test_a_dry_run_plans_gemma4_31b_from_2_mb_of_67_gb(published, gemma4_31b):
    (target, target_bytes), (_, head_bytes) = gemma4_31b
    text = run_command(export_main, "--target-model", "gemma4-31B", "--dry-run").stdout
    assert published.bytes < 2_000_000
    assert len(list(target.glob("*.safetensors"))) == 13 and target_bytes > 6e10
    assert f"google/gemma-4-31B-it@{commit_of(target)}: {target_bytes / 1e9:.1f} GB to download" in text
    assert f"{head_bytes / 1e9:.1f} GB to download" in text
    assert "hidden_states 2, 30, 57" in text
    assert (
        "fits A100 (80 GiB), Jetson Orin (61 GiB), H100 (80 GiB)" in text and "does not fit RTX 3090 (24 GiB)" in text
    )
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("peagle", "P-EAGLE head of speculators: 3,672.0 M parameters"),
        ("assistant", "Gemma 4 assistant head of transformers: 469.5 M parameters"),
        ("dflash", "DFlash head of z-lab: 1,536.0 M parameters"),
    ],
)
def test_a_head_of_each_kind_with_the_published_shapes_fits_gemma4_31b(kind, says, gemma4_31b, tmp_path):
    """The twin check passes too. It once refused a small copy of four layers that differed only by float32 rounding."""
    (target, _), _ = gemma4_31b
    save_head(tmp_path / kind, HEADS[kind](gemma4_config(60)))
    given = "--checkpoint", target, "--draft", tmp_path / kind, "--cuda-arch", "sm_90", "--dry-run"
    text = run_command(export_main, "--target-model", "gemma4-31B", *given).stdout
    assert says in text and "fits H100 (80 GiB)" in text


def test_an_export_without_download_is_refused_with_the_sizes(published):
    code, line = fail_command(export_main, "--target-model", "gemma4-31B", "--cuda-arch", "sm_90")
    assert code == 1
    assert "google/gemma-4-31B-it (61." in line and "--download" in line and "--dry-run" in line
    assert published.bytes < 10_000
    assert not Path(constants.HF_HUB_CACHE).exists()


def test_the_plan_from_headers_equals_that_from_files(hub_pair):
    with find_sources(replace(flags(), dry_run=True)).local() as here:
        by_headers = make_plan(here)
        assert not (here.checkpoint / "tokenizer.json").exists()
    files = make_plan(flags(TINY.checkpoint, TINY.draft))
    assert plan_json(by_headers) == plan_json(files)
    assert by_headers.target_headers == files.target_headers
    assert by_headers.draft.headers == files.draft.headers


def test_a_head_whose_map_is_of_another_vocabulary_is_refused_by_its_values(hub_pair, tmp_path):
    folder = tmp_path / "wrong"
    folder.mkdir()
    tensors = load_file(TINY.draft / "model.safetensors")
    tensors["d2t"] = tensors["d2t"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((TINY.draft / "config.json").read_bytes())
    hub_pair.add("org/wrong", folder)
    given = ("--checkpoint", TARGET, "--draft", "org/wrong", *CPU, "--dry-run")
    code, line = fail_command(export_main, *given)
    assert code == 1 and "org/wrong/" in line and "d2t" in line and "eagle3-headers" not in line


def by_headers(hub: StandInHub, name: str, folder: Path):
    """Return the tensors of a repository as a dry run reads them."""
    hub.add(name, folder)
    with find_sources(flags(name, TINY.draft, dry_run=True)).local() as here:
        return open_source(here.checkpoint).headers()


@pytest.mark.parametrize("name", [*packed("compressed_tensors")[:1], *packed("awq")[:1]])
def test_fetched_headers_of_packed_checkpoints_equal_those_of_the_files(name, hub):
    files = open_source(GOLDEN / name).headers()
    assert by_headers(hub, "org/packed", GOLDEN / name) == files


@pytest.mark.parametrize("name", packed("gptq")[:1])
def test_a_dry_run_refuses_a_checkpoint_whose_plan_needs_values(name, hub):
    with pytest.raises(ValueError, match="needs the values of .*: type --download") as refused:
        by_headers(hub, "org/packed", GOLDEN / name)
    assert needs_values(refused.value)
    here = fetched(flags("org/packed", TINY.draft))
    assert open_source(here.checkpoint).headers() == open_source(GOLDEN / name).headers()


def test_mxfp4_and_torchao_checkpoints_are_recognized_by_their_headers(hub, tmp_path):
    mxfp4_checkpoint(tmp_path / "mxfp4")
    (tmp_path / "torchao").mkdir()
    weights = {"a.weight": random_weight(torch.Size((64, 256)), QuantConfig(4, 32, True, "min_max"))}
    tensors, metadata = flatten_tensor_state_dict(weights)
    save_file(tensors, tmp_path / "torchao" / "model.safetensors", metadata=metadata)
    for name in ("mxfp4", "torchao"):
        files = open_source(tmp_path / name).headers()
        assert by_headers(hub, f"org/{name}", tmp_path / name) == files
        assert name == "mxfp4" or files["a.weight"].quantized


def test_reading_values_that_were_not_fetched_is_refused(hub_pair):
    with find_sources(flags(dry_run=True)).local() as here:
        source = open_source(here.draft)
        assert source.tensor("d2t").equal(load_file(TINY.draft / "model.safetensors")["d2t"])
        with pytest.raises(HeaderAlone, match="needs the values of fc.weight"):
            source.tensor("fc.weight")
        assert read_draft(here.draft).chain_len == read_draft(TINY.draft).chain_len
    assert not here.draft.exists()


@pytest.mark.parametrize("own", [True, False])
def test_a_dry_run_reports_tokenizers_that_it_does_not_compare(own, hub_pair, tmp_path):
    folder = tmp_path / "with-tokenizer"
    folder.mkdir()
    for file in TINY.draft.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    text = (TINY.checkpoint / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text + ("" if own else "\n"))
    hub_pair.add("org/told", folder)
    sources = find_sources(flags(draft="org/told", dry_run=True))
    assert any("different tokenizer files" in line for line in sources.lines()) is not own
    assert not hub_pair.asked("tokenizer.json")
