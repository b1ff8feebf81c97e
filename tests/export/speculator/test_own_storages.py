"""Each tensor that is lowered has a storage of its own, on both backends: views are copied, and a view that is made
later is refused."""

from pathlib import Path

import pytest
import torch
from family_configs import family_config
from torch import nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from transformers import AutoModelForCausalLM

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.backend import load_backend
from eagle3.export.pipeline import load_speculator, trace
from eagle3.export.planning.plan import make_plan
from eagle3.export.speculator import tensor_files
from eagle3.export.speculator.speculator import check_storages, own_storages
from eagle3.export.speculator.tensor_files import parts


def held(values) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class Views(nn.Module):
    """Holds every kind of view: two of one storage, twice the same one, one alone, one beside the whole storage, one of
    another dtype, a repeated row, and the parts of a quantized weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        whole, both, alone = torch.randn(4, 8), torch.randn(6, 8), torch.randn(3, 8)
        self.whole, self.rows = held(whole), held(whole[1:])
        self.first, self.second = held(both[:2]), held(both[2:])
        self.tied = self.second
        self.again = held(both[2:])
        self.alone = held(alone[:2])
        self.repeated = held(torch.randn(1, 8).expand(3, 8))
        self.register_buffer("bits", whole.view(torch.int32), persistent=False)
        codes = IntxUnpackedToInt8Tensor.from_hp(torch.randn(6, 32), (1, 32), torch.int8)
        halves = []
        for half in (slice(0, 2), slice(2, 6)):
            cut = [part[half] for part in parts(codes)]
            attributes = (getattr(codes, name) for name in codes.tensor_attribute_names)
            halves.append(held(IntxUnpackedToInt8Tensor(*cut, *attributes)))
        self.upper, self.lower = halves

    def forward(self, x):
        rows = (self.whole, self.rows, self.first, self.second, self.again, self.alone, self.repeated, self.bits)
        return tuple(x @ each.float().T for each in (*rows, self.upper.dequantize()[:, :8], self.lower.dequantize()))


def plain(model: nn.Module) -> list[torch.Tensor]:
    return [part for value in (*model.parameters(), *model.buffers()) for part in parts(value)]


@pytest.mark.parametrize("large", [tensor_files.LARGE, 0])
def test_views_become_tensors_of_their_own_with_the_same_values(large, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tensor_files, "LARGE", large)
    model = Views()
    values, start = [part.clone() for part in plain(model)], model.whole.data_ptr()
    own_storages(model, tmp_path)
    assert all(torch.equal(part, value) for part, value in zip(plain(model), values, strict=True))
    assert model.whole.data_ptr() == start  # it fills its storage
    assert model.tied is model.second and model.again.data_ptr() == model.second.data_ptr()
    others = [part for part in plain(model) if part is not model.again]
    assert len({part.untyped_storage().data_ptr() for part in others}) == len(others)
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in others)
    in_file = model.rows.untyped_storage().filename is not None
    assert in_file == (large == 0) and model.whole.untyped_storage().filename is None
    again = [part.data_ptr() for part in plain(model)]
    own_storages(model, tmp_path)  # copies nothing
    assert [part.data_ptr() for part in plain(model)] == again


class Late(nn.Module):
    """Holds a view of a weight as a plain attribute, which a trace makes a constant of the program."""

    def __init__(self, second: torch.Tensor):
        super().__init__()
        self.weight, self.second = held(torch.ones(4, 8)), second

    def forward(self, x):
        return x @ self.weight.T, x @ self.second.T


def test_a_view_of_a_traced_program_is_refused_in_a_line_with_its_name(tmp_path: Path):
    late, alone = Late(torch.ones(2, 8)), Late(torch.ones(4, 8)[2:])
    check_storages(torch.export.export(late, (torch.ones(1, 8),)))
    late.second = late.weight.data[2:]
    for model, names in ((late, "second, weight: "), (alone, "second: ")):
        own_storages(model, tmp_path)
        with pytest.raises(ValueError, match=rf"^{names}parts of one storage of 128 bytes[^\n]*$"):
            check_storages(torch.export.export(model, (torch.ones(1, 8),)))


@pytest.mark.first(1)
@pytest.mark.parametrize(("backend", "dtype"), [("xnnpack", torch.float32), ("cuda", torch.bfloat16)])
def test_both_backends_trace_a_split_checkpoint_only_with_own_storages(backend, dtype, tmp_path: Path):
    """LaraMini's conversion splits a tensor into four views, which loading leaves as they are in the backend's
    dtype."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(family_config("lara_mini")).to(dtype)
    model.save_pretrained(tmp_path)
    flags = {"backend": backend, "cuda_arch": "sm_90" if backend == "cuda" else None, "max_seq_len": 128}
    flags["qlinear"] = "none"
    plan = make_plan(ExportConfig("auto", checkpoint=tmp_path, draft=Path("none"), output_dir=tmp_path / "o", **flags))
    chosen = load_backend(backend)
    speculator = load_speculator(plan, chosen.attention, chosen.dtype, chosen.conversion(plan))
    with chosen.tracing(speculator, plan):
        with pytest.raises(ValueError, match=r"in_proj_qkv\.weight.*parts of one storage"):
            trace(speculator, plan.methods[-1], plan.draft.hidden_size, chosen.dtype)
        own_storages(speculator, tmp_path)
        trace(speculator, plan.methods[-1], plan.draft.hidden_size, chosen.dtype)
