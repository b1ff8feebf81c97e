"""Reads an EAGLE head step by step into an ``EagleDescription``, from its configuration and tensor headers alone.

The function of a dialect (``dialects.py``) makes a ``Reader`` and calls its steps in order, with the values in which
its trainer's code differs. Contradictions are refused with both values. Missing information is replaced by a default,
and a warning names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.checks import SELECTOR, shared_lm_head
from eagle3.export.draft.common.layer_config import FAMILIES, layer_config, one_rope, windows
from eagle3.export.draft.common.speculators import LAYER, Proposal
from eagle3.export.draft.kinds import EAGLE, EAGLE3, P_EAGLE
from eagle3.export.draft.kinds.eagle import settings
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.rope_reading import RopeFlags, RopeOfTrainer, trained_rope, without_decided
from eagle3.export.draft.kinds.eagle.settings import Heeded
from eagle3.export.draft.kinds.eagle.tensor_names import (
    MASK,
    MASK_TOKENS,
    has_midlayer,
    head_kind,
    layer_count,
    own_name,
    own_tensors,
)

IDS = "eagle_aux_hidden_state_layer_ids"
AUX_OUTPUTS = "aux_hidden_states_layer_ids"
"""AngelSlim's own key of the taps, with ids of layer outputs. For vLLM it adds the usual key, with each id one
higher."""
_MEANINGS = {AUX_OUTPUTS: "output", "target_layer_ids": "output", "aux_hidden_state_layer_ids": "input"}
"""Maps other keys of the taps to the meaning of their ids in the code that writes them: the keys of AngelSlim, of z-lab
and DeepSpec, and of DFlash heads in speculators."""


@dataclass(frozen=True)
class Files:
    """The files of a head, and the values of the flags that override them, None for a flag that was not typed."""

    source: Source
    fields: Fields
    headers: Mapping[str, TensorHeader]
    norm_before_residual: bool | None
    rope: RopeFlags

    def without_decided(self) -> Fields:
        """Return the configuration without the keys of RoPE that flags decide."""
        return Fields(self.fields.file, without_decided(self.fields, self.rope.decided))


class Reader:
    """A head that is being read. ``variants`` are all keys of the configuration, and ``own`` has the tensors' headers
    under the names that ``Head`` gives them."""

    def __init__(
        self,
        files: Files,
        dialect: str,
        layers: Fields | None = None,
        any_type: bool = True,
        rope_type: str | None = None,
        gemma4: bool = False,
    ):
        """Read the tensors' names, the layers' configuration and the kind.

        Args:
            layers: the fields of the layers, if they are not at the top
            any_type: True if the trainer's code builds Llama's layers for any ``model_type``, often the target's
            rope_type: the type of layer whose RoPE the code uses if a file has one RoPE for each type
            gemma4: True for Gemma 4's layers
        """
        fields = files.fields
        self.files, self.fields, self.file, self.folder = files, fields, fields.file, fields.file.parent
        self.dialect, self.gemma4, self.warnings = dialect, gemma4, list[str]()
        self.names, self.own = own_tensors(self.folder, files.headers)
        if layers is None and LAYER in fields:
            raise ValueError(f"{self.file} is of speculators ({LAYER}): type --draft-dialect speculators")
        self.of_layers = one_rope(fields if layers is None else layers, rope_type)
        self.variants = fields.changed(fields.nested("eagle_config"))
        settings.refuse_variants(self.variants)
        if "layers.0.self_attn.q_proj.weight" not in self.own:
            raise ValueError(
                f"{self.folder} has no q_proj of a first layer (layers.0, midlayer): this is no EAGLE head"
            )
        self.layer, self.layers = layer_config(self.of_layers, self.own, any_type), layer_count(self.own)
        self.kind = head_kind(fields, self.layer.hidden_size, self.own)
        if not str(self.of_layers.get("model_type", "llama")).startswith((*FAMILIES, "mistral")):
            self.warnings.append(
                f"{self.file}: model_type is {self.of_layers['model_type']}; the layer is read as Llama's, as its "
                "tensors are"
            )

    def read_rope(self, trained: RopeOfTrainer = RopeOfTrainer()) -> None:  # noqa: B008 - it is frozen
        rope, lines = trained_rope(self.of_layers, self.layer, trained, self.files.rope, self.dialect)
        self.layer.rope_parameters = rope
        self.warnings += lines

    def check_depth(self, key: str | None = None, of_target: str = "", one_midlayer: bool = False) -> None:
        """Raise ValueError if ``config.json`` gives the head's own depth, not its target's, and that differs from the
        number of layers with tensors.

        Args:
            key: the key of the depth of an EAGLE, if it has a reliable one
            of_target: the trainer that copies ``num_hidden_layers`` and the sliding layers of an EAGLE-3's target
            one_midlayer: True if the trainer's code builds one layer, ``midlayer``, whatever the key says
        """
        if self.kind != P_EAGLE and of_target and any(windows(self.of_layers, self.layer, self.layers)):
            self.layer.layer_types = None
            self.warnings.append(
                f"{self.file}: {of_target} copies the sliding layers from the target: the head has full attention, as "
                "in training; type --draft-window for a window"
            )
            kept = {name: value for name, value in self.variants.items() if name != settings.WINDOWS}
            self.variants = Fields(self.file, kept)
        self.windows = windows(self.of_layers, self.layer, self.layers)
        alone = self.layers == 1 and one_midlayer and has_midlayer(self.names)
        said, key = self.layer.num_hidden_layers, key if self.kind == EAGLE else "num_hidden_layers"
        if key is None or (self.kind == EAGLE3 and (of_target or alone)):
            return
        said = said if key == "num_hidden_layers" else self.fields.count(key, self.layers)
        if self.layers != said:
            raise ValueError(
                f"{self.folder}: {key} is {said} in config.json, but there are tensors of {self.layers} layers: is a "
                "shard missing?"
            )

    def check_settings(self, heeded: Heeded = Heeded()) -> None:  # noqa: B008 - it is frozen
        """Decide whether the head takes the final state, and check settings and tensors (``settings.py``)."""
        flag, rope = self.files.norm_before_residual, self.files.rope
        self.final = self.kind == EAGLE or not self.variants.boolean("use_aux_hidden_state", True)
        if self.kind == EAGLE3 and self.final and "fc.weight" in self.own:
            self.warnings.append(f"{self.file}: use_aux_hidden_state is false, so its fc.weight is not read")
        decided = rope.decided + (() if flag is None else ("norm_before_residual",))
        settings.refuse_unheeded(heeded, self.variants, self.own, decided, self.windows)
        settings.check_presence(self.kind, self.variants, self.own, self.final, self.warnings)
        settings.check_gemma4(self.folder, self.gemma4, self.own)

    def read_norms(self, later: str = "input_layernorm", feeds_normed: bool = False, doubt: str = "") -> None:
        """Read which norms apply where.

        Args:
            later: the norm of the input of later layers, for a checkpoint that has both norms
            feeds_normed: True if the next step's feature is always the normed state
            doubt: the part of a warning that names the other dialect to which a file with ``norm_output`` may belong
        """
        said = self.variants.boolean("norm_output", False)
        self._doubt_norm_output(said, doubt, "the next step's feature")
        returned = self.variants.boolean("return_hidden_post_norm", False)
        self._set_norms(later, "norm.weight" in self.own, said or returned or feeds_normed)

    def read_norms_of_specforge(self, doubt: str) -> None:
        """Read the norms of SpecForge, whose ``norm_output`` makes lm_head take the normed state, and feeds no step."""
        self._doubt_norm_output(self.variants.boolean("norm_output", False), doubt, "lm_head's input")
        normed = self.variants.boolean("norm_output", True) and "norm.weight" in self.own
        self._set_norms("hidden_norm", normed, False)

    def _doubt_norm_output(self, said: bool, doubt: str, meaning: str) -> None:
        if self.variants.get("norm_output") is not None and doubt:
            self.warnings.append(
                f"{self.file}: norm_output is {str(said).lower()}, read as in {self.dialect}, for {meaning}: type "
                f"--draft-dialect {doubt} trained the head"
            )

    def _set_norms(self, later: str, normed: bool, feeds: bool) -> None:
        of_later = range(1, self.layers)
        both = ("input_layernorm", "hidden_norm")
        found = [name for name in both if all(f"layers.{index}.{name}.weight" in self.own for index in of_later)]
        if not found:
            raise ValueError(f"{self.folder}: a layer after the first has neither input_layernorm nor hidden_norm")
        self.later_norm, self.feeds_normed = found[0] if len(found) == 1 else later, feeds
        unused = {"fc.weight", "fc.bias"} if self.kind != EAGLE and self.final else set()
        unused |= set() if normed else {"norm.weight"}
        if self.kind != P_EAGLE and MASK in self.own:
            unused |= {MASK}
            self.warnings.append(
                f"{self.folder} has {MASK}, as a P-EAGLE head, but its config.json has none of "
                f"{', '.join(MASK_TOKENS)}: read as an {self.kind} head; add the id of its mask token if it proposes "
                "all tokens at once"
            )
        (other,) = {*both} - {self.later_norm}
        unused |= {SELECTOR, *(f"layers.{index}.{other}.weight" for index in of_later)}
        self.names = {name: each for name, each in self.names.items() if each not in unused}
        self.own = {each: header for each, header in self.own.items() if each not in unused}

    def described(
        self,
        ids_are: str = "input",
        ids_key: str = IDS,
        known: bool = False,
        second_key: str | None = None,
        always_taps: str = "",
        proposal: Proposal = Proposal(),  # noqa: B008 - it is frozen
        doubts_residual: bool = False,
    ) -> EagleDescription:
        """Return the description.

        Args:
            ids_are: the meaning of a layer id under ``ids_key``: the "input" or the "output" of that layer
            known: True if all code that writes the dialect gives ids this meaning
            second_key: another key with ids in the dialect's files
            always_taps: the trainer, if its code always uses the same taps
            doubts_residual: True if systems disagree on the meaning of an absent ``norm_before_residual``
        """
        selector = next((name for name in self.files.headers if own_name(name) == SELECTOR), None)
        vocabulary = self.files.headers[selector].elements if selector else self.layer.vocab_size
        shares = shared_lm_head(self.fields, self.own, vocabulary)
        tied = shares and self.fields.boolean("tie_word_embeddings", False)
        ties = tied and self.kind != EAGLE and "embed_tokens.weight" in self.own
        before_residual = self._norm_before_residual(doubts_residual)
        if self.kind == P_EAGLE and "embed_tokens.weight" not in self.own:
            raise ValueError(
                f"{self.folder} lacks embed_tokens.weight: the embedding of a P-EAGLE is trained and differs from the "
                "target's"
            )
        if any(self.folder.glob("adapter_model.*")):
            self.warnings.append(
                f"{self.folder} has a LoRA of its target beside the head (adapter_model): merge it into the target, or "
                "less is accepted"
            )
        ids, ids_are = (None, ids_are) if self.final else self._taps(ids_key, ids_are, second_key, always_taps)
        return EagleDescription(
            kind=self.kind,
            dialect=self.dialect,
            source=self.files.source,
            layer=self.layer,
            layers=self.layers,
            tensor_names=self.names,
            headers=self.own,
            target_vocab_size=vocabulary,
            aux_layers=ids,
            aux_convention=ids_are,
            convention_known=known,
            takes_final_state=self.final,
            norm_before_residual=before_residual,
            norm_before_fc=self.variants.boolean("norm_before_fc", False),
            feeds_normed=self.feeds_normed,
            later_norm=self.later_norm,
            shares_lm_head=shares and not ties,
            ties_lm_head=ties,
            mask_token_id=self._mask_token() if self.kind == P_EAGLE else None,
            selector=selector,
            windows=self.windows,
            chain_len=proposal.chain_len,
            verifier=proposal.verifier,
            verifier_architectures=proposal.verifier_architectures,
            gemma4=self.gemma4,
            embedding_scale=self.layer.hidden_size**0.5 if self.gemma4 else 1.0,
            softcap=self.fields.number("final_logit_softcapping") if self.gemma4 else None,
            warnings=tuple(self.warnings),
        )

    def _norm_before_residual(self, doubted: bool) -> bool:
        if self.files.norm_before_residual is not None:
            return self.files.norm_before_residual
        said = self.variants.boolean("norm_before_residual")
        if said is None and doubted and self.kind != EAGLE:
            self.warnings.append(
                f"{self.file} has no norm_before_residual: taken as false, as speculators does; vLLM takes it as true. "
                "If hardly anything is accepted, type --norm-before-residual true"
            )
        return bool(said)

    def _taps(
        self, ids_key: str, ids_are: str, second_key: str | None, always: str
    ) -> tuple[tuple[int, ...] | None, str]:
        """Return the ids of the taps, under any known key and at any place, and their meaning. A wrong tap causes no
        error, so it raises ValueError if ids at two places or under two keys mean different layers."""
        meanings = {ids_key: ids_are} | _MEANINGS | {IDS: ids_are} | {ids_key: ids_are}
        places = {"": self.fields, "eagle_config.": self.fields.nested("eagle_config")}
        found = [
            (f"{where}{key}", key, ids)
            for key in meanings
            for where, held in places.items()
            if (ids := held.layer_ids(key)) is not None
        ]
        if not found:
            return None, ids_are
        (name, key, ids), *others = found
        for other, its_key, its_ids in others:
            if its_ids != ids and _inputs(its_ids, meanings[its_key]) != _inputs(ids, meanings[key]):
                raise ValueError(
                    f"{self.file} names taps twice: {name} is {list(ids)}, {other} is {list(its_ids)}: they mean "
                    "different layers, take out the ones that the head was not trained with"
                )
        if key not in (IDS, ids_key, second_key):
            self.warnings.append(
                f"{self.file} names its taps as {name} {list(ids)}, a key that {self.dialect} does not have, taken as "
                f"{meanings[key]}s of layers as in the systems that have it: type --aux-layers if hardly anything is "
                "accepted"
            )
        if always:
            self.warnings.append(
                f"{self.file} names taps {','.join(map(str, ids))}, taken as {meanings[key]}s of layers, but {always} "
                "always trains with the inputs of 2, n//2, n-3: if hardly anything is accepted, type --aux-layers with "
                "those"
            )
        return ids, meanings[key]

    def _mask_token(self) -> int:
        found = [token for key in MASK_TOKENS if (token := self.variants.count(key, least=0)) is not None]
        rows = self.own["embed_tokens.weight"].shape[0]
        if not found:
            raise ValueError(
                f"{self.file} has none of {', '.join(MASK_TOKENS)}, which a P-EAGLE head proposes from: add it"
            )
        if found[0] >= rows:
            raise ValueError(
                f"{self.file}: the mask token is {found[0]}, but embed_tokens.weight has {rows} rows: correct it"
            )
        return found[0]


def _inputs(ids: tuple[int, ...], meaning: str) -> tuple[int, ...]:
    return tuple(id + 1 for id in ids) if meaning == "output" else ids
