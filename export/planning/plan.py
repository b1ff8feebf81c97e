"""The plan of an export, made from flags, configurations and tensor headers before any weight is read.

It also applies the readings of a head that the flag ``--read FIELD=VALUE`` gives.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints import Source, open_source
from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.checkpoints.gguf_metadata import check_metadata, rows_of_embedding, template_note
from eagle3.export.checkpoints.safetensors_folder import unread_index
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.checkpoints.target_config import read_target_config, special_ids
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.configuration.config import LONGEST_CHAIN, NO_HEAD, ExportConfig
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.kinds.eagle.description import EagleDescription, windowed
from eagle3.export.draft.kinds.eagle.rope_reading import RopeFlags
from eagle3.export.draft.kinds.mtp.reading import read_own_layer
from eagle3.export.draft.loading import no_head
from eagle3.export.draft.reading import TABLES, read_draft, without_copies
from eagle3.export.planning.memory import cache_bytes, draft_caches, state_bytes, target_caches
from eagle3.export.planning.methods import MethodPlan, fused_rounds, own_verify_rows, plan_methods, programs
from eagle3.export.planning.pairing import check_pair, check_trained_for, within_vocabulary
from eagle3.export.planning.paths import check_context, draft_folder, target_paths, uses_own_layer
from eagle3.export.planning.taps import Taps, choose_taps
from eagle3.export.planning.tensors import check_target
from eagle3.export.planning.tokenizer import check_tokenizer
from eagle3.runner.contract import SPECULATE, TARGET_ROWS
from eagle3.runner.system.machine import size_text
from eagle3.targets import TARGETS, TargetSpec, spec_for
from eagle3.targets.spec import Skeleton, sliding_window

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from eagle3.targets.attention import KVCacheShape

LARGE = 100_000_000
"""The number of weights above which reading them takes most of the time of a step."""


@dataclass(frozen=True)
class Plan:
    """All decisions of an export, for its later stages; lengths are in tokens."""

    config: ExportConfig
    spec: TargetSpec
    checkpoint: Path  # the folder with the configuration and the tokenizer
    target_source: Source
    target_config: "PreTrainedConfig"  # transformers' text configuration
    target_headers: dict[str, TensorHeader]  # the headers of the tensors that are read
    draft: DraftDescription
    chosen_taps: Taps
    chain_len: int
    verify_rows: int
    """The rows of the longest verify window: one for the anchor and one for each proposal."""
    max_seq_len: int
    methods: tuple[MethodPlan, ...]
    qlinear: str
    draft_qlinear: str
    """The recipes for the weights of target and draft. Each is a recipe of the backend; the target's is "checkpoint" if
    its weights are already quantized and no recipe quantizes them again."""
    bos_id: int  # -1 if there is none
    eos_ids: tuple[int, ...]
    warnings: tuple[str, ...]
    """Warnings about possible mistakes, one line each."""

    @property
    def quantized_headers(self) -> dict[str, TensorHeader]:
        """The headers, by name, of the target's weights that are quantized in the checkpoint."""
        return {name: header for name, header in self.target_headers.items() if header.quantized}

    @cached_property
    def kept_headers(self) -> dict[str, TensorHeader]:
        """The headers among ``quantized_headers``, by name, whose codes the artifact keeps."""
        entry, found = BACKENDS[self.config.backend], self.quantized_headers
        if not found or entry.quantizes:
            return found
        if not entry.kept_group or self.config.qlinear is not None:
            return {}
        from torch import nn

        named = self.skeleton.model.named_modules(remove_duplicate=False)
        matrices = {f"{name}.weight" for name, module in named if isinstance(module, nn.Linear | nn.Embedding)}
        return {
            name: header
            for name, header in found.items()
            if self.skeleton.key_map(name) in matrices and header.group and header.group % entry.kept_group == 0
        }

    @cached_property
    def skeleton(self) -> Skeleton:
        """The target on the meta device. Callers read it and must not change it."""
        return self.spec.module().skeleton(self.target_config, self.max_seq_len)

    @cached_property
    def caches(self) -> "list[KVCacheShape]":
        """Both models' KV caches."""
        import torch

        dtype = getattr(torch, BACKENDS[self.config.backend].dtype)
        target = target_caches(self.spec, self.target_config, self.max_seq_len, dtype, self.config.int8_caches)
        return target + draft_caches(self.draft, self.max_seq_len, dtype)

    @property
    def cache_bytes(self) -> int:
        """The bytes of both models' KV caches, and of the states of the target's other layers."""
        import torch

        dtype = getattr(torch, BACKENDS[self.config.backend].dtype)
        return cache_bytes(self.caches) + state_bytes(self.spec, self.target_config, self.max_seq_len, dtype)

    @property
    def speculates(self) -> bool:
        """True if the artifact has the method ``speculate``, a greedy round in one call."""
        return any(method.name == SPECULATE for method in self.methods)

    @property
    def programs(self) -> tuple[MethodPlan, ...]:
        """The methods of the program. One of them may compute several of ``methods``."""
        return programs(self.methods, self.config.backend)

    @property
    def served_by(self) -> dict[str, str] | None:
        """Maps the methods that are not in the program to the one that computes them; None if all are."""
        names = {method.name for method in self.programs}
        missing = {method.name: TARGET_ROWS for method in self.methods if method.name not in names}
        return missing or None

    def method(self, name: str) -> MethodPlan:
        return next(method for method in self.methods if method.name == name)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.chosen_taps.layers

    @property
    def proposals(self) -> int:
        """The number of tokens that one forward of the draft proposes."""
        return self.draft.proposals(self.chain_len)

    @property
    def sliding_window(self) -> int:
        return sliding_window(self.target_config)

    @property
    def weight_bytes(self) -> int:
        """The bytes of both checkpoints' tensors, which make up most of an artifact."""
        headers = [*self.target_headers.values(), *self.draft.headers.values()]
        return sum(header.bytes for header in headers)

    @property
    def few_rows(self) -> int:
        """The most rows that the backend allows a method other than prefill."""
        return BACKENDS[self.config.backend].few_rows(max(self.verify_rows, self.draft.block_rows))

    @property
    def sessions(self) -> bool:
        """True if the artifact has the methods that read and write its state."""
        return BACKENDS[self.config.backend].sessions and self.config.sessions is not False

    @property
    def has_draft(self) -> bool:
        """True if there is a draft head: False for ``--draft none``."""
        return self.draft.kind != NO_HEAD


