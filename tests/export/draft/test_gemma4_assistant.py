"""Gemma 4 assistants compute and propose the same as transformers' own class and its assisted generation."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from assisted_generation import proposed
from commands import fail_command, run_command
from draft_oracle import check_draft
from eager import eager_session
from generations import prompt_of, same_tokens_behind_a_kept_prefix, same_tokens_by_every_path
from random_checkpoints import SIZE, random_assistant, random_model, save_random_assistant, save_random_draft
from refusals import refusal
from safetensors.torch import load_file, save_file
from scripted import ThreeMethods
from traced_for_cuda import traced, wide_model
from transformers import Gemma4TextConfig, Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

from eagle3.export.checks.artifact import compare_proposals
from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.kinds import GEMMA4_ASSISTANT
from eagle3.export.draft.kinds.gemma4_assistant.twin import states_are_shared
from eagle3.export.draft.reading import read_draft
from eagle3.export.lowering.mlx.attention import MlxAttention
from eagle3.export.pipeline import load_speculator, make_manifest, make_metadata
from eagle3.export.planning.pairing import check_pair
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.runner.contract import DRAFT_DECODE, SPECULATE
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.generation import complete
from eagle3.targets.attention import EagerAttention

SIZES = ("31B", "E2B", "E4B", "26B-A4B")
KINDS = {"tied": False, "ordered": True}
COPIES = "tied, with copies of the target's keys"


@pytest.fixture(scope="module")
def target():
    """A target of transformers with keys in its last layers, which an assistant uses."""
    with states_are_shared(Gemma4TextConfig):
        return random_model("gemma4-31B")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """The target and a head of each kind, as transformers saves them."""
    folder = tmp_path_factory.mktemp("assistants")
    target.save_pretrained(folder / "target")
    for name, ordered in KINDS.items():
        save_random_assistant(folder / name, target.config, ordered)
    return folder


def plan_of(folder: Path, kind: str, target_model: str = "gemma4-31B", **flags):
    given = {"checkpoint": folder / "target", "draft": folder / kind, "max_seq_len": 128, "chain_len": 3}
    given |= {} if torch.cuda.is_available() or "backend" in flags else {"cuda_arch": "sm_90"}
    return make_plan(ExportConfig(target_model, output_dir=None, **given, **flags))


@pytest.fixture(scope="module", params=[*KINDS, COPIES])
def session(request, folder):
    """An eager session; with copies, the head is that of a program whose methods share no caches."""
    kind, *copies = request.param.split(", ")
    plan = plan_of(folder, kind, **({"backend": "mlx"} if copies else {"sessions": False}))
    speculator = load_speculator(plan, MlxAttention if copies else EagerAttention, torch.float32)
    session = EagerSession(speculator, replace(make_metadata(plan, make_manifest(plan)), served_by=None))
    session.kind, session.plan, session.speculator = kind, plan, speculator
    return session


class Recorded(ThreeMethods):
    """A session that records the proposals of each round, by the position of its first token."""

    def __init__(self, session):
        super().__init__(session)
        self.rounds = {}

    def target_verify(self, tokens, input_pos):
        self.rounds[int(input_pos[0])] = tokens[0, 1:].tolist()
        return self._session.target_verify(tokens, input_pos)


def assert_same_rounds(ours: Recorded, rounds: list[list[int]], length: int) -> None:
    found = [each for position, each in ours.rounds.items() if position >= length]
    wanted = [each for each in rounds if len(each) == 3]  # the last round has fewer
    assert found[: len(wanted)] == wanted and len(wanted) > 15


@pytest.mark.parametrize("kind", KINDS)
def test_a_gemma4_assistant_equals_transformers_own_class(kind, folder):
    """The calls seed, chain and roll back, beyond the sliding window, in float32."""
    draft = read_draft(folder / kind)
    assert (draft.kind, draft.dialect, draft.has_cache, draft.chain_len) == (GEMMA4_ASSISTANT, "transformers", False, 3)
    compared = check_draft(draft, 0)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4 and compared["tokens"] > 2 * 16


def test_a_gemma4_assistant_attends_to_the_last_layers_that_store_keys(tmp_path):
    model = random_model("gemma4-E2B")
    model.save_pretrained(tmp_path / "target")
    folder, assistant = save_random_assistant(tmp_path / "tied", model.config).parent, random_assistant(model.config)
    compared = check_draft(read_draft(folder / "tied"), 0)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4
    tokens, rounds = proposed(model, assistant, prompt_of(40), 24, 3)
    ours = Recorded(eager_session(plan_of(folder, "tied", target_model="gemma4-E2B")))
    assert complete(ours, prompt_of(40), max_new_tokens=24, stop_ids=[]).token_ids == tokens
    assert_same_rounds(ours, rounds, 40)


def test_a_unified_assistant_proposes_the_tokens_of_transformers_assisted_generation(target, tmp_path):
    """Its target has no entry in a table of families, and is read all the same."""
    keys = {key: value for key, value in target.config.to_dict().items() if key not in ("model_type", "architectures")}
    config = Gemma4UnifiedTextConfig.from_dict(keys)
    with states_are_shared(type(config)):
        model = Gemma4UnifiedForCausalLM(config).eval().requires_grad_(False)
    randomize(model, seed=3)
    model.save_pretrained(tmp_path / "target")
    save_random_assistant(tmp_path / "tied", config)
    compared = check_draft(read_draft(tmp_path / "tied"), 0)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4
    plan = plan_of(tmp_path, "tied", target_model="auto")
    tokens, rounds = proposed(model, random_assistant(config), prompt_of(40), 24, 3)
    ours = Recorded(eager_session(plan))
    assert complete(ours, prompt_of(40), max_new_tokens=24, stop_ids=[]).token_ids == tokens
    assert_same_rounds(ours, rounds, 40)


@pytest.mark.first(1)
@pytest.mark.parametrize("length", [40, 3])  # past the window of 16, and within it
def test_a_gemma4_assistants_proposals_equal_transformers_assisted_generation(length, session, target, folder):
    assistant = random_assistant(target.config, KINDS[session.kind])
    assistant.load_state_dict(load_file(folder / session.kind / "model.safetensors"), strict=False)
    assistant.tie_weights()
    tokens, rounds = proposed(target, assistant, prompt_of(length), 24, 3)
    ours = Recorded(session)
    assert complete(ours, prompt_of(length), max_new_tokens=24, stop_ids=[]).token_ids == tokens
    assert_same_rounds(ours, rounds, length)


def test_the_check_of_an_artifact_computes_a_gemma4_assistants_proposals(session):
    ours, prompt = Recorded(session), prompt_of(12)
    anchor = complete(ours, prompt, max_new_tokens=5, stop_ids=[]).token_ids[0]
    window = [anchor, *ours.rounds[12]]
    assert compare_proposals(session.speculator, session.plan, prompt, window, tie=1e-3) == 3


@pytest.mark.parametrize("session", KINDS, indirect=True)
def test_a_gemma4_assistant_has_no_cache_no_seeding_and_one_row(session):
    metadata = session.metadata
    assert not metadata.has_draft_cache and metadata.draft_sliding_window == 0
    assert metadata.manifest["format_version"] == 5 and metadata.manifest["draft_kind"] == GEMMA4_ASSISTANT
    calls = complete(ThreeMethods(session), prompt_of(60), max_new_tokens=2, stop_ids=[]).stats.method_calls
    assert calls[DRAFT_DECODE] <= 6  # no call for the four chunks of the prompt


@pytest.mark.first(1)
def test_every_path_of_the_loop_gives_the_same_tokens_with_a_gemma4_assistant(session):
    prompt = prompt_of(30)
    plain = same_tokens_by_every_path(session, prompt)
    same_tokens_behind_a_kept_prefix(session, prompt, plain, reused=len(prompt))


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_an_assistants_linears_use_the_small_m_kernels_and_no_cache_is_written(kind, tmp_path):
    model = wide_model("gemma4-31B")
    model.save_pretrained(tmp_path / "target")
    save_random_assistant(tmp_path / kind, model.config, KINDS[kind], hidden_size=64, intermediate_size=128)
    plan = plan_of(tmp_path, kind, draft_qlinear="default", speculate=True)
    for name, program, counted in traced(plan, *(DRAFT_DECODE, SPECULATE)[: 1 + KINDS[kind]]):
        written = [node for node in program.graph.nodes if "index_copy" in str(node.target)]
        assert len(written) == (0 if name == DRAFT_DECODE else 2 * 6)  # the target's own keys and values
        assert not counted["large_m"] and not counted["dequantize"]
        assert name == SPECULATE or counted["small_m"] == 3 * 5 + 3  # both projections; the vocabulary or centroids


# --- what is refused


def changed(folder: Path, into: Path, keys=None, tensors=None) -> Path:
    """Write a copy of a head with changed keys of its text configuration and changed tensors (None removes one), and
    return its folder."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    config["text_config"] |= keys or {}
    (into / "config.json").write_text(json.dumps(config))
    held = load_file(into / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in held.items() if value is not None}, into / "model.safetensors")
    return into


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 96}, "states of 64 (backbone_hidden_size), but the target's hidden size is 96"),
        ({"sliding_window": 24}, "sliding_attention with sliding_window 16, but the target's have 24"),
        ({"global_head_dim": 16}, "full_attention with head_dim 32, but the target's have 16"),
        ({"layer_types": ["full_attention"] * 6}, "the target keeps no keys of that kind"),
        ({"vocab_size": 128}, "vocabulary of 96, the target has 128"),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_values(changes, says, folder):
    common = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 16}
    config = Gemma4TextConfig(**SIZE | common | {"hidden_size_per_layer_input": 0} | changes)
    assert says in refusal(check_pair, read_draft(folder / "tied"), config, ())


