"""Part 3: chooses matmul templates by the estimates of ``matmuls``, because nothing can be timed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import joint_graph
from torch._inductor.ir import ChoiceCaller
from torch._inductor.select_algorithm import TritonTemplateCaller
from torch._inductor.template_heuristics.triton import BaseConfigHeuristic
from torch._inductor.virtualized import V

from eagle3.export.lowering.cuda.named_gpu.matmuls import MORE, ranked
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
def choices(gpu: Gpu) -> Iterator[None]:
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
        return ranked(templates, gpu)

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
