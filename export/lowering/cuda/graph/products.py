"""The registry of matmuls, which dispatch, checks, gates and requests to L2 read."""

from torchao.quantization import IntxUnpackedToInt8Tensor

from eagle3.export.lowering.cuda.kernels.bf16 import bf16_small_m
from eagle3.export.lowering.cuda.kernels.int4.layouts import LAYOUTS
from eagle3.export.lowering.cuda.kernels.int8_experts import int8_experts_small_m
from eagle3.export.lowering.cuda.kernels.int8_matmul import int8_matmul
from eagle3.export.lowering.cuda.kernels.k_quant_matmul import k_quant_matmul
from eagle3.export.lowering.cuda.kernels.k_quants import k_quant_small_m
from eagle3.export.lowering.cuda.kernels.product import Product
from eagle3.export.lowering.cuda.kernels.small_m import int8_small_m
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor

BF16 = Product(None, bf16_small_m, None, lambda weight: (weight,), gate="tile", asks_l2=True)
QUANTIZED = (
    *(layout.product for layout in LAYOUTS.values()),
    Product(
        IntxUnpackedToInt8Tensor,
        int8_small_m,
        int8_matmul,
        lambda weight: (weight.qdata, weight.scale, weight.zero_point),
    ),
    Product(KQuantTensor, k_quant_small_m, k_quant_matmul, lambda weight: weight.parts),
)
PRODUCTS = (BF16, *QUANTIZED)
OF_EXPERTS = (int8_experts_small_m,)
"""Operators over the quantized weights of experts, which the experts' modules call themselves."""


def targets(products: tuple[Product, ...]) -> dict[str, Product]:
    """Map the target of each product's node of few rows, as a traced graph names it, to the product."""
    return {f"{product.few_name.replace('::', '.')}.default": product for product in products}
