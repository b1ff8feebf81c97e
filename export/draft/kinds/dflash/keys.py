"""The keys of a configuration of the DFlash family: which of four forms it has, which kind it says that it is, and
what a form's keys say where trainers name one thing differently.

Keys of z-lab's form lie at the top or in ``dflash_config``. Other trainers save in it too, with keys of their own:
SpecForge, AngelSlim, ModelOpt, and JetSpec, whose ``causal_head`` says that a row of a block sees no later one. Source:
z-lab's ``dflash/model.py``; SpecForge's ``modeling/draft``; JetSpec's ``models/draft_head.py``; vLLM's
``configs/speculators/algos.py`` and SGLang's ``models/dflash.py``, which serve them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import boolean, count, nested
from eagle3.export.draft.kinds.dflash import DFLASH, DFLASH2, DOMINO, DSPARK, KINDS, XPRESS

SPECULATORS, Z_LAB, DEEPSPEC, MUSE_GLIMMER = "speculators", "z-lab", "deepspec", "muse-glimmer"
LAYER, OWN, ANCHORS = "transformer_layer_config", "dflash_config", "num_anchors"
"""Keys that tell the forms apart. AngelSlim has the last one in z-lab's form."""
TAPS = "target_layer_ids"
FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
SIZES_OF_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
CAUSAL = ("is_causal", "causal", "causal_head")
"""Keys that say whether a row of a block sees no later one, in z-lab's form. The first that is there counts."""
_PROJECTOR = "projector_type"
_PROJECTORS = {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK, "domino": DOMINO}
_ANCHOR, _BONUS = "sample_from_anchor", "dspark_bonus_anchor"
_HEEDED = ("block_size", "mask_token_id", TAPS, *CAUSAL, _ANCHOR, _BONUS)
_OF_DSPARK = ("markov_rank", "markov_head_type")
PREFIX, _SHIFT = "pure_draft_prefix_len", "shift_label"
_OF_DOMINO = (_SHIFT, PREFIX, "gru_hidden_dim", "emb_dim")
_OF_TRAINING = (
    _PROJECTOR,
    ANCHORS,
    "mask_token",
    "num_target_layers",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
)
"""Keys that change nothing here: of training, of what is stated elsewhere, and of a confidence head, which is not
used."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_swa": (False,),
    "swa_window_size": (),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_gemma_norm": (False,),
    "attention_value_scale": (1.0,),
    "attention_mode": ("gqa", "mha"),
    "logit_scale": (1.0,),
    "use_aux_hidden_state": (True,),
    "use_qk_norm": (True,),
}
"""Keys that the code of some server or trainer heeds and ours does not, with the values that change nothing."""


def form_of(config: Mapping[str, Any], file: Path) -> str:
    if LAYER in config:
        return SPECULATORS
    if config.get("model_type") == "muse_glimmer_assistant":
        return MUSE_GLIMMER
    return DEEPSPEC if ANCHORS in config and TAPS not in nested(config, OWN, file) else Z_LAB


def kind_of(config: Mapping[str, Any], form: str, file: Path) -> str:
    """Return the kind that a configuration says. Raises ValueError, which names it, for a kind that is not read."""
    kind = next(name for name in (DFLASH, DFLASH2, DSPARK, XPRESS, DOMINO) if KINDS[name].recognizes(config))
    own = nested(config, OWN, file)
    said = own.get(_PROJECTOR) or config.get(_PROJECTOR)
    if said not in (None, *_PROJECTORS):
        raise ValueError(
            f"{file}: {_PROJECTOR} is {said!r}, a head of the DFlash family that is not read: "
            f"{', '.join(_PROJECTORS)} are"
        )
    projected = _PROJECTORS[said] if said else kind
    if projected != kind and kind != DFLASH:
        raise ValueError(f"{file}: {_PROJECTOR} is {said!r}, which is not read in a {kind} head: name another head")
    if projected == DFLASH and (own.get(_SHIFT) or config.get(_SHIFT)):
        raise ValueError(f"{file}: {_SHIFT} is true in a {DFLASH} head: type {_ANCHOR} in its place")
    others = {XPRESS: (SPECULATORS,), DOMINO: (SPECULATORS, Z_LAB)}
    if form not in others.get(projected, (form,)):
        raise ValueError(
            f"{file.parent} is an {projected} head in a form other than {' and '.join(others[projected])}'s, which is "
            "not read"
        )
    return projected


def check_neutral(config: Mapping[str, Any], form: str, fields: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for a key that changes what a head computes in a way that is not read. ``fields`` are of its
    layers."""
    own = nested(config, OWN, file)
    for key, harmless in _NEUTRAL.items():
        value = own.get(key, config.get(key, fields.get(key)))
        if value is not None and value not in harmless:
            raise ValueError(f"{file}: {key} is {value}, which is not read in a head of {form}'s form")
    width = own.get("target_hidden_size", fields.get("hidden_size"))
    if width != fields.get("hidden_size"):
        raise ValueError(f"{file}: target_hidden_size is {width}, another than hidden_size, which is not read")
    for key in ("rope_scaling", "rope_parameters"):
        if "rope_dim" in nested(fields, key, file):
            raise ValueError(f"{file}: {key} has a rope_dim, but whole heads are rotated here: this is not read")


