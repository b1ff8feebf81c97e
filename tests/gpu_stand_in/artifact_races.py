"""Runs launches of a CUDA artifact by Triton's interpreter under the race detector, in several orders of programs.

ARTIFACT is made by ``cuda_artifact.py``. A verify and two draft steps are called at positions where the rings of
sliding windows or of recurrent layers wrap. Each launch runs in all ORDERS of its programs, and the results are
compared bit for bit. The script prints the accesses that overlap by design, with the reason, and the races found; it
exits with 1 if there are any races.

    python tests/gpu_stand_in/artifact_races.py ARTIFACT reversed delayed
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton and any module with kernels is imported

import click
import torch
from cuda_artifact import sources_of
from interpreted_artifact import MODERATE, Machine
from race_detector import ORDERS, Detector
from race_hooks import watching

from eagle3.runner.contract import DRAFT_DECODE, TARGET_VERIFY
from eagle3.runner.hosts.torch_host import TorchSession

CALLS = {TARGET_VERIFY: (16,), DRAFT_DECODE: (4, 17)}
"""Numbers of rows by method, clamped to the method's bounds. The first method returns features for the draft."""
RING = 128
"""The slots of a ring buffer of gemma4-tiny, which is also the number of positions per part of its split attention."""


def calls(session: TorchSession) -> Iterator[str]:
    """Make each call with half of its rows before the end of a ring buffer, and yield a description of the call.

    Of recurrent layers only the last rows can be computed again: the first call begins at position 0, and every other
    one at the last row of the call before.
    """
    torch.manual_seed(1)
    feature, end = None, 1
    for name, counts in CALLS.items():
        least, most = session._rows[name]
        for rows in dict.fromkeys(min(max(count, least), most) for count in counts):
            first = RING - rows // 2 if session.metadata.rollback_rows is None else end - 1
            at = torch.arange(first, first + rows)
            end = end if name == DRAFT_DECODE else first + rows
            tokens = torch.randint(3, min(800, session.metadata.vocab_size), (1, rows))
            given = (feature.expand(1, rows, -1).contiguous(),) if name == DRAFT_DECODE else ()
            outputs = [each.cpu() for each in session._call(name, tokens, *given, at)]
            if any(each.is_floating_point() and not each.isfinite().all() for each in outputs):
                raise click.ClickException(f"{name} of {rows} rows returned a value that is not finite")
            if name == TARGET_VERIFY:
                feature = outputs[1][:, -1:].clone()
            yield f"{name}, positions {at[0]} to {at[-1]}"


def main(artifact: Path, orders: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    machine = Machine(sources_of(artifact))
    with machine.running(), watching(Detector(orders)) as detector:
        session = machine.open(artifact, graphs=False, unwritten=MODERATE)  # calls begin far after position 0
        for call in calls(session):
            found = f"{len(detector.findings)} findings"
            click.echo(f"{call}: {machine.kernels.launches.total()} launches, {found} so far", err=True)
    for reason, count in detector.by_design.items():
        click.echo(f"by design, {count} times: {reason}")
    if detector.findings:
        raise SystemExit(f"found in {', '.join(detector.orders)}:\n{detector.report()}")
    click.echo(f"{machine.kernels.launches.total()} launches in the orders {', '.join(detector.orders)}: nothing found")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or ORDERS)
