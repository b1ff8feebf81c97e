"""A GGUF file as the target's weights is read as gguf-py and transformers read it, or refused in one line."""

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from commands import fail_command
from eager import eager_session, eager_speculator
from gguf_files import TYPES, as_read, gemma4_gguf, random_blocks
from transformers import Gemma4ForCausalLM

from eagle3.export.checkpoints.finite import check_finite
from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.graph.check import check_linears
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.lowering.xnnpack.quantization import Recipe, XnnpackWeights, quantized
from eagle3.export.pipeline import load_speculator, trace
from eagle3.export.planning.plan import make_plan
from eagle3.export.report import plan_text
from eagle3.runner.contract import TARGET_VERIFY
from eagle3.runner.loop.generation import complete
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"].checkpoint
Q4_K_M = {"attn_v.weight": "Q6_K", "token_embd.weight": "Q6_K", "ffn_down.weight": "Q5_K", ".weight": "Q4_K"}
"""Like llama.cpp's mixture of that name."""


@pytest.fixture(scope="module")
def model():
    return Gemma4ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def file(model, tmp_path_factory) -> Path:
    return gemma4_gguf(tmp_path_factory.mktemp("gguf") / "tiny-Q4_K_M.gguf", model, Q4_K_M)


def planned(file: Path, backend: str = "xnnpack", **flags):
    config = ExportConfig("gemma4-tiny", output_dir=None, checkpoint=file, config_folder=TINY, backend=backend, **flags)
    return make_plan(config)


@pytest.fixture(scope="module")
def plan(file):
    return planned(file)


