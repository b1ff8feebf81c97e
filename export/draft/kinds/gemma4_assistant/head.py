"""The module of a Gemma 4 assistant, which has no keys, values or caches of its own.

    x = pre_projection(cat[the target's scaled embedding of token p + 1, feature of p])
    x = layers(x), whose queries attend to the target's keys and values up to p, rotated for position p + 1
    state = norm(x);  logits = lm_head(state);  the next feature is post_projection(state)

The feature of the first step is the target's final state after its norm. All steps of a round have the same p: the slot
of the newest token, p + 1, holds the keys of a rejected token or none, so that the queries do not attend to it. A layer
attends to the keys of the last target layer of its kind that has a cache; a sliding layer attends to as many slots as
the target's window.

With ``use_ordered_embeddings`` the tokens are grouped around centroids. Only the tokens of the best centroids are
scored; all others get the smallest of these scores, less one.

Source: transformers' ``Gemma4AssistantForCausalLM`` and ``SinglePositionMultiTokenCandidateGenerator``.
"""

from typing import Any, Self

import torch
from executorch.examples.models.gemma4.text_decoder import Gemma4MLP
from executorch.examples.models.gemma4_31b.model import Gemma4DecoderLayer
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama import modeling_llama

from eagle3.export.draft.common import head
from eagle3.export.draft.kinds.gemma4_assistant.copied_keys import CopiedKeys
from eagle3.export.draft.kinds.gemma4_assistant.reading import AssistantDescription
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory
from eagle3.targets.gemma4 import SharedInputs, rotary


