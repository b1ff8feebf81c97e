"""DeepSeek's DeepSpec: the target's own flat keys, with ``ttt_length`` and the taps in ``target_layer_ids``, which mean
outputs. A head has one layer, Qwen3's or Gemma 4's, an embedding and an lm_head of the whole vocabulary.

Source: deepseek-ai/DeepSpec, ``deepspec/modeling/eagle3/qwen3/modeling.py`` and ``deepspec/eval/eagle3/evaluator.py``.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect, Proposal


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    return "ttt_length" in config


def proposal(config: dict[str, Any], file: Path) -> Proposal:
    """Return the steps that the head was trained for, and its target."""
    from eagle3.export.checkpoints.json_fields import count  # imported here: eagle3.export.checkpoints imports torch

    verifier = config.get("target_model_name_or_path")
    steps = count(config, "ttt_length", Proposal().chain_len, file)
    return Proposal(steps, verifier if isinstance(verifier, str) else None)


def refuse(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for more than one layer: in DeepSpec's code later layers take the embedding as well."""
    from eagle3.export.checkpoints.json_fields import count

    if count(config, "num_hidden_layers", 1, file) > 1:
        raise ValueError(
            f"{file}: num_hidden_layers is {config['num_hidden_layers']}, but DeepSpec's own evaluation takes only "
            "heads of one layer: this head is not read"
        )


DIALECT = Dialect(
    "deepspec",
    recognizes,
    ids_key="target_layer_ids",
    ids_are="output",
    ids_are_known=True,
    proposal=proposal,
    refuse=refuse,
    trainer="DeepSpec",
    heeds=lambda _kind: (),
    has_gemma4=True,
    any_model_type=False,
)
