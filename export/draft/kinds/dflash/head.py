"""The module of a DFlash head, which drafts a block of tokens in one forward.

    f_p = hidden_norm(fc(cat(taps at p)));  every layer keeps keys and values of f_p at position p
    x = embed([anchor, MASK, MASK, ...]), at the positions after the last f
    x = x + attention(input_layernorm(x)), to the kept positions and to the block itself
    x = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(x)) of the rows that propose, as the variant's module changes them (variants/)

The block's keys and values are written after those of the context, where the next call writes the context's. The block
always has the size that the head was trained with, even if fewer of its tokens are verified.
"""

from typing import Self

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from eagle3.export.draft.common.head import CachedHead, Pieces
from eagle3.export.draft.kinds.dflash.description import Behind, DFlashDescription
from eagle3.export.draft.kinds.dflash.layers import Attention, DraftLayer, Gemma4Layer, Place, RMSNorm
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory, Block, KVCacheShape, ring_window
from eagle3.targets.sinks import softcapped


class Head(CachedHead):
    """A DFlash head. A call writes the keys and values of the given rows, and proposes the tokens after the last
    one."""

    takes_final_state = False
    token_cache: Tensor
    """The token of every position, for a module that takes the token before the anchor."""

    def __init__(self, draft: DFlashDescription, max_seq_len: int, proposals: int = 1):
        super().__init__()
        config, size = draft.layer, draft.hidden_size
        self.max_seq_len, self.proposals = max_seq_len, proposals
        self.block_rows, self.first_row, self.mask_token = draft.block_rows, draft.first_row, draft.mask_token_id
        self.tap_order = draft.tap_order
        self.slots = max_seq_len + draft.block_rows  # and a block after the last position
        self.embedding_scale, self.output_multiplier = draft.embedding_scale, draft.output_multiplier
        self.softcap = draft.softcap
        if draft.has_embedding:
            tokens, width = draft.headers["embed_tokens.weight"].shape
            self.embed_tokens = nn.Embedding(tokens, width)
        self.fc = nn.Linear(draft.taps_width, size, bias="fc.bias" in draft.headers)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        layer = Gemma4Layer if draft.gemma4 else draft.variant.layer(DraftLayer)
        self.layers = nn.ModuleList(layer(draft, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        if not draft.shares_lm_head:
            self.lm_head = nn.Linear(size, draft.draft_vocab_size, bias="lm_head.bias" in draft.headers)
        self.behind_name = draft.variant.module
        if (behind := draft.variant.behind(draft, proposals)) is not None:
            setattr(self, self.behind_name, behind)
        d2t = torch.empty(draft.draft_vocab_size, dtype=torch.long) if draft.maps_vocabulary else None
        self.register_buffer("d2t", d2t)
        rings = [ring_window(window, self.slots) for window in draft.windows]
        self.kinds = [
            (ring, each if ring else Block(causal=each.causal))  # without a ring the window covers every position
            for ring, each in zip(rings, draft.attends, strict=True)
        ]

    def attach(
        self, draft: DFlashDescription, attention: AttentionFactory, dtype: torch.dtype, target: TapTarget
    ) -> Self:
        """Add KV caches, the rotary table (float32), and the target's embedding and lm_head if the head has none."""
        config = draft.layer
        for attn, (ring, _) in zip(self._attentions(), self.kinds, strict=True):
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            shape = KVCacheShape(kv_heads, config.head_dim, self.slots, ring, dtype, heads=heads)
            attn.kv_attention = attention(shape)
        self.keep_offsets(draft.d2t_holds_ids)
        if (behind := self.behind) is not None:
            behind.attached()
            if behind.takes_token_before:
                self.register_buffer("token_cache", torch.zeros(self.slots, dtype=torch.long), persistent=False)
        self.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)
        if not draft.has_embedding:
            self.embed_tokens = target.embed_tokens
        self.embed_as_target = target.embed if draft.embeds_as_target else None
        if draft.shares_lm_head:
            self.lm_head = target.lm_head
        return self

    @property
    def behind(self) -> Behind | None:
        """The variant's module after the block; None if there is none. Its attribute has the name that its tensors
        have."""
        return getattr(self, self.behind_name, None) if self.behind_name else None

    def fuse(self, taps: tuple[Tensor, ...]) -> Tensor:
        """Fuse the states of the taps [1, T, H_target] into the features [1, T, H], from which every layer makes keys
        and values."""
        return self.hidden_norm(self.fc(torch.cat(self.in_order(taps), dim=-1)))

    def forward(
        self,
        tokens: Tensor,
        feature: Tensor,
        input_pos: Tensor,
        last: bool = False,  # noqa: ARG002 - it only computes the block after the last row
        accepted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of ``feature`` at ``input_pos``, and draft the block after the last row, or after
        row ``accepted``. The block's anchor is that row's token.

        Returns:
            draft logits [1, K, draft_vocab_size], and the states from which they are computed

        Raises:
            ValueError: (eager mode) positions that leave a gap or pass ``max_seq_len``
        """
        if not torch.compiler.is_exporting():
            self.check_positions(input_pos)
        anchor = tokens[:, -1:] if accepted is None else tokens.gather(1, accepted[None])
        start = (input_pos[-1:] if accepted is None else input_pos.gather(0, accepted)) + 1
        masks = tokens.new_full((1, self.block_rows - 1), self.mask_token)
        positions = start + torch.arange(self.block_rows, device=tokens.device)
        x = self._embed(torch.cat((anchor, masks), dim=1)) * self.embedding_scale
        context, block = self._places(feature, input_pos, positions)
        for layer, attn, kind in zip(self.layers, self._attentions(), self.kinds, strict=True):
            attn.write(feature, context[kind])
            x = layer(x, block[kind])
        keeps = self.behind is not None and self.behind.takes_token_before
        given = self._with_token_before(anchor, start, tokens, input_pos) if keeps else anchor
        return self._proposed(x, given)

    def _proposed(self, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the normed states of those rows of a block's states x [1, B, H] that propose tokens.
        ``given`` is int64 [1, 1 or 2]: the anchor, after the token before it if ``behind`` takes that token too."""
        proposing, behind = slice(self.first_row, self.first_row + self.proposals), self.behind
        if behind is not None and behind.sees_block:
            block = self.norm(x)
            logits = self._scores(block[:, proposing])
            return behind(logits, block, given, self.target_ids, self._embed), block[:, proposing]
        state = self.norm(x[:, proposing])
        logits = self._scores(state)
        return (logits if behind is None else behind(logits, state, given, self.target_ids, self._embed)), state

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [1, T] -> [1, T, H], without ``embedding_scale``."""
        return (self.embed_as_target or self.embed_tokens)(tokens)

    def chains(
        self,
        tokens: Tensor,
        feature: Tensor,
        input_pos: Tensor,
        anchors: Tensor,
        wanted: Tensor,
        pieces: Pieces,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Draft a block after every anchor. See ``Head.chains``; the rows must be those of one piece of text, from its
        first on, and K at most the head's proposals."""
        given, positions = tokens[0, anchors, None], input_pos[anchors, None] + 1 + torch.arange(self.block_rows)
        masks = given.new_full((len(anchors), self.block_rows - 1), self.mask_token)
        x = self._embed(torch.cat((given, masks), dim=1)) * self.embedding_scale
        context, block = self.rotary_emb(feature, input_pos[None]), self.rotary_emb(feature, positions)
        for layer, attn, (_, attends) in zip(self.layers, self._attentions(), self.kinds, strict=True):
            attn.write(feature, Place(None, *context))
            x = layer(x, Place((positions, attends), *block))
        behind = self.behind
        if behind is None:
            return self._hits(x, wanted)
        if behind.takes_token_before:
            given = torch.cat((tokens[0, (anchors - 1).clamp_min(0), None], given), dim=1)
        parts = zip(x.split(1), given.split(1), strict=True)
        logits = torch.cat([self._proposed(*part)[0] for part in parts])
        proposed = self.target_ids(logits)[:, : wanted.shape[1]]
        return (proposed == wanted).cumprod(1).bool(), logits[:, 0]

    def _hits(self, x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``chains`` returns for the states x [N, B, H] of blocks. A row's scores are computed where all
        proposals before it are as wanted."""
        hits, blocks = torch.zeros(wanted.shape, dtype=torch.bool), torch.arange(len(x))
        logits = scores = self._scores(self.norm(x[:, self.first_row]))
        for step in range(wanted.shape[1]):
            if step:
                scores = self._scores(self.norm(x[blocks, self.first_row + step]))
            blocks = blocks[self.target_ids(scores) == wanted[blocks, step]]
            hits[blocks, step] = True
            if not len(blocks):
                break
        return hits, logits

    def _with_token_before(self, anchor: Tensor, start: Tensor, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """Store ``tokens`` at their positions, which are one past ``input_pos``. Return int64 [1, 2]: the token before
        the anchor's position ``start`` [1], and the anchor. The token at position 0 is not stored; in its place the
        anchor is returned twice."""
        self.token_cache.index_copy_(0, input_pos + 1, tokens[0])
        before = self.token_cache[start - 1]
        return torch.cat((torch.where(start > 1, before, anchor[0])[None], anchor), dim=1)

    def _places(
        self, feature: Tensor, input_pos: Tensor, positions: Tensor
    ) -> tuple[dict[tuple[int, Block], Place], dict[tuple[int, Block], Place]]:
        """Return the ``Place`` of the context's rows and that of the block's rows, for each kind of layer."""
        context, block = self.rotary_emb(feature, input_pos[None]), self.rotary_emb(feature, positions[None])
        places: dict[tuple[int, Block], Place] = {}
        blocks: dict[tuple[int, Block], Place] = {}
        for attn, kind in zip(self._attentions(), self.kinds, strict=True):
            if kind not in places:
                places[kind] = Place(attn.kv_attention.rows(input_pos), *context)
                blocks[kind] = Place(attn.kv_attention.rows(positions, kind[1]), *block)
        return places, blocks

    def _attentions(self) -> list[Attention]:
        return [layer.self_attn for layer in self.layers]  # type: ignore[misc]

    def _scores(self, state: Tensor) -> Tensor:
        return softcapped(self.lm_head(state) * self.output_multiplier, self.softcap)
