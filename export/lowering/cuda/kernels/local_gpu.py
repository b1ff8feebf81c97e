"""Queries the GPU of this machine. This module imports nothing else of the backend, which would take seconds."""

import torch


def local_arch() -> str | None:
    """Return the architecture of the GPU of this machine, such as "sm_90"; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def local_multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU of this machine."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
