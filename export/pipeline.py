"""Makes one artifact from its plan: loads, traces, lowers, writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints.finite import check_finite
from eagle3.export.checks.artifact import check_artifact, why_not
from eagle3.export.checks.fit.measure import fitted
from eagle3.export.checks.preflight import check_export_memory
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.draft.loading import load_draft
from eagle3.export.lowering.backend import load_backend
from eagle3.export.output.contents import copy_tokenizer, package_versions, sha256_by_name, write_files, write_record
from eagle3.export.output.folder import full_disk_named, whole_folder
from eagle3.export.output.progress import Progress
from eagle3.export.output.tokenizer import write_tokenizer
from eagle3.export.planning.methods import MethodPlan
from eagle3.export.planning.plan import Plan
from eagle3.export.report import draft_text, quantized_text
from eagle3.export.speculator.merged_linears import merge_linears
from eagle3.export.speculator.speculator import (
    Eagle3Speculator,
    SpeculatorMethod,
    check_storages,
    own_storages,
    trace_inputs,
)
from eagle3.export.speculator.state import StateBuffer, state_buffers, state_groups, trace_state
from eagle3.export.speculator.tensor_files import in_files, return_freed_memory
from eagle3.runner.contract import (
    FORWARD,
    LACKING,
    OUTSIDE,
    PREFILL,
    READ_STATE,
    WRITE_STATE,
    Metadata,
    format_version,
)
from eagle3.targets.attention import AttentionFactory, with_int8_caches
from eagle3.targets.loading import Convert, default_form
from eagle3.targets.spec import ROLLBACK_ROWS, is_recurrent


def run_export(plan: Plan, twin: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Make the artifact folder, and return the contents of ``export.json``. ``twin`` is the result of ``preflight``."""
    backend = load_backend(plan.config.backend)
    memory = check_export_memory(plan, backend)
    output = plan.config.folder
    progress.say(f"{draft_text(plan)}; it takes {plan.chosen_taps}" if plan.has_draft else draft_text(plan))
    with whole_folder(output, plan.config.overwrite) as folder, full_disk_named(output, plan.weight_bytes):
        with progress.stage("checksums"):
            manifest = make_manifest(plan) | {"twin": twin}
        if not plan.config.random_weights:
            with progress.stage("finite weights"):
                check_finite(plan.target_source, plan.target_headers.__contains__)
                check_finite(plan.draft.source, plan.draft.tensor_names.__contains__)
        plan, fit = fitted(plan, progress)
        manifest |= {"taps": list(plan.taps), "taps_are": str(plan.chosen_taps)}
        convert = backend.conversion(plan)
        if plan.quantized_headers:
            progress.say(quantized_text(plan))
        with progress.stage("load target and draft"):
            kept_in = folder if memory.in_files else None
            speculator = load_speculator(plan, backend.attention, backend.dtype, convert, kept_in)
            return_freed_memory()
        manifest |= convert.record()
        if "scales" in manifest:
            rounded = manifest["scales"]
            progress.say(f"scales are rounded by at most {rounded['largest_rounding']:.2%} (in {rounded['of']})")
        with progress.stage("prepare weights"):
            backend.prepare(speculator, plan)
            merge_linears(speculator, folder)
            manifest |= backend.pack(speculator, plan, folder)
            own_storages(speculator, folder)
            return_freed_memory()
        programs = {}
        for method in plan.programs:
            with progress.stage(f"trace {method.name}"), backend.tracing(speculator, plan):
                programs[method.name] = trace(speculator, method, plan.draft.feature_size, backend.dtype)
        manifest |= backend.describe(programs, plan)
        kept: list[StateBuffer] = []
        if plan.sessions:
            with progress.stage(f"trace {READ_STATE} and {WRITE_STATE}"):
                kept = state_buffers(programs, speculator)
                access = backend.state_access()
                assert access is not None, "BackendEntry.sessions says that there is one"
                programs[READ_STATE], programs[WRITE_STATE] = trace_state(speculator, kept, access)
        elif plan.config.sessions is None:
            progress.say(f"conversations with it cannot be kept: {plan.config.backend} has no {READ_STATE} yet")
        with progress.stage(f"lower to {plan.config.backend}"):
            metadata = make_metadata(plan, manifest, speculator.draft.ids_in_target(), kept)
            files, built = backend.lower(programs, metadata.constant_methods(), plan)
        for arch, lack in built.get(LACKING, {}).items():
            progress.say(f"the artifact does not run on {arch}, which has too little for a block: {lack}")
        for name, left in built.get(OUTSIDE, {}).items():
            progress.say(f"ExecuTorch's own kernels compute in {name}: {', '.join(left)}")
        with progress.stage("write"):
            digests = write_files(files, folder)
            copy_tokenizer(plan.checkpoint, folder)
            for line in write_tokenizer(plan.checkpoint, folder):
                progress.say(line)
        verdict = fit["verdict"] if fit else None
        checked = check(folder, plan, speculator, progress, verdict, mixed=OUTSIDE in built)
        record = {
            "flags": plan.config.as_json(),
            "manifest": manifest,
            "check": checked,
            "fit": fit,
            "stages": progress.stages,
            **sizes(speculator),
            **built,
        }
        return write_record(folder, record, digests)


