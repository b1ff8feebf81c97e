"""Lowers to CUDA: AOTInductor compiles each whole method, by ExecuTorch's CUDA backend, in bfloat16.

With a GPU in this machine, kernels are timed on it; without one, the user names an architecture (``named_gpu``). The
methods share weights and caches by qualified name. Both go into a file of their own.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import executorch.backends.cuda.triton.kernels  # noqa: F401  (registers torch.ops.triton)
import torch
from executorch.backends.cuda.cuda_backend import CudaBackend
from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.passes import MemoryPlanningPass
from torch import Tensor
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from eagle3.export.configuration.config import CUDA_RECIPES, WEIGHT_TABLES
from eagle3.export.draft.loading import unfilled
from eagle3.export.lowering.backend import Backend, files_of
from eagle3.export.lowering.cuda.gpu_memory import gpu_memory, suggest_flags
from eagle3.export.lowering.cuda.graph.check import check_linears
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.lowering.cuda.graph.gates import gate_in_products
from eagle3.export.lowering.cuda.graph.prefetches import prefetch_weights
from eagle3.export.lowering.cuda.graph.recurrent import use_cuda_recurrence
from eagle3.export.lowering.cuda.graph.rotations import CudaAttention, rotate_in_attention
from eagle3.export.lowering.cuda.graph.shortcuts import (
    analyzed_once,
    counters_unchanged,
    no_repro,
    prefetches_unseen,
)
from eagle3.export.lowering.cuda.inductor.early_launches import can_start_early, early_launches
from eagle3.export.lowering.cuda.inductor.fusion import (
    argmax_over_blocks,
    barriers_between_loops,
    fused_further,
    rows_in_registers,
)
from eagle3.export.lowering.cuda.inductor.hosts import ANY_PROCESSOR, compiled_for
from eagle3.export.lowering.cuda.inductor.interface import interface_once
from eagle3.export.lowering.cuda.inductor.launches import recorded_launches
from eagle3.export.lowering.cuda.inductor.registers import registers_kept
from eagle3.export.lowering.cuda.kernels.int4.layouts import layout_of
from eagle3.export.lowering.cuda.kernels.local_gpu import local_arch
from eagle3.export.lowering.cuda.kernels.sums import made_for_here, made_for_named
from eagle3.export.lowering.cuda.named_gpu import check_named_versions, in_two_processes, named_gpu
from eagle3.export.lowering.cuda.weight_table import tables_by_gpu
from eagle3.export.lowering.cuda.weights.conversion import CudaWeights
from eagle3.export.lowering.cuda.weights.experts import use_fused_experts
from eagle3.export.lowering.cuda.weights.quantization import (
    check_quantized_headers,
    check_recipe,
    fitted_recipe,
    lay_out,
    quantize,
)
from eagle3.export.lowering.edge.replays import repeated_alone
from eagle3.export.lowering.gc_tuning import collected_rarely
from eagle3.export.patching.tested_versions import FOR_CUDA, TESTED_WITH_GPU, check_versions
from eagle3.export.patching.toolchain import cpp_compiler, cross_compiler, cuda_home, nvcc_version, toolchain
from eagle3.export.planning.memory import GpuMemory
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.export.speculator.state import RowAccess, write_rows
from eagle3.runner.contract import (
    DRAFT_DECODE,
    FORWARD,
    HOST_MODEL_FILE,
    LACKING,
    LAUNCHES,
    MODEL_FILE,
    PREFILL,
    READ_STATE,
    WRITE_STATE,
)
from eagle3.runner.system import gpus
from eagle3.runner.system.gpus import BY_ARCH, archs_of, lacking_on_later
from eagle3.runner.system.machine import version_of
from eagle3.targets.attention import AttentionFactory

if TYPE_CHECKING:
    from eagle3.export.output.contents import Writable

OPTIONS = {
    "coordinate_descent_tuning": False,
    "epilogue_fusion_user_defined_triton_kernel": False,  # our kernels are launched exactly as they are written
    # as in ExecuTorch's export, since the time of a call is spent in the kernels
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.enable_line_tables": False,  # a quarter of a library, with paths of this machine
    **ANY_PROCESSOR,
}


def named_arch(plan: Plan) -> str:
    """Return the value of ``--cuda-arch``; it is required without a GPU, except in a dry run."""
    assert plan.config.cuda_arch is not None
    return plan.config.cuda_arch


def served_archs(plan: Plan) -> str:
    """Return the architecture of this machine's GPU, or without one the value of ``--cuda-arch``."""
    return local_arch() or named_arch(plan)


