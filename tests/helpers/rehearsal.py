"""Runs ``scripts/gpu/gpu_run.py`` on the strict stand-in for a GPU: launches are checked and compute nothing.

    python tests/helpers/rehearsal.py A FOLDER [FLAGS OF gpu_run.py]

Every process of a stage is started by this file too. So that nothing takes minutes, sizes and seconds are smaller. A
kernel of the tournament counts as right once its launch was accepted. An artifact that was compiled for the CPU is run
as it is, and computes.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "gpu"))

import gpu_run


def run_on_stand_in(work: Path) -> None:
    gpu_run.add_paths(work)
    from stand_in_driver import H100, StandIn
    from stand_in_torch import cuda_build, load

    device = StandIn()
    device.become(H100._replace(total=16 << 30))
    cuda = load(device)
    with ExitStack() as stack:
        stack.enter_context(cuda_build(cuda))
        smaller(stack)
        try:
            gpu_run.main()
        finally:
            if refused := device.journal():
                sys.stdout.write(f"the stand-in refused: {refused}\n")


def smaller(stack: ExitStack) -> None:
    import gpu_carry
    import gpu_probe
    import gpu_stages
    import gpu_tournament
    import torch

    from eagle3.runner.hosts import torch_host

    torch.set_num_threads(1)
    fault = gpu_tournament.Tournament.fault
    whole = 1 << 30  # packed weights are whole, since a small artifact is compared with its checksums
    for each in (
        patch.object(torch.cuda.Event, "elapsed_time", lambda _self, _end: 1.0, create=True),
        patch.object(torch_host, "export_host_symbols", lambda _device: None),  # the stand-in's are there already
        patch.multiple(gpu_tournament, DEVICE="cpu", COPIED=1 << 20, WARM_UP_SECONDS=0, CYCLED=1 << 20, LAYERS=4),
        patch.object(gpu_tournament.Tournament, "fault", lambda *given: fault(*given) and ""),
        patch.multiple(gpu_probe, SIZE=1 << 27),
        patch.multiple(gpu_carry, SAMPLE=whole, RECORD=whole),
        patch.multiple(gpu_stages, SECONDS=4, ROUNDS=60, BEFORE=20, TOKENS=12),
    ):
        stack.enter_context(each)


if __name__ == "__main__":
    if "--stage" in sys.argv:
        run_on_stand_in(Path(sys.argv[sys.argv.index("--work") + 1]))
    else:  # as many seconds as it takes: this machine may be busy
        gpu_run.LIMIT = 3600
        gpu_run.PLANS = {plan: dict.fromkeys(stages, 900) for plan, stages in gpu_run.PLANS.items()}
        gpu_run.main()