def check(
    folder: Path,
    plan: Plan,
    speculator: Eagle3Speculator,
    progress: Progress,
    verdict: str | None,
    mixed: bool = False,
) -> dict[str, Any] | None:
    """Check the finished artifact if its backend runs here. ``verdict`` is that of the head's measurement, if there was
    one. ``mixed``: ExecuTorch's own kernels compute between delegates. Returns the entry of ``export.json``; None if it
    was not checked."""
    if not plan.config.check:
        return None
    backend = load_backend(plan.config.backend)
    extra = BACKENDS[plan.config.backend].check_extra
    advice = f"; pip install 'eagle3-export[{extra}]' lets any machine check them" if extra else ""
    cannot = f"this machine cannot run {plan.config.backend} artifacts{advice}"
    reason: str | None = "only the artifact's own runtime computes operations between delegates"
    if not mixed or backend.stand_in() is None:
        reason = why_not(folder) if backend.runs_here() else cannot
    if reason:
        progress.say(f"not checked: {reason}")
        return None
    with progress.stage("check"):
        outcome = check_artifact(folder, plan, speculator if backend.eager_on_host else None, verdict)
    for number, line in enumerate(outcome.warning):
        progress.say(f"Warning: {line}" if number == 0 else line)
    for line in outcome.gain:
        progress.say(line)
    return outcome.record


def load_speculator(
    plan: Plan,
    attention: AttentionFactory,
    dtype: torch.dtype,
    convert: Convert | None = None,
    folder: Path | None = None,
) -> Eagle3Speculator:
    """Load both models. ``attention`` makes the attention of both models; the target's tensors are converted as they
    are read. With a ``folder``, large converted tensors are kept in files on its disk."""
    if folder is not None:
        convert = in_files(convert or default_form, dtype, folder)
    with_caches = with_int8_caches(attention) if plan.config.int8_caches else attention
    target = plan.spec.module().load(
        plan.target_source.tensors(), plan.target_config, plan.max_seq_len, dtype, with_caches, convert
    )
    draft = load_draft(plan.draft, plan.max_seq_len, dtype, attention, target, plan.proposals)
    return Eagle3Speculator(target, draft, plan.taps, plan.config.logits, plan.verify_rows)


def trace(speculator: Eagle3Speculator, method: MethodPlan, feature_size: int, dtype: torch.dtype) -> ExportedProgram:
    """Trace a method for every length from ``min_len`` to ``max_len``. Raises ValueError for tensors that share a
    storage."""
    inputs = trace_inputs(method.name, method.traced_len, feature_size, dtype)
    dynamic = None
    if method.min_len < method.max_len:
        rows = Dim("rows", min=method.min_len, max=method.max_len)
        by_rank = {1: {0: rows}, 2: {1: rows}, 3: {1: rows}}
        dynamic = (tuple(by_rank[value.ndim] for value in inputs),)
    with torch.no_grad():
        program = torch.export.export(
            SpeculatorMethod(speculator, method.name), inputs, dynamic_shapes=dynamic, strict=False
        )
    check_storages(program)
    return program


