"""The module of an EAGLE head with its own KV cache: EAGLE-3, P-EAGLE, and EAGLE 1 and 2.

    f = fc(cat(taps))                       # first step of an EAGLE-3; later steps take g of the step before
    g = layers(embed(token), f)             # layers.py
    logits = lm_head(norm(g)); the next f is norm(g) if the head feeds the normed state, else g

For an EAGLE, f is the target's final state. A P-EAGLE proposes all K tokens in one forward: K - 1 mask rows follow the
last row. They have the mask token and the mask feature fc(mask_hidden).

Source: the papers (EAGLE-3, arXiv 2503.01840; EAGLE, 2401.15077), speculators' ``Eagle3DraftModel``,
``PEagleDraftModel`` and ``EagleSpeculator``, whose outputs are under tests/golden/.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from eagle3.export.draft.common.head import CachedHead
from eagle3.export.draft.kinds import EAGLE, P_EAGLE
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.layers import DraftLayer, Gemma4DraftLayer, Keep, RMSNorm, rotary_table
from eagle3.export.draft.kinds.eagle.tensor_names import MASK
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory, KVCacheShape, ring_window
from eagle3.targets.sinks import softcapped


class Head(CachedHead):
    """An EAGLE head. Draft slot p pairs the target's feature at p with token p + 1.

    ``proposals`` is the number of tokens that one forward proposes: K for a P-EAGLE, otherwise 1.
    """

    mask_feature: Tensor

    def __init__(self, draft: EagleDescription, max_seq_len: int, proposals: int = 1):
        super().__init__()
        config, size = draft.layer, draft.hidden_size
        self.proposals = proposals if draft.kind == P_EAGLE else 1
        self.slots = max_seq_len + self.proposals - 1  # mask rows may lie beyond the context
        self.max_seq_len, self.feeds_normed = max_seq_len, draft.feeds_normed
        self.joins_in_fc, self.mask_token = draft.kind == EAGLE, draft.mask_token_id
        self.takes_final_state, self.tap_order = draft.takes_final_state, draft.tap_order
        self.embedding_scale, self.softcap = draft.embedding_scale, draft.softcap
        if draft.has_embedding:
            tokens, width = draft.headers["embed_tokens.weight"].shape
            self.embed_tokens = nn.Embedding(tokens, width)

        def norm(name: str, width: int) -> nn.Module | None:
            return RMSNorm(width, config.rms_norm_eps) if draft.has(name) else None

        self.input_norm = norm("input_norm", draft.taps_width) if draft.norm_before_fc else None
        tapped = [draft.headers[name].shape[0] for name in sorted(draft.headers) if name.startswith("fc_norm.")]
        self.fc_norm = nn.ModuleList(RMSNorm(width, config.rms_norm_eps) for width in tapped) if tapped else None
        self.embed_norm = norm("embed_norm", size)
        fused = draft.headers["fc.weight"].shape[1] if draft.has("fc") else 0
        self.fc = nn.Linear(fused, size, bias="fc.bias" in draft.headers) if fused else None
        layer = Gemma4DraftLayer if draft.gemma4 else DraftLayer
        self.layers = nn.ModuleList(layer(draft, index) for index in range(draft.layers))
        self.norm = norm("norm", size)
        if not draft.shares_lm_head and not draft.ties_lm_head:
            self.lm_head = nn.Linear(size, draft.draft_vocab_size, bias="lm_head.bias" in draft.headers)
        d2t = torch.empty(draft.draft_vocab_size, dtype=torch.long) if draft.maps_vocabulary else None
        self.register_buffer("d2t", d2t)
        if self.mask_token is not None:
            self.register_buffer(MASK, torch.empty(draft.headers[MASK].shape))
        self.windows = [ring_window(window, self.slots) for window in draft.windows]

    def attach(
        self, draft: EagleDescription, attention: AttentionFactory, dtype: torch.dtype, target: TapTarget
    ) -> Self:
        """Add the parts that no checkpoint holds: KV caches, the rotary table (float32), a shared embedding and
        lm_head."""
        for layer, window in zip(self.layers, self.windows, strict=True):
            attn: Any = layer.self_attn  # an attention class of transformers
            heads, kv_heads = draft.layer.num_attention_heads, draft.layer.num_key_value_heads
            shape = KVCacheShape(kv_heads, attn.head_dim, self.slots, window, dtype, heads=heads)
            attn.kv_attention = attention(shape)
        self.keep_offsets(draft.d2t_holds_ids)
        self.rotary_emb = rotary_table(draft)
        if not draft.has_embedding:
            self.embed_tokens = target.embed_tokens
        if draft.shares_lm_head:
            self.lm_head = target.lm_head
        if draft.ties_lm_head:
            tokens, width = self.embed_tokens.weight.shape
            self.lm_head = nn.Linear(width, tokens, bias=False, device="meta")
            self.lm_head.weight = self.embed_tokens.weight
        if self.mask_token is not None:
            taps = getattr(self, MASK).reshape(1, 1, -1).split(draft.taps_width // self._taps(), dim=-1)
            with torch.no_grad():
                self.register_buffer("mask_feature", self._fused(taps).detach(), persistent=False)
            delattr(self, MASK)
        return self

    @property
    def window(self) -> int:
        """The shortest sliding window of the layers' ring caches, 0 if there is none."""
        return min((window for window in self.windows if window), default=0)

    def _taps(self) -> int:
        return len(self.fc_norm) if self.fc_norm is not None else 1

    def fuse(self, taps: tuple[Tensor, ...]) -> Tensor:
        """Fuse the target's tapped states, each [1, T, H_target], into one feature [1, T, H]. For a head that takes one
        state, before or after the target's norm, return that state."""
        if self.takes_final_state or self.joins_in_fc or self.fc is None:
            (state,) = taps
            return state
        return self._fused(self.in_order(taps))

    def _fused(self, taps: tuple[Tensor, ...]) -> Tensor:
        if self.fc_norm is not None:
            taps = tuple(norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True))
        assert self.fc is not None, "a head of taps has an fc"
        states = torch.cat(taps, dim=-1)
        return self.fc(states if self.input_norm is None else self.input_norm(states))

    def next_inputs(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of a chain's next step: for a P-EAGLE its mask token and mask feature."""
        if self.mask_token is None:
            return tokens, feature
        return torch.full_like(tokens, self.mask_token), self.mask_feature.expand(1, tokens.shape[1], -1)

    def forward(
        self, tokens: Tensor, feature: Tensor, input_pos: Tensor, last: bool = False, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows at draft slots ``input_pos`` and write their keys and values.

        Args:
            tokens: int64 [1, T], target ids; slot p takes token p + 1
            feature: [1, T, H], from ``fuse`` or a recurrent feature
            input_pos: int64 [T], consecutive, at most one past the last slot written
            last: return only the last row, and a P-EAGLE's mask rows
            accepted: int64 [1], return this row as if it were the last; the rows after it are ignored

        Returns:
            draft logits [1, T + K - 1 or K, draft_vocab_size], and the recurrent features of the same rows

        Raises:
            ValueError: (eager mode) positions that leave a gap or pass ``max_seq_len``
        """
        if not torch.compiler.is_exporting():
            self.check_positions(input_pos)
        if self.proposals > 1:
            tokens, feature, input_pos = self._with_mask_rows(tokens, feature, input_pos)
            if accepted is not None:
                tokens, feature = self._masked_behind(tokens, feature, accepted)
        embedded = self.embed_tokens(tokens)
        if self.embedding_scale != 1.0:
            embedded = embedded * self.embedding_scale
        if self.embed_norm is not None:
            embedded = self.embed_norm(embedded)
        state = feature
        if self.joins_in_fc:
            assert self.fc is not None, "an EAGLE has an fc"
            state = self.fc(torch.cat((embedded, feature), dim=-1))
        rows: dict[int, Any] = {}
        rotary = self.rotary_emb(feature, input_pos[None])
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            attn: Any = layer.self_attn
            if window not in rows:
                rows[window] = attn.kv_attention.rows(input_pos)
            keep = self._kept(last, accepted) if index == len(self.layers) - 1 else None
            state = layer(embedded, state, keep, position_embeddings=rotary, attention_mask=rows[window])
        normed = state if self.norm is None else self.norm(state)
        logits = softcapped(self.lm_head(normed), self.softcap)
        return logits, normed if self.feeds_normed else state

    def _with_mask_rows(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.mask_token is not None, "a P-EAGLE has a mask token"
        rows = self.proposals - 1
        masks = tokens.new_full((1, rows), self.mask_token)
        positions = input_pos[-1:] + torch.arange(1, rows + 1, device=input_pos.device)
        features = self.mask_feature.expand(1, rows, -1)
        return torch.cat((tokens, masks), 1), torch.cat((feature, features), 1), torch.cat((input_pos, positions))

    def _masked_behind(self, tokens: Tensor, feature: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the rows after row ``accepted`` by mask rows, of which the first ones give the proposals."""
        assert self.mask_token is not None, "a P-EAGLE has a mask token"
        behind = torch.arange(tokens.shape[1], device=tokens.device) > accepted
        tokens = torch.where(behind, self.mask_token, tokens)
        return tokens, torch.where(behind[None, :, None], self.mask_feature, feature)

    def _kept(self, last: bool, accepted: Tensor | None) -> Keep | None:
        """Return a function that selects the rows that the last layer must compute; None for all rows."""
        if accepted is not None:
            rows = (accepted + torch.arange(self.proposals, device=accepted.device))[None, :, None]
            return lambda x: x.gather(1, rows.expand(-1, -1, x.shape[-1]))
        return (lambda x: x[:, -self.proposals :]) if last else None
