"""Checks that a head has the norms and biases that its configuration implies, and none that it excludes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import boolean
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.draft.dialects import Dialect
from eagle3.export.draft.dialects.dialect import EAGLE
from eagle3.export.draft.kinds.eagle.tensor_names import layer_count

Headers = Mapping[str, TensorHeader]


def check_gemma4(folder: Path, gemma4: bool, own: Headers) -> None:
    """Check that the head has all tensors that only Gemma 4's layers have, or, if ``gemma4`` is False, none of them."""
    for name in ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "layer_scalar"):
        if gemma4 != (f"layers.0.{name}" in own):
            raise ValueError(
                f"{folder} {'lacks' if gemma4 else 'has'} layers.0.{name}: EAGLE-3 heads with Gemma 4's layers are "
                "read as DeepSpec saves them (Gemma4Eagle3Model)"
            )


def check_normed(folder: Path, dialect: Dialect, kind: str, own: Headers) -> None:
    """Check that an EAGLE whose next feature is normed has the norms that its trainer's class always has."""
    if kind == EAGLE and dialect.feeds_normed(kind):
        every = [f"layers.{index}.input_layernorm.weight" for index in range(layer_count(own))]
        for name in ("norm.weight", *every):
            if name not in own:
                raise ValueError(
                    f"{folder} lacks {name}, which every {kind} head of {dialect.trainer} has: copy it again"
                )


def check_presence(
    folder: Path,
    kind: str,
    variants: Mapping[str, Any],
    own: Headers,
    final: bool,
    warnings: list[str],
) -> None:
    """Check that the tensors include the norms and biases that the configuration implies, and none that it excludes."""
    file = folder / "config.json"
    layers = range(layer_count(own))
    implied = {f"layers.{index}.post_attention_layernorm.weight": True for index in layers}
    implied |= {"input_norm.weight": boolean(variants, "norm_before_fc", False, file) and not final}
    implied |= {"embed_norm.weight": False} if kind != EAGLE else {}
    if kind != EAGLE:
        implied |= {
            "layers.0.input_layernorm.weight": boolean(variants, "use_input_layernorm_in_first_layer", True, file),
            "norm.weight": boolean(variants, "use_last_layernorm", True, file),
        }
        implied |= {} if final else {"layers.0.hidden_norm.weight": True}
        if final and "layers.0.hidden_norm.weight" not in own:
            warnings.append(f"{folder} has no hidden_norm: the target's final state is taken without a norm")
    for name, wanted in implied.items():
        if wanted != (name in own):
            raise ValueError(
                f"{folder} {'lacks' if wanted else 'has'} {name}, which its config.json "
                f"{'implies' if wanted else 'has no place for'}"
            )
    fc_norm = any(name.startswith("fc_norm.") for name in own)
    said = boolean(variants, "fc_norm", None, file)
    if not said:  # SGLang's older name of the key
        said = boolean(variants, "use_aux_norm", fc_norm and said is None, file)
    if said != fc_norm:
        raise ValueError(f"{folder}: fc_norm is {said} in config.json, but the tensors differ")
    normed = sum(own[name].shape[0] for name in own if name.startswith("fc_norm."))
    fused = own["fc.weight"].shape[1] if said and not final else normed
    if normed != fused:
        raise ValueError(
            f"{folder}: the norms of fc_norm have {normed} features together, but fc takes {fused}: is a shard missing?"
        )
    for key, name in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")):
        if boolean(variants, key, False, file) and f"layers.0.{name}.bias" not in own:
            raise ValueError(f"{folder} lacks layers.0.{name}.bias, which its config.json implies ({key} is true)")
