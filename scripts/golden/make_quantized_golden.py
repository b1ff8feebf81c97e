"""Make the golden fixtures under tests/golden/quantized/: linears as common quantization tools pack them.

Each case is a folder with a checkpoint (config.json, model.safetensors) of linears with random weights, and
dense.safetensors, the weights as the tool itself dequantizes them: compressed-tensors' compressor, GPTQModel's
TorchLinear, AutoAWQ's WQLinear_GEMM. Install the tools beside this project's environment, not in it. The last two are
used as uncompiled sources:

    pip install --no-deps --target golden-packages compressed-tensors==0.20.0 loguru==0.7.3 psutil \\
        pypcre logbar accelerate device-smi tokenicer defuser pillow
    pip download --no-deps --no-binary :all: gptqmodel==7.7.0 autoawq==0.2.9
    for sources in *.tar.gz; do tar xzf $sources; done
    PYTHONPATH=golden-packages:gptqmodel-7.7.0:autoawq-0.2.9 python scripts/golden/make_quantized_golden.py \\
        --out tests/golden/quantized
"""

import importlib
import importlib.util
import json
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch
from case import arguments, save_linear
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import calculate_qparams
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from torch import Tensor, nn

ROWS, COLUMNS = 12, 256  # the rows do not fill a word of zero points
COMPRESSED_TENSORS = {
    "w4_g32": ({"num_bits": 4, "strategy": "group", "group_size": 32}, torch.bfloat16),
    "w4_g128": ({"num_bits": 4, "strategy": "group", "group_size": 128}, torch.float16),
    "w4_g64_asymmetric": ({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, torch.bfloat16),
    "w4_channel": ({"num_bits": 4, "strategy": "channel"}, torch.bfloat16),
    "w8_channel": ({"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "w8_g128_asymmetric": ({"num_bits": 8, "strategy": "group", "group_size": 128, "symmetric": False}, torch.float32),
}
GPTQ = {  # bits, group, symmetric, format, columns in the order of their groups
    "v1_g128": (4, 128, True, "gptq", True),
    "v1_g32_asymmetric": (4, 32, False, "gptq", True),
    "v2_channel_asymmetric": (4, -1, False, "gptq_v2", True),
    "v2_g64_scattered": (4, 64, False, "gptq_v2", False),
    "v1_8_bits": (8, 128, True, "gptq", True),
    "v2_8_bits_asymmetric": (8, 32, False, "gptq_v2", True),
}
AWQ = {"g128": (128,), "g64": (64,), "channel": (-1,)}


def main() -> None:
    out = arguments("quantized").out
    tools = {"compressed_tensors": by_compressed_tensors, "gptq": by_gptqmodel, "awq": by_autoawq}
    for (kind, make), cases in zip(tools.items(), (COMPRESSED_TENSORS, GPTQ, AWQ), strict=True):
        for number, (name, case) in enumerate(cases.items()):
            torch.manual_seed(number)
            save_linear(out / kind / name, *make(*case))


def by_compressed_tensors(given: dict, dtype: torch.dtype) -> tuple[dict, dict, torch.Tensor]:
    """Return quantization_config, the parts of a linear, and its weight [ROWS, COLUMNS] as the tool decompresses it."""
    args = QuantizationArgs(**given)
    weight = torch.randn(ROWS, COLUMNS).mul_(0.02).add_(0.003).to(dtype)
    groups = weight.unflatten(1, (-1, args.group_size or COLUMNS))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    parts = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero.to(torch.int8)}
    parts = PackedQuantizationCompressor.compress(parts, scheme)
    dense = PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    written = json.loads(config.model_dump_json()) | {"version": version("compressed-tensors")}
    return written, parts, dense


def random_linear(bits: int, symmetric: bool, g_idx: Tensor) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a linear with weights that are exact codes, its scales (fp16) and its zero points, both [rows, groups]. No
    zero point is 0."""
    rows, groups = 32, int(g_idx.max()) + 1
    scale = (0.002 * (0.5 + torch.rand(rows, groups))).half()
    zero = torch.full((rows, groups), 1 << (bits - 1)) if symmetric else torch.randint(1, 1 << bits, (rows, groups))
    linear = nn.Linear(COLUMNS, rows, bias=False)
    codes = torch.randint(0, 1 << bits, (rows, COLUMNS))
    linear.weight.data = (codes - zero[:, g_idx]) * scale[:, g_idx].float()
    return linear, scale, zero


def by_gptqmodel(bits: int, group: int, symmetric: bool, kind: str, in_order: bool) -> tuple[dict, dict, Tensor]:
    g_idx = torch.arange(COLUMNS) // (COLUMNS if group == -1 else group)
    g_idx = (g_idx if in_order else g_idx[torch.randperm(COLUMNS)]).int()
    linear, scale, zero = random_linear(bits, symmetric, g_idx)
    packed = TorchLinear(bits, group, symmetric, not in_order, COLUMNS, linear.out_features)
    packed.pack(linear, scale.float(), zero.float(), g_idx)
    packed.post_init()
    dense = packed.dequantize_weight().t()
    config = QuantizeConfig(bits=bits, group_size=group, sym=symmetric, desc_act=not in_order, format=kind)
    if kind == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, config)
    written = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": not in_order}
    names = ("qweight", "qzeros", "scales", "g_idx")
    return written | {"checkpoint_format": kind}, {name: getattr(packed, name) for name in names}, dense


def by_autoawq(group: int) -> tuple[dict, dict, Tensor]:
    gemm = autoawq_gemm()
    linear, scale, zero = random_linear(4, False, torch.arange(COLUMNS) // (COLUMNS if group == -1 else group))
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, COLUMNS if group == -1 else group, False, scale.t(), zero.t())
    dense = gemm.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, packed.group_size).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return config, dict(packed.state_dict()), dense


@cache
def autoawq_gemm() -> ModuleType:
    """Import AutoAWQ's module without the imports of its packages, which need an older transformers."""
    (place,) = importlib.util.find_spec("awq").submodule_search_locations
    for name in ("awq", "awq.modules", "awq.modules.linear"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(Path(place, *name.split(".")[1:]))]
    return importlib.import_module("awq.modules.linear.gemm")


if __name__ == "__main__":
    main()
