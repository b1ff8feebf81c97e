"""Sets torch's number of threads. Imports nothing of torch, because it must run before torch is imported."""

import os


def leave_threads_to_xnnpack() -> None:
    """Start torch with one OpenMP thread, unless ``OMP_NUM_THREADS`` is set. Call it before torch is imported.

    XNNPACK and ExecuTorch's attention share a thread pool with one thread per core. In attention, each of these threads
    multiplies through torch's BLAS, which would start OpenMP threads of its own. On 2 cores that doubles the time of
    ``target_verify``. ``torch.set_num_threads`` does not help, because it affects the calling thread alone.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
