"""Targets with an MTP head, by speculators or from the target's own checkpoint, generate and draft correctly."""

from pathlib import Path

import pytest
import torch
from commands import fail_command, run_command
from eager import eager_session
from generations import prompt_of, same_tokens_behind_a_kept_prefix, same_tokens_by_every_path
from mtp_heads import CASES, GOLDEN, ON_THE_CPU, changed, plan_of, save_target, transformers_head
from mtp_oracle import drafter_of
from random_checkpoints import random_model
from refusals import refusal
from scripted import ThreeMethods
from traced_for_cuda import traced
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.kinds import MTP
from eagle3.export.exporting import prepare
from eagle3.export.pipeline import make_manifest
from eagle3.runner.contract import DRAFT_DECODE, SPECULATE
from eagle3.runner.loop.generation import complete
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler
from eagle3.targets.state_mixers import token_by_token

SHARED = "the target's embedding (a copy would take 12,288 bytes), the target's lm_head"


class Recorded(ThreeMethods):
    """A session that records the proposals of each round, by the position of its first token."""

    def __init__(self, session):
        super().__init__(session)
        self.rounds, self.features = {}, []

    def target_verify(self, tokens, input_pos):
        self.rounds[int(input_pos[0])] = tokens[0, 1:].tolist()
        return self._session.target_verify(tokens, input_pos)

    def prefill(self, tokens, input_pos):
        step = self._session.prefill(tokens, input_pos)
        self.features.append(step.feature)
        return step


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("glm"), "glm4_moe")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A Qwen3 target for the golden head of speculators."""
    folder = tmp_path_factory.mktemp("qwen") / "target"
    random_model("qwen3-4B", num_hidden_layers=4).save_pretrained(folder)
    return folder


@pytest.mark.first(1)
@pytest.mark.parametrize("length", [40, 3])
def test_mtp_proposals_equal_those_of_transformers_generation_with_mtp(length, glm, monkeypatch):
    """transformers drafts one token with each layer, so one per round for this target, from the state that transformers
    passes to its MTP model."""
    main = AutoModelForCausalLM.from_pretrained(glm).float()
    head, rounds = transformers_head(main, glm), []
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_args, **_options: head)
    candidates = MTPCandidateGenerator.get_candidates

    def noted(self, input_ids, *args, **options):
        ids, logits = candidates(self, input_ids, *args, **options)
        rounds.append((input_ids.shape[1] - 1, ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    prompt = prompt_of(length)
    tokens = main.generate(torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=40)[0, length:]
    session = Recorded(eager_session(plan_of(glm, chain_len=1)))
    assert complete(session, prompt, max_new_tokens=40, stop_ids=[]).token_ids == tokens.tolist()
    wanted = {at: ids for at, ids in rounds if ids}
    assert len(wanted) > 20 and {at: session.rounds.get(at) for at in wanted} == wanted


@torch.no_grad()
@pytest.mark.first(1)
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_with_recurrent_layers_the_first_proposal_equals_transformers_mtp_layer(model_type, tmp_path):
    """transformers does not generate with an assistant if layers are recurrent, so its MTP layer is run on the whole
    text."""
    main = AutoModelForCausalLM.from_pretrained(save_target(tmp_path / "target", model_type)).float()
    layer = transformers_head(main, tmp_path / "target").layers[0]
    session = Recorded(eager_session(plan_of(tmp_path / "target", **ON_THE_CPU)))
    text = prompt_of(40) + complete(session, prompt_of(40), max_new_tokens=40, stop_ids=[]).token_ids
    with token_by_token(main):
        states = main.model(torch.tensor([text]), use_cache=False).last_hidden_state
    assert main.lm_head(states).argmax(-1)[0, 39:-1].tolist() == text[40:]
    compared = 0
    for anchor, proposed in session.rounds.items():
        positions = torch.arange(anchor)[None]
        rotary = main.model.rotary_emb(states[:, :anchor], positions)
        mask = torch.full((anchor, anchor), -torch.inf).triu(1)[None, None]
        embedded = main.model.embed_tokens(torch.tensor([text[1 : anchor + 1]]))
        given = {"position_embeddings": rotary, "attention_mask": mask, "position_ids": positions, "cache": None}
        state = layer(embedded, states[:, :anchor], **given)
        assert int(main.lm_head(state[:, -1]).argmax()) == proposed[0]
        compared += 1
    assert compared > 20


@torch.no_grad()
def test_the_pairing_gives_a_speculators_mtp_head_the_state_before_the_norm(qwen):
    session = Recorded(eager_session(plan_of(qwen, GOLDEN / "qwen3", max_prefill=None)))
    complete(session, prompt := prompt_of(12), max_new_tokens=2, stop_ids=[])
    model, seen = AutoModelForCausalLM.from_pretrained(qwen).float(), []
    model.model.layers[-1].register_forward_hook(lambda _module, _args, out: seen.append(out))
    model(torch.tensor([prompt]))
    torch.testing.assert_close(torch.cat(session.features, dim=1), seen[0], atol=1e-4, rtol=1e-4)


class ByFormulas(ThreeMethods):
    """A session that compares every draft step with the formulas, for the tokens and features written last in each
    slot."""

    def __init__(self, session, name: str):
        super().__init__(session)
        target = session._speculator.target
        self.drafter = drafter_of(name, target.embed_tokens.weight, target.lm_head.weight)
        self.tokens, self.features, self.steps = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 64), 0

    def draft_decode(self, tokens, feature, input_pos):
        step, start = self._session.draft_decode(tokens, feature, input_pos), int(input_pos[0])
        self.tokens = torch.cat([self.tokens[:start], tokens[0]])
        self.features = torch.cat([self.features[:start], feature[0]])
        logits, state = self.drafter(self.tokens, self.features)
        torch.testing.assert_close(step.logits[0, 0], logits[-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(step.feature[0, 0], state[-1], atol=1e-4, rtol=1e-4)
        self.steps += 1
        return step


@pytest.mark.parametrize("name", CASES)
def test_every_mtp_step_of_a_generation_equals_its_formulas(name, qwen):
    """Steps are seeded in chunks, chained, and rolled back after accepted windows of several lengths. A bias restricts
    the target to four tokens, so that some are accepted."""
    session = eager_session(plan_of(qwen, GOLDEN / name))
    checked, prompt = ByFormulas(session, name), prompt_of(40)
    sampling = Sampling(temperature=1.0, seed=2, logit_bias={token: 50.0 for token in (10, 12, 13, 14)})
    biased = []
    for chain in (0, None):
        choice = Sampler(sampling, session.metadata, prompt)
        biased.append(complete(checked, prompt, chain=chain, max_new_tokens=50, stop_ids=[], choice=choice))
    assert biased[0].token_ids == biased[1].token_ids and biased[1].stats.num_accepted_tokens > 5
    assert checked.steps > 50
    options = {"max_new_tokens": 16, "stop_ids": []}
    plain, three = complete(checked, prompt, chain=0, **options), complete(checked, prompt, **options)
    fused = complete(session, prompt, **options)
    assert plain.token_ids == three.token_ids == fused.token_ids and three.stats.counts() == fused.stats.counts()
    assert fused.stats.method_calls[SPECULATE] > 5


@pytest.mark.whole
def test_every_path_of_the_loop_gives_the_same_tokens_with_an_mtp_head(glm):
    plan = plan_of(glm)
    session, prompt = eager_session(plan), prompt_of(30)
    metadata, manifest = session.metadata, make_manifest(plan)
    assert metadata.has_draft_cache and metadata.proposals == 1 and metadata.chain_len == 3
    assert manifest["draft_kind"] == MTP and manifest["taps"] == []
    plain = same_tokens_by_every_path(session, prompt)
    same_tokens_behind_a_kept_prefix(session, prompt, plain, reused=len(prompt) - 2)


@pytest.mark.first(1)
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3"])
def test_on_cuda_the_linears_of_an_mtp_head_use_the_small_m_kernels(model_type, tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    wide |= {"dtype": "bfloat16"} | ({"moe_intermediate_size": 256} if model_type == "glm4_moe" else {})
    save_target(tmp_path / "target", model_type, **wide)
    plan = plan_of(tmp_path / "target", draft_qlinear="default", speculate=True)
    ((_, program, counted),) = traced(plan, DRAFT_DECODE)
    fused = [node for node in program.graph.nodes if "experts" in str(node.target) and node.op == "call_function"]
    # eh_proj, the layer (for one with experts, the shared expert's MLP), lm_head
    assert counted == {"small_m": 9, "large_m": 0, "dequantize": 0} and len(fused) == (model_type == "glm4_moe")


# --- defaults and output


def test_draft_may_be_omitted_if_the_checkpoint_has_an_mtp_layer(glm, qwen):
    assert plan_of(glm, None).draft.dialect == "the target's own checkpoint"
    flags = ("--checkpoint", glm, "--max-seq-len", 64, "--dry-run", "--backend", "xnnpack")
    said = run_command(export_main, *flags).stdout
    assert "MTP head of the target's own checkpoint" in said and SHARED in said
    assert "taps     the target's final state after its norm" in said
    code, line = fail_command(export_main, "--checkpoint", qwen, "--dry-run", "--backend", "xnnpack")
    assert code == 1 and "or --draft mtp if its checkpoint has an MTP layer" in line


def test_random_weights_with_fewer_layers_keep_the_mtp_layer(glm):
    flags = ("--checkpoint", glm, "--max-seq-len", 64, "--dry-run", "--backend", "xnnpack", "--random-weights")
    for layers in ((), ("--layers", 2)):
        assert "MTP head of the target's own" in run_command(export_main, *flags, "--draft", "mtp", *layers).stdout


# --- what is refused


@pytest.mark.parametrize(
    ("layer", "keys", "says"),
    [
        (
            {"model_type": "qwen3_next"},
            {},
            "MTP head of a qwen3_next model, which has hybrid layers (linear attention)",
        ),
        ({"model_type": "llama"}, {}, "MTP head of a llama model, which has layers of no known kind"),
        ({"hidden_size": 96}, {}, "for a target with hidden_size 96, but the target has 64"),
        ({"vocab_size": 128}, {}, "vocabulary of 128, the target has 96"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 8, "use_sliding_window": True}, {}, "sliding"),
        ({"num_attention_heads": 8}, {}, "is [128, 64], but config.json implies [256, 64]"),
        ({}, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, but only MTP heads of one layer"),
        ({}, {"transformer_layer_config": None}, "has no transformer_layer_config"),
        ({}, {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}, "is an MTP head in a form"),
    ],
)
def test_an_mtp_head_of_another_kind_or_target_is_refused(layer, keys, says, qwen, tmp_path):
    if keys.get("transformer_layer_config", 1) is None:
        layer = None
    head = changed(GOLDEN / "qwen3", tmp_path / "head", keys, layer)
    assert says in refusal(plan_of, qwen, head)


def test_targets_without_a_supported_mtp_layer_are_refused_by_name(glm, qwen, tmp_path):
    llama = tmp_path / "llama"
    model = random_model("llama3.1-8B", num_hidden_layers=4)
    model.save_pretrained(llama)
    assert "trained for tiny-verifier (Qwen3ForCausalLM)" in refusal(plan_of, llama, GOLDEN / "qwen3")
    line = refusal(plan_of, llama, changed(GOLDEN / "qwen3", tmp_path / "head", {"speculators_config": None}))
    assert "MTP head for a target with model_type qwen3, but the target has llama" in line
    assert "--draft mtp: " in (line := refusal(plan_of, llama)) and "has no MTP layer" in line
    line = refusal(plan_of, qwen, glm)
    assert "is a glm4_moe model with an MTP layer" in line and f"type --checkpoint {glm} --draft mtp" in line
    own = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    assert "of a llama is not supported" in refusal(plan_of, changed(llama, tmp_path / "own", tensors=own))


def test_a_damaged_mtp_layer_of_a_target_is_refused(glm, tmp_path):
    def with_changes(name: str, **given) -> str:
        return refusal(plan_of, changed(glm, tmp_path / name, **given))

    expert = "model.layers.3.mlp.experts.5.up_proj.weight"
    assert "its MTP layer lacks layers.0.mlp.experts.5.up_proj.weight" in with_changes("a", tensors={expert: None})
    assert "of its MTP layer is [2, 2]" in with_changes("b", tensors={expert: torch.zeros(2, 2)})
    assert "num_nextn_predict_layers is 2" in with_changes("d", keys={"num_nextn_predict_layers": 2})
    twice = {"model.layers.3.shared_norm.weight": torch.zeros(64)}
    assert "has layers.0.shared_norm.weight, which" in with_changes("e", tensors=twice)


def test_flags_for_eagle_heads_are_refused_with_an_mtp_head(glm, qwen):
    for flags in (
        {"draft_dialect": "sglang"},
        {"norm_before_residual": True},
        {"draft_window": 8},
        {"draft_rope_theta": 1e4},
    ):
        own = ExportConfig(checkpoint=glm, draft=Path("mtp"), cuda_arch="sm_90", dry_run=True, **flags)
        assert "is for EAGLE heads" in refusal(prepare, own)
        assert "is for EAGLE heads" in refusal(plan_of, qwen, GOLDEN / "qwen3", **flags)
    assert "takes the target's final state and no taps" in refusal(plan_of, glm, aux_layers=(1,))
    assert "takes one state of its target, but 2" in refusal(plan_of, qwen, GOLDEN / "qwen3", aux_layers=(1, 2))
