"""The register of patches: every part of another package that an export replaces while it runs, with the reason.

A patch has the name of the attribute that it replaces, as ``package.module.attribute``. ``replaced`` and ``with_items``
apply a patch within a context. They refuse a name that is not registered here, or that the installed package does not
have. Patches hold only for the versions that they were tested with (``tested_versions.py``).
"""

import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from eagle3.export.patching.tested_versions import TESTED


@dataclass(frozen=True)
class Patch:
    """A patch's reason. ``optional`` is True if some builds of the package lack the attribute. ``thread`` is the
    address of upstream's discussion, if there is one."""

    why: str
    optional: bool = False
    thread: str = ""


def _group(why: str, *names: str, prefix: str = "", optional: bool = False, thread: str = "") -> dict[str, Patch]:
    return {f"{prefix}{name}": Patch(why, optional, thread) for name in names}


_GPU = "it would query a GPU that this machine lacks: it returns the properties of the GPU in --cuda-arch"
_WEIGHTS = "weights stay on the host, and fake CUDA tensors stand for them"
PATCHES: dict[str, Patch] = {
    # --- Any backend
    **_group(
        "a pass that changes no node returns the graph as it is, and repeated nodes keep their shapes",
        "executorch.exir.pass_base._ExportPassBase.call",
        *(
            f"{base}.{name}"
            for base in (
                "executorch.exir.pass_base._ExportPassBase",
                "torch._export.pass_base._ExportPassBaseDeprecatedDoNotUse",
            )
            for name in ("_fx", "ExportInterpreter.run_node")
        ),
    ),
    **_group(
        "a program for the CPU is decomposed once, and only the nodes that decompositions change are traced; for CUDA "
        "the operator that each node came from is recorded",
        "torch.export.ExportedProgram.run_decompositions",
    ),
    **_group(
        "PyTorch's dispatcher is queried once for the operators that a decomposition may keep, not for each namespace",
        "torch._export.utils._materialize_cpp_cia_ops",
        "torch.export.exported_program._collect_all_valid_cia_ops",
        "torch.export.decomp_utils._collect_all_valid_cia_ops",
    ),
    # --- The twin check
    **_group(
        "it rejects a model in which no layer keeps keys; replaced in each family's own configuration",
        "transformers.models.gemma4.configuration_gemma4.Gemma4TextConfig.kv_sharing_modes",
    ),
    # --- Apple silicon
    **_group(
        "a scalar's name includes its dtype: otherwise a bfloat16 0 would also bound indices, which it makes floats",
        "executorch.backends.mlx.builder.program_builder.MLXProgramBuilder.make_or_get_constant",
    ),
    # --- The CPU
    **_group(
        "it copies the whole graph and compiles it to Python for each delegate, only to sort it: the graph is sorted "
        "in place",
        "executorch.exir.lowered_backend_module.legalize_graph",
    ),
    **_group(
        "passes for convolutions, batch norms and padding, which cannot change a program of linear layers, are left "
        "out",
        "executorch.backends.xnnpack.xnnpack_preprocess.XNNPACKPassManager",
    ),
    **_group(
        "the bytes of a weight are stored once for all delegates and methods",
        "executorch.backends.xnnpack.xnnpack_preprocess.NamedDataStore",
    ),
    **_group(
        "a delegate's program is copied without its weights, which no pass changes",
        "executorch.backends.xnnpack.xnnpack_preprocess.XnnpackBackend.copy_exported_program_for_preprocess",
    ),
    **_group(
        "operations over the used slots of a cache, whose number is the value of an input, are delegated to XNNPACK as "
        "well",
        "executorch.backends.xnnpack.partition.config.xnnpack_config.has_free_unbacked_symbols",
    ),
    **_group(
        "a weight's name includes the hash of its scales: otherwise weights with equal codes and different scales "
        "would be stored as one",
        "executorch.backends.xnnpack.operators.node_visitor.NodeVisitor.get_serialized_buffer_index",
    ),
    **_group(
        "a rotation is a product with a permutation, one node instead of four; replaced in each family's own module",
        "transformers.models.llama.modeling_llama.rotate_half",
    ),
    **_group(
        "queries and keys are rotated in the layout of their projections; replaced in each family's own module",
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
    ),
    **_group(
        "the search for scales leaves out groups that have converged; codes and scales stay the same",
        "torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor."
        "_choose_qparams_and_quantize_scale_only_hqq",
    ),
    **_group(
        "a program is decomposed once, whatever operators it holds",
        "executorch.exir.program._program.contains_any_call_fn_target_op",
    ),
    **_group(
        "a graph is compiled to Python on its first call, since hardly any graph is called",
        "torch.fx.GraphModule.recompile",
    ),
    **_group(
        "the Python stack of each traced node is not collected, since no artifact holds it",
        "torch.fx.config.do_not_emit_stack_traces",
    ),
    # --- CUDA, with a GPU and without
    **_group(
        "linears and embeddings with quantized weights are dispatched to the kernels of this package",
        "torchao.quantization.IntxUnpackedToInt8Tensor._TORCH_FN_TABLE",
        "torchao.quantization.IntxUnpackedToInt8Tensor._ATEN_OP_TABLE",
    ),
    **_group(
        "a Triton kernel is analyzed once for all calls of the same form, its counters count as read only, and "
        "prefetches into L2 are left out of what is analyzed",
        "identify_accessed_tensors",
        "identify_mutated_tensors",  # its name in torch 2.11
        prefix="torch._higher_order_ops.triton_kernel_wrap.",
        optional=True,
    ),
    **_group(
        "a program that reproduces the compilation is not written, since its log is not kept",
        "torch._dynamo.repro.after_aot.save_graph_repro",
    ),
    **_group(
        "sines and cosines of positions are computed once per forward",
        "torch._inductor.lowering.lowerings",
    ),
    **_group(
        "independent small kernels are launched together",
        "torch._inductor.codegen.triton_combo_kernel._custom_combo_kernel_horizontal_partition_algorithm",
        "torch._inductor.scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels",
    ),
    **_group(
        "a loop of a kernel may load values that other threads stored in an earlier loop: a barrier is added between "
        "the two",
        "torch._inductor.codegen.triton.TritonKernel.codegen_body",
    ),
    **_group(
        "the argmax of a vocabulary is divided among blocks",
        "torch._inductor.decomposition.decompositions",
    ),
    **_group(
        "the C++ that all methods have in common is compiled once",
        "torch._inductor.cpp_builder.CppBuilder.build",
    ),
    **_group(
        "libraries are compiled for other hosts as well (``--host-arch``)",
        "torch._inductor.codecache.batch_convert_cubins_to_obj",
        "executorch.backends.cuda.cuda_backend.CudaBackend.codesign_so",
    ),
    **_group(
        "the launches of each method are recorded for the cost model",
        "executorch.backends.cuda.cuda_backend.CudaBackend.get_extra_aoti_compile_context_manager",
        "torch._inductor.codegen.cpp_wrapper_gpu.CppWrapperGpu._generate_kernel_call_helper",
        "torch._inductor.codegen.cpp_wrapper_gpu.CppWrapperGpu.finalize_prefix",
    ),
    **_group(
        "a kernel may start before the one in front of it has ended (``--int4-layout records``), and waits for its end",
        "torch._inductor.codegen.cpp_wrapper_gpu.CppWrapperGpu._define_kernel_helper",
        "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides.kernel_driver",
        thread="pytorch/pytorch#188886",
    ),
    **_group(
        "weight tables name a library for each GPU (``--weight-table fqn0``)",
        "executorch.backends.cuda.cuda_weight_collector.encode_cuda_weight_metadata",
        thread="pytorch/executorch#22198",
    ),
    # --- CUDA without a GPU
    **_group(
        "methods are compiled in two processes",
        "executorch.backends.cuda.cuda_backend.CudaBackend.preprocess_multimethod",
    ),
    **_group(
        _GPU,
        "version.cuda",
        "accelerator.is_available",
        "_C._cuda_getCurrentRawStream",
        prefix="torch.",
        optional=True,  # CPU builds of PyTorch lack some of them
    ),
    **_group(
        _GPU,
        "_is_compiled",
        "is_available",
        "device_count",
        "current_device",
        "_exchange_device",
        "_maybe_exchange_device",
        "get_device_properties",
        "get_device_capability",
        "get_rng_state",
        "set_rng_state",
        prefix="torch.cuda.",
    ),
    **_group(
        _GPU,
        "get_device_properties",
        "Worker.get_device_properties",
        prefix="torch._dynamo.device_interface.CudaInterface.",
    ),
    **_group(
        "code is compiled for architectures without the suffix a, so that its PTX runs on later ones",
        "sm_arch_from_capability",
        "CUDABackend.make_ttgir",
        "CUDABackend.make_llir",
        prefix="triton.backends.nvidia.compiler.",
    ),
    **_group(
        "code is compiled for architectures without the suffix a",
        "torch._inductor.codegen.cuda.compile_utils._nvcc_arch_as_compile_option",
    ),
    **_group("nothing is loaded or launched", "torch._inductor.runtime.triton_helpers.set_driver_to_gpu"),
    **_group("a matmul's fatbin for sm_90 gets code for sm_90a as well", "torch._inductor.codecache.subprocess"),
    **_group(
        "each image of a kernel is launched with its own warps and shared memory",
        "generate_load_kernel",
        "generate_launch_kernel",
        prefix="torch._inductor.codegen.cpp_wrapper_gpu.DeferredTritonCallWrapper.",
    ),
    **_group(
        "a configuration's limit of registers is kept, without which fewer programs fit on a multiprocessor",
        "CachingAutotuner._create_compile_options",
        "config_to_dict",
        prefix="torch._inductor.runtime.triton_heuristics.",
    ),
    **_group(
        "a kernel is compiled with one configuration, and nothing is loaded or launched",
        "get_caching_autotuner_plugins",
        prefix="torch._inductor.runtime.triton_heuristics.",
    ),
    **_group(
        "kernels cannot be timed without a GPU: templates are ranked by an estimate",
        "codegen.wrapper.PythonWrapperCodegen.generate_and_run_autotune_block",
        "select_algorithm.AlgorithmSelectorCache.do_autotuning",
        "template_heuristics.triton.BaseConfigHeuristic.get_mm_configs",
        "fx_passes.joint_graph.lazy_init",
        prefix="torch._inductor.",
    ),
    **_group(
        _WEIGHTS,
        "graph.is_same_tensor",
        "graph.GraphLowering.get_original_value_of_constant",
        "graph.GraphLowering.get_attr",
        "compile_fx.clone_preserve_strides",
        "codecache.determine_aoti_mmap_flags",
        prefix="torch._inductor.",
    ),
    **_group(
        "constants are recorded as GPU tensors, although their data is on the host",
        "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_device",
    ),
    **_group(_WEIGHTS, "torch._subclasses.fake_tensor.FakeTensor.tolist"),
    **_group(
        _WEIGHTS,
        "cuda_backend.CudaBackend.move_program_to_device",
        "cuda_backend.CudaBackend.release_moved_tensors",
        "cuda_backend._compile_time_cpu_clones",
        "cuda_weight_collector.CudaWeightCollector.materialize",
        prefix="executorch.backends.cuda.",
    ),
    **_group(
        "a weight of several methods is recognized by identity, without hashing it",
        "executorch.backends.cuda.cuda_weight_collector.CudaWeightCollector._add_weight",
    ),
    **_group(
        "indexing and copying of a CUDA tensor switch to its device, which fails in a CPU build, even for a fake "
        "tensor",
        "__getitem__",
        "__setitem__",
        "__invert__",
        "copy_",
        prefix="torch.Tensor.",
    ),
}

