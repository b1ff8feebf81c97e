"""Makes weights in llama.cpp's K-quants."""

import gguf
import numpy as np
import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from gguf_files import TYPES, random_blocks
from torch import Tensor

from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor, laid_out

KINDS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}


def weight(kind: str, n: int, k: int, blocks: np.ndarray | None = None) -> tuple[KQuantTensor, Tensor]:
    """Return a random weight in the form for CUDA, and its values as dequantized by gguf-py."""
    raw = random_blocks(kind, n, k, seed=n + k) if blocks is None else blocks.reshape(n, -1)
    tensor = ExportableGGUFTensor(torch.from_numpy(raw), kind.lower(), torch.float32)
    return laid_out(tensor), torch.from_numpy(gguf.dequantize(raw, TYPES[kind]))


def activations(m: int, k: int) -> Tensor:
    return torch.randn(m, k).bfloat16()
