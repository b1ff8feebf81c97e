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

z-lab's keys lie at the top or in ``dflash_config``. JetSpec's ``causal_head`` says that a row of a block sees no later
one. Source: z-lab's ``dflash/model.py``; SpecForge's ``modeling/draft``; JetSpec's ``models/draft_head.py``; vLLM's
``configs/speculators/algos.py`` and SGLang's ``models/dflash.py``, which serve them.

A dialect is a function ``read`` that makes a ``Reader``, and a line of ``DIALECTS``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import Source
from eagle3.export.draft.common.checks import SELECTOR, check_named_once, shared_lm_head
from eagle3.export.draft.common.layer_config import full_attention_fields, layer_config, names_gemma4, one_rope, windows
from eagle3.export.draft.common.speculators import LAYER, ROPE_OF, SPECULATORS, Proposal, layer_fields, proposal_of
from eagle3.export.draft.kinds import DFLASH, KINDS, kind_of
from eagle3.export.draft.kinds.dflash.description import (
    ANCHOR,
    BONUS,
    FACTORS,
    Z_LAB,
    DFlash,
    DFlashDescription,
    Given,
    Variant,
)
from eagle3.export.draft.kinds.dflash.dflash2 import DFlash2
from eagle3.export.draft.kinds.dflash.domino import Domino
from eagle3.export.draft.kinds.dflash.dspark import DSpark
from eagle3.export.draft.kinds.dflash.xpress import XPress
from eagle3.targets.attention import Block

VARIANTS: dict[str, type[Variant]] = {each.kind: each for each in (DFlash, DFlash2, DSpark, XPress, Domino)}
OWN, ANCHORS = "dflash_config", "num_anchors"
"""Keys by which dialects are recognized. AngelSlim also writes ``num_anchors``, inside z-lab's ``dflash_config``."""
TAPS = "target_layer_ids"
CAUSAL = ("is_causal", "causal", "causal_head")
"""Keys of z-lab's dialect that say whether a row of a block attends to no later row. The first one present counts."""
PROJECTOR = "projector_type"
_HEEDED = ("block_size", "mask_token_id", TAPS, *CAUSAL, ANCHOR, BONUS)
_OF_TRAINING = (
    PROJECTOR,
    ANCHORS,
    "mask_token",
    "num_target_layers",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
)
"""Keys that are ignored: settings of training, repetitions of other keys, and settings of a confidence head, which is
not used."""
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
"""Keys that some server or trainer uses and this package does not, with the values that have no effect."""
MUSE_GLIMMER_TOKENS = 202_048
"""The vocabulary of Muse Glimmer, which its assistant's configuration leaves out."""
_UNREAD = r"confidence_head\..*|verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq"
_KEYS_AND_VALUES = r"(layers\.\d+\.self_attn\.)([kv]_proj\..*)"
Attends = Callable[[Fields, int, int, bool], Block]
"""A function that returns the range that the rows of a block attend to in a layer. It takes the keys, the layer's
sliding window (0 for none), the rows of a block, and the variant's default of ``sliding_window_non_causal``."""


@dataclass(frozen=True)
class Files:
    """The files of a head."""

    fields: Fields
    source: Source


