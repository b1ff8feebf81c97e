"""Part 3: chooses matmul templates by estimates, because nothing can be timed.

Estimates the time of a matmul with each of Inductor's templates, from their tiles.

A block of the grid goes along K and loads ``stages - 1`` steps ahead. A step takes the longest of: the memory latency
divided by the steps in flight, the loads of all blocks of a multiprocessor, and their multiplications. Few rows
therefore need many bytes in flight, and many rows need large tiles. The constants are not exact and need not be,
because the times of templates differ by factors. At the rate of ``wgmma`` the choices for 32 to 2,048 rows are those at
the rate of ``mma.sync``: the loads of a step take longer than either.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import joint_graph
from torch._inductor.ir import ChoiceCaller
from torch._inductor.select_algorithm import TritonTemplateCaller
from torch._inductor.template_heuristics.triton import BaseConfigHeuristic, GemmConfig
from torch._inductor.virtualized import V

from eagle3.export.lowering.cuda.kernels.sums import note_given_up
from eagle3.export.patching.patches import all_replaced
from eagle3.runner.system.gpus import Gpu

INDUCTOR = "torch._inductor."

UNTIMED = {
    "compile_threads": 1,  # worker processes would not have these replacements
    "fx_graph_cache": False,
    "joint_graph_constant_folding": False,  # it would read the values of weights, which are fake
    "benchmark_epilogue_fusion": False,
    "shape_padding": False,
}


@contextmanager
def choices(*gpus: Gpu) -> Iterator[None]:
    """Make Inductor benchmark nothing, and run the code that would tune kernels on fake tensors."""
    run_block = PythonWrapperCodegen.generate_and_run_autotune_block
    init_patterns = joint_graph.lazy_init

    def run_block_on_fakes(self: PythonWrapperCodegen) -> object:
        with V.fake_mode:
            return run_block(self)

    def rank_by_estimate(
        _self: object,
        _name: str,
        _nodes: object,
        _layout: object,
        _gens: object,
        _key: object,
        choices: list[ChoiceCaller],
        *_args: object,
        **_kwargs: object,
    ) -> dict[ChoiceCaller, float]:
        templates = [choice for choice in choices if isinstance(choice, TritonTemplateCaller)]
        if not templates or any(choice.log_info.get("tile_shape", "None") == "None" for choice in templates):
            return {choice: float(rank + 1) for rank, choice in enumerate(templates or choices)}
        return ranked(templates, gpus)

    def with_more(self: BaseConfigHeuristic) -> Callable[..., Any]:
        return partial(self.preprocess_mm_configs, configs=self.mm_configs + MORE)

    with (
        config.patch(UNTIMED),
        all_replaced(
            {
                f"{INDUCTOR}codegen.wrapper.PythonWrapperCodegen.generate_and_run_autotune_block": run_block_on_fakes,
                f"{INDUCTOR}select_algorithm.AlgorithmSelectorCache.do_autotuning": rank_by_estimate,
                f"{INDUCTOR}template_heuristics.triton.BaseConfigHeuristic.get_mm_configs": with_more,
                # Patterns are traced once per process, on tensors of the requested device.
                f"{INDUCTOR}fx_passes.joint_graph.lazy_init": lambda _device=None: init_patterns(torch.device("cpu")),
            }
        ),
    ):
        yield


LATENCY = 800.0  # ns, the latency of a load from busy memory
BYTES, FLOPS = 36.0, 3500.0  # per nanosecond and multiprocessor: H200's memory, mma.sync in bfloat16
START = 3000.0  # ns, to start a kernel
BARRIER = 50.0  # ns per step of the loop
OTHER_REGISTERS = 64  # per thread, in addition to its accumulators
MORE = [
    GemmConfig(16, 32, 128, 4, 2),
    GemmConfig(16, 32, 128, 5, 2),
    GemmConfig(16, 64, 128, 4, 4),
    GemmConfig(16, 64, 128, 5, 4),
    GemmConfig(32, 64, 128, 4, 4),
    GemmConfig(128, 128, 64, 3, 8),
]
"""Tiles that are tried in addition to Inductor's own. Inductor has none for few rows with more than two stages of 128
columns."""


@dataclass(frozen=True)
class Tile:
    """A tile of the output [m, n], computed from ``k`` columns of the operands at a time."""

    m: int
    n: int
    k: int
    stages: int
    warps: int

    @classmethod
    def of(cls, choice: TritonTemplateCaller) -> "Tile":
        m, k, n = (int(size) for size in choice.log_info["tile_shape"].strip("()").split(","))
        return cls(m, n, k, choice.bmreq.num_stages, choice.bmreq.num_warps)


def nanoseconds(tile: Tile, sizes: tuple[int, int, int, int], itemsize: int, gpu: Gpu) -> float:
    """Estimate the time of a batched matmul of ``sizes`` (batch, M, N, K) with elements of ``itemsize`` bytes; infinite
    for a tile that does not fit ``gpu``."""
    batch, m, n, k = sizes
    loaded = (tile.m + tile.n) * tile.k * itemsize  # bytes per step
    shared = tile.stages * loaded
    registers = tile.m * tile.n // (32 * tile.warps) + OTHER_REGISTERS  # per thread
    if shared > gpu.shared_memory_per_block or registers > 255:
        return float("inf")
    blocks = batch * ceil(m / tile.m) * ceil(n / tile.n)
    together = min(gpu.resident(registers, shared, 32 * tile.warps), ceil(blocks / gpu.multiprocessors))
    ahead = tile.stages - 1 or 0.5  # with one stage nothing is multiplied while a step is loaded
    step = max(LATENCY / ahead, together * loaded / BYTES, together * 2 * tile.m * tile.n * tile.k / FLOPS)
    step += BARRIER
    waves = ceil(blocks / (gpu.multiprocessors * together))
    return START + waves * (ceil(k / tile.k) * step + LATENCY)


def ranked(choices: list[TritonTemplateCaller], gpus: Sequence[Gpu]) -> dict[TritonTemplateCaller, float]:
    """Map the templates of one matmul to their estimated times. With several GPUs that is the sum of their times, each
    as a multiple of that GPU's shortest."""
    hint = V.graph.sizevars.optimization_hint
    left, right = choices[0].input_nodes[-2:]
    *batch, m, n = (hint(size) for size in choices[0].layout.size)
    sizes = prod(batch), m, n, hint(left.get_size()[-1])
    itemsize = right.get_dtype().itemsize
    tiles = {choice: Tile.of(choice) for choice in choices}
    times = [{choice: nanoseconds(tile, sizes, itemsize, gpu) for choice, tile in tiles.items()} for gpu in gpus]
    if len(times) == 1:
        return times[0]
    lost = {choice: [each[choice] / min(each.values()) for each in times] for choice in choices}
    best = min(choices, key=lambda choice: sum(lost[choice]))
    named = dict(zip((f"sm_{gpu.arch}" for gpu in gpus), lost[best], strict=True))
    note_given_up(f"template of {m} x {n} x {sizes[3]}", named)
    return {choice: sum(each) for choice, each in lost.items()}