def starts_early(plan: Plan) -> bool:
    """Return True if kernels begin before those in front of them have ended."""
    return layout_of(plan.config.int4_layout).early and can_start_early(served_archs(plan))


def hosts_of(plan: Plan) -> list[str]:
    """Return the processors that libraries are compiled for: those of ``--host-arch``, or this machine's."""
    return (plan.config.host_arch or platform.machine()).split(",")


def others_of(hosts: Sequence[str]) -> list[str]:
    """Return those of ``hosts`` that this machine is not."""
    return [host for host in hosts if host != platform.machine()]


class NvidiaBackend:
    """See ``eagle3.export.lowering.backend.Backend``."""

    dtype = torch.bfloat16
    attention: AttentionFactory = CudaAttention
    eager_on_host = False  # attention is a Triton kernel; scripts/gpu/gpu_run.py compares tokens on the GPU

    def check(self, plan: Plan) -> None:
        """Raise ValueError or FileNotFoundError, with what to type, if this machine cannot lower the plan."""
        arch, local = plan.config.cuda_arch, local_arch()
        if local is None:
            check_named_versions()
        elif arch not in (None, local):
            raise ValueError(
                f"--cuda-arch {arch}, but the GPU at hand is {local} and kernels are tuned on it: leave the flag out, "
                "or set CUDA_VISIBLE_DEVICES= to lower without the GPU"
            )
        else:
            check_versions(FOR_CUDA, TESTED_WITH_GPU, "lowering for CUDA", "")
        cuda_home()
        cpp_compiler()
        for host in others_of(hosts_of(plan)):
            cross_compiler(host)
        skeleton = plan.skeleton
        if plan.qlinear == "checkpoint":
            check_quantized_headers(plan.target_headers, skeleton)
        layout = plan.config.int4_layout
        if layout_of(layout).pack and not has_int4(plan):
            raise ValueError(f"--int4-layout {layout} is for INT4 weights, and this export has none: leave it out")
        if plan.qlinear in CUDA_RECIPES[1:]:
            check_recipe("--qlinear", plan.qlinear, skeleton.model, plan.target_config)
        if plan.draft_qlinear in CUDA_RECIPES[1:]:
            check_recipe("--draft-qlinear", plan.draft_qlinear, unfilled(plan.draft), plan.draft.layer)

    def memory(self, plan: Plan) -> tuple[int, str]:
        if local_arch():
            return torch.cuda.mem_get_info()[1], torch.cuda.get_device_name()
        if plan.config.cuda_arch is None:  # this is a dry run, since an export needs an architecture
            gpu = max(gpus.BY_ARCH.values(), key=lambda gpu: gpu.memory)
            return gpu.memory, f"the largest GPU that is known, {gpu.name},"
        gpu = max((BY_ARCH[arch] for arch in archs_of(named_arch(plan))), key=lambda gpu: gpu.memory)
        return gpu.memory, gpu.name

    def footprint(self, plan: Plan) -> GpuMemory:
        return gpu_memory(plan)

    def suggest_flags(self, plan: Plan, has: int) -> str | None:
        return suggest_flags(plan, has)

    def export_seconds(self, _plan: Plan) -> None:
        return None

    def export_bytes(self, _plan: Plan) -> None:
        return None

    def artifact_bytes(self, _plan: Plan) -> None:
        return None

    def held_bytes(self, plan: Plan) -> int:
        makes = plan.qlinear in CUDA_RECIPES[1:] or layout_of(plan.config.int4_layout).pack is not None
        return self.footprint(plan).target if makes else 0

    def conversion(self, plan: Plan) -> CudaWeights:
        """Return the conversion that quantizes the target's weights as they are read, on the host, and puts them into
        their kernels' layouts."""
        target = plan.skeleton.model
        recipe = fitted_recipe(plan.qlinear, plan.target_config, target) if plan.qlinear in CUDA_RECIPES[1:] else None
        return CudaWeights(target, recipe, self.dtype)

    def prepare(self, speculator: Eagle3Speculator, plan: Plan) -> None:
        """Fuse experts, and choose the kernels of recurrent layers. Quantize the draft head as the plan says, and put
        its weights into their kernels' layouts."""
        use_fused_experts(speculator.get_submodule("target"))
        use_cuda_recurrence(speculator.get_submodule("target"))
        if plan.draft_qlinear in CUDA_RECIPES[1:]:
            recipe = fitted_recipe(plan.draft_qlinear, plan.draft.layer, speculator.draft)
            quantize(speculator.draft, recipe, spare=speculator.target.parameters())
            use_fused_experts(speculator.draft)
            lay_out(speculator.draft, spare=speculator.target.parameters())

    def pack(self, speculator: Eagle3Speculator, plan: Plan, folder: Path) -> dict[str, Any]:
        """Pack INT4 weights into their layout, if they are not loaded in it."""
        pack = layout_of(plan.config.int4_layout).pack
        return {"int4_weights": pack(speculator, folder)} if pack else {}

    @contextmanager
    def tracing(self, _speculator: Eagle3Speculator, plan: Plan) -> Iterator[None]:
        with small_m_dispatch(plan.few_rows), collected_rarely():
            yield

    def state_access(self) -> RowAccess:
        return RowAccess(read_by_index, write_by_index)

    def exact_activations(self, _speculator: Eagle3Speculator) -> AbstractContextManager[object]:
        return nullcontext()

    def runs_here(self) -> bool:
        return local_arch() is not None

    def stand_in(self) -> None:
        return None

    def describe(self, programs: Mapping[str, ExportedProgram], plan: Plan) -> dict[str, Any]:
        """Return the architecture, how kernels were chosen, and the count of the quantized linears of each method by
        kernel."""
        local, named = local_arch(), plan.config.cuda_arch
        return {
            "cuda_arch": local or (named and ",".join(archs_of(named))),
            "host_arch": ",".join(hosts_of(plan)),
            "launches": "early" if starts_early(plan) else "in-order",
            "kernels": f"autotuned on {torch.cuda.get_device_name()}" if local else "chosen by estimate",
            "linears": {name: check_linears(name, program) for name, program in programs.items()},
            "toolchain": {"triton": version_of("triton"), "nvcc": nvcc_version()},
        }

    def lower(
        self, programs: Mapping[str, ExportedProgram], constant_methods: Mapping[str, Any], plan: Plan
    ) -> "tuple[dict[str, Writable], dict[str, Any]]":
        """Return a program for each host, in which each method is one delegate. Weights and caches are its tensor data,
        by name.

        The second value describes the launches of each method: ``draft_decode`` and ``forward`` with one row, the
        others with their most rows. It also names the later architectures on which a launch lacks resources. Code that
        was compiled on a GPU is for that GPU only.
        """
        partitioners = {
            name: [
                CudaPartitioner(
                    [CudaBackend.generate_method_name_compile_spec(name), CompileSpec("low_memory_mode", b"ON")]
                )
            ]
            for name in programs
        }
        for name, program in programs.items():
            gate_in_products(program)
            rotate_in_attention(program)
            if starts_early(plan) and name != PREFILL:
                prefetch_weights(program)
        lengths = {name: ranges(program) for name, program in programs.items()}
        rows = {method.name: 1 if method.name in (DRAFT_DECODE, FORWARD) else method.max_len for method in plan.methods}
        longest = {method.name: method.max_len for method in plan.methods}

        def check_lengths(name: str) -> None:
            if ranges(programs[name]) != lengths[name]:
                raise ValueError(
                    f"{name} was compiled for {ranges(programs[name])} of its lengths {lengths[name]} alone"
                )

        named, hosts = local_arch() is None, hosts_of(plan)
        with (
            as_planned(plan),
            recorded_launches(rows, longest) as launches,
            TemporaryDirectory() as folder,
            compiled_for(others_of(hosts), Path(folder)) as libraries,
            in_two_processes(launches, check_lengths) if named else nullcontext(),
        ):
            lowered = to_edge_transform_and_lower(
                dict(programs),
                partitioner=partitioners,
                compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
                constant_methods=dict(constant_methods),
            )
            for name in programs:
                check_lengths(name)
            program = lowered.to_executorch(
                ExecutorchBackendConfig(
                    memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False), emit_mutable_buffer_names=True
                )
            )
            files = files_of(program)
            own = files.pop(MODEL_FILE)
            for host in hosts:
                name = MODEL_FILE if host == hosts[0] else HOST_MODEL_FILE.format(host)
                files[name] = own if host == platform.machine() else libraries.program(program, host)
        launched = {name: method["launches"] for name, method in launches.items()}
        lacking = lacking_on_later(named_arch(plan), launched) if named else {}
        return files, {LAUNCHES: launches, LACKING: lacking}


