"""Make the golden fixtures under tests/golden/floats/: linears in NVFP4 and FP8 as quantization tools store them.

Each case is a folder with a checkpoint (config.json, model.safetensors) of a linear with random weights, and
dense.safetensors, the weight as the tool itself dequantizes it: compressed-tensors' compressors, Model Optimizer's
NVFP4QTensor. Install the tools beside this project's environment, not in it:

    pip install --no-deps --target golden-packages compressed-tensors==0.20.0 loguru==0.7.3 psutil \\
        nvidia-modelopt==0.47.0 omegaconf pyyaml antlr4-python3-runtime==4.9.3 pulp nvidia-ml-py rich scipy
    PYTHONPATH=golden-packages python scripts/golden/make_float_golden.py --out tests/golden/floats
"""

import json

import torch
from case import arguments, save_linear
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from torch import Tensor

ROWS, COLUMNS = 12, 96
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"}
COMPRESSED_TENSORS = {
    "fp8_tensor": FP8 | {"strategy": "tensor"},
    "fp8_row": FP8 | {"strategy": "channel"},
    "fp8_block": FP8 | {"strategy": "block", "block_structure": [8, 32]},
    "nvfp4": NVFP4,
}


def main() -> None:
    out = arguments("floats").out
    torch.manual_seed(0)
    for name, args in COMPRESSED_TENSORS.items():
        save_linear(out / name, *by_compressed_tensors(QuantizationArgs(**args)))
    save_linear(out / "modelopt_nvfp4", *by_model_optimizer())


def by_compressed_tensors(args: QuantizationArgs) -> tuple[dict, dict[str, Tensor], Tensor]:
    """Return quantization_config, the parts of a linear, and its weight [ROWS, COLUMNS] as the tool dequantizes it."""
    weight = torch.randn(ROWS, COLUMNS) * 0.02
    whole = generate_gparam(weight.min(), weight.max()) if args.num_bits == 4 else None
    blocks = {"tensor": (ROWS, COLUMNS), "channel": (1, COLUMNS), "block": (8, 32), "tensor_group": (1, 16)}
    rows, columns = blocks[args.strategy]
    # the last block of a column may be lower
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -ROWS % rows))
    grouped = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale, _ = calculate_qparams(grouped.amin((1, 3)), grouped.amax((1, 3)), args, global_scale=whole)
    kind = "nvfp4-pack-quantized" if args.num_bits == 4 else "float-quantized"
    compressor = NVFP4PackedCompressor if args.num_bits == 4 else NaiveQuantizationCompressor
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
    given = {"weight": weight, "weight_scale": scale}
    given |= {} if whole is None else {"weight_global_scale": whole.reshape(1)}
    parts = compressor.compress(given, scheme)
    dense = compressor.decompress(dict(parts), scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status=QuantizationStatus.COMPRESSED
    )
    return json.loads(config.model_dump_json()), parts, dense


def by_model_optimizer() -> tuple[dict, dict[str, Tensor], Tensor]:
    packed, scale, whole = NVFP4QTensor.quantize(torch.randn(ROWS, COLUMNS) * 0.02, 16)
    dense = packed.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    parts = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
    parts["input_scale"] = torch.tensor(0.01)
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}, parts, dense


if __name__ == "__main__":
    main()
