"""A tensor in pytorch_model.bin, however it was pickled, is read like one in a safetensors file with the same
values."""

import shutil
from dataclasses import replace

import pytest
import torch
from dialect_files import write
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.pickled import PickledFolder
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.plan import make_plan
from eagle3.export.planning.tensors import check_draft


def every_other(value: Tensor) -> Tensor:
    """Return a view of the same numbers, with other numbers between them in its storage."""
    return torch.stack((value, torch.zeros_like(value)), -1)[..., 0]


def behind_another(value: Tensor) -> Tensor:
    """Return a contiguous copy in a storage that begins with other numbers."""
    return torch.cat((torch.zeros_like(value).flatten(), value.flatten()))[value.numel() :].view(value.shape)


def transposed(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT if value.ndim > 1 else value


PICKLED = {
    "tensors": lambda value: value,
    "parameters": lambda value: nn.Parameter(value, requires_grad=False),
    "parameters that learn": lambda value: nn.Parameter(value, requires_grad=value.is_floating_point()),
    "buffers": nn.Buffer,
    "tensors with gradients": lambda value: value.clone().requires_grad_(value.is_floating_point()),
    "results of an operation": lambda value: nn.Parameter(value.clone()) * 1 if value.is_floating_point() else value,
    "transposed": transposed,
    "every other": every_other,
    "behind another": behind_another,
    "transposed parameters": lambda value: nn.Parameter(transposed(value), requires_grad=False),
    "the imaginary part of a conjugate": lambda value: (
        torch.complex(value.float(), -value.float()).conj().imag if value.dtype == torch.float32 else value
    ),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float64]


def converted(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def same(found: Tensor, expected: Tensor) -> bool:
    if isinstance(expected, TorchAOBaseTensor):
        parts = expected.__tensor_flatten__()[0]
        return type(found) is type(expected) and all(same(getattr(found, p), getattr(expected, p)) for p in parts)
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in PICKLED), *(("parameters", dtype) for dtype in DTYPES)],
    ids=str,
)
def test_pickled_tensors_equal_those_of_a_safetensors_file(kind, dtype, tmp_path):
    values = converted({"weight": torch.randn(6, 8), "bias": torch.randn(6), "one": torch.tensor(2.5)}, dtype)
    values |= {"ids": torch.arange(5), "is_there": torch.tensor([True, False])}
    save_file(values, tmp_path / "model.safetensors")
    expected = open_source(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    torch.save({name: PICKLED[kind](value) for name, value in values.items()}, tmp_path / "pytorch_model.bin")
    source = PickledFolder(tmp_path)
    (tmp_path / "other.safetensors").rename(tmp_path / "model.safetensors")
    assert source.headers() == expected.headers()
    for name, value in source.tensors():
        assert type(value) is Tensor and not value.requires_grad and not value.is_neg(), name
        assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes, name
        assert same(value, values[name]) and same(source.tensor(name), values[name]), name


def test_pickled_tensors_that_share_a_storage_are_read_separately(tmp_path):
    table = torch.randn(8, 4)
    views = {"all": table, "again": table, "rows": table[2:4], "part": table[:, 1:3]}
    torch.save(views, tmp_path / "pytorch_model.bin")
    source = PickledFolder(tmp_path)
    assert {name: header.bytes for name, header in source.headers().items()} == {
        "all": 128,
        "again": 128,
        "rows": 32,
        "part": 64,
    }
    given = dict(source.tensors())
    assert torch.equal(given["rows"], table[2:4]) and torch.equal(given["part"], table[:, 1:3])
    assert torch.equal(given["again"], table) and given["part"].is_contiguous()


def torchao_weights(config) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    quantize_(model, config)
    return {name: nn.Parameter(value, requires_grad=False) for name, value in model.state_dict().items()}


def test_pickled_weights_quantized_by_torchao_are_named_as_such(tmp_path):
    for config, kind in (
        (IntxWeightOnlyConfig(torch.int8, PerGroup(32)), "IntxUnpackedToInt8Tensor"),
        (Float8WeightOnlyConfig(), "Float8Tensor"),
    ):
        weights = torchao_weights(config)
        torch.save(weights, tmp_path / "pytorch_model.bin")
        source = PickledFolder(tmp_path)
        (header,) = source.headers().values()
        assert (header.dtype, header.quantized, header.shape) == (kind, True, (32, 64))
        assert 32 * 64 < header.bytes < 2 * 32 * 64
        ((name, value),) = source.tensors()
        assert same(value, weights[name].detach()) and not isinstance(value, nn.Parameter)


def test_an_unsupported_pickled_quantized_weight_is_refused_by_its_class(checkpoints, tmp_path):
    _, whole = checkpoints("qwen3-4B")
    shutil.copy(whole / "config.json", tmp_path)
    state = dict(open_source(whole).tensors())
    state["model.layers.0.self_attn.q_proj.weight"] = torchao_weights(Float8WeightOnlyConfig())["0.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    draft = write(tmp_path / "draft", "safeailab")
    with pytest.raises(ValueError, match=r"q_proj\.weight is Float8Tensor, quantized: name the original checkpoint"):
        make_plan(ExportConfig("auto", None, tmp_path, draft, backend="xnnpack"))
    head = dict(open_source(draft).tensors())
    head["midlayer.mlp.up_proj.weight"] = torchao_weights(Float8WeightOnlyConfig())["0.weight"]
    (draft / "model.safetensors").unlink()
    torch.save(head, draft / "pytorch_model.bin")
    shape = head["midlayer.mlp.down_proj.weight"].shape[::-1]
    described = read_draft(draft)
    described.headers["layers.0.mlp.up_proj.weight"] = replace(
        described.headers["layers.0.mlp.up_proj.weight"], shape=tuple(shape)
    )
    with pytest.raises(ValueError, match=r"up_proj\.weight is Float8Tensor, but must be floating-point"):
        check_draft(described)


class Marked(Tensor):
    """A tensor subclass, as a training framework may have."""


def test_a_pickled_tensor_subclass_is_refused_by_name(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    torch.save({"fc.weight": torch.randn(4, 4).as_subclass(Marked)}, file)
    with pytest.raises(ValueError, match=r"more than tensors.*Marked"):
        PickledFolder(tmp_path).headers()
    with torch.serialization.safe_globals([Marked]), pytest.raises(ValueError, match=r"fc\.weight is a Marked"):
        PickledFolder(tmp_path).headers()
