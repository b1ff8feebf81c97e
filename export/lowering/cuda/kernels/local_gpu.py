"""The GPU at hand. Nothing else of the backend is imported for it, which takes seconds."""

import torch


def local_arch() -> str | None:
    """Return the architecture of the GPU at hand, such as "sm_90"."""
    if not torch.cuda.is_available():
        return None
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def local_multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU at hand."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
