"""Who multiplies on how many threads. Imports nothing: it has to come before torch."""

import os


def leave_threads_to_xnnpack() -> None:
    """Start torch with one OpenMP thread, unless ``OMP_NUM_THREADS`` says otherwise. Only before torch is imported.

    XNNPACK and ExecuTorch's attention share a pool of threads of their own, one a core. Each of those, in attention,
    multiplies through torch's BLAS, which would start OpenMP threads below it: on 2 cores that makes ``target_verify``
    twice as slow as it is. ``torch.set_num_threads`` does not help, it speaks for the calling thread alone.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
