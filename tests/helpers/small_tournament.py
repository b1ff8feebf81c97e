"""Lists the linears of a small kernel tournament, with names like those of Gemma 4 31B."""

from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH

LINEARS = {"gate_up": (512, 512, GELU_TANH), "down": (128, 768, "")}