def test_a_head_trained_on_other_positions_or_for_another_family_is_refused(folder, target, tmp_path):
    ropes = target.config.to_dict()["rope_parameters"]
    ropes["full_attention"] = ropes["full_attention"] | {"rope_theta": 5e5}
    other = read_draft(changed(folder / "tied", tmp_path / "other", {"rope_parameters": ropes}))
    assert "rope_theta in rope_parameters 500000.0, but the target's have 1000000.0" in refusal(
        check_pair, other, target.config, ()
    )
    llama = random_model("llama3.1-8B").config
    assert "is a Gemma 4 assistant, but the target is a llama" in refusal(
        check_pair, read_draft(folder / "tied"), llama, ()
    )


@pytest.mark.parametrize(
    ("kind", "tensors", "says"),
    [
        ("tied", {"pre_projection.weight": None}, "lacks pre_projection.weight"),
        ("tied", {"model.layers.0.self_attn.k_proj.weight": torch.zeros(2, 2)}, "has no place for"),
        ("ordered", {"masked_embedding.centroids.weight": None}, "lacks centroids.weight"),
        ("ordered", {"masked_embedding.token_ordering": torch.zeros(96).long()}, "1 different ids from 0 to 0"),
    ],
)
def test_tensors_that_a_head_does_not_have_are_refused(kind, tensors, says, folder, target, tmp_path):
    draft = read_draft(changed(folder / kind, tmp_path / "head", tensors=tensors))
    assert says in refusal(check_pair, draft, target.config, ())


