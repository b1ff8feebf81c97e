"""The text part of a multimodal model gives the logits of the multimodal model, not those of its text model class."""

import copy

import pytest
import torch
import transformers
from eager import eager_speculator
from family_configs import EXPERTS, SIZE
from random_checkpoints import GRANITE, save_random_draft
from transformers import CONFIG_MAPPING

from eagle3.export import ExportConfig, prepare
from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.twin.comparison import TOLERANCE
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.target import compare, make_twin, without_images
from eagle3.targets import spec_for
from eagle3.targets.text_part import model_class, text_config_of

SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SIGLIP |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
CLIP = SIGLIP | {"model_type": "clip_vision_model"}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
MLLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_global_layers": 1}
MLLAMA |= {"attention_heads": 2, "image_size": 28, "intermediate_layers_indices": [0], "vision_output_dim": 64}
LLAMA4 = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA4 |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}

WRAPPERS = {
    "aya_vision": ({"model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 16}, SIGLIP),
    "gemma3": ({"model_type": "gemma3_text", "final_logit_softcapping": 3.0, "sliding_window": 16}, SIGLIP),
    "llava": ({"model_type": "granite", **GRANITE}, CLIP),
    "paligemma": ({"model_type": "gemma2", "final_logit_softcapping": 3.0, "sliding_window": 16}, SIGLIP),
    "qwen2_5_vl": (MROPE, QWEN),
    "qwen3_vl_moe": (MROPE | EXPERTS, QWEN | {"deepstack_visual_indexes": [0]}),
    "glm4v": (MROPE, QWEN),
    "mllama": ({"cross_attention_layers": [1], "bos_token_id": 0}, MLLAMA),
    "muse_glimmer": (
        {"final_logit_softcapping": 3.0, "output_multiplier": 0.5, "hidden_activation": "silu"},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"layer_types": ["full_attention"]},
    ),
    "llama4": ({"model_type": "llama4_text", "num_local_experts": 4, "attention_chunk_size": 16}, LLAMA4),
}
"""Fields of the text and of the vision part beside the sizes. What the text models do to their logits, the first four
wrappers leave out or do."""


def wrapper(name: str):
    text, vision = WRAPPERS[name]
    text = SIZE | {"pad_token_id": 0} | text
    config = CONFIG_MAPPING[name](**copy.deepcopy({"text_config": text, "vision_config": vision}))
    return config, getattr(transformers, next(iter(classes(config))).__name__)


def classes(config):
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    yield from found if isinstance(found, tuple) else (found,)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_multimodal_model_has_the_multimodal_logits(name, tmp_path):
    config, kind = wrapper(name)
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    randomize(model, seed=5)
    model.save_pretrained(tmp_path / "target")
    if name == "llama4":  # transformers 5.24.0 raises an error without this field
        without_images(model.language_model)
    text = model.config.get_text_config()
    draft = save_random_draft(tmp_path / "draft", text, aux_layers=(0, 2, 4))
    folders = {"checkpoint": tmp_path / "target", "draft": draft}
    plan = prepare(ExportConfig(output_dir=tmp_path / "out", backend="xnnpack", max_seq_len=128, **folders)).plan
    target = eager_speculator(plan).target
    tokens = torch.randint(1, 96, (1, 50), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, use_cache=False).logits
    for start in range(0, 50, 10):
        state, _ = target(tokens[:, start : start + 10], torch.arange(start, start + 10), (0,))
        torch.testing.assert_close(target.logits(state), expected[:, start : start + 10], atol=1e-3, rtol=1e-3)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["aya_vision", "gemma3", "llava", "paligemma"])
def test_the_twin_of_a_multimodal_model_is_the_multimodal_class(name, tmp_path):
    """The logits of the text model class differ only in scale or softcap, and are wrong."""
    config, kind = wrapper(name)
    config.architectures = [kind.__name__]
    config.save_pretrained(tmp_path)
    text = read_target_config(tmp_path, "auto")
    spec = spec_for("auto", text.model_type)

    class OfTheText:
        max_forward_len = staticmethod(spec.max_forward_len)

        def module(self):
            return self

        def load(self, weights, given, *rest):
            target = spec.module().load(weights, given, *rest)
            model = transformers.AutoModelForCausalLM.from_config(text_config(given))
            model.lm_head, model.model = target.lm_head, Given()
            target.logits = lambda state: model(inputs_embeds=state).logits
            return target

    assert compare(spec, make_twin(text), 0).difference <= TOLERANCE
    found = compare(OfTheText(), make_twin(text), 0)
    assert (found.largest["logits"] > 0.01) == (name in DIFFERENT)


DIFFERENT = ("aya_vision", "gemma3", "llava")


def text_config(config):
    """Return only the text configuration."""
    return type(config).from_dict({key: value for key, value in config.to_dict().items() if key != "whole_config"})


class Given(torch.nn.Module):
    """A stand-in for a decoder that returns its input embeddings as its state."""

    def forward(self, inputs_embeds, **given):
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def test_a_multimodal_file_without_architectures_is_read_as_transformers_class():
    config, kind = wrapper("qwen2_5_vl")
    assert model_class(text_config_of(config)) is kind
    config, _ = wrapper("gemma3")
    config.architectures = ["Gemma3ForCausalLM"]
    assert model_class(text_config_of(config)).__name__ == "Gemma3ForCausalLM"
    config.architectures = ["Gemma3Model"]  # the class does not generate text
    assert model_class(text_config_of(config)).__name__ == "Gemma3ForConditionalGeneration"
