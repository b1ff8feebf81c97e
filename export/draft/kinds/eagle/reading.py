"""Reads an EAGLE head of any dialect into an ``EagleDescription``, from its configuration and tensor headers alone.

Contradictions are refused with both values. Missing information is replaced by a default, and a warning names it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import boolean, count, nested, number
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.gemma4_fields import full_attention_fields, names_gemma4
from eagle3.export.draft.common.layer_config import FAMILIES, layer_config, windows
from eagle3.export.draft.common.rope import one_rope
from eagle3.export.draft.common.tensor_names import SELECTOR, check_named_once
from eagle3.export.draft.dialects import DIALECTS, Dialect
from eagle3.export.draft.dialects.dialect import EAGLE, EAGLE3, P_EAGLE
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.named_taps import named_taps
from eagle3.export.draft.kinds.eagle.presence import check_gemma4, check_normed, check_presence
from eagle3.export.draft.kinds.eagle.rope_reading import RopeFlags, trained_rope, without_decided
from eagle3.export.draft.kinds.eagle.tensor_names import MASK, has_midlayer, layer_count, own_name
from eagle3.export.draft.kinds.eagle.unheeded import WINDOWS, doubts_of_taps, refuse_unheeded_variants
from eagle3.export.draft.kinds.eagle.which import MASK_TOKENS, PARD, head_kind

_MATRICES = ("_proj.weight", "fc.weight", "lm_head.weight", "embed_tokens.weight")
Headers = Mapping[str, TensorHeader]


def read_eagle(
    source: Source,
    config: dict[str, Any],
    headers: Headers,
    dialect: str | None,
    norm_before_residual: bool | None,
    rope: RopeFlags,
) -> EagleDescription:
    """Describe the EAGLE head in the folder of ``source``, whose ``config.json`` is ``config``, with the headers of its
    tensors. See ``read_draft`` for the other arguments. Raises ValueError with one line."""
    file = source.path / "config.json"
    chosen = DIALECTS[dialect] if dialect else _recognize(file, config, headers)
    return _describe(source, file, config, headers, chosen, norm_before_residual, rope)


def _recognize(file: Path, config: dict[str, Any], headers: Headers) -> Dialect:
    for dialect in DIALECTS.values():
        if dialect.recognizes(config, headers):
            return dialect
    if PARD in config:
        raise ValueError(
            f"{file.parent} is a PARD model ({PARD} in config.json): independent draft models are not supported, type "
            "--draft with a head (eagle3-export --list-drafts lists the kinds)"
        )
    if "model_type" in config:
        raise ValueError(
            f"{file} is of a {config['model_type']} model, and it has no fc.weight as a draft head has: if it is the "
            f"target, type --checkpoint {file.parent}; independent draft models are not supported"
        )
    raise ValueError(
        f"{file}: not recognized as a draft head (architectures: {config.get('architectures') or 'none'}): if it is "
        f"one, type --draft-dialect with one of {', '.join(DIALECTS)}"
    )


def _describe(
    source: Source,
    file: Path,
    config: dict[str, Any],
    headers: Headers,
    dialect: Dialect,
    norm_before_residual: bool | None,
    rope: RopeFlags,
) -> EagleDescription:
    folder, warnings = source.path, []
    names, own = _own_tensors(folder, headers)
    dialect.check(config, file)
    gemma4 = dialect.has_gemma4 and names_gemma4(config)
    fields = full_attention_fields(config, file) if gemma4 else dialect.layer_fields(config)
    if fields is config and "transformer_layer_config" in config:
        raise ValueError(f"{file} is of speculators (transformer_layer_config): type --draft-dialect speculators")
    dialect.refuse(without_decided(config, rope.decided), file)
    fields = one_rope(fields, dialect.takes_rope_of, file)
    variants = config | nested(config, "eagle_config", file)
    _refuse_variants(file, variants)
    if "layers.0.self_attn.q_proj.weight" not in own:
        raise ValueError(f"{folder} has no q_proj of a first layer (layers.0, midlayer): this is no EAGLE head")
    layer, layers = layer_config(file, fields, own, any_type=dialect.any_model_type), layer_count(own)
    kind = head_kind(file, config, layer.hidden_size, own)
    if not str(fields.get("model_type", "llama")).startswith((*FAMILIES, "mistral")):
        warnings.append(
            f"{file}: model_type is {fields['model_type']}; the layer is read as Llama's, as its tensors are"
        )
    layer.rope_parameters, lines = trained_rope(file, layer, fields, dialect, kind, rope)
    warnings += lines
    if kind != P_EAGLE and dialect.depth_is_targets and any(windows(file, layer, layers)):
        layer.layer_types = None
        warnings.append(
            f"{file}: {dialect.trainer} copies the sliding layers from the target: the head has full attention, as in "
            "training; type --draft-window for a window"
        )
        variants = {key: value for key, value in variants.items() if key != WINDOWS}
    _check_depth(file, config, kind, dialect, layer.num_hidden_layers, names)
    final = kind == EAGLE or not boolean(variants, "use_aux_hidden_state", True, file)
    if kind == EAGLE3 and final and "fc.weight" in own:
        warnings.append(f"{file}: use_aux_hidden_state is false, so its fc.weight is not read")
    decided = rope.decided + (() if norm_before_residual is None else ("norm_before_residual",))
    of_layers = windows(file, layer, layers)
    refuse_unheeded_variants(dialect, kind, file, variants, own, decided, of_layers)
    check_presence(folder, kind, variants, own, final, warnings)
    check_normed(folder, dialect, kind, own)
    check_gemma4(folder, gemma4, own)
    later = _later_norm(folder, own, layers, dialect)
    normed, feeds = _output_norm(file, variants, own, dialect, kind, warnings)
    unused = {"fc.weight", "fc.bias"} if kind != EAGLE and final else set()
    unused |= set() if normed else {"norm.weight"}
    unused |= {MASK} if kind != P_EAGLE else set()
    if MASK in own and kind != P_EAGLE:
        warnings.append(
            f"{folder} has {MASK}, as a P-EAGLE head, but its config.json has none of {', '.join(MASK_TOKENS)}: read "
            f"as an {kind} head; add the id of its mask token if it proposes all tokens at once"
        )
    other = {"input_layernorm": "hidden_norm", "hidden_norm": "input_layernorm"}[later]
    unused |= {f"layers.{index}.{other}.weight" for index in range(1, layers)}
    names = {name: each for name, each in names.items() if each not in unused and each != SELECTOR}
    own = {each: header for each, header in own.items() if each not in unused and each != SELECTOR}
    selector = next((name for name in headers if own_name(name) == SELECTOR), None)
    vocabulary = headers[selector].elements if selector else layer.vocab_size
    shares, ties = _lm_head(folder, config, own, vocabulary, kind)
    if norm_before_residual is None:
        norm_before_residual = boolean(variants, "norm_before_residual", False, file)
        if dialect.warns_of_residual and variants.get("norm_before_residual") is None and kind != EAGLE:
            warnings.append(
                f"{file} has no norm_before_residual: taken as false, as speculators does; vLLM takes it as true. If "
                "hardly anything is accepted, type --norm-before-residual true"
            )
    if kind == P_EAGLE and "embed_tokens.weight" not in own:
        raise ValueError(
            f"{folder} lacks embed_tokens.weight: the embedding of a P-EAGLE is trained and differs from the target's"
        )
    if any(folder.glob("adapter_model.*")):
        warnings.append(
            f"{folder} has a LoRA of its target beside the head (adapter_model): merge it into the target, or less is "
            "accepted"
        )
    ids, ids_are, lines = (None, dialect.ids_are, []) if final else named_taps(config, file, dialect)
    warnings += [*lines, *doubts_of_taps(dialect, file, ids, ids_are)]
    proposal = dialect.proposal(config, file)
    return EagleDescription(
        kind=kind,
        dialect=dialect.name,
        source=source,
        layer=layer,
        layers=layers,
        tensor_names=names,
        headers=own,
        target_vocab_size=vocabulary,
        aux_layers=ids,
        aux_convention=ids_are,
        convention_known=dialect.ids_are_known,
        takes_final_state=final,
        norm_before_residual=norm_before_residual,
        norm_before_fc=boolean(variants, "norm_before_fc", False, file),
        feeds_normed=feeds,
        later_norm=later,
        shares_lm_head=shares,
        ties_lm_head=ties,
        mask_token_id=_mask_token(file, variants, own) if kind == P_EAGLE else None,
        selector=selector,
        windows=of_layers,
        chain_len=proposal.chain_len,
        verifier=proposal.verifier,
        verifier_architectures=proposal.verifier_architectures,
        gemma4=gemma4,
        embedding_scale=layer.hidden_size**0.5 if gemma4 else 1.0,
        softcap=number(config, "final_logit_softcapping", None, file) if gemma4 else None,
        warnings=tuple(warnings),
    )


def _own_tensors(folder: Path, headers: Headers) -> tuple[dict[str, str], dict[str, TensorHeader]]:
    """Return a map from the checkpoint's names to ``DraftHead``'s, and a map from ``DraftHead``'s names to the
    headers."""
    names = {name: known for name in headers if (known := own_name(name)) is not None}
    own = {each: headers[name] for name, each in names.items()}
    check_named_once(folder, names)
    for name, each in names.items():
        shape, rank = headers[name].shape, 2 if each.endswith(_MATRICES) else None
        if 0 in shape or len(shape) != (rank or len(shape)):
            raise ValueError(f"{folder}: {name} is {list(shape)}: it is damaged, or of another kind of head")
    return names, own


def _check_depth(
    file: Path, config: Mapping[str, Any], kind: str, dialect: Dialect, said: int, names: Mapping[str, str]
) -> None:
    """Raise ValueError if ``config.json`` gives the head's own depth, not its target's, and that differs from the
    number of layers with tensors. ``said`` is ``num_hidden_layers`` of ``config.json``. ``names`` maps the checkpoint's
    names to ``DraftHead``'s."""
    layers, key = layer_count(names.values()), "num_hidden_layers"
    if kind == EAGLE and dialect.depth_of_eagle:
        key = dialect.depth_of_eagle
        said = count(config, key, layers, file)
    alone = layers == 1 and dialect.builds_midlayer and has_midlayer(names)
    targets = (kind == EAGLE and key == "num_hidden_layers") or (kind == EAGLE3 and (dialect.depth_is_targets or alone))
    if not targets and layers != said:
        raise ValueError(
            f"{file.parent}: {key} is {said} in config.json, but there are tensors of {layers} layers: is a shard "
            "missing?"
        )