class Head(head.CachedHead):
    """A Gemma 4 assistant. A call computes one row: with ``copies``, the last or accepted one of those it writes."""

    token_ordering: Tensor
    d2t = None

    def __init__(self, draft: AssistantDescription, max_seq_len: int, proposals: int = 1):  # noqa: ARG002
        super().__init__()
        self.has_cache, self.max_seq_len = draft.has_cache, max_seq_len
        self.copies: CopiedKeys | None = None
        config, feature = draft.layer, draft.hidden_size
        width, tokens = config.hidden_size, config.vocab_size
        self.pre_projection = nn.Linear(2 * feature, width, bias=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.post_projection = nn.Linear(width, feature, bias=False)
        self.takes_final_state, self.embeds_as_target = draft.takes_final_state, draft.embeds_as_target
        self.ordered = draft.ordered
        if self.ordered:
            self.chosen = draft.config.centroid_intermediate_top_k
            self.embed_tokens = nn.Embedding(tokens, width)
            self.centroids = nn.Linear(width, draft.config.num_centroids, bias=False)
            self.register_buffer("token_ordering", torch.empty(tokens, dtype=torch.long))
        else:
            self.lm_head = nn.Linear(width, tokens, bias=False)

    def attach(
        self,
        draft: AssistantDescription,
        attention: AttentionFactory,
        dtype: torch.dtype,
        target: TapTarget,
    ) -> Self:
        """Add the rotary tables (float32), and the modules whose caches it reads: the target's, or its copies."""
        tables: Any = Gemma4TextRotaryEmbedding(draft.layer)
        self.kinds = draft.kinds
        self.rotary_scales = {kind: getattr(tables, f"{kind}_attention_scaling") for kind in self.kinds}
        for kind in self.kinds:
            self.register_buffer(f"{kind}_inv_freq", getattr(tables, f"{kind}_inv_freq"), persistent=False)
        if self.ordered:
            groups = self.token_ordering.long().view(draft.config.num_centroids, -1)
            self.register_buffer("token_ordering", groups)
        self.dtype = dtype
        self._target = [target]  # in a list, so that it is not a submodule and its tensors keep their names
        if draft.has_cache:
            heads = draft.layer.num_attention_heads
            self.copies = CopiedKeys(target, self.kinds, heads, attention, draft.hidden_size)
        for layer, kind in zip(self.layers, draft.layer.layer_types, strict=True):
            attn: Any = layer.self_attn
            attn.kept = [self._kept(kind)]
        return self

    def _kept(self, kind: str) -> Any:  # noqa: ANN401 - a module of an attention factory
        (target,) = self._target
        return target.kept(kind) if self.copies is None else self.copies.caches[kind]

    def joined(self, feature: Tensor, input_pos: Tensor) -> Tensor:
        return feature if self.copies is None else self.copies.joined(feature, input_pos)

    def forward(
        self,
        tokens: Tensor,
        feature: Tensor,
        input_pos: Tensor,
        last: bool = False,  # noqa: ARG002 - one row is the last one
        accepted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.copies is not None:
            if not torch.compiler.is_exporting():
                self.check_positions(input_pos)
            self.copies.write(feature, input_pos)
            if accepted is None:
                tokens, feature, input_pos = tokens[:, -1:], feature[:, -1:], input_pos[-1:]
        if accepted is not None:
            tokens, input_pos = tokens.gather(1, accepted[None]), input_pos.gather(0, accepted)
            feature = feature.gather(1, accepted[None, :, None].expand(-1, -1, feature.shape[-1]))
        following = None
        if self.copies is not None:
            feature, steps, following = self.copies.split(feature)
            input_pos = input_pos - steps
        (target,) = self._target
        embed = target.embed if self.embeds_as_target else target.embed_tokens
        x = self.pre_projection(torch.cat((embed(tokens), feature), dim=-1))
        rows = {kind: self._rows(kind, input_pos) for kind in self.kinds}
        for layer in self.layers:
            x = layer(x, input_pos, rows.get("sliding_attention"), rows.get("full_attention"))
        state = self.norm(x)
        recurrent = self.post_projection(state)
        if following is not None:
            recurrent = torch.cat((recurrent, following), dim=-1)
        return self._scores(state), recurrent

    def _rows(self, kind: str, input_pos: Tensor) -> SharedInputs:
        kept = self._kept(kind)
        tables = rotary(input_pos + 1, getattr(self, f"{kind}_inv_freq"), self.rotary_scales[kind], self.dtype)
        return SharedInputs(kept.rows(input_pos), *tables)

    def _scores(self, state: Tensor) -> Tensor:
        """Return logits [1, 1, vocab_size] of a normed state [1, 1, width]."""
        if not self.ordered:
            return self.lm_head(state)
        if state.shape[1] > 1:  # the rows of a measurement
            return torch.cat([self._scores(row) for row in state.split(1, dim=1)], dim=1)
        best = self.centroids(state).topk(self.chosen, dim=-1).indices
        ids = self.token_ordering[best.flatten()].reshape(1, 1, -1)
        scores = torch.matmul(self.embed_tokens(ids[0, 0]), state[0, 0])[None, None]
        others = (scores.amin(-1, keepdim=True) - 1.0).expand(-1, -1, self.token_ordering.numel())
        return others.scatter(-1, ids, scores)


class Layer(Gemma4DecoderLayer):
    """ExecuTorch's layer of Gemma 4 with queries only."""

    def __init__(self, config: Any, index: int):  # noqa: ANN401 - transformers' text configuration
        nn.Module.__init__(self)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.is_sliding = config.layer_types[index] == "sliding_attention"
        self.self_attn = QueryAttention(config, index)
        self.mlp = Gemma4MLP(width, config.intermediate_size)
        for name in ("input", "post_attention"):
            setattr(self, f"{name}_layernorm", nn.RMSNorm(width, eps=eps))
        for name in ("pre", "post"):
            setattr(self, f"{name}_feedforward_layernorm", nn.RMSNorm(width, eps=eps))
        self.register_buffer("layer_scalar", torch.ones(1))


class QueryAttention(nn.Module):
    """Attention whose queries attend to the cache of ``kept``, a layer of the target."""

    def __init__(self, config: Any, index: int):  # noqa: ANN401 - transformers' text configuration
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.per_layer_config[index].head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.kept: list[Any] = []

    def forward(self, x: Tensor, _input_pos: Tensor, rows: SharedInputs) -> Tensor:
        """Return the attention's output: x [1, T, width] -> [1, T, width]."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        query = query * rows.cos.unsqueeze(2) + modeling_llama.rotate_half(query) * rows.sin.unsqueeze(2)
        (kept,) = self.kept
        return self.o_proj(kept(query, None, None, rows.attention, 1.0).flatten(2))
