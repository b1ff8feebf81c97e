"""A method's library returns outputs that ExecuTorch's CUDA runtime accepts. The runtime copies the bytes of an output
into a tensor of the declared dtype and dimensions, and refuses a view with an offset or gaps."""

import pytest
import torch
from torch import Tensor

from eagle3.runner.artifact.cuda_weights import _dtype as dtype_of
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.contract import DRAFT_DECODE, METHODS, MODEL_FILE, SPECULATE, row_bounds
from eagle3.runner.hosts import torch_host
from eagle3.runner.hosts.opening import open_session

IDS = torch.zeros(1, 8, dtype=torch.int64)


def refused(output: Tensor, dtype: torch.dtype, sizes: list[int]) -> str | None:
    """Return the reason why ExecuTorch would refuse an output, None if it accepts it; ``sizes`` are upper bounds."""
    if output.dtype != dtype:
        return f"{output.dtype}, declared {dtype}"
    if output.dim() != len(sizes) or any(size > most for size, most in zip(output.shape, sizes, strict=True)):
        return f"shape {list(output.shape)}, declared up to {sizes}"
    if output.storage_offset() or not output.is_contiguous():
        return f"begins at element {output.storage_offset()}, strides {output.stride()} of {list(output.shape)}"
    return None


@pytest.mark.parametrize(
    "given, reason",
    [
        (IDS[:, 4:], "begins at element 4"),
        (IDS.view(2, 4).t()[None, 0], "strides"),
        (IDS.int(), "declared torch.int64"),
        (IDS[0], "declared up to"),
        (torch.zeros(1, 9, dtype=torch.int64), "declared up to"),
        (IDS[:, :4], None),
    ],
)
def test_outputs_that_executorch_refuses_are_recognized(given, reason):
    said = refused(given, torch.int64, [1, 8])
    assert said is None if reason is None else reason in said


@pytest.fixture(scope="module")
def hosted(host_artifact):
    return open_session(open_artifact(host_artifact))


@pytest.mark.parametrize("name", [*METHODS, SPECULATE])
def test_every_output_of_every_length_is_accepted_by_executorch(name, hosted, host_artifact):
    plan = torch_host.read_pte(host_artifact / MODEL_FILE).plan(name)
    declared = [plan.values[place].val for place in plan.outputs]
    features = plan.values[plan.inputs[1]].val
    for rows in set(row_bounds(hosted.metadata)[name]):
        inputs = [torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)]
        if name == DRAFT_DECODE:
            inputs.insert(1, torch.zeros(1, rows, features.sizes[-1], dtype=dtype_of(int(features.scalar_type))))
        outputs = hosted._methods[name](inputs)
        assert len(outputs) == len(declared)
        for output, tensor in zip(outputs, declared, strict=True):
            reason = refused(output, dtype_of(int(tensor.scalar_type)), list(tensor.sizes))
            assert reason is None, f"{name} of {rows} rows: {reason}"