def _refuse_variants(file: Path, variants: Mapping[str, Any]) -> None:
    for key, what in (
        ("use_mtp_layernorm", "applies norms to embedding and state as MTP layers do"),
        ("eh_proj_before_attn", "projects embedding and state before attention"),
    ):
        if boolean(variants, key, False, file):
            raise ValueError(f"{file}: {key} is true: a head that {what} is not supported")
    if count(variants, "parallel_draft_step", 1, file) > 1:
        raise ValueError(
            f"{file}: parallel_draft_step is {variants['parallel_draft_step']}: heads with Medusa's parallel layers "
            "are not supported"
        )
    number(variants, "logit_scale", None, file)  # a scale above 0 does not change greedy proposals
    if boolean(variants, "norm_before_fc", False, file) and boolean(variants, "fc_norm", False, file):
        raise ValueError(f"{file}: norm_before_fc and fc_norm are both true, but exclude each other: correct it")


def _later_norm(folder: Path, own: Headers, layers: int, dialect: Dialect) -> str:
    """Return the name of the norm that the layers after the first apply to their input."""
    found = {
        norm
        for norm in ("input_layernorm", "hidden_norm")
        if layers > 1 and all(f"layers.{index}.{norm}.weight" in own for index in range(1, layers))
    }
    if layers > 1 and not found:
        raise ValueError(f"{folder}: a layer after the first has neither input_layernorm nor hidden_norm")
    return dialect.later_norm if len(found) != 1 else found.pop()


