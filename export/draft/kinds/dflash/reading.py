"""Reads a DFlash checkpoint: as speculators saves it, in the form of z-lab's own files, in which other trainers save
too, in that of DeepSeek's DeepSpec, which has one class for DFlash and DSpark, or as transformers saves Muse Glimmer's
assistant.

The first two differ in the keys, in what a layer id means (the input or the output of that layer), and in sliding
layers: in speculators all rows of a block see ``sliding_window`` positions before the block, in z-lab's code a row sees
``sliding_window`` positions up to itself. They also differ for a target that scales its embedding, such as Gemma:
speculators trains with the rows as they are. z-lab trained DFlash with what the target's module returns, scaled; from
DFlash2 on its code takes the rows as they are, times ``input_embedding_scale`` where a configuration has it.

DeepSpec's heads have z-lab's ids, full attention, an embedding and an lm_head; the anchor's row proposes. A
``markov_rank`` of 0 makes a DFlash of its DSpark. Those for Gemma 4 have its layers of full attention, scale their
embedding as it does and cap their logits before the bias.

Muse Glimmer's assistant has ids of outputs, other names for ``fc`` and ``hidden_norm``, and no vocabulary. It takes the
rows of the target's embedding without the norm that the target has behind them, and a row sees ``sliding_window``
positions before itself, and all rows of its block.

A Domino is a DFlash of z-lab's or speculators' form whose ``projector_type`` says so; SpecForge trains it, and NVIDIA's
ModelOpt.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.export.checkpoints.json_fields import boolean, count, layer_ids, nested, number
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.gemma4_fields import full_attention_fields, names_gemma4
from eagle3.export.draft.common.layer_config import layer_config, windows
from eagle3.export.draft.common.rope import one_rope
from eagle3.export.draft.common.tensor_names import SELECTOR, check_named_once
from eagle3.export.draft.dialects import DIALECTS, Proposal
from eagle3.export.draft.kinds.dflash import DFLASH, DFLASH2, DOMINO, DSPARK, XPRESS
from eagle3.export.draft.kinds.dflash.description import DFlashDescription
from eagle3.export.draft.kinds.dflash.keys import (
    CAUSAL,
    DEEPSPEC,
    FACTORS,
    LAYER,
    MUSE_GLIMMER,
    PREFIX,
    SIZES_OF_DFLASH2,
    SPECULATORS,
    TAPS,
    Z_LAB,
    check_neutral,
    first_row,
    form_of,
    keys_of_z_lab,
    kind_of,
)
from eagle3.targets.attention import Block

if TYPE_CHECKING:
    from transformers import LlamaConfig

_UNREAD = r"confidence_head\..*|verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq"
_KEYS_AND_VALUES = r"(layers\.\d+\.self_attn\.)([kv]_proj\..*)"
_GRU = r"(?:logit_head\.|domino_head\.)?(prefix_gru\.weight_[ih]h_l0|embed_proj\.[02]\.weight)"
"""A Domino's, as SpecForge saves it now and at first, and as speculators does."""
OF_MUSE_GLIMMER = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
MUSE_GLIMMER_TOKENS = 202_048
"""The vocabulary of Muse Glimmer, which its assistant's configuration leaves out."""
_MARKOV = ("vanilla", "gated", "rnn")


