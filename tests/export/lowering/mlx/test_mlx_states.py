"""Targets whose layers keep a state are one delegate for MLX, whose rows roll back as those of the eager module."""

from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="pip install 'mlx[cpu]' computes programs for MLX")

from family_configs import family_config  # noqa: E402 - without MLX it is not needed
from transformers import AutoModelForCausalLM  # noqa: E402

from eagle3.export import ExportConfig  # noqa: E402
from eagle3.export.lowering.backend import load_backend  # noqa: E402
from eagle3.export.lowering.mlx.exact import compare  # noqa: E402
from eagle3.export.lowering.mlx.program import methods  # noqa: E402
from eagle3.export.output.contents import write_files  # noqa: E402
from eagle3.export.pipeline import load_speculator, make_metadata, trace  # noqa: E402
from eagle3.export.planning.plan import make_plan  # noqa: E402
from eagle3.export.twin.randomize import randomize  # noqa: E402
from eagle3.runner.contract import PREFILL, TARGET_ROWS  # noqa: E402
from eagle3.targets.spec import ROLLBACK_ROWS, is_recurrent  # noqa: E402

LAYERS = {
    "qwen3_5_text": {"layer_types": ["linear_attention"]},
    "lfm2": {"layer_types": ["conv"]},
    "falcon_h1": {},
    "kimi_linear": {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]},
}
"""The fields of a configuration of one layer. Falcon-H1's has attention too."""


@pytest.mark.first(1)
@pytest.mark.parametrize("family", LAYERS)
def test_rows_of_a_layer_with_a_state_roll_back_as_those_of_the_eager_module(family, tmp_path):
    described = family_config(family)
    for field, value in (LAYERS[family] | {"num_hidden_layers": 1}).items():
        setattr(described, field, value)
    model = AutoModelForCausalLM.from_config(described).eval().requires_grad_(False)
    randomize(model, seed=5)
    model.save_pretrained(tmp_path / "target")
    config = ExportConfig(checkpoint=tmp_path / "target", draft=Path("none"), backend="mlx", max_seq_len=128, fit=False)
    plan, backend = make_plan(config), load_backend("mlx")
    recurrent = is_recurrent(plan.target_config)
    assert recurrent == (family != "lfm2")
    assert (plan.method(PREFILL).min_len, plan.method(PREFILL).max_len) == (1, ROLLBACK_ROWS if recurrent else 127)
    speculator = load_speculator(plan, backend.attention, backend.dtype, backend.conversion(plan))
    (method,) = plan.programs
    with backend.tracing(speculator, plan):
        program = trace(speculator, method, 0, backend.dtype)
    metadata = make_metadata(plan, {})
    files, _ = backend.lower({TARGET_ROWS: program}, metadata.constant_methods(), plan)
    write_files(files, tmp_path)
    loaded = methods(tmp_path / "model.pte")
    assert compare(loaded, speculator, metadata) < 1e-4
    graph = loaded[TARGET_ROWS].graph
    chain = graph["instruction_chains"][graph["main_chain_idx"]]["instructions"]
    chain.remove(next(each for each in chain if each["op_type"] == "IndexCopyNode"))  # the first ring
    with pytest.raises(ValueError, match="differs from the eager module"):
        compare(loaded, speculator, metadata)
