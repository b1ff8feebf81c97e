"""Gives the shapes of a Llama layer's tensors, for the random weights of a small copy."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(layer: "LlamaConfig", at: str, inputs: int, norms: Iterable[str]) -> tuple[Shapes, Shapes]:
    """Return the shapes of the linears and of the norms that a decoder layer may have, by name without ``.weight``.

    Args:
        at: the layer's name
        inputs: the input width of its projections of queries, keys and values
        norms: the names of its norms of the hidden size, except those that only Gemma 4 has
    """
    size, inner, head_dim = layer.hidden_size, layer.intermediate_size, layer.head_dim
    queries, keys = layer.num_attention_heads * head_dim, layer.num_key_value_heads * head_dim
    linears: Shapes = {
        f"{at}.self_attn.q_proj": (queries, inputs),
        f"{at}.self_attn.k_proj": (keys, inputs),
        f"{at}.self_attn.v_proj": (keys, inputs),
        f"{at}.self_attn.o_proj": (size, queries),
        f"{at}.mlp.gate_proj": (inner, size),
        f"{at}.mlp.up_proj": (inner, size),
        f"{at}.mlp.down_proj": (size, inner),
    }
    every = (*norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")  # only Gemma 4 has the last two
    widths: Shapes = {f"{at}.{name}": (size,) for name in every}
    return linears, widths | {f"{at}.self_attn.{name}_norm": (head_dim,) for name in "qk"}