class Reader:
    """A head that is being read. ``named`` is the variant that its file names. ``variant`` is the variant that its keys
    describe, and ``said`` holds these keys."""

    def __init__(
        self,
        files: Files,
        dialect: str,
        layers: Fields | None = None,
        rope_type: str | None = None,
        names: Mapping[str, str] | None = None,
        gemma4: bool = False,
        defaults: bool = False,
    ):
        """Read the variant, the tensors' names and the layers' configuration.

        Args:
            layers: the fields of the layers, if they are not at the top
            rope_type: the type of layer whose RoPE is used if a file has one RoPE for each type
            names: the dialect's names of tensors, mapped to the module's
            gemma4: True for Gemma 4's layers
            defaults: True if the system's configuration classes have defaults for the keys of a variant; other systems
                write every key that has a meaning
        """
        fields, headers = files.fields, files.source.headers()
        self.files, self.fields, self.file, self.folder = files, fields, fields.file, fields.file.parent
        self.dialect, self.gemma4, self.defaults = dialect, gemma4, defaults
        self.named = _variant_named(fields, dialect)
        self.said = _keys_of_z_lab(fields, self.named) if dialect == Z_LAB else fields
        self.variant = VARIANTS[self.named.settled(self.said, defaults)]
        of_layers = one_rope(fields if layers is None else layers, rope_type)
        _check_neutral(fields, dialect, of_layers)
        self.names = {name: own for name in headers if (own := _own_name(name, names or {})) is not None}
        check_named_once(self.folder, self.names)
        plain = {own.replace(".kept.", "."): headers[name] for name, own in self.names.items()}
        for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"):
            if name not in plain:
                raise ValueError(f"{self.folder} has no {name}: this is no {self.variant.kind} head")
        self.layer = layer_config(of_layers, plain)
        if self.layer.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0 and not gemma4:
            raise ValueError(
                f"{self.file}: partial_rotary_factor, but a {self.variant.kind} head's code rotates whole heads: "
                "correct it"
            )
        self.rows = self._required("block_size", least=2)
        self.sliding = windows(of_layers, self.layer, self.layer.num_hidden_layers)
        self.own = {own: headers[name] for name, own in self.names.items() if own != SELECTOR}

    def described(
        self,
        attends: Attends,
        ids_key: str = TAPS,
        ids_are: str = "output",
        known: bool = True,
        anchor: bool | None = None,
        proposal: Proposal | None = None,
        embeds_as_target: bool = False,
    ) -> DFlashDescription:
        """Return the description.

        Args:
            ids_are: "input" or "output": the state of the named layer that an id under ``ids_key`` stands for
            known: True if all code that writes the dialect gives ids this meaning
            anchor: True if the anchor's row proposes in a file without a key for it; None for the variant's default
            embeds_as_target: True if a head without an embedding or a scale embeds tokens as the target does
        """
        said, vocabulary = self.said, self.layer.vocab_size
        ranges = tuple(attends(said, window, self.rows, self.variant.sliding_non_causal) for window in self.sliding)
        first = self.named.first_row(said, self.named.anchor_proposes if anchor is None else anchor, self.defaults)
        proposal = proposal or Proposal(chain_len=self.variant.chain_len(self.rows, first))
        if proposal.chain_len > self.rows - first:
            raise ValueError(
                f"{self.file}: speculative_tokens is {proposal.chain_len}, but a block of block_size {self.rows} "
                f"proposes {self.rows - first}: correct one of them"
            )
        if (ids := said.layer_ids(ids_key)) is None:
            raise ValueError(
                f"{self.file} has no {ids_key}, which names the target's layers that the head taps: add it"
            )
        scale = said.number("input_embedding_scale")
        given = Given(said, self.defaults, self.layer, self.own, self.rows, first)
        return DFlashDescription(
            kind=self.variant.kind,
            dialect=self.dialect,
            source=self.files.source,
            layer=self.layer,
            tensor_names={name: own for name, own in self.names.items() if own != SELECTOR},
            headers=self.own,
            target_vocab_size=vocabulary,
            aux_layers=ids,
            aux_convention=ids_are,
            convention_known=known,
            shares_lm_head=shared_lm_head(self.fields, self.own, vocabulary),
            selector=next((name for name, own in self.names.items() if own == SELECTOR), None),
            windows=tuple(
                each.before + 1 + self.rows if window and each.before is not None else 0
                for each, window in zip(ranges, self.sliding, strict=True)
            ),
            block_rows=self.rows,
            attends=ranges,
            mask_token_id=self._mask_token(),
            first_row=first,
            chain_len=proposal.chain_len,
            verifier=proposal.verifier,
            verifier_architectures=proposal.verifier_architectures,
            gemma4=self.gemma4,
            embedding_scale=self.layer.hidden_size**0.5 if self.gemma4 else 1.0 if scale is None else scale,
            embeds_as_target=embeds_as_target and scale is None and "embed_tokens.weight" not in self.own,
            output_multiplier=said.number("output_multiplier", 1.0),
            softcap=said.number("final_logit_softcapping"),
            variant=self.variant.read(given),
        )

    def _required(self, key: str, least: int) -> int:
        """Return the value of a count that every head must have. Raises ValueError if the key is missing."""
        value = self.said.count(key, least=least)
        if value is None:
            raise ValueError(f"{self.file} has no {key}, which every head of the DFlash family has: add it")
        return value

    def _mask_token(self) -> int:
        token = self._required("mask_token_id", least=0)
        embedding = self.own.get("embed_tokens.weight")
        rows = self.layer.vocab_size if embedding is None else embedding.shape[0]
        if token >= rows:
            raise ValueError(f"{self.file}: mask_token_id is {token}, but the embedding has {rows} rows: correct it")
        return token