def keys_of_z_lab(config: Mapping[str, Any], kind: str, file: Path) -> dict[str, Any]:
    """Return the keys of a file of z-lab's form. Raises ValueError for a key with two values, and for one that is not
    known, since it may change what the head computes."""
    own = nested(config, OWN, file)
    sizes = {DFLASH2: SIZES_OF_DFLASH2, DSPARK: _OF_DSPARK, DOMINO: _OF_DOMINO}.get(kind, ())
    heeded = (*_HEEDED, *FACTORS, *sizes)
    for key, value in own.items():
        if key not in (*heeded, *_OF_TRAINING, *_NEUTRAL, "target_hidden_size"):
            raise ValueError(f"{file}: {OWN} has {key}, which is not known of a {kind}: this head is not read")
        if key in config and config[key] != value and key in heeded:
            raise ValueError(f"{file}: {key} is {config[key]}, but {value} in {OWN}: correct one of them")
    if any((file.parent / name).exists() for name in ("mask_embedding.pt", "mask_embedding.safetensors")):
        raise ValueError(f"{file.parent} has an embedding of its mask token in a file of its own, which is not read")
    return {key: config[key] for key in heeded if key in config} | own


def first_row(said: Mapping[str, Any], form: str, kind: str, tokens: int | None, file: Path) -> int:
    """Return the first row of a block that proposes a token: 0 if the anchor's does, else 1. A Domino's ``shift_label``
    says it.

    Where nothing says so, heads of DeepSpec and DSparks in z-lab's form propose from the anchor on. A DSpark of
    speculators does if it proposes as many ``tokens`` as its block has rows: its configuration had no such key when the
    anchor's row was not trained, and vLLM takes a missing one for false.
    """
    if kind == DOMINO:
        return 0 if _shifted(said, form, file) else 1
    from_anchor, bonus = (boolean(said, key, None, file) for key in (_ANCHOR, _BONUS))
    if from_anchor is None and bonus is not None:
        from_anchor = not bonus
    if from_anchor is None:
        whole = kind == DSPARK and tokens == count(said, "block_size", None, file)
        from_anchor = form == DEEPSPEC or (whole if form == SPECULATORS else kind == DSPARK)
    elif bonus == from_anchor:
        raise ValueError(f"{file}: {_ANCHOR} and {_BONUS} are both {str(bonus).lower()}: correct one of them")
    return 0 if from_anchor else 1


def _shifted(said: Mapping[str, Any], form: str, file: Path) -> bool:
    """Return True for a Domino whose rows propose the token behind their own, the anchor's as well."""
    shifted = boolean(said, _SHIFT, True if form == SPECULATORS else None, file)
    if shifted is None:
        raise ValueError(f"{file} has no shift_label, which says if the anchor's row of a {DOMINO} proposes: add it")
    if boolean(said, _ANCHOR, shifted, file) != shifted:
        raise ValueError(f"{file}: shift_label is {shifted}, but sample_from_anchor is not: correct one of them")
    if form == SPECULATORS and not shifted:
        raise ValueError(f"{file}: shift_label is false: speculators' {DOMINO} would see the tokens that it proposes")
    return shifted
