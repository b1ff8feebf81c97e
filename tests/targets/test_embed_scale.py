"""Gemma's embedding is scaled by a factor in the dtype of its checkpoint, whatever the dtype of the export."""

import pytest
import torch
from family_configs import SIZE
from random_checkpoints import GEMMA4
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Gemma4TextConfig

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.targets import spec_for
from eagle3.targets.attention import EagerAttention

WIDTH = 96  # its root is 9.7980, and 9.8125 in bfloat16


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 9.8125), (torch.float32, 96**0.5)])
@pytest.mark.parametrize(("kind", "fields"), [(Gemma3TextConfig, {}), (Gemma4TextConfig, GEMMA4)], ids=["3", "4"])
def test_an_export_in_float32_scales_as_transformers_does_in_the_checkpoints_dtype(
    kind, fields, dtype, scale, tmp_path
):
    torch.manual_seed(0)
    config = kind(**SIZE | fields | {"hidden_size": WIDTH}, dtype=dtype)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path)
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").get_input_embeddings()
    text = read_target_config(tmp_path, "auto")
    load = spec_for("auto", text.model_type).module().load
    target = load(open_source(tmp_path).tensors(), text, 64, torch.float32, EagerAttention)
    tokens = torch.arange(3, 40)[None]
    embedded = target.embed(tokens)
    assert embedded.dtype == torch.float32
    assert torch.allclose(embedded, scale * by_transformers.weight[tokens].float(), rtol=1e-6, atol=0)
    assert torch.allclose(
        embedded, by_transformers(tokens).float(), rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=0
    )
