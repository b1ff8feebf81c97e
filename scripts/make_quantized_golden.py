"""Make the golden fixtures under tests/golden_quantized/: linears as the tools of the hubs pack them.

Each case is a folder as a checkpoint's (config.json, model.safetensors) of linears with random weights, and
dense.safetensors, the weights that the tool itself makes of them. compressed-tensors' own compressor packs and unpacks.
It is wanted beside this project's environment, not in it:

    pip install --no-deps --target golden-packages compressed-tensors==0.20.0 loguru==0.7.3 psutil
    PYTHONPATH=golden-packages python scripts/make_quantized_golden.py --out tests/golden_quantized
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

ROWS, COLUMNS = 12, 256  # rows that do not fill a word of zero points
COMPRESSED_TENSORS = {
    "w4_g32": ({"num_bits": 4, "strategy": "group", "group_size": 32}, torch.bfloat16),
    "w4_g128": ({"num_bits": 4, "strategy": "group", "group_size": 128}, torch.float16),
    "w4_g64_asymmetric": ({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, torch.bfloat16),
    "w4_channel": ({"num_bits": 4, "strategy": "channel"}, torch.bfloat16),
    "w8_channel": ({"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "w8_g128_asymmetric": ({"num_bits": 8, "strategy": "group", "group_size": 128, "symmetric": False}, torch.float32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for number, (name, (args, dtype)) in enumerate(COMPRESSED_TENSORS.items()):
        torch.manual_seed(number)
        save(out / "compressed_tensors" / name, *by_compressed_tensors(QuantizationArgs(**args), dtype))


def by_compressed_tensors(args: QuantizationArgs, dtype: torch.dtype) -> tuple[dict, dict, torch.Tensor]:
    """quantization_config, the parts of a linear, and its weight [ROWS, COLUMNS] by the tool's own decompression."""
    weight = torch.randn(ROWS, COLUMNS).mul_(0.02).add_(0.003).to(dtype)
    groups = weight.unflatten(1, (-1, args.group_size or COLUMNS))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    given = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero.to(torch.int8)}
    parts = PackedQuantizationCompressor.compress(given, scheme)
    dense = PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    written = json.loads(config.model_dump_json()) | {"version": version("compressed-tensors")}
    return written, parts, dense


def save(folder: Path, config: dict, parts: dict, dense: torch.Tensor) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=2) + "\n")
    save_file({f"model.proj.{part}": value.contiguous() for part, value in parts.items()}, folder / "model.safetensors")
    save_file({"model.proj.weight": dense.contiguous()}, folder / "dense.safetensors")


if __name__ == "__main__":
    main()
