"""Gemma 4 assistants, the drafters that Google publishes beside the models (MTP in vLLM).

A head takes the embedding of the newest token and the target's final state at the position before it. Its layers have
only queries, which attend to the keys and values in the target's caches. So it has no cache and needs no seeding.
"""

from eagle3.export.draft.common.kind import Kind

GEMMA4_ASSISTANT = "Gemma 4 assistant"
_PARTS = "eagle3.export.draft.kinds.gemma4_assistant.parts"

KINDS: dict[str, Kind] = {
    GEMMA4_ASSISTANT: Kind(
        "the target's final state and KV caches; no cache; a step for each proposal",
        _PARTS,
        published=tuple(f"google/gemma-4-{size}-it-assistant" for size in ("31B", "E2B", "E4B", "26B-A4B")),
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        architectures="^Gemma4(Unified)?Assistant",
    ),
}