_used: dict[str, Patch] = {}
_MISSING = object()


def used() -> dict[str, Patch]:
    """Return the patches that this process has applied so far, by name."""
    return dict(_used)


@contextmanager
def replaced(name: str, value: object, owner: ModuleType | type | None = None) -> Iterator[None]:
    """Replace the attribute that patch ``name`` names by ``value`` while the context lasts.

    Args:
        owner: the module or class with the attribute, where there are several: each family of transformers has its own

    Raises:
        KeyError: ``name`` is not in the register
        ValueError: the installed package has no such attribute
    """
    patch = PATCHES[name]
    attribute = name.rpartition(".")[2]
    if owner is None:
        owner = _owner(name)
    if not patch.optional and not hasattr(owner, attribute):
        raise _gone(name)
    _used[name] = patch
    before = vars(owner).get(attribute, _MISSING)  # the stored object, so that a static method stays one
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


@contextmanager
def all_replaced(values: Mapping[str, Any]) -> Iterator[None]:
    """Apply ``replaced`` for several patches; ``values`` maps names to values."""
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(replaced(name, value))
        yield


@contextmanager
def with_items(name: str, items: Mapping[Any, Any], table: dict[Any, Any] | None = None) -> Iterator[None]:
    """Put ``items`` into the dictionary that patch ``name`` names while the context lasts.

    ``table`` is the dictionary itself, for a name that stands for several dictionaries. Raises the errors of
    ``replaced``.
    """
    patch = PATCHES[name]
    if table is None:
        table = original(name)
    _used[name] = patch
    before = {key: table.get(key, _MISSING) for key in items}
    table.update(items)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is _MISSING:
                del table[key]
            else:
                table[key] = value


def original(name: str) -> Any:  # noqa: ANN401 - a function, a class or a table
    """Return the attribute that patch ``name`` replaces. Raises the errors of ``replaced``."""
    assert name in PATCHES, name
    try:
        return getattr(_owner(name), name.rpartition(".")[2])
    except AttributeError:
        raise _gone(name) from None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the context lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _owner(name: str) -> ModuleType | type:
    """Return the module or class that has the attribute ``name``."""
    parts = name.split(".")[:-1]
    for length in range(len(parts), 0, -1):
        try:
            owner: ModuleType | type = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[length:]:
                owner = getattr(owner, part)
        except AttributeError:
            break
        return owner
    raise _gone(name)


def _gone(name: str) -> ValueError:
    package = name.split(".")[0]
    found = importlib.metadata.version(package)
    return ValueError(
        f"{package} {found} has no {name}, which an export replaces ({PATCHES[name].why}): "
        f"type pip install '{package}=={TESTED[package][-1]}.*'"
    )
