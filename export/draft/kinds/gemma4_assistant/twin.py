"""The twin check of an assistant: compares the head with transformers' own class, over random keys and values of a
stand-in target. The keys are written in chunks, each followed by rejected rows. Steps are chained, and positions pass
the sliding window twice. transformers is given only the keys to which the head may attend: those before the newest
token, and in a sliding layer the last ones of the window (its own mask would let one more through).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.draft.common.head import load_head
from eagle3.export.draft.kinds.gemma4_assistant.head import Head
from eagle3.export.draft.kinds.gemma4_assistant.reading import LM_HEAD, AssistantDescription, read
from eagle3.export.patching.patches import original, replaced
from eagle3.export.twin.comparison import Comparison, twin_folder
from eagle3.export.twin.lengths import prompt_length
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.shrink import shrink
from eagle3.targets.attention import EagerAttention, KVCacheShape

CHUNK, CHAIN, WRONG = 5, 3, 4  # rows
CENTROIDS, CHOSEN = 20, 6
KV_SHARING = "transformers.models.gemma4.configuration_gemma4.Gemma4TextConfig.kv_sharing_modes"


def compare(draft: AssistantDescription, seed: int = 0) -> Comparison:
    with torch.no_grad(), twin_folder() as folder, states_are_shared(type(draft.layer)):
        reference = small_reference(draft, seed)
        left_out = {LM_HEAD} if draft.config.tie_word_embeddings else set()
        tensors = {name: value for name, value in reference.state_dict().items() if name not in left_out}
        file = folder / "config.json"
        reference.config.to_json_file(file, use_diff=False)
        save_file(tensors, folder / "model.safetensors")
        twin = read(Fields(file, read_object(file)), open_source(folder))
        length = prompt_length(twin.layer.to_dict()) + CHUNK
        target: Any = StandIn(twin, length + WRONG, torch.Generator().manual_seed(seed))
        head = load_head(Head, twin, length + WRONG, torch.float32, EagerAttention, target)
        return _play(reference, head, target, length)


@contextmanager
def states_are_shared(config_class: type) -> Iterator[None]:
    """Let transformers build models of a class of text configurations with the keys that an assistant needs: a model in
    which all layers share keys can be built, and a model in which none does stores the keys of the last layer of each
    kind."""
    original_modes = original(KV_SHARING)

    def modes(self: Any) -> list[str | None]:  # noqa: ANN401 - transformers' text configuration
        layers, kinds = self.num_hidden_layers, self.layer_types
        if self.num_kv_shared_layers >= layers:
            return ["reuse"] * layers
        if self.num_kv_shared_layers:
            return original_modes.fget(self)
        last = {kind: index for index, kind in enumerate(kinds)}
        return ["store" if last[kind] == index else None for index, kind in enumerate(kinds)]

    owner = next(each for each in config_class.__mro__ if "kv_sharing_modes" in vars(each))
    with replaced(KV_SHARING, property(modes), owner):
        yield


def small_reference(draft: AssistantDescription, seed: int) -> Any:  # noqa: ANN401 - a model of transformers
    """Return transformers' model of a smaller configuration, with random weights."""
    from transformers import AutoModelForCausalLM

    text = shrink(draft.layer)
    text.num_kv_shared_layers = text.num_hidden_layers
    fields = draft.config.to_dict() | {"text_config": text.to_dict(), "backbone_hidden_size": text.hidden_size + 16}
    if draft.ordered:
        fields |= {"num_centroids": CENTROIDS, "centroid_intermediate_top_k": CHOSEN}
        text.vocab_size -= text.vocab_size % CENTROIDS
        fields["text_config"]["vocab_size"] = text.vocab_size
    fields["dtype"] = "float32"
    model = AutoModelForCausalLM.from_config(type(draft.config).from_dict(fields), attn_implementation="eager")
    model = model.eval().requires_grad_(False)
    randomize(model, seed)
    if draft.ordered:
        order = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(order)
    return model


class StandIn(nn.Module):
    """A target with random keys and values at each position, and an embedding. Keys have small norms, so that each
    query attends to many of them: if it attended to one, four layers and three steps would amplify float32's rounding
    errors to 1e-4."""

    def __init__(self, draft: AssistantDescription, length: int, generator: torch.Generator):
        super().__init__()
        self.generator, self.keys = generator, {}
        self.table = torch.randn(draft.layer.vocab_size, draft.hidden_size, generator=generator)
        self.window = draft.layer.sliding_window
        self.modules_by_kind = {}
        for kind in set(draft.layer.layer_types):
            layer = draft.layer.per_layer_config[draft.layer.layer_types.index(kind)]
            window = self.window if kind == "sliding_attention" else 0
            shape = KVCacheShape(layer.num_key_value_heads, layer.head_dim, length, window)
            self.modules_by_kind[kind] = EagerAttention(shape)
            keys = self._noise(shape, length) / shape.head_dim**0.5
            self.keys[kind] = keys, self._noise(shape, length)

    def _noise(self, shape: KVCacheShape, rows: int) -> Tensor:
        return torch.randn(1, rows, shape.kv_heads, shape.head_dim, generator=self.generator)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def kept(self, kind: str) -> nn.Module:
        return self.modules_by_kind[kind]

    def write(self, start: int, end: int, rejected: int) -> None:
        """Write the keys of positions ``start`` to ``end``, and wrong ones at ``rejected`` further positions."""
        for kind, module in self.modules_by_kind.items():
            pair = [torch.cat((each[:, start:end], self._noise(module.shape, rejected)), 1) for each in self.keys[kind]]
            positions = torch.arange(start, end + rejected)
            query = torch.zeros(1, len(positions), module.shape.kv_heads, module.shape.head_dim)
            module(query, *pair, module.rows(positions), 1.0)

    def seen(self, end: int) -> dict[str, tuple[Tensor, ...]]:
        """Return the keys and values before position ``end``, in the form that transformers takes."""
        first = {"sliding_attention": max(0, end - self.window), "full_attention": 0}
        return {
            kind: tuple(each[:, first[kind] : end].transpose(1, 2) for each in pair) for kind, pair in self.keys.items()
        }


def _play(reference: Any, head: Any, target: StandIn, length: int) -> Comparison:  # noqa: ANN401
    compared, vocabulary = Comparison(length), len(target.table)
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        target.write(start, end, WRONG)
        token = torch.randint(0, vocabulary, (1, 1), generator=target.generator)
        state = torch.randn(1, 1, target.table.shape[1], generator=target.generator)
        given = token, state
        for _ in range(CHAIN):
            logits, following = head(*given, torch.tensor([end - 1]))
            expected = reference(
                inputs_embeds=torch.cat((target.embed(token), state), dim=-1),
                position_ids=torch.tensor([[end]]),
                shared_kv_states=target.seen(end),
            )
            compared.add("tap 0", end - 1, following, expected.last_hidden_state, expected.last_hidden_state)
            compared.add("logits", end - 1, logits, expected.logits, expected.logits)
            token, state = expected.logits.argmax(-1), expected.last_hidden_state
            given = token, following
    return compared