def read(folder: Path, config: dict[str, Any], source: Source) -> DFlashDescription:
    """Describe the head in ``folder``. Raises ValueError, one line, for a configuration that contradicts itself, and
    for what none of the trainers' code computes."""
    file, headers = folder / "config.json", source.headers()
    form = form_of(config, file)
    named = kind_of(config, form, file)
    speculators = form == SPECULATORS
    said = keys_of_z_lab(config, named, file) if form == Z_LAB else config
    unbiased = named == DSPARK and not speculators and not count(said, "markov_rank", None, file, least=0)
    kind = DFLASH if unbiased else named
    gemma4 = form == DEEPSPEC and names_gemma4(config)
    takes = DIALECTS[SPECULATORS].takes_rope_of if speculators else None
    fields = one_rope(_layer_fields(config, form, gemma4, file), takes, file)
    check_neutral(config, form, fields, file)
    names = {name: own for name in headers if (own := own_name(name)) is not None}
    check_named_once(folder, names)
    plain = {name.replace(".kept.", "."): headers[given] for given, name in names.items()}
    for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"):
        if name not in plain:
            raise ValueError(f"{folder} has no {name}: this is no {kind} head")
    layer = layer_config(file, fields, plain)
    if layer.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0 and not gemma4:
        raise ValueError(f"{file}: partial_rotary_factor, but a {kind} head's code rotates whole heads: correct it")
    rows = _required(said, "block_size", file, least=2)
    sliding = windows(file, layer, layer.num_hidden_layers)
    attends = tuple(_attends(file, kind, said, window, rows, form) for window in sliding)
    found = {own: headers[name] for name, own in names.items() if own != SELECTOR}
    trained = DIALECTS[SPECULATORS].proposal(config, file) if speculators else None
    first = first_row(said, form, named, trained.chain_len if trained else None, file)
    suggested = rows - 1 if kind == DOMINO else rows - first  # a Domino's as SGLang serves it
    proposal = trained or Proposal(chain_len=suggested)
    if proposal.chain_len > rows - first:
        raise ValueError(
            f"{file}: speculative_tokens is {proposal.chain_len}, but a block of block_size {rows} proposes "
            f"{rows - first}: correct one of them"
        )
    return DFlashDescription(
        kind=kind,
        dialect=form,
        source=source,
        layer=layer,
        tensor_names={name: own for name, own in names.items() if own != SELECTOR},
        headers=found,
        target_vocab_size=layer.vocab_size,
        aux_layers=_taps(said, file, speculators),
        aux_convention="input" if speculators else "output",
        shares_lm_head=_shares_lm_head(folder, config, found, layer.vocab_size),
        selector=next((name for name, own in names.items() if own == SELECTOR), None),
        windows=tuple(
            each.before + 1 + rows if window and each.before is not None else 0
            for each, window in zip(attends, sliding, strict=True)
        ),
        block_rows=rows,
        attends=attends,
        mask_token_id=_mask_token(said, found, layer.vocab_size, file),
        first_row=first,
        chain_len=proposal.chain_len,
        verifier=proposal.verifier,
        verifier_architectures=proposal.verifier_architectures,
        gemma4=gemma4,
        embedding_scale=layer.hidden_size**0.5 if gemma4 else number(said, "input_embedding_scale", 1.0, file),
        embeds_as_target=form == Z_LAB and _embeds_as_target(named, said, found),
        output_multiplier=number(said, "output_multiplier", 1.0, file),
        softcap=number(said, "final_logit_softcapping", None, file),
        **(_convolutions(said, layer, found, file) if kind == DFLASH2 else {}),
        **(_markov(said, first, file) if kind == DSPARK else {}),
        **(_refiner(said, file) if kind == XPRESS else {}),
        **(_gru(said, rows - first, speculators, file) if kind == DOMINO else {}),
    )


def _layer_fields(config: dict[str, Any], form: str, gemma4: bool, file: Path) -> Mapping[str, Any]:
    """Return the keys of a head's layers."""
    if form == SPECULATORS:
        return nested(config, LAYER, file)
    if form == MUSE_GLIMMER:
        of_qwen3 = {"model_type": "qwen3", "use_sliding_window": True}  # whose layers these are
        return {"vocab_size": MUSE_GLIMMER_TOKENS} | config | of_qwen3
    return full_attention_fields(config, file) if gemma4 else config


def _embeds_as_target(named: str, said: Mapping[str, Any], found: Mapping[str, TensorHeader]) -> bool:
    """Return True for a head of z-lab's that was trained with the target's own module as its embedding."""
    unscaled = "embed_tokens.weight" not in found and said.get("input_embedding_scale") is None
    return named in (DFLASH, DOMINO) and unscaled


def _convolutions(
    said: Mapping[str, Any], layer: "LlamaConfig", found: Mapping[str, TensorHeader], file: Path
) -> dict[str, Any]:
    """Return the fields of a DFlash2. Those that a configuration leaves out are speculators' defaults."""
    sizes = zip(SIZES_OF_DFLASH2, (2, 16, 256, 16), strict=True)
    taps, group, rank, chosen = (count(said, key, default, file) for key, default in sizes)
    if layer.hidden_size % group or chosen > layer.vocab_size or taps > said["block_size"]:
        raise ValueError(
            f"{file}: conv_group_size {group} must divide hidden_size {layer.hidden_size}, selector_top_k {chosen} be "
            f"at most the vocabulary's {layer.vocab_size}, conv_kernel_size {taps} at most block_size "
            f"{said['block_size']}: correct it"
        )
    if "d2t" in found:
        raise ValueError(f"{file.parent} has a d2t, but a {DFLASH2} head speaks the target's whole vocabulary")
    return {"conv_taps": taps, "conv_group": group, "selector_rank": rank, "selector_top_k": chosen}


def _markov(said: Mapping[str, Any], first: int, file: Path) -> dict[str, Any]:
    """Return the fields of a DSpark."""
    rank, kind = count(said, "markov_rank", 256, file, least=0), said.get("markov_head_type") or "vanilla"
    if kind not in _MARKOV or (kind == "rnn" and first):
        raise ValueError(
            f"{file}: markov_head_type {kind!r} with sample_from_anchor {str(not first).lower()}: {', '.join(_MARKOV)} "
            "are what is read, rnn with sample_from_anchor alone"
        )
    return {"markov_rank": rank, "markov_type": kind}