def _output_norm(
    file: Path, variants: Mapping[str, Any], own: Headers, dialect: Dialect, kind: str, warnings: list[str]
) -> tuple[bool, bool]:
    """Return two flags: whether lm_head takes the normed state, and whether the next step does."""
    said = boolean(variants, "norm_output", False, file)
    if variants.get("norm_output") is not None and dialect.norm_output_doubt:
        meaning = "the next step's feature" if dialect.norm_output_feeds else "lm_head's input"
        warnings.append(
            f"{file}: norm_output is {str(said).lower()}, read as in {dialect.name}, for {meaning}: type "
            f"--draft-dialect {dialect.norm_output_doubt} trained the head"
        )
    if not dialect.norm_output_feeds:
        return boolean(variants, "norm_output", True, file) and "norm.weight" in own, False
    feeds = said or boolean(variants, "return_hidden_post_norm", False, file) or dialect.feeds_normed(kind)
    return "norm.weight" in own, feeds


def _lm_head(folder: Path, config: Mapping[str, Any], own: Headers, vocabulary: int, kind: str) -> tuple[bool, bool]:
    """Return two flags: whether the head uses the target's lm_head, and whether it uses its own embedding as
    lm_head."""
    spoken = count(config, "draft_vocab_size", None, folder / "config.json")
    head = own.get("lm_head.weight")
    if head is not None:
        if spoken is not None and spoken != head.shape[0]:
            raise ValueError(
                f"{folder}: draft_vocab_size is {spoken} in config.json, but lm_head.weight has {head.shape[0]} rows: "
                "the two are of different heads, or one is damaged"
            )
        return False, False
    if spoken not in (None, vocabulary):
        raise ValueError(
            f"{folder}: no lm_head.weight, and draft_vocab_size {spoken} is not the target's vocabulary of "
            f"{vocabulary}, so that the target's cannot stand in for it: is a shard missing?"
        )
    tied = boolean(config, "tie_word_embeddings", False, folder / "config.json")
    if kind != EAGLE and tied and "embed_tokens.weight" in own:
        return False, True
    return True, False


def _mask_token(file: Path, variants: Mapping[str, Any], own: Headers) -> int:
    given = (count(variants, key, None, file, least=0) for key in MASK_TOKENS)
    found = [token for token in given if token is not None]
    if not found:
        raise ValueError(f"{file} has none of {', '.join(MASK_TOKENS)}, which a P-EAGLE head proposes from: add it")
    if found[0] >= own["embed_tokens.weight"].shape[0]:
        raise ValueError(
            f"{file}: the mask token is {found[0]}, but embed_tokens.weight has {own['embed_tokens.weight'].shape[0]} "
            "rows: correct it"
        )
    return found[0]