def make_manifest(plan: Plan) -> dict[str, Any]:
    """Return the manifest, which describes how the artifact was made."""
    config = plan.config
    return {
        "format_version": format_version(
            plan.proposals,
            config.logits,
            config.with_forward,
            plan.speculates,
            plan.draft.has_cache,
            plan.has_draft,
            is_recurrent(plan.target_config),
            plan.sessions,
        ),
        "target": config.target_model,
        "model_type": plan.target_config.model_type,
        "target_sha256": sha256_by_name(plan.target_source.files()),
        "draft": draft_name(plan),
        "draft_verifier": plan.draft.verifier,
        "draft_kind": plan.draft.kind,
        "draft_dialect": plan.draft.dialect,
        "draft_sha256": sha256_by_name(plan.draft.source.files()),
        "taps": list(plan.taps),
        "taps_are": str(plan.chosen_taps),
        "qlinear": plan.qlinear,
        "draft_qlinear": plan.draft_qlinear,
        "kv_cache": plan.config.kv_cache,
        "backend": config.backend,
        "random_weights": config.random_weights,
        "packages": package_versions(),
        "repositories": {
            name: {"id": found.repository, "commit": found.revision} for name, found in config.repositories.items()
        },
    }


def draft_name(plan: Plan) -> str | None:
    """Return the head's repository, or the last two parts of its folder; None without a head."""
    if not plan.has_draft:
        return None
    named = plan.config.repositories.get("draft")
    return named.repository if named else "/".join(plan.draft.folder.resolve().parts[-2:])


def make_metadata(
    plan: Plan, manifest: dict[str, Any], draft_ids: Tensor | None = None, kept: Sequence[StateBuffer] = ()
) -> Metadata:
    """Make the artifact's metadata. ``draft_ids`` maps the draft's ids to the target's, if they differ. ``kept`` is the
    state that ``read_state`` returns; none if the artifact has no such method."""
    prefill = plan.method(PREFILL)
    return Metadata(
        max_seq_len=plan.max_seq_len,
        vocab_size=plan.target_config.vocab_size,
        n_layers=plan.target_config.num_hidden_layers,
        min_prefill=prefill.min_len,
        max_prefill=prefill.max_len,
        sliding_window=plan.sliding_window,
        chain_len=plan.chain_len,
        draft_vocab_size=plan.draft.draft_vocab_size,
        bos_id=plan.bos_id,
        eos_ids=plan.eos_ids,
        manifest=manifest,
        use_kv_cache=True,
        use_sdpa_with_kv_cache=False,
        enable_dynamic_shape=True,
        proposals=plan.proposals,
        draft_sliding_window=max(plan.draft.windows, default=0),
        has_draft=plan.has_draft,
        has_draft_cache=plan.draft.has_cache,
        verify_rows=None if plan.verify_rows == plan.chain_len + 1 else plan.verify_rows,
        rollback_rows=ROLLBACK_ROWS if is_recurrent(plan.target_config) else None,
        has_logits=plan.config.logits,
        served_by=plan.served_by,
        draft_ids=draft_ids if plan.config.logits else None,
        state=tuple(int(number) for group in state_groups(kept) for number in group) if kept else None,
        forward_len=plan.method(FORWARD).max_len if plan.config.with_forward else None,
    )


def sizes(speculator: Eagle3Speculator) -> dict[str, int]:
    """Return the number of parameters of both models, and the bytes that the draft adds: its weights and its KV
    cache."""
    shared = {id(p) for p in speculator.target.parameters()}
    own = [p for p in speculator.draft.parameters() if id(p) not in shared]
    caches = [b for name, b in speculator.draft.named_buffers() if "cache" in name]
    return {
        "target_parameters": sum(p.numel() for p in speculator.target.parameters()),
        "draft_parameters": sum(p.numel() for p in own),
        "draft_bytes": sum(stored_bytes(t) for t in own + caches),
    }


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes in memory; for a quantized tensor, those of its parts. Codes of 4 bits count half a byte,
    as in the file, although torchao holds each in a byte on the CPU."""
    if not isinstance(tensor, TorchAOBaseTensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    parts = sum(getattr(tensor, name).nbytes for name in names)
    in_halves = isinstance(tensor, IntxUnpackedToInt8Tensor) and tensor.target_dtype == torch.int4  # type: ignore[attr-defined]
    return parts - tensor.qdata.nbytes // 2 if in_halves else parts
