"""Make the golden fixtures of Muse Glimmer's assistant, in tests/golden/dflash, with transformers' own class.

The cases are folders as in make_zlab_golden.py, with the same tensors. transformers proposes from the row after the
anchor on (``DFlashTokenCandidateGenerator``). This needs transformers 5.24, not the versions of the other scripts:

    ATEN_CPU_CAPABILITY=avx2 python scripts/golden/make_muse_glimmer_golden.py
"""

import torch
from case import BLOCK, MASK_TOKEN, OUTPUTS, VOCAB, arguments, randomize, versions, write_cases
from make_zlab_golden import LAYERS, golden
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

CASES = {"dflash_muse_glimmer": (["sliding_attention", "full_attention"], 755)}
"""Maps a folder to kinds of layers and a seed, the first from 704 on without a near-tie."""
WINDOW = 6


class Called(nn.Module):
    """Wraps the model so that it is called like the other models."""

    def __init__(self, model: MuseGlimmerAssistantModel):
        super().__init__()
        self.model = model

    def forward(self, position_ids: Tensor, noise_embedding: Tensor, target_hidden: Tensor) -> Tensor:
        given = {"noise_embeds": noise_embedding, "context_hidden_states": target_hidden, "position_ids": position_ids}
        kept, layers = target_hidden.shape[1], self.model.config.layer_types
        at = torch.arange(kept, kept + noise_embedding.shape[1])[:, None] - torch.arange(position_ids.shape[1])
        masks = {"full_attention": torch.ones_like(at).bool(), "sliding_attention": at.abs() <= WINDOW}
        mask = {kind: masks[kind][None, None] for kind in layers}
        return self.model(**given, attention_mask=mask).last_hidden_state


def make(layers: list[str], generator: torch.Generator) -> tuple:
    sizes = {key: value for key, value in LAYERS.items() if key != "vocab_size"}
    own = {"block_size": BLOCK, "mask_token_id": MASK_TOKEN, "target_layer_ids": OUTPUTS, "layer_types": layers}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = MuseGlimmerAssistantConfig(**sizes, **own, **tokens, sliding_window=WINDOW)
    config._attn_implementation = "sdpa"
    model = MuseGlimmerAssistantModel(config).eval()
    randomize(model, generator)
    tensors = golden(Called(model), generator)
    model.config.vocab_size = VOCAB  # published configurations lack this key
    return model, tensors


if __name__ == "__main__":
    write_cases(arguments("dflash").out, CASES, make, versions("torch", "transformers"))
