"""Lowers a module to CUDA by Inductor, and makes the kernels runnable by Triton's interpreter."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton.language as tl
from executorch.backends.cuda.cuda_backend import CudaBackend
from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch._inductor import config as inductor
from torch._inductor.codecache import CudaKernelParamCache
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._inductor.cpp_builder import CppBuilder, run_compile_cmd
from torch._inductor.virtualized import V
from triton.runtime.interpreter import InterpretedFunction

from eagle3.export.lowering.cuda.backend import OPTIONS
from eagle3.export.lowering.cuda.graph.shortcuts import analyzed_once, no_repro
from eagle3.export.lowering.cuda.inductor.fusion import fused_further
from eagle3.export.lowering.cuda.inductor.launches import recorded_launches
from eagle3.export.lowering.cuda.named_gpu import named_gpu
from eagle3.export.lowering.edge.replays import repeated_alone
from eagle3.export.lowering.gc_tuning import collected_rarely

EDGE = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
HEADER = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import math as tl_math

"""


@contextmanager
def short_cuts() -> Iterator[None]:
    """Lower without the work that an export saves too, and that changes nothing."""
    with collected_rarely(), analyzed_once(), no_repro(), repeated_alone(decompose_by_node=False):
        yield


@contextmanager
def only_checked() -> Iterator[None]:
    """Check the C++ that calls the kernels, but make no code of it, which takes two thirds of a compilation."""
    build = CppBuilder.build

    def check(self: CppBuilder) -> None:
        target, command = self.get_target_file_path(), self.get_command_line()
        if not target.endswith(".wrapper.o"):
            return build(self)
        checking = command.replace(" -c ", " -fsyntax-only ")
        assert checking != command
        run_compile_cmd(checking, cwd=self._output_dir)
        compiler = command.split()[0]
        return run_compile_cmd(f"{compiler} -x c++ -c /dev/null -o {target}", cwd=self._output_dir)

    with patch.object(CppBuilder, "build", check):
        yield


def lowered(module, given, rows: int = 0, longest: int = 0, arch: str = "sm_90", library: bool = False, **dynamic):
    """Lower a module. Return the kernels that it calls, in order and with their arguments, and a record of its inputs,
    outputs, buffers and launches. Dynamic sizes count as ``rows``, for the workspace as ``longest``. Without
    ``library`` the result cannot be loaded; with it, ``graph.library`` has its bytes and ``graph.edge`` the program."""
    program = torch.export.export(module, given, strict=False, **dynamic)
    specs = [CudaBackend.generate_method_name_compile_spec("forward"), CompileSpec("low_memory_mode", b"ON")]
    called, graph = [], SimpleNamespace()
    counts = ({"forward": rows}, {"forward": longest or rows}) if rows else ({}, {})

    def note(self, kernel_name, call_args, **kwargs):
        called.append((kernel_name, list(call_args)))
        call(self, kernel_name, call_args, **kwargs)

    def keep(self):
        finish(self)
        graph.sources = dict(self._kernel_name_to_body)
        graph.blocks = {name: CudaKernelParamCache.get(name)["config"] for name, _ in called}
        graph.inputs = {name: tuple(x.get_size()) for name, x in V.graph.graph_inputs.items()}
        graph.outputs = V.graph.get_output_names()
        graph.wrappers = self.prefix.getvalue()
        graph.buffers = {name: tuple(x.maybe_get_size() or ()) for name, x in V.graph.name_to_buffer.items()}

    with (
        short_cuts(),
        named_gpu(arch),
        inductor.patch(OPTIONS),
        fused_further(),
        nullcontext() if library else only_checked(),
        recorded_launches(*counts) as launches,
    ):
        call, finish = CppWrapperGpu._generate_kernel_call_helper, CppWrapperGpu.finalize_prefix
        with patch.multiple(CppWrapperGpu, _generate_kernel_call_helper=note, finalize_prefix=keep):
            graph.edge = to_edge_transform_and_lower(program, partitioner=[CudaPartitioner(specs)], compile_config=EDGE)
    (graph.recorded,) = launches.values()
    graph.launches = graph.recorded["launches"]
    graph.grids = {entry["kernel"]: entry["grid"] for entry in graph.launches}
    if library:
        stored = (each if isinstance(each, bytes) else each.to_bytes() for each in graph.edge._named_data_store.buffers)
        (graph.library,) = (each for each in stored if each.startswith(b"\x7fELF"))
    return called, graph


def function(name, source, folder):
    """Return a kernel from generated code, without the decorators that would compile it."""
    path = folder / f"{name}.py"
    path.write_text(HEADER + source[source.index(f"def {name}(") :].split("'''")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.libdevice = tl.math
    return InterpretedFunction(getattr(module, name))