BACKEND: Backend = NvidiaBackend()


@contextmanager
def as_planned(plan: Plan) -> Iterator[None]:
    """Make ExecuTorch's CUDA backend and Inductor lower as the plan says."""
    named = local_arch() is None
    with (
        named_gpu(named_arch(plan)) if named else toolchain(),
        nullcontext() if named else registers_kept(),
        inductor.patch(OPTIONS),
        fused_further(apart=(READ_STATE, WRITE_STATE)),
        interface_once(),
        barriers_between_loops(),
        rows_in_registers(),
        early_launches() if starts_early(plan) else nullcontext(),
        counters_unchanged(),
        prefetches_unseen(),
        analyzed_once(),
        no_repro(),
        collected_rarely(),
        repeated_alone(decompose_by_node=False),
        argmax_over_blocks(),
        made_for_named(named_arch(plan)) if named else made_for_here(),
        tables_by_gpu(archs_of(served_archs(plan)), named)
        if plan.config.weight_table == WEIGHT_TABLES[1]
        else nullcontext(),
    ):
        yield


def has_int4(plan: Plan) -> bool:
    """Return True if a recipe makes INT4 weights, or the checkpoint has some."""
    recipes = {plan.qlinear, plan.draft_qlinear} & {*CUDA_RECIPES[1:]}
    return bool(recipes) or any("Int4" in header.dtype for header in plan.target_headers.values())


def read_by_index(buffer: Tensor, axis: int | None, rows: Tensor) -> Tensor:
    """Do the same as ``read_rows``. ``index_select`` is not lowered without a GPU: it asks for the tensor's device. A
    clone is removed from the graph, which would then return the buffer itself."""
    if axis is None:
        return buffer[None][rows].squeeze(0)
    return buffer[(slice(None),) * axis + (rows,)]


def write_by_index(buffer: Tensor, axis: int | None, rows: Tensor, value: Tensor) -> None:
    """Do the same as ``write_rows``. A graph in which an input is a buffer's new value, as after ``copy_``, is refused
    by ExecuTorch."""
    if axis is None:
        buffer[None].index_copy_(0, rows, value[None])
    else:
        write_rows(buffer, axis, rows, value)


def ranges(program: ExportedProgram) -> dict[str, str]:
    """Return the range of each dynamic dimension of a program, as the compiler sees it. A compiler that narrows a range
    has made code that is valid for those lengths only."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    shapes = next(value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor))
    assert shapes is not None  # a traced program has one
    return {str(symbol): str(span) for symbol, span in shapes.var_to_range.items()} | {
        str(symbol): str(value) for symbol, value in shapes.replacements.items()
    }