def _variant_named(fields: Fields, dialect: str) -> type[Variant]:
    """Return the variant that a configuration names. Raises ValueError for an unsupported one."""
    file, kind = fields.file, kind_of(fields)
    own = fields.nested(OWN)
    said = own.get(PROJECTOR) or fields.get(PROJECTOR)
    projectors = {each.projector_type: name for name, each in KINDS.items() if each.projector_type}
    if said not in (None, *projectors):
        raise ValueError(
            f"{file}: {PROJECTOR} is {said!r}, an unsupported head of the DFlash family: supported are "
            f"{', '.join(projectors)}"
        )
    projected = projectors[said] if said else kind
    if projected != kind and kind != DFLASH:
        raise ValueError(f"{file}: {PROJECTOR} is {said!r}, which is not supported in a {kind} head: name another head")
    variant = VARIANTS[projected or DFLASH]
    variant.check_keys(own, fields)
    if variant.dialects and dialect not in variant.dialects:
        raise ValueError(
            f"{file.parent} is an {projected} head in a form other than {' and '.join(variant.dialects)}'s, which is "
            "not read"
        )
    return variant


def _check_neutral(config: Fields, dialect: str, layers: Fields) -> None:
    """Raise ValueError for a key whose value changes the head's output in an unsupported way."""
    file, own = config.file, config.nested(OWN)
    for key, harmless in _NEUTRAL.items():
        value = own.get(key, config.get(key, layers.get(key)))
        if value is not None and value not in harmless:
            raise ValueError(f"{file}: {key} is {value}, which is not supported in a head of the dialect {dialect}")
    width = own.get("target_hidden_size", layers.get("hidden_size"))
    if width != layers.get("hidden_size"):
        raise ValueError(f"{file}: target_hidden_size is {width} and differs from hidden_size, which is not supported")
    for key in ("rope_scaling", "rope_parameters"):
        if "rope_dim" in layers.nested(key):
            raise ValueError(f"{file}: {key} has a rope_dim, but only RoPE over whole heads is supported")


def _keys_of_z_lab(config: Fields, variant: type[Variant]) -> Fields:
    """Return the keys of a file of z-lab's dialect, which lie at the top or in ``dflash_config``. Raises ValueError for
    a key with two values, and for an unknown key, since it may change the head's output."""
    file, own = config.file, config.nested(OWN)
    heeded = (*_HEEDED, *FACTORS, *variant.keys)
    for key, value in own.items():
        if key not in (*heeded, *_OF_TRAINING, *_NEUTRAL, "target_hidden_size"):
            raise ValueError(
                f"{file}: {OWN} has {key}, a key that is not known for a {variant.kind}: this head is not read"
            )
        if key in config and config[key] != value and key in heeded:
            raise ValueError(f"{file}: {key} is {config[key]}, but {value} in {OWN}: correct one of them")
    if any((file.parent / name).exists() for name in ("mask_embedding.pt", "mask_embedding.safetensors")):
        raise ValueError(f"{file.parent} has an embedding of its mask token in a file of its own, which is not read")
    return Fields(file, {key: config[key] for key in heeded if key in config}).changed(own)


