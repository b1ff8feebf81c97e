"""Gemma 4 assistants, the drafters that Google publishes beside the models (MTP in vLLM).

A head takes the embedding of the newest token and the target's final state before it. Its layers have queries alone:
they attend to the keys and values that the target keeps. So it has no cache, and nothing is seeded.
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
