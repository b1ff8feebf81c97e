"""The module of an MTP head with its own KV cache; ``mtp/__init__.py`` has the formulas."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from eagle3.export.draft.common.head import CachedHead
from eagle3.export.draft.kinds.mtp.reading import MTPDescription
from eagle3.export.draft.kinds.mtp.tensors import conversion_of, layer_of, one_layer_config
from eagle3.targets import TapTarget
from eagle3.targets.attention import HF_ATTENTION, AttentionFactory, KVCacheShape
from eagle3.targets.complex_rotary import RealRotary


class Head(CachedHead):
    """An MTP head. Draft slot p pairs the target's state at p with token p + 1."""

    def __init__(self, draft: MTPDescription, max_seq_len: int, proposals: int = 1):  # noqa: ARG002 - always 1
        super().__init__()
        model, size = conversion_of(draft.layer).model, draft.hidden_size
        norm, epsilon = type(model.model.norm), draft.layer.rms_norm_eps
        self.max_seq_len, self.takes_final_state, self.d2t = max_seq_len, draft.takes_final_state, None
        self.enorm, self.hnorm, self.norm = (norm(size, eps=epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        layer = layer_of(model)
        layer.self_attn.config._attn_implementation = HF_ATTENTION
        self.layers = nn.ModuleList([layer])
        self._rotary_class = type(model.model.rotary_emb)

    @property
    def window(self) -> int:
        return 0

    def attach(self, draft: MTPDescription, attention: AttentionFactory, dtype: torch.dtype, target: TapTarget) -> Self:
        """Add the KV cache, the rotary table (float32), and the target's embedding and lm_head."""
        attn: Any = self.layers[0].self_attn  # an attention class of transformers
        heads, kv_heads = draft.layer.num_attention_heads, draft.layer.num_key_value_heads
        shape = KVCacheShape(kv_heads, draft.key_size, self.max_seq_len, 0, dtype, heads=heads)
        attn.kv_attention = attention(shape)
        self.rotary_emb = self._rotary_class(one_layer_config(draft.layer))
        self.embed_tokens, self.lm_head = target.embed_tokens, target.lm_head
        return self

    def forward(
        self, tokens: Tensor, feature: Tensor, input_pos: Tensor, last: bool = False, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows at draft slots ``input_pos`` and write their keys and values. See ``Head`` in
        ``common/head.py``.

        Raises:
            ValueError: (eager mode) positions that leave a gap or pass ``max_seq_len``
        """
        if not torch.compiler.is_exporting():
            self.check_positions(input_pos)
        (layer,) = self.layers
        attn: Any = layer.self_attn
        x = self.eh_proj(torch.cat((self.enorm(self.embed_tokens(tokens)), self.hnorm(feature)), dim=-1))
        with RealRotary():
            rotary = self.rotary_emb(x, input_pos[None])
            x = layer(x, attention_mask=attn.kv_attention.rows(input_pos), position_embeddings=rotary)
        if accepted is not None:
            x = x.gather(1, accepted[None, :, None].expand(-1, -1, x.shape[-1]))
        elif last:
            x = x[:, -1:]
        state = self.norm(x)
        return self.lm_head(state), state