def _own_name(name: str, names: Mapping[str, str]) -> str | None:
    """Return the module's name of a tensor, None for one that is not read. Projections of keys and values are in a
    module of their own, because they are applied to the taps as well."""
    name = name.removeprefix("model.")
    name = names.get(name, name)
    if re.fullmatch(_UNREAD, name):
        return None
    for pattern, own in (each for variant in VARIANTS.values() for each in variant.names.items()):
        if found := re.fullmatch(pattern, name):
            name = found.expand(own)
    return re.sub(_KEYS_AND_VALUES, r"\1kept.\2", name)


def _sees_backwards(said: Fields, window: int, rows: int, _non_causal: bool) -> Block:
    """Return the range that the rows of a block attend to in z-lab's code."""
    _check_window(said, window, rows)
    causal = next((each for key in CAUSAL if (each := said.boolean(key)) is not None), bool(window))
    return Block(window - 1 if window else None, causal=causal)


def _sees_before_block(said: Fields, window: int, _rows: int, non_causal: bool) -> Block:
    causal = bool(window) and not said.boolean("sliding_window_non_causal", non_causal)
    return Block(window or None, from_first_row=bool(window), causal=causal)


def _sees_to_both_sides(said: Fields, window: int, rows: int, _non_causal: bool) -> Block:
    _check_window(said, window, rows)
    return Block(window or None, causal=False)


def _check_window(said: Fields, window: int, rows: int) -> None:
    if window and window < rows:
        raise ValueError(f"{said.file}: sliding_window is {window}, less than a block of block_size {rows}: correct it")


def read_speculators(files: Files) -> DFlashDescription:
    fields, proposal = files.fields, proposal_of(files.fields)
    head = Reader(files, SPECULATORS, layer_fields(fields), ROPE_OF, defaults=True)
    # Heads whose anchor row was not trained have no key for it, and vLLM reads a missing key as false.
    anchor = head.named.anchor_proposes and proposal.chain_len == head.rows
    return head.described(_sees_before_block, "aux_hidden_state_layer_ids", "input", anchor=anchor, proposal=proposal)


def read_muse_glimmer(files: Files) -> DFlashDescription:
    of_qwen3 = {"model_type": "qwen3", "use_sliding_window": True}  # the assistant's layers are Qwen3's
    layers = files.fields.changed({"vocab_size": MUSE_GLIMMER_TOKENS, **files.fields, **of_qwen3})
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    return Reader(files, "muse-glimmer", layers, names=names).described(_sees_to_both_sides, known=False)


def read_deepspec(files: Files) -> DFlashDescription:
    gemma4 = names_gemma4(files.fields)
    layers = full_attention_fields(files.fields) if gemma4 else None
    return Reader(files, "deepspec", layers, gemma4=gemma4).described(_sees_backwards, anchor=True)


def read_z_lab(files: Files) -> DFlashDescription:
    head = Reader(files, Z_LAB)
    return head.described(_sees_backwards, embeds_as_target=head.named.embeds_as_target)


class Dialect(NamedTuple):
    """Recognizes and reads the files of a system."""

    recognizes: Callable[[Fields], bool]
    """Returns True for a configuration of this dialect that none before it recognizes."""
    read: Callable[[Files], DFlashDescription]


DIALECTS = (
    Dialect(lambda fields: LAYER in fields, read_speculators),
    Dialect(lambda fields: fields.get("model_type") == "muse_glimmer_assistant", read_muse_glimmer),
    Dialect(lambda fields: ANCHORS in fields and TAPS not in fields.nested(OWN), read_deepspec),
    Dialect(lambda _fields: True, read_z_lab),
)
"""The dialects in order: the first that recognizes a configuration reads it."""
