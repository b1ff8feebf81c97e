"""The GPUs that can be named: the first of each architecture in the contract's table."""

from eagle3.runner.hardware import gpus
from eagle3.runner.hardware.gpus import Gpu, gpus_of

ARCHITECTURES = dict.fromkeys(f"sm_{gpu.arch}" for gpu in gpus.GPUS.values())
GPUS: dict[str, Gpu] = {arch: gpus_of(arch)[0] for arch in ARCHITECTURES}
