"""The targets that ``eagle3-export --target-model`` knows.

Adding one is a file and a line. The file is a family: ``skeleton`` and ``load``, which returns a ``TapTarget``
(``spec.py``); a model made of transformers' decoder layers needs none, ``decoder_layers.py`` adapts those as they are.
The line goes into ``TARGETS``; ``--list-targets`` and the choices of the command line read it from there.
"""

from eagle3.targets.spec import SHIPPED, TapTarget, TargetSpec

TARGETS: dict[str, TargetSpec] = {
    "gemma4-31B": TargetSpec("Gemma 4 31B, text only", "eagle3.targets.gemma4", model_types=("gemma4_text",)),
    "gemma4-tiny": TargetSpec(
        "5.3 M parameters of Gemma 4 trained on Python's standard library; shipped, with its draft head",
        "eagle3.targets.gemma4",
        model_types=("gemma4_text",),
        checkpoint=SHIPPED / "gemma4_tiny" / "target",
        draft=SHIPPED / "gemma4_tiny" / "draft",
        max_seq_len=1024,
    ),
    "llama3.1-8B": TargetSpec("Llama 3.1 8B", "eagle3.targets.decoder_layers", model_types=("llama",)),
    "qwen3-4B": TargetSpec("Qwen3 4B", "eagle3.targets.decoder_layers", model_types=("qwen3",)),
}

__all__ = ["TARGETS", "TapTarget", "TargetSpec"]
