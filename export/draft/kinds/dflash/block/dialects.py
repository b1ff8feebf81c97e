"""The dialects of the block family: the differences between the files of the systems that write such heads.

The dialects of speculators and of z-lab differ in the keys, in the meaning of a layer id (the input or the output of
that layer), and in sliding layers: in speculators all rows of a block attend to ``sliding_window`` positions before the
block, in z-lab's code a row attends to the last ``sliding_window`` positions including its own. The two also differ for
a target that scales its embedding, such as Gemma. speculators trains with the unscaled rows of the embedding. z-lab
trained DFlash with the scaled rows that the target's module returns; since DFlash2 its code takes the unscaled rows,
times ``input_embedding_scale`` if the configuration has that key. Other trainers save heads as z-lab does, with keys of
their own: SpecForge, AngelSlim, ModelOpt, and JetSpec.

DeepSpec's heads have layer ids with z-lab's meaning, full attention, an embedding and an lm_head; the anchor's row
proposes. A ``markov_rank`` of 0 turns DeepSpec's DSpark into a DFlash. DeepSpec's heads for Gemma 4 have that target's
full-attention layers, scale their embedding as the target does and cap their logits before the bias.

Muse Glimmer's assistant has ids of layer outputs, other names for ``fc`` and ``hidden_norm``, and no key for the
vocabulary. It takes the rows of the target's embedding without the norm that follows in the target. A row attends to
``sliding_window`` positions before itself, and to all rows of its block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import boolean, nested
from eagle3.export.draft.common.gemma4_fields import full_attention_fields, names_gemma4
from eagle3.export.draft.dialects import speculators
from eagle3.export.draft.dialects.dialect import Proposal
from eagle3.export.draft.kinds.dflash.block.keys import ANCHORS, CAUSAL, OWN, TAPS, keys_of_z_lab
from eagle3.targets.attention import Block

SPECULATORS, Z_LAB, DEEPSPEC, MUSE_GLIMMER = "speculators", "z-lab", "deepspec", "muse-glimmer"
LAYER = speculators.LAYER
MUSE_GLIMMER_TOKENS = 202_048
"""The vocabulary of Muse Glimmer, which its assistant's configuration leaves out."""

Keys = Mapping[str, Any]


def _sees_backwards(said: Keys, window: int, rows: int, _non_causal: bool, file: Path) -> Block:
    """Return the range that the rows of a block attend to in z-lab's code."""
    _check_window(window, rows, file)
    stated = (boolean(said, key, None, file) for key in CAUSAL)
    causal = next((each for each in stated if each is not None), bool(window))
    return Block(window - 1 if window else None, causal=causal)


def _sees_before_block(said: Keys, window: int, _rows: int, non_causal: bool, file: Path) -> Block:
    causal = bool(window) and not boolean(said, "sliding_window_non_causal", non_causal, file)
    return Block(window or None, from_first_row=bool(window), causal=causal)


def _sees_to_both_sides(_said: Keys, window: int, rows: int, _non_causal: bool, file: Path) -> Block:
    _check_window(window, rows, file)
    return Block(window or None, causal=False)


def _check_window(window: int, rows: int, file: Path) -> None:
    if window and window < rows:
        raise ValueError(f"{file}: sliding_window is {window}, less than a block of block_size {rows}: correct it")


def _top_keys(config: dict[str, Any], _kind: str, _own: tuple[str, ...], _file: Path) -> dict[str, Any]:
    return config


def _top_layer(config: dict[str, Any], _file: Path) -> Keys:
    return config


@dataclass(frozen=True)
class Dialect:
    """The properties in which the dialects of the block family differ."""

    name: str
    recognizes: Callable[[Keys, Path], bool]
    """Returns True for a configuration of this dialect that none before it recognizes."""
    keys: Callable[[dict[str, Any], str, tuple[str, ...], Path], dict[str, Any]] = _top_keys
    """Returns the keys of a configuration, given the kind of head and the keys of its variant."""
    layer_fields: Callable[[dict[str, Any], Path], Keys] = _top_layer
    """Returns the keys that describe the layers."""
    of_gemma4: Callable[[Keys], bool] = lambda _config: False
    """Returns True for a head with Gemma 4's layers."""
    ids_key: str = TAPS
    """The key of the taps' ids."""
    ids_are: str = "output"
    """"input" or "output": the state of the named layer that an id stands for."""
    ids_are_known: bool = True
    """True if all code that writes the dialect gives ids this meaning."""
    attends: Callable[[Keys, int, int, bool, Path], Block] = _sees_backwards
    """Returns the range that the rows of a block attend to in a layer. Takes the keys, the layer's sliding window (0
    for none), the rows of a block, and the variant's default of ``sliding_window_non_causal``."""
    proposal: Callable[[dict[str, Any], Path], Proposal] | None = None
    """Returns the chain length and the target that the file names; None for a dialect without such keys."""
    takes_rope_of: str | None = None
    """The type of layer whose RoPE is used if a file has one RoPE for each type."""
    anchor_proposes: Callable[[bool, bool], bool] = lambda variant, _whole: variant
    """Returns True if the anchor's row proposes in a file without a key for it. Takes the variant's
    ``anchor_proposes``, and True if the head proposes as many tokens as its block has rows."""
    embeds_as_target: bool = False
    """True if heads without an embedding embed tokens as the target does, for variants with ``embeds_as_target``."""
    has_defaults: bool = False
    """The system's configuration classes have defaults for the keys of a variant; other systems write every key that
    has a meaning."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps the dialect's names of tensors to the module's."""


def _layer_of_muse_glimmer(config: dict[str, Any], _file: Path) -> Keys:
    of_qwen3 = {"model_type": "qwen3", "use_sliding_window": True}  # the assistant's layers are Qwen3's
    return {"vocab_size": MUSE_GLIMMER_TOKENS} | config | of_qwen3


DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        SPECULATORS,
        lambda config, _file: LAYER in config,
        layer_fields=lambda config, file: nested(config, LAYER, file),
        ids_key="aux_hidden_state_layer_ids",
        ids_are="input",
        attends=_sees_before_block,
        proposal=speculators.proposal,
        takes_rope_of=speculators.DIALECT.takes_rope_of,
        # Heads whose anchor row was not trained have no such key, and vLLM reads a missing key as false.
        anchor_proposes=lambda variant, whole: variant and whole,
        has_defaults=True,
    ),
    Dialect(
        MUSE_GLIMMER,
        lambda config, _file: config.get("model_type") == "muse_glimmer_assistant",
        layer_fields=_layer_of_muse_glimmer,
        attends=_sees_to_both_sides,
        ids_are_known=False,
        names={"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"},
    ),
    Dialect(
        DEEPSPEC,
        lambda config, file: ANCHORS in config and TAPS not in nested(config, OWN, file),
        layer_fields=lambda config, file: full_attention_fields(config, file) if names_gemma4(config) else config,
        of_gemma4=names_gemma4,
        anchor_proposes=lambda _variant, _whole: True,
    ),
    Dialect(Z_LAB, lambda _config, _file: True, keys=keys_of_z_lab, embeds_as_target=True),
)
"""The dialects in order: the first that recognizes a configuration reads it."""


def dialect_of(config: Mapping[str, Any], file: Path) -> Dialect:
    return next(dialect for dialect in DIALECTS if dialect.recognizes(config, file))
