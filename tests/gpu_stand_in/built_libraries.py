"""A record of a launch, as an export writes it."""


def launch(**changed):
    return {
        "kernel": "int4_small_m_kernel_0", "grid": [400, 1, 1], "threads": 128, "shared_bytes": 40 << 10,
        "weight_bytes": 10**9, "buffer_bytes": [], "arguments": {}, "count": 2,
        "constants": {"N": 32000, "K": 256, "BLOCK_N": 64, "BLOCK_K": 128, "BLOCK_M": 1},  # 1,000 iterations
    } | changed  # fmt: skip
