"""MLP speculators, which IBM publishes as accelerators. Each proposal has a stage, which turns the previous state and
the embedding of the previous token into the next state. There is no attention, so no cache and no seeding."""

from eagle3.export.draft.common.kind import Kind

MLP_SPECULATOR = "MLP speculator"
_PARTS = "eagle3.export.draft.kinds.mlp_speculator.parts"

KINDS: dict[str, Kind] = {
    MLP_SPECULATOR: Kind(
        "the target's final state; no cache; all proposals in one step",
        _PARTS,
        published=("ibm-ai-platform/llama3-8b-accelerator",),
        model_types=("mlp_speculator",),
        architectures="MLPSpeculator",
    ),
}
