"""Exports gemma4-tiny, or the model that the flags name, to CUDA by running ``eagle3-export``. The Triton source of
each compiled kernel is kept in a folder beside the artifact, for ``interpreted_artifact.py``.

    python tests/gpu_stand_in/cuda_artifact.py FOLDER [FLAGS OF eagle3-export]
"""

import ast
import hashlib
import pickle
import re
import sys
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.codecache import CudaKernelParamCache
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from eagle3.export.cli import main
from eagle3.export.lowering.cuda.inductor.card_launches import CARDS
from eagle3.export.lowering.cuda.named_gpu.second_image import OwnImage, SecondImages

ARCHS = ("sm_80", "sm_90", "sm_120")
"""The architectures of the artifact where there is no GPU: one with early launches and ``wgmma``, one without either,
and one that allows a block less shared memory."""
DEFAULT = ("--target-model", "gemma4-tiny", *(() if torch.cuda.is_available() else ("--cuda-arch", ",".join(ARCHS))))


def sources_of(artifact: Path) -> Path:
    return artifact.with_name(f"{artifact.name}.kernels")


def export(folder: Path, flags: tuple[str, ...] = DEFAULT) -> None:
    """Export, and keep beside the artifact each kernel's source, and the PTX of each second image, which has none in
    its fatbin."""
    sources, finish, compiled = sources_of(folder), CppWrapperGpu.finalize_prefix, SecondImages._by_triton
    sources.mkdir(parents=True)

    def keep(self: CppWrapperGpu) -> None:
        finish(self)  # now every kernel is compiled
        for name, body in self._kernel_name_to_body.items():
            if known := CudaKernelParamCache.get(name):
                keep_source(sources, known, body)

    def keep_ptx(self: SecondImages, autotuner: CachingAutotuner, *given: Any) -> OwnImage | None:
        image = compiled(self, autotuner, *given)
        if image is not None:
            cubins = (Path(cache_dir()) / "triton-own").glob(f"*/{autotuner.fn.__name__}.cubin")
            ptx = next(cubin.with_suffix(".ptx") for cubin in cubins if cubin.read_bytes() == image.cubin)
            (sources / f"{uuid.uuid4()}.ptx").write_bytes(ptx.read_bytes())
        return image

    with patch.object(CppWrapperGpu, "finalize_prefix", keep), patch.object(SecondImages, "_by_triton", keep_ptx):
        try:
            main([*flags, "--output-dir", str(folder)])
        except SystemExit as end:
            if end.code:
                raise
    for file in list(sources.glob("*.pickle")):
        name_by_image(file)


def keep_source(sources: Path, known: dict, body: str) -> None:
    meta = known["triton_meta"]
    kernel = {
        "name": known["mangled_name"],
        "image": known["cubin_path"],
        "source": ast.literal_eval(re.search(r"async_compile\.triton\('\w+', ('''.*''')", body, re.DOTALL)[1]),
        "signature": meta["signature"],
        "constants": meta["constants"] | known["config"],
        "cards": [card.record() for card in known.get(CARDS, ())],
    }
    # The name is unique, since another process keeps the kernels of its methods in the same folder.
    (sources / f"{uuid.uuid4()}.pickle").write_bytes(pickle.dumps(kernel))


def name_by_image(file: Path) -> None:
    """Rename the file of a kernel to the hash of its final machine code, which the library contains."""
    kernel = pickle.loads(file.read_bytes())
    image = Path(kernel.pop("image")).read_bytes()
    file.unlink()
    file = file.with_stem(hashlib.sha256(image).hexdigest())
    file.write_bytes(pickle.dumps(kernel | {"size": len(image)}))


if __name__ == "__main__":
    export(Path(sys.argv[1]), tuple(sys.argv[2:]) or DEFAULT)