def _refiner(said: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the fields of an xPress. Those that a configuration leaves out are speculators' defaults."""
    sizes = (("xpress_rank", 256), ("xpress_mlp_ratio", 2), ("num_jacobi_passes", 6))
    rank, ratio, passes = (count(said, key, default, file) for key, default in sizes)
    return {"refiner_rank": rank, "refiner_mlp_ratio": ratio, "refiner_passes": passes}


def _gru(said: Mapping[str, Any], proposals: int, speculators: bool, file: Path) -> dict[str, Any]:
    """Return the fields of a Domino. Those that a configuration leaves out are speculators' defaults, in its form."""
    defaults = {PREFIX: 1, "gru_hidden_dim": 1024, "emb_dim": 256}
    for key in defaults:
        if not speculators and said.get(key) is None:
            raise ValueError(f"{file} has no {key}, which every {DOMINO} head of this form has: add it")
    first, size, rank = (count(said, key, default, file, least=int(key != PREFIX)) for key, default in defaults.items())
    if first >= proposals:
        raise ValueError(
            f"{file}: {PREFIX} is {first}, but a block proposes {proposals} tokens, the last with a bias: correct it"
        )
    for key in FACTORS:
        if said.get(key) not in (None, 1.0):
            raise ValueError(f"{file}: {key} is {said[key]}, which no code of a {DOMINO} knows: take it out")
    return {"gru_size": size, "gru_rank": rank, "gru_first": first}


def own_name(name: str) -> str | None:
    """Return the module's name of a tensor, None for one that is not read. Keys and values are in a module of their
    own, because they are made of taps as well."""
    name = name.removeprefix("model.")
    name = OF_MUSE_GLIMMER.get(name, name)
    if re.fullmatch(_UNREAD, name):
        return None
    if of_gru := re.fullmatch(_GRU, name):
        return f"domino_head.{of_gru[1].removesuffix('.weight')}.weight"
    return re.sub(_KEYS_AND_VALUES, r"\1kept.\2", name)


def _attends(file: Path, kind: str, said: Mapping[str, Any], window: int, rows: int, form: str) -> Block:
    """Return what the rows of a block attend to in a layer with a sliding window, 0 for none."""
    if form == SPECULATORS:
        causal = bool(window) and not boolean(said, "sliding_window_non_causal", kind == DFLASH2, file)
        return Block(window or None, from_first_row=bool(window), causal=causal)
    if window and window < rows:
        raise ValueError(f"{file}: sliding_window is {window}, less than a block of block_size {rows}: correct it")
    if form == MUSE_GLIMMER:
        return Block(window or None, causal=False)
    stated = (boolean(said, key, None, file) for key in CAUSAL)
    causal = next((each for each in stated if each is not None), bool(window))
    return Block(window - 1 if window else None, causal=causal)


def _taps(said: Mapping[str, Any], file: Path, speculators: bool) -> tuple[int, ...]:
    key = "aux_hidden_state_layer_ids" if speculators else TAPS
    ids = layer_ids(said, key, file)
    if ids is None:
        raise ValueError(f"{file} has no {key}, the layers of the target that the head takes: add it")
    return ids


def _required(said: Mapping[str, Any], key: str, file: Path, least: int) -> int:
    value = count(said, key, None, file, least=least)
    if value is None:
        raise ValueError(f"{file} has no {key}, which every head of the {DFLASH} family has: add it")
    return value


def _mask_token(said: Mapping[str, Any], own: Mapping[str, TensorHeader], vocabulary: int, file: Path) -> int:
    token = _required(said, "mask_token_id", file, least=0)
    rows = own["embed_tokens.weight"].shape[0] if "embed_tokens.weight" in own else vocabulary
    if token >= rows:
        raise ValueError(f"{file}: mask_token_id is {token}, but the embedding has {rows} rows: correct it")
    return token


def _shares_lm_head(folder: Path, config: Mapping[str, Any], own: Mapping[str, TensorHeader], vocabulary: int) -> bool:
    spoken = count(config, "draft_vocab_size", None, folder / "config.json")
    head = own.get("lm_head.weight")
    if head is None and spoken not in (None, vocabulary):
        raise ValueError(
            f"{folder}: no lm_head.weight, and draft_vocab_size {spoken} is not the target's vocabulary of "
            f"{vocabulary}, so that the target's cannot stand in for it: is a shard missing?"
        )
    if head is not None and spoken is not None and head.shape[:1] != (spoken,):
        raise ValueError(
            f"{folder}: draft_vocab_size is {spoken} in config.json, but lm_head.weight has {head.shape[0]} rows: the "
            "two are of different heads, or one is damaged"
        )
    return head is None