@pytest.fixture(scope="module")
def reference(model):
    """Return transformers' model with the weights of the GGUF file, dequantized by gguf-py."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        if name.endswith("_proj.weight") or name in ("model.embed_tokens.weight", "lm_head.weight"):
            kind = "Q4_K" if "v_proj" not in name and "down_proj" not in name else "Q5_K"
            kind = "Q6_K" if "v_proj" in name or name in ("model.embed_tokens.weight", "lm_head.weight") else kind
            state[name] = as_read(value, kind)
    other = Gemma4ForCausalLM(model.config).eval().requires_grad_(False)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "BF16", "F16", "F32"])
def test_every_gguf_tensor_type_is_dequantized_as_by_gguf_py(kind, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "gemma4")
    writer.add_uint32("gemma4.block_count", 1)
    if kind.endswith("_K"):
        data = random_blocks(kind, 6, 512)
    else:
        data = gguf.quantize(np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32), TYPES[kind])
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFFile(tmp_path / "one.gguf")
    ((name, header),) = source.headers().items()
    ((name, raw),) = source.tensors()
    value = XnnpackWeights(torch.nn.Module(), Recipe("none", "none", 0))(name, raw)
    assert (name, header.shape, header.dtype) == ("layers.0.mlp.up_proj.weight", (6, 512), kind)
    assert header.bytes == data.nbytes
    assert torch.equal(value.float(), torch.from_numpy(gguf.dequantize(data, TYPES[kind])))


def test_gguf_blocks_stay_memory_mapped(file, plan):
    codes = next(value for name, value in plan.target_source.tensors() if name.endswith("up_proj.weight")).raw
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in maps if str(file) in line]
    assert any(start <= codes.data_ptr() < end for start, end in spans)


@pytest.mark.whole
def test_on_the_cpu_a_gguf_target_gives_transformers_tokens(plan, reference):
    assert plan.checkpoint == TINY and plan.qlinear == "checkpoint"
    session = eager_session(plan, eager_speculator(plan, xnnpack.conversion(plan)))
    for prompt in ([2, 7, 11, 30, 512, 9], list(range(40, 140))):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=[])
        assert (
            complete(session, prompt, max_new_tokens=40, stop_ids=()).token_ids == expected[0, len(prompt) :].tolist()
        )


def test_on_the_cpu_a_gguf_target_is_quantized_again_on_request(file, reference):
    plan = planned(file, qlinear="8da8w")
    assert "dequantized to float32 as they load, then quantized again: 8da8w" in plan_text(plan)
    speculator = eager_speculator(plan, xnnpack.conversion(plan))
    weights, linears = reference.state_dict(), []
    for name, module in speculator.target.named_modules():
        if name.endswith("_proj") and "layers.0." in name:
            (own,) = (key for key in weights if key.endswith(f"{name[name.index('layers.0.') :]}.weight"))
            expected = quantized(Recipe("8da8w", "8w", 0), module, weights[own])
            assert torch.equal(module.weight.qdata, expected.qdata)
            assert torch.equal(module.weight.scale, expected.scale)
            linears.append(name)
    assert len(linears) == 7


ARCH = None if torch.cuda.is_available() else "sm_90"


@pytest.mark.whole
def test_on_cuda_gguf_weights_are_bit_equal_and_verify_reads_each_once(file, reference):
    flags = ExportConfig("gemma4-tiny", None, file, backend="cuda", cuda_arch=ARCH, config_folder=TINY)
    plan = make_plan(flags)
    cuda.check(plan)
    speculator = load_speculator(plan, cuda.attention, cuda.dtype, cuda.conversion(plan))
    cuda.prepare(speculator, plan)
    target = speculator.target.model
    assert target.lm_head.weight is target.embed_tokens.weight  # the two are tied, and one tensor on the GPU
    state = {name.removeprefix("model."): value for name, value in reference.state_dict().items()}
    packed = [(name, value) for name, value in target.named_parameters() if isinstance(value, KQuantTensor)]
    assert len(packed) == 42
    for name, value in packed:
        assert torch.equal(value.dequantize(torch.float32), state[name]), name
    with cuda.tracing(speculator, plan):
        program = trace(speculator, plan.method(TARGET_VERIFY), plan.draft.hidden_size, cuda.dtype)
    assert check_linears(TARGET_VERIFY, program) == {"small_m": 42, "large_m": 0, "dequantize": 0}


def test_on_cuda_a_gguf_type_without_a_kernel_is_named_with_its_tensor(model, tmp_path):
    file = gemma4_gguf(tmp_path / "q8.gguf", model, {"ffn_down.weight": "Q8_0", ".weight": "Q4_K"})
    flags = () if ARCH is None else ("--cuda-arch", ARCH)
    line = refused(tmp_path, file, "gemma4-tiny", "--backend", "cuda", *flags)
    assert "layers.0.mlp.down_proj.weight is Q8_0, but Q4_K, Q5_K, Q6_K" in line
    line = refused(tmp_path, file, "gemma4-tiny", "--backend", "cuda", "--qlinear", "default", *flags)
    assert "quantized already: leave --qlinear default out" in line


def test_a_split_gguf_file_is_read_completely(file, plan, tmp_path):
    reader = gguf.GGUFReader(file)
    half = len(reader.tensors) // 2
    parts = [tmp_path / f"tiny-{part:05}-of-00002.gguf" for part in (1, 2)]
    for number, (part, tensors) in enumerate(zip(parts, (reader.tensors[:half], reader.tensors[half:]), strict=True)):
        writer = gguf.GGUFWriter(part, "gemma4")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_uint32("gemma4.block_count", 6)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole = planned(parts[0])
    assert whole.target_headers == plan.target_headers and whole.target_source.files() == parts
    line = refused(tmp_path, parts[1])
    assert f"part 2 of 2: type --checkpoint {parts[0]}" in line
    parts[1].unlink()
    assert f"{parts[1]} is missing" in refused(tmp_path, parts[0])


def refused(tmp_path: Path, file: Path, *args, config: Path | None = TINY) -> str:
    """Return the one error line of an export that must not start."""
    folder = ("--config", config) if config else ()
    flags = ("--backend", "xnnpack", "--dry-run", "--output-dir", tmp_path / "out", "--target-model")
    code, line = fail_command(export_main, *flags, *(args or ("gemma4-tiny",)), "--checkpoint", file, *folder)
    assert code == 1
    return line


def test_a_gguf_file_without_a_config_is_refused_with_where_to_find_one(file, tmp_path):
    assert "tiny-Q4_K_M.gguf needs one and a tokenizer: type --config FOLDER" in refused(tmp_path, file, config=None)
    line = refused(tmp_path, TINY)
    assert "is for a GGUF file" in line and "leave it out" in line


def test_a_config_beside_a_gguf_file_is_used(file):
    shutil.copy(TINY / "config.json", file.parent)
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, checkpoint=file, backend="xnnpack"))
    (file.parent / "config.json").unlink()
    assert plan.checkpoint == file.parent


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"block_count": 7}, "block_count is 7, but {config} implies 6 (num_hidden_layers)"),
        (
            {"attention.head_count_kv": [2, 2, 2, 2, 2, 2]},
            "head_count_kv is 2 for layer 5, but {config} implies 1 for layer 5",
        ),
        ({"attention.sliding_window": 128}, "sliding_window is 128, but {config} implies 64"),
        ({"rope.freq_base": 5e5}, "rope.freq_base is 500000, but {config} implies 1e+06"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.type is linear, but {config} implies none"),
        ({"attention.layer_norm_rms_epsilon": 1e-5}, "epsilon is 1e-05, but {config} implies 1e-06"),
        ({"attention.sliding_window_pattern": [True] * 6}, "pattern is True for layer 5, but {config} implies False"),
        ({".general.type": "mmproj"}, "holds no language model (general.type mmproj)"),
        ({".split.count": 3}, "is one of 3 parts, but its name is not that of a part"),
    ],
)
def test_gguf_metadata_that_disagrees_with_the_config_is_refused(fields, says, model, tmp_path):
    file = gemma4_gguf(tmp_path / "other.gguf", model, Q4_K_M, fields)
    assert says.format(config=TINY / "config.json") in refused(tmp_path, file)


def test_a_gguf_architecture_other_than_the_configs_is_refused_with_both(tmp_path):
    from gguf_files import write_gguf

    file = write_gguf(tmp_path / "llama.gguf", "llama", {"block_count": 6}, {})
    line = refused(tmp_path, file)
    assert "llama.gguf is llama (for llama or mistral)" in line and "is a gemma4_text" in line and "--config" in line
    file = write_gguf(tmp_path / "rwkv.gguf", "rwkv7", {"block_count": 6}, {})
    assert "general.architecture is rwkv7, but only gemma4, " in refused(tmp_path, file)


def test_an_unsupported_gguf_type_is_named_with_its_tensor(file, tmp_path):
    reader, out = gguf.GGUFReader(file), tmp_path / "iq.gguf"
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.2.ffn_up.weight")
    data = bytearray(file.read_bytes())
    at = tensor.field.offset + int(sum(part.nbytes for part in tensor.field.parts[:4]))
    data[at : at + 4] = struct.pack("<I", TYPES.TQ1_0)
    out.write_bytes(data)
    line = refused(tmp_path, out)
    assert "blk.2.ffn_up.weight is TQ1_0, but only F32, F16, BF16, Q4_K" in line


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-4000], "is truncated, damaged"),
        (lambda data: b"", "is no GGUF file"),
        (lambda data: data[:4] + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_a_damaged_gguf_file_is_refused_in_one_line(damage, says, file, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(damage(file.read_bytes()))
    line = refused(tmp_path, tmp_path / "bad.gguf")
    assert says in line and str(tmp_path / "bad.gguf") in line


def test_a_nan_scale_in_a_gguf_file_is_found(file, tmp_path):
    bad = Path(shutil.copy(file, tmp_path))
    tensor = next(tensor for tensor in gguf.GGUFReader(bad).tensors if tensor.name == "blk.1.attn_v.weight")
    for block, wrong in ((0, b"\x00\x7c"), (3, b"\x00\x7e")):  # infinity, NaN in a Q6_K block's scale
        data = bytearray(file.read_bytes())
        at = tensor.data_offset + block * 210 + 208
        data[at : at + 2] = wrong
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj\.weight holds 1 values of 128"):
            check_finite(GGUFFile(bad), lambda name: True)