def test_an_assistant_given_as_another_kind_is_refused_by_name(folder, target, tmp_path):
    eagle = save_random_draft(tmp_path / "eagle", target.config)
    for source, other, says in ((folder / "tied", eagle, "Gemma 4 assistant"), (eagle, folder / "tied", "lacks")):
        mixed = Path(shutil.copytree(source, tmp_path / f"mixed {says}"))
        shutil.copy(other / "config.json", mixed)
        try:
            line = refusal(check_pair, read_draft(mixed), target.config, ())
        except Exception:
            line = refusal(read_draft, mixed)
        assert says in line
    assert "--draft-dialect is for EAGLE heads" in refusal(read_draft, folder / "tied", "sglang")


def test_an_assistant_config_that_transformers_rejects_is_refused_in_one_line(folder, tmp_path):
    head = changed(folder / "tied", tmp_path / "head", {"hidden_size_per_layer_input": 32})
    assert "transformers cannot read it as an assistant" in refusal(read_draft, head)


def test_gemma4_assistants_are_listed_with_published_heads():
    listed = json.loads(run_command(export_main, "--list-drafts", "--json").stdout)
    assert listed[GEMMA4_ASSISTANT]["heads"] == [f"google/gemma-4-{each}-it-assistant" for each in SIZES]
    assert "RedHatAI/gemma-4-31B-it-speculator.eagle3" in listed["EAGLE-3"]["heads"]
    assert not set(listed["EAGLE-3"]["heads"]) & {*listed["P-EAGLE"]["heads"], "google/gemma-4-31B-it-assistant"}
    assert not [head for head in listed["EAGLE-3"]["heads"] if re.search("dflash|dspark|peagle|assistant", head, re.I)]
    assert "no cache" in run_command(export_main, "--list-drafts").stdout


def test_a_dry_run_shows_an_assistants_memory(folder):
    flags = ("--target-model", "gemma4-31B", "--checkpoint", folder / "target", "--max-seq-len", 64, "--dry-run")
    said = run_command(export_main, *flags, "--backend", "xnnpack", "--draft", folder / "tied").stdout
    assert "Gemma 4 assistant head of transformers" in said and "the target's embedding (a copy would take" in said
    assert "it takes" not in said and "taps     the target's final state after its norm" in said
    code, line = fail_command(export_main, *flags, "--draft", folder / "tied", "--aux-layers", "1,2")
    assert code == 1 and "leave --aux-layers" in line
