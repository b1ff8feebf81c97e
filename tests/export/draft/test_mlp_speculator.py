"""MLP speculators equal fms-extras, with which the published heads were trained. scripts/golden/make_mlp_golden.py made
the golden numbers."""

from pathlib import Path

import pytest
import torch
from dflash_heads import changed
from generations import prompt_of, same_tokens_behind_a_kept_prefix, same_tokens_by_every_path
from places import TESTS
from random_checkpoints import random_model, save_random_mlp
from refusals import refusal
from safetensors.torch import load_file, save_file
from scripted import ThreeMethods
from traced_for_cuda import traced, wide_model
from transformers import LlamaConfig

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.kinds import MLP_SPECULATOR
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.export.pipeline import load_speculator, make_manifest, make_metadata
from eagle3.export.planning.pairing import check_pair
from eagle3.export.planning.plan import make_plan
from eagle3.runner.contract import DRAFT_DECODE
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.generation import complete
from eagle3.targets.attention import EagerAttention

GOLDEN = TESTS / "golden" / "mlp"
CASES = sorted(path.name for path in GOLDEN.iterdir())
TARGET = LlamaConfig(hidden_size=64, vocab_size=96)


def head_of(folder: Path, proposals: int):
    return load_draft(read_draft(folder), 32, torch.float32, EagerAttention, None, proposals)


@pytest.mark.parametrize("case", CASES)
def test_an_mlp_speculator_proposes_fms_extras_tokens(case):
    draft, golden = read_draft(GOLDEN / case), load_file(GOLDEN / case / "golden.safetensors")
    stages = golden["proposals"].shape[1]
    check_pair(draft, TARGET, ())
    assert (draft.kind, draft.dialect, draft.has_cache) == (MLP_SPECULATOR, "fms-extras", False)
    assert draft.chain_len == stages
    for length in range(1, stages + 1):
        head = head_of(GOLDEN / case, length)
        for position in range(12):
            row = slice(position, position + 1)
            logits, _ = head(golden["tokens"][:, row], golden["states"][:, row], torch.tensor([position]), last=True)
            torch.testing.assert_close(logits[0], golden["logits"][position, :length], atol=1e-4, rtol=1e-4)
            assert head.target_ids(logits)[0].tolist() == golden["proposals"][position, :length].tolist()
        for accepted in (0, 7):  # as a fused round calls it
            picked, _ = head(golden["tokens"], golden["states"], torch.arange(12), accepted=torch.tensor([accepted]))
            torch.testing.assert_close(picked[0], golden["logits"][accepted, :length], atol=1e-4, rtol=1e-4)


def test_copies_of_tied_weights_and_names_without_a_prefix_are_read(tmp_path):
    """The cases are fms's own checkpoints, and a tied head saved tensor by tensor."""
    folder = changed(GOLDEN / "tied", tmp_path / "head")
    held = load_file(folder / "model.safetensors")
    copies = {name.replace(".0.", f".{stage}."): value.clone() for name, value in held.items() for stage in (1, 2, 3)}
    copies |= {f"speculator.proj.{stage}.weight": held["speculator.proj.1.weight"].clone() for stage in (1, 2, 3)}
    named = {name.removeprefix("speculator."): value for name, value in (copies | held).items()}
    assert len(named) > 15
    save_file(named, folder / "model.safetensors")
    check_pair(read_draft(folder), TARGET, ())
    given, golden = head_of(folder, 4), load_file(GOLDEN / "tied" / "golden.safetensors")
    logits, _ = given(golden["tokens"][:, :1], golden["states"][:, :1], torch.tensor([0]), last=True)
    torch.testing.assert_close(logits[0], golden["logits"][0], atol=1e-4, rtol=1e-4)


# --- with a target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    model = random_model("llama3.1-8B")
    model.save_pretrained(folder / "target")
    save_random_mlp(folder / "draft", model.config)
    return folder


def plan_of(folder: Path, **flags):
    given = {"checkpoint": folder / "target", "draft": folder / "draft", "max_seq_len": 128}
    arch = None if torch.cuda.is_available() else "sm_90"
    return make_plan(ExportConfig("llama3.1-8B", output_dir=None, cuda_arch=arch, **(given | flags)))


@pytest.fixture(scope="module")
def session(folder):
    plan = plan_of(folder, sessions=False)
    speculator = load_speculator(plan, EagerAttention, torch.float32)
    return EagerSession(speculator, make_metadata(plan, make_manifest(plan)))


def test_an_mlp_speculator_takes_one_call_per_round_without_cache_or_seeding(session):
    metadata = session.metadata
    assert not metadata.has_draft_cache and metadata.proposals == metadata.chain_len == 4
    assert metadata.manifest["draft_kind"] == MLP_SPECULATOR and metadata.manifest["format_version"] == 5
    stats = complete(ThreeMethods(session), prompt_of(60), max_new_tokens=40, stop_ids=[]).stats
    assert stats.method_calls[DRAFT_DECODE] <= stats.method_calls["target_verify"] + 1


def test_every_path_of_the_loop_gives_the_same_tokens_with_an_mlp_speculator(session):
    prompt = prompt_of(30)
    plain = same_tokens_by_every_path(session, prompt)
    same_tokens_behind_a_kept_prefix(session, prompt, plain, reused=len(prompt))


@pytest.mark.whole
def test_on_cuda_the_linears_of_an_mlp_speculator_use_the_small_m_kernels(tmp_path):
    model = wide_model("llama3.1-8B")
    model.save_pretrained(tmp_path / "target")
    save_random_mlp(tmp_path / "draft", model.config, inner_dim=512)
    ((_, _, counted),) = traced(plan_of(tmp_path, draft_qlinear="default", speculate=True), DRAFT_DECODE)
    assert not counted["large_m"] and not counted["dequantize"] and counted["small_m"] == 3  # proj, lm_head


# --- what is refused


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"n_predict": 0}, "n_predict is 0, but must be a whole number from 1 on"),
        ({"n_predict": 1, "tie_weights": True}, "n_predict is 1, but must be a whole number from 2 on"),
        ({"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, "has the architecture ArcticMLPSpeculator"),
    ],
)
def test_an_mlp_speculator_with_an_unsupported_configuration_is_refused(keys, says, tmp_path):
    assert says in refusal(read_draft, changed(GOLDEN / "untied", tmp_path / "head", keys))


@pytest.mark.parametrize(
    ("keys", "tensors", "says"),
    [
        ({}, {"speculator.ln.1.bias": None}, "lacks stages.1.shift"),
        ({}, {"speculator.emb.3.weight": torch.zeros(96, 40)}, "has stages.3.embed_tokens.weight, which"),
        ({"tie_weights": True}, {}, "tie_weights is true, but speculator.ln.1"),
        ({"inner_dim": 48}, {}, "stages.0.shift is [40], but config.json implies [48]"),
        ({"emb_dim": 32}, {}, "states of 32 (emb_dim), but the target's hidden size is 64"),
        ({"vocab_size": 90}, {}, "vocabulary of 90, the target has 96"),
    ],
)
def test_an_mlp_speculator_with_tensors_of_another_head_is_refused(keys, tensors, says, tmp_path):
    assert says in refusal(
        check_pair, read_draft(changed(GOLDEN / "untied", tmp_path / "head", keys, tensors)), TARGET, ()
    )
