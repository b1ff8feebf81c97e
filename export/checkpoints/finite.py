"""Whether a checkpoint's weights are numbers: one NaN is enough for a model that says token 0 forever."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from eagle3.export.checkpoints.safetensors_folder import shard_paths


def check_finite(folder: Path, is_read: Callable[[str], bool]) -> None:
    """Read every floating-point tensor whose name ``is_read`` once, memory-mapped. Raises ValueError naming the first
    that holds NaN or an infinity."""
    for path in shard_paths(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not is_read(name):
                    continue
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and tensor.numel() and not _finite(tensor):
                    wrong = int((~torch.isfinite(tensor)).sum())
                    raise ValueError(
                        f"{path}: {name} holds {wrong:,} values of {tensor.numel():,} that are NaN or infinite: the "
                        "file is damaged or the training diverged: copy it again, or name another checkpoint"
                    )


def _finite(tensor: torch.Tensor) -> bool:
    """By its extremes, which a NaN passes through: one reading, no memory."""
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()  # float8 has no extremes
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(wide))
