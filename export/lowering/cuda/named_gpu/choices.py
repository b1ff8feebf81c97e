"""Part 3: nothing can be timed, so Inductor's choices are made by its heuristics."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import joint_graph
from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplateCaller
from torch._inductor.virtualized import V

UNTIMED = {
    "compile_threads": 1,  # workers are processes of their own and know nothing of this substitution
    "fx_graph_cache": False,
    "joint_graph_constant_folding": False,  # reads the values of weights, which are fake
    "benchmark_epilogue_fusion": False,
    "shape_padding": False,
}


@contextmanager
def choices() -> Iterator[None]:
    """Within it, Inductor benchmarks nothing, and the code that would tune kernels runs on fake tensors."""
    run_block = PythonWrapperCodegen.generate_and_run_autotune_block
    init_patterns = joint_graph.lazy_init

    def run_block_on_fakes(self):
        with V.fake_mode:
            return run_block(self)

    def rank_by_order(self, name, nodes, layout, gens, key, choices, *args, **kwargs) -> dict:
        """Templates in the order that Inductor proposes them in, as if each took longer than the one before."""
        templates = [choice for choice in choices if isinstance(choice, TritonTemplateCaller)] or choices
        return {choice: float(rank + 1) for rank, choice in enumerate(templates)}

    with (
        config.patch(UNTIMED),
        patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", run_block_on_fakes),
        patch.object(AlgorithmSelectorCache, "do_autotuning", rank_by_order),
        # Patterns are traced once a process, on tensors of the device that is asked for.
        patch.object(joint_graph, "lazy_init", lambda device=None: init_patterns(torch.device("cpu"))),
    ):
        yield