def make_plan(config: ExportConfig) -> Plan:
    """Read configurations and headers, decide every length, and check that target and draft are a pair.

    Raises FileNotFoundError or ValueError with a message of one line: the fact, both values, the flag to type.
    """
    spec = TARGETS[config.target_model]
    weights, checkpoint = target_paths(config, spec)
    target_config = read_target_config(checkpoint, config.target_model)
    spec = spec_for(config.target_model, target_config.model_type)
    target_source = open_source(weights)
    check_tokenizer(checkpoint)
    bos_id, eos_ids = special_ids(checkpoint, target_config)
    if isinstance(target_source, GGUFFile):
        check_metadata(target_source, target_config, checkpoint, eos_ids)
    target_headers, whole_config = target_source.headers(), target_config
    if isinstance(target_source, GGUFFile):
        target_config = copy(target_config)
        target_config.vocab_size = rows_of_embedding(target_source, target_headers, whole_config, checkpoint)
    max_seq_len = config.max_seq_len or min(spec.max_seq_len, target_config.max_position_embeddings)
    check_context(max_seq_len, target_config.max_position_embeddings)
    skeleton = spec.module().skeleton(target_config, max_seq_len)
    target_headers = check_target(target_source, target_headers, skeleton, target_config, checkpoint)
    has_draft = config.draft != Path(NO_HEAD)
    if has_draft and uses_own_layer(config):
        draft: DraftDescription = read_own_layer(target_source, target_config, checkpoint)
    elif has_draft:
        rope = RopeFlags(config.draft_rope_theta, config.draft_partial_rotary, config.publisher)
        draft = read_draft(draft_folder(config), config.draft_dialect, config.norm_before_residual, rope)
    else:
        draft = no_head(checkpoint, whole_config)
    if config.draft_window is not None:
        draft = windowed(draft, config.draft_window)
    taps = choose_taps(draft, target_config, config.aux_layers, config.aux_convention)
    if has_draft and config.read:
        draft, taps = with_readings(draft, taps, target_config, config.read)
    if has_draft:
        check_trained_for(draft, checkpoint)
        check_pair(draft, whole_config, taps.layers)
    draft = within_vocabulary(draft, target_config.vocab_size).in_program(BACKENDS[config.backend].shares_caches)
    chain_len = config.chain_len or min(draft.chain_len, LONGEST_CHAIN)
    if draft.longest_chain and chain_len > draft.longest_chain:
        raise ValueError(
            f"--chain-len {chain_len}: the draft, a {draft.kind}, can propose {draft.longest_chain} tokens a round: "
            f"type --chain-len {draft.longest_chain} or less"
        )
    target_bytes = sum(header.bytes for header in target_headers.values())
    qlinear = choose_recipe(config, target_headers)
    draft_qlinear = config.draft_qlinear or BACKENDS[config.backend].draft_recipe if has_draft else "none"
    if has_draft:
        # otherwise a draft step would read the target's lm_head, which has more bytes
        wider = qlinear == "none" and draft_qlinear != "none"
        draft = without_copies(draft, target_source, target_headers, skeleton, TABLES[:1] if wider else TABLES)
    verify_rows = config.verify_rows or (chain_len + 1 if has_draft else own_verify_rows(config, qlinear))
    fused, left_out = fused_rounds(config, draft, chain_len, target_bytes, verify_rows) if has_draft else (False, ())
    return Plan(
        config=config,
        spec=spec,
        checkpoint=checkpoint,
        target_source=target_source,
        target_config=target_config,
        target_headers=target_headers,
        draft=draft,
        chosen_taps=taps,
        chain_len=chain_len,
        verify_rows=verify_rows,
        max_seq_len=max_seq_len,
        methods=plan_methods(config, spec, target_config, chain_len, max_seq_len, draft, fused, verify_rows),
        qlinear=qlinear,
        draft_qlinear=draft_qlinear,
        bos_id=bos_id,
        eos_ids=eos_ids,
        warnings=(
            *draft.warnings,
            *(line for folder in dict.fromkeys((weights, draft.folder)) for line in unread_index(folder)),
            *target_source.notes(),
            *(template_note(target_source, checkpoint) if isinstance(target_source, GGUFFile) else ()),
            *_length_warnings(draft, max_seq_len),
            *_chain_notes(config, draft),
            *_recipe_notes(config, target_headers),
            *left_out,
            *([taps.doubt] if taps.doubt else []),
        ),
    )


