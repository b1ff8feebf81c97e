"""Makes prompts of a given length whose end repeats their beginning.

A prompt of the file comes first, then the others in turn until the context is nearly full, then the first half of the
prompt again. The likely continuation is the second half of that prompt, which stands near the beginning of the context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

from eagle3.runner.bench.configurations import Workload
from eagle3.runner.model import Model
from eagle3.runner.text.prompts import Prompt


def with_contexts(workload: Workload, lengths: Sequence[int], models: Sequence[Model]) -> Workload:
    """Return a workload that has, for each prompt of ``workload``, one prompt of each length. A prompt's category is
    its length.

    Raises ValueError for a dialogue, for too few prompts, and for a length that a model has no room for or that is too
    short for a prompt.
    """
    if workload.chat or any(prompt.messages or prompt.further_turns for prompt in workload.prompts):
        raise ValueError(f"{workload.file}: --context makes prompts of plain text: leave --chat and dialogues out")
    if len(workload.prompts) < 2:
        raise ValueError(
            f"{workload.file} has one prompt: --context fills the context with the others, give more lines"
        )
    new_tokens = max(options.max_new_tokens for options in workload.all_options)
    for model in models:
        if lengths[-1] + new_tokens > model.metadata.max_seq_len:
            raise ValueError(
                f"a context of {lengths[-1]} and {new_tokens} new tokens pass the artifact's "
                f"{model.metadata.max_seq_len} slots: give a shorter --context or --max-new-tokens, or export with a "
                "larger --max-seq-len"
            )
    return replace(workload, prompts=list(_long(workload, lengths, models[0])))


def _long(workload: Workload, lengths: Sequence[int], model: Model) -> Iterator[Prompt]:
    metadata, prompts = model.metadata, workload.prompts
    encoded = [model.encode(prompt.first_turn) for prompt in prompts]
    texts = [tokens[1:] if tokens[0] == metadata.bos_id else tokens for tokens in encoded]
    for prompt, own in zip(prompts, texts, strict=True):
        if not own:
            raise ValueError(f"{workload.file} line {prompt.line} is empty but for the token that begins a text")
    for length in lengths:
        for index, (prompt, own) in enumerate(zip(prompts, texts, strict=True)):
            begin = encoded[index][: len(encoded[index]) - len(own)]
            asked = own[: (len(own) + 1) // 2]
            room = length - len(begin) - len(own) - len(asked)
            if room < 0:
                raise ValueError(
                    f"{workload.file} line {prompt.line} has {len(own)} tokens, too many for a context of {length} "
                    "that repeats half of them: give a longer --context"
                )
            others = (token for text in cycle([*texts[index + 1 :], *texts[:index]]) for token in text)
            tokens = [*begin, *own, *islice(others, room), *asked]
            yield replace(prompt, text=None, tokens=tokens, category=str(length))
