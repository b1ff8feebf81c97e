"""Makes gemma4-tiny in the form of a CUDA artifact, but compiled by AOTInductor for the CPU, so that the PyTorch host
runs it without a GPU.

ExecuTorch's CUDA backend packs it: a library, a weight table, and one store of weights and caches for all methods. Its
steps for a GPU (moving weights, Triton kernels, compile options) are removed.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from eager import eager_speculator
from executorch.backends.cuda.cuda_backend import CudaBackend
from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.output.contents import copy_tokenizer
from eagle3.export.pipeline import make_manifest, make_metadata, trace
from eagle3.export.planning.plan import make_plan
from eagle3.runner.contract import MODEL_FILE

OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    "aot_inductor.link_libtorch": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.threads": 1,  # the model is too small for more
}


def write_host_artifact(folder: Path) -> None:
    """Write ``model.pte``, the ``.ptd`` and the tokenizer into a new ``folder``: float32, plain attention."""
    arch = None if torch.cuda.is_available() else "sm_90"
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch=arch))
    speculator = eager_speculator(plan)
    size = plan.draft.hidden_size
    programs = {method.name: trace(speculator, method, size, torch.float32) for method in plan.methods}
    metadata = make_metadata(plan, make_manifest(plan) | {"cuda_arch": None}, speculator.draft.ids_in_target())
    partitioners = {name: [CudaPartitioner([CudaBackend.generate_method_name_compile_spec(name)])] for name in programs}
    with _for_the_cpu():
        program = to_edge_transform_and_lower(
            programs,
            partitioner=partitioners,
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=metadata.constant_methods(),
        ).to_executorch()
    folder.mkdir()
    with (folder / MODEL_FILE).open("wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(folder))
    copy_tokenizer(plan.checkpoint, folder)


@contextlib.contextmanager
def _for_the_cpu() -> Iterator[None]:
    replaced = {
        "move_program_to_device": lambda cls, program, device, specs: program,
        "get_custom_passes": lambda cls, specs: [],
        "get_aoti_compile_options": lambda cls, specs: OPTIONS,
        "get_extra_aoti_compile_context_manager": lambda cls, specs: contextlib.nullcontext(),
        "collect_unsupported_fallback_kernels": lambda cls, missing: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(CudaBackend, name, classmethod(value)))
        yield


if __name__ == "__main__":
    write_host_artifact(Path(sys.argv[1]))
