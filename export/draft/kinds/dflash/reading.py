"""Reads a checkpoint of the block family, of any variant and dialect."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import count, layer_ids, nested, number
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.layer_config import layer_config, windows
from eagle3.export.draft.common.rope import one_rope
from eagle3.export.draft.common.tensor_names import SELECTOR, check_named_once
from eagle3.export.draft.dialects import Proposal
from eagle3.export.draft.kinds.dflash.block.description import DFlashDescription
from eagle3.export.draft.kinds.dflash.block.dialects import Dialect, dialect_of
from eagle3.export.draft.kinds.dflash.block.keys import OWN, PROJECTOR, check_neutral, required
from eagle3.export.draft.kinds.dflash.block.variant import Given
from eagle3.export.draft.kinds.dflash.variants import DFLASH, KINDS, every_variant, variant_of

_UNREAD = r"confidence_head\..*|verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq"
_KEYS_AND_VALUES = r"(layers\.\d+\.self_attn\.)([kv]_proj\..*)"


def read(folder: Path, config: dict[str, Any], source: Source) -> DFlashDescription:
    """Describe the head in ``folder``. Raises ValueError with one line if the configuration contradicts itself or asks
    for something that no trainer's code computes."""
    file, headers = folder / "config.json", source.headers()
    dialect = dialect_of(config, file)
    named = variant_of(_kind(config, dialect, file))
    said = dialect.keys(config, named.kind, named.keys, file)
    variant = variant_of(named.settled(said, dialect, file))
    kind, gemma4 = variant.kind, dialect.of_gemma4(config)
    fields = one_rope(dialect.layer_fields(config, file), dialect.takes_rope_of, file)
    check_neutral(config, dialect.name, fields, file)
    names = {name: own for name in headers if (own := own_name(name, dialect)) is not None}
    check_named_once(folder, names)
    plain = {name.replace(".kept.", "."): headers[given] for given, name in names.items()}
    for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"):
        if name not in plain:
            raise ValueError(f"{folder} has no {name}: this is no {kind} head")
    layer = layer_config(file, fields, plain)
    if layer.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0 and not gemma4:
        raise ValueError(f"{file}: partial_rotary_factor, but a {kind} head's code rotates whole heads: correct it")
    rows = required(said, "block_size", file, least=2)
    sliding = windows(file, layer, layer.num_hidden_layers)
    attends = tuple(dialect.attends(said, window, rows, variant.sliding_non_causal, file) for window in sliding)
    found = {own: headers[name] for name, own in names.items() if own != SELECTOR}
    trained = dialect.proposal(config, file) if dialect.proposal else None
    first = named.first_row(said, dialect, trained.chain_len if trained else None, file)
    proposal = trained or Proposal(chain_len=variant.chain_len(rows, first))
    if proposal.chain_len > rows - first:
        raise ValueError(
            f"{file}: speculative_tokens is {proposal.chain_len}, but a block of block_size {rows} proposes "
            f"{rows - first}: correct one of them"
        )
    return DFlashDescription(
        kind=kind,
        dialect=dialect.name,
        source=source,
        layer=layer,
        tensor_names={name: own for name, own in names.items() if own != SELECTOR},
        headers=found,
        target_vocab_size=layer.vocab_size,
        aux_layers=_taps(said, dialect.ids_key, file),
        aux_convention=dialect.ids_are,
        convention_known=dialect.ids_are_known,
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
        embeds_as_target=dialect.embeds_as_target and named.embeds_as_target and _unscaled(said, found),
        output_multiplier=number(said, "output_multiplier", 1.0, file),
        softcap=number(said, "final_logit_softcapping", None, file),
        variant=variant.read(Given(said, dialect, layer, found, rows, first, file)),
    )


def _kind(config: dict[str, Any], dialect: Dialect, file: Path) -> str:
    """Return the kind that a configuration names. Raises ValueError for an unsupported kind."""
    kind = next(name for name, each in KINDS.items() if each.recognizes(config))
    own = nested(config, OWN, file)
    said = own.get(PROJECTOR) or config.get(PROJECTOR)
    projectors = {each.projector_type: name for name, each in KINDS.items() if each.projector_type}
    if said not in (None, *projectors):
        raise ValueError(
            f"{file}: {PROJECTOR} is {said!r}, an unsupported head of the DFlash family: supported are "
            f"{', '.join(projectors)}"
        )
    projected = projectors[said] if said else kind
    if projected != kind and kind != DFLASH:
        raise ValueError(f"{file}: {PROJECTOR} is {said!r}, which is not supported in a {kind} head: name another head")
    variant = variant_of(projected)
    variant.check_keys(own, config, file)
    if variant.dialects and dialect.name not in variant.dialects:
        raise ValueError(
            f"{file.parent} is an {projected} head in a form other than {' and '.join(variant.dialects)}'s, which is "
            "not read"
        )
    return projected


def _unscaled(said: Mapping[str, Any], found: Mapping[str, TensorHeader]) -> bool:
    return "embed_tokens.weight" not in found and said.get("input_embedding_scale") is None


def own_name(name: str, dialect: Dialect) -> str | None:
    """Return the module's name of a tensor, None for one that is not read. Projections of keys and values are in a
    module of their own, because they are applied to the taps as well."""
    name = name.removeprefix("model.")
    name = dialect.names.get(name, name)
    if re.fullmatch(_UNREAD, name):
        return None
    for pattern, own in (each for variant in every_variant() for each in variant.names.items()):
        if found := re.fullmatch(pattern, name):
            name = found.expand(own)
    return re.sub(_KEYS_AND_VALUES, r"\1kept.\2", name)


def _taps(said: Mapping[str, Any], key: str, file: Path) -> tuple[int, ...]:
    ids = layer_ids(said, key, file)
    if ids is None:
        raise ValueError(f"{file} has no {key}, which names the target's layers that the head taps: add it")
    return ids


def _mask_token(said: Mapping[str, Any], own: Mapping[str, TensorHeader], vocabulary: int, file: Path) -> int:
    token = required(said, "mask_token_id", file, least=0)
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