def choose_recipe(config: ExportConfig, headers: dict[str, TensorHeader]) -> str:
    """Return ``Plan.qlinear``. Raises ValueError for a recipe if the backend keeps the checkpoint's own codes."""
    keeps_codes = BACKENDS[config.backend].quantizes
    if any(header.quantized for header in headers.values()):
        if keeps_codes and config.qlinear is not None:
            raise ValueError(f"the checkpoint is quantized already: leave --qlinear {config.qlinear} out")
        if config.qlinear in (None, "none"):
            return "checkpoint"
    return config.qlinear or ("default" if keeps_codes else "none")


def _recipe_notes(config: ExportConfig, headers: dict[str, TensorHeader]) -> Iterator[str]:
    """Propose a recipe if a large target would stay in float32 because none was chosen."""
    backend, elements = BACKENDS[config.backend], sum(header.elements for header in headers.values())
    quantized = any(header.quantized for header in headers.values())
    if config.qlinear is None and backend.small_recipe and not quantized and elements > LARGE:
        yield (
            f"the target keeps float32, {size_text(4 * elements)} of weights that each step reads: type --qlinear "
            f"{backend.small_recipe} for {size_text(elements)}, or --qlinear none to keep float32"
        )


def _chain_notes(config: ExportConfig, draft: DraftDescription) -> Iterator[str]:
    """Yield a note if the head proposes more tokens a round than fit into a verify window of 16 rows."""
    if config.chain_len is None and draft.chain_len > LONGEST_CHAIN:
        yield (
            f"the head's files suggest {draft.chain_len} draft tokens a round, but at most {LONGEST_CHAIN} are "
            f"supported: the chain length is {LONGEST_CHAIN}"
        )


def _length_warnings(draft: DraftDescription, max_seq_len: int) -> Iterator[str]:
    trained = getattr(draft.layer, "max_position_embeddings", max_seq_len)
    full = isinstance(draft, EagleDescription) and not any(draft.windows)
    within = bool(draft.windows) and all(0 < window <= trained for window in draft.windows)
    if trained < max_seq_len and not within:
        window = f": type --draft-window {trained} to let it attend to the last {trained} tokens only" if full else ""
        yield (
            f"the draft head was made for {trained} positions, the context has {max_seq_len}: past {trained} fewer "
            f"proposals may be accepted; the tokens stay those of greedy decoding{window}"
        )


def with_readings(
    draft: DraftDescription, taps: Taps, target: "PreTrainedConfig", given: Iterable[str]
) -> tuple[DraftDescription, Taps]:
    """Return the head and its taps with the readings ``given``, each FIELD=VALUE. Raises ValueError with one line for a
    field that the head's kind lacks, and for an invalid value."""
    fields = {field.name: field for field in KINDS[draft.kind].load().FIELDS}
    reading, typed = HeadReading(draft, taps.layers, target), []
    for text in given:
        name, _, value = text.partition("=")
        if name not in fields:
            raise ValueError(
                f"--read {text}: a head of the kind {draft.kind} has {', '.join(fields)}: type one of them "
                "with = and a value"
            )
        try:
            reading = fields[name].applied(reading, fields[name].parse(value))
        except ValueError as error:
            raise ValueError(f"--read {text}: {error}: type another value") from error
        typed.append(f"--read {text}")
    if reading.taps == taps.layers:
        return reading.draft, taps
    layers = target.num_hidden_layers
    if list(reading.taps) != sorted(set(reading.taps)) or any(not 0 <= tap <= layers for tap in reading.taps):
        raise ValueError(
            f"{' '.join(typed)}: the taps {','.join(map(str, reading.taps))} must ascend, be unique and lie within the "
            f"target's {layers} layers"
        )
    return reading.draft, Taps(reading.taps, " ".join(typed))
