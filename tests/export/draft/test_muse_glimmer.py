"""Muse Glimmer with its own assistant: transformers' assisted generation proposes and accepts the same tokens."""

import pytest
import torch
import transformers
from eager import eager_session
from safetensors.torch import load_file
from scripted import ThreeMethods
from transformers import MuseGlimmerForConditionalGeneration
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerConfig, MuseGlimmerTextConfig

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.kinds import DFLASH
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.shrink import shrink
from eagle3.runner.loop.generation import complete
from eagle3.targets.text_part import build, text_config_of

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="transformers before 5.24 has no such assistant"
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "sliding_window": 24, "rms_norm_eps": 1e-5}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
BLOCK, TOKENS = 5, 96


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' target and assistant with random weights, and the folder that holds both."""
    folder = tmp_path_factory.mktemp("muse")
    text = MuseGlimmerTextConfig(**SIZES, **SPECIAL, num_hidden_layers=4, vocab_size=TOKENS)
    target = MuseGlimmerForConditionalGeneration(MuseGlimmerConfig(text_config=text, vision_config=VISION)).eval()
    own = {"num_hidden_layers": 2, "block_size": BLOCK, "mask_token_id": TOKENS - 1, "target_layer_ids": [0, 1, 2]}
    own |= {"layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.MuseGlimmerAssistantConfig(**SIZES | own, **SPECIAL)
    assistant = transformers.MuseGlimmerAssistantModel(config).eval()
    for seed, model in enumerate((target, assistant)):
        randomize(model.requires_grad_(False), seed=seed)
    target.save_pretrained(folder / "target")
    assistant.config.vocab_size = TOKENS  # Published configurations lack it; only Muse Glimmer's own is known.
    assistant.save_pretrained(folder / "assistant")
    return target, assistant, folder


@pytest.fixture(scope="module")
def session(pair):
    arch = None if torch.cuda.is_available() else "sm_90"
    given = {"checkpoint": pair[2] / "target", "draft": pair[2] / "assistant", "max_seq_len": 128, "max_prefill": 16}
    return eager_session(make_plan(ExportConfig(output_dir=None, cuda_arch=arch, **given)))


class Recorded(ThreeMethods):
    """A session that records the proposals of every round, except those after a part of the prompt."""

    def __init__(self, session, prompt: list[int]):
        super().__init__(session)
        self.proposals, self.prompt = [], prompt

    def draft_decode(self, tokens, feature, input_pos):
        step = self._session.draft_decode(tokens, feature, input_pos)
        if int(input_pos[-1]) + 1 >= len(self.prompt):
            self.proposals.append(step.ids[0].tolist())
        return step


def assisted(target, assistant, prompt: list[int], count: int) -> tuple[list[int], list[list[int]]]:
    """Return transformers' tokens, and the proposals of each round."""
    generator, rounds = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator, []
    candidates = generator.get_candidates

    def keep(self, input_ids, *args, is_first_iteration, **options):
        ids, logits = candidates(self, input_ids, *args, is_first_iteration=is_first_iteration, **options)
        if not is_first_iteration:
            rounds.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(generator, "get_candidates", keep)
        options = {"max_new_tokens": count, "do_sample": False, "speculation_type": "dflash"}
        out = target.generate(torch.tensor([prompt]), assistant_model=assistant, **options)
    return out[0, len(prompt) :].tolist(), rounds


@pytest.mark.parametrize("length", [3, 60])
def test_transformers_proposes_and_accepts_the_same_tokens_as_muse_glimmers_assistant(length, pair, session):
    target, assistant, _ = pair
    prompt = torch.randint(3, TOKENS - 1, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected, rounds = assisted(target, assistant, prompt, 24)
    recorded = Recorded(session, prompt)
    found = complete(recorded, prompt, max_new_tokens=24, stop_ids=[])
    assert found.token_ids == expected
    ours = [each[: len(theirs)] for each, theirs in zip(recorded.proposals, rounds, strict=False)]
    assert ours == rounds[: len(ours)] and len(rounds) - len(ours) <= 1


def test_muse_glimmers_twin_is_in_float32_whatever_the_checkpoints_dtype(pair):
    """transformers creates the head in the dtype of the whole configuration, and the decoder in that of the text
    configuration."""
    config = MuseGlimmerConfig.from_pretrained(pair[2] / "target")
    config.dtype = config.text_config.dtype = torch.bfloat16
    twin = build(shrink(text_config_of(config)), real=True)
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.float32}
    assert config.dtype == torch.bfloat16


def test_muse_glimmers_assistant_is_read_as_its_dflash_variant(pair):
    draft = read_draft(pair[2] / "assistant")
    assert (draft.kind, draft.dialect, draft.first_row, draft.aux_layers) == (DFLASH, "muse-glimmer", 1, (0, 1, 2))
    assert [(each.before, each.causal) for each in draft.attends] == [(24, False), (None, False)]


def test_muse_glimmers_draft_rows_are_embedded_without_the_targets_norm(pair, session):
    weight = load_file(pair[2] / "target" / "model.safetensors")["model.language_model.embed_tokens.weight"]
    rows = session._speculator.draft.embed_tokens(torch.tensor([5]))
    torch.testing.assert_close(rows[0], weight[5].to(rows.dtype))
    assert not torch.allclose(rows[0], session._speculator.target.embed(torch.tensor([5]))[0], atol=1e-2)
