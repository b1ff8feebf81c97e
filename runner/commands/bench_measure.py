"""Checks the prompts for all configurations, then runs each prompt through every configuration in turn: a speedup is a
ratio within such a run."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from eagle3.runner.commands.batch import check_prompt, generate_turns
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.loop.step_times import session_steps, step_milliseconds
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.text.prompts import Prompt, read_prompts


@dataclass(frozen=True)
class Workload:
    """The input of every configuration: the prompts of ``file``, and ``options`` (``eagle3.runner.options``) for all
    prompts that do not set their own. ``chat``: texts are put into the chat template."""

    file: Path
    prompts: Sequence[Prompt]
    options: dict[str, Any]
    chat: bool

    @property
    def all_options(self) -> list[Options]:
        """The options of each prompt. Raises ValueError for invalid ones."""
        return [self._checked(prompt) for prompt in self.prompts]

    @property
    def decoding(self) -> str:
        return "sampling" if any(options.temperature for options in self.all_options) else "greedy decoding"

    def _checked(self, prompt: Prompt) -> Options:
        try:
            return Options.of(**prompt.own_options(self.options))
        except ValueError as error:
            raise ValueError(f"{self.file} line {prompt.line}: {error}") from error


@dataclass(frozen=True)
class Configuration:
    """A configuration: an artifact, under the name that the user gave, the number of draft tokens per round, and
    whether the lookup proposes too."""

    artifact: str
    model: Model
    chain_len: int | str
    ngram: bool = False

    def complete(self, workload: Workload, prompt: Prompt) -> list[Result]:
        """Run a prompt and return the result of each turn. Nothing of an earlier prompt is reused."""
        self.model.forget()
        return list(generate_turns(self.model, prompt, workload.chat, None, self.options(workload, prompt)))

    def options(self, workload: Workload, prompt: Prompt) -> dict[str, Any]:
        return prompt.own_options(workload.options) | {"chain_len": self.chain_len, "ngram": self.ngram}


def make_workload(file: Path, options: dict[str, Any], chat: bool) -> Workload:
    """Read the prompts. If anything is sampled and no seed is given, a seed is drawn for all configurations.

    Raises ValueError for a line that is not a prompt, and for invalid options of a prompt.
    """
    prompts = read_prompts(None if str(file) == "-" else file)
    workload = Workload(file, prompts, options, chat)
    if all(asked.plain for asked in workload.all_options):
        return workload
    return replace(workload, options={"seed": secrets.randbits(32)} | options)


def configurations_of(
    artifact: str, model: Model, lengths: Sequence[int | str] | None, ngram: bool = False
) -> list[Configuration]:
    """Return the configurations of an artifact: without speculation first, then each chain length (None: the
    artifact's own); with ``ngram`` the same with the lookup."""
    lengths = [model.metadata.chain_len] if lengths is None else lengths
    lookups = (False, True) if ngram else (False,)
    return [
        Configuration(artifact, model, length, lookup) for lookup in lookups for length in dict.fromkeys((0, *lengths))
    ]


def check_configurations(configurations: Sequence[Configuration], workload: Workload) -> None:
    """Raise ValueError for the first prompt that a configuration cannot run."""
    for prompt in workload.prompts:
        for configuration in configurations:
            try:
                check_prompt(configuration.model, prompt, workload.chat, None, configuration.options(workload, prompt))
            except ValueError as error:
                raise ValueError(f"{configuration.artifact}: {workload.file} line {prompt.line}: {error}") from error


def check_same_tokens(one: Configuration, other: Configuration) -> None:
    """Raise ValueError if the same token ids have different meanings in the two artifacts."""
    advice = "--compare takes artifacts of one target with different quantization or draft heads"
    sizes = [configuration.model.metadata.vocab_size for configuration in (one, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{one.artifact} has a vocabulary of {sizes[0]} tokens, {other.artifact} one of {sizes[1]}: {advice}"
        )
    if one.model.has_text and other.model.has_text:
        ours, theirs = (configuration.model.text.tokenizer.get_vocab() for configuration in (one, other))
        if differing := sorted(ours.items() ^ theirs.items()):
            token = differing[0][0]
            raise ValueError(
                f"the tokenizers of {one.artifact} and {other.artifact} differ ({token!r} is {ours.get(token)} and "
                f"{theirs.get(token)}): {advice}"
            )


def with_contexts(workload: Workload, lengths: Sequence[int], models: Sequence[Model]) -> Workload:
    """Return a workload that has, for each prompt of ``workload``, one prompt of each length in tokens, which is its
    category. The prompt comes first, then the others in turn, then its first half again: what likely follows stands
    near the beginning of the context.

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


@dataclass(frozen=True)
class Completion:
    """A completion. ``turn`` counts from 0."""

    prompt: Prompt
    turn: int
    result: Result


@dataclass(frozen=True)
class Outcome:
    """The completions of a configuration: for each pass those of all prompts, in the order of the prompts."""

    configuration: Configuration
    passes: list[list[Completion]] = field(default_factory=list)

    @property
    def completions(self) -> list[Completion]:
        """The completions of all passes."""
        return sum(self.passes, [])

    def stats(self, category: str | None = None) -> list[GenerationStats]:
        """Return the statistics of each pass, over all prompts or those of one category."""
        return [
            total(a.result.stats for a in completions if category in (None, a.prompt.category))
            for completions in self.passes
        ]


def total(stats: Iterable[GenerationStats]) -> GenerationStats:
    summed = GenerationStats()
    for each in stats:
        summed.add(each)
    return summed


def measure(
    configurations: Sequence[Configuration], workload: Workload, repeats: int, advance: Callable[[], None]
) -> tuple[list[Outcome], list[dict[str, float]]]:
    """Run all prompts ``repeats`` times, each prompt through every configuration in turn, after a warm-up prompt.

    Returns the outcome of each configuration, and for each pass ``step_milliseconds`` of the first one's session.
    """
    session = configurations[0].model.session
    steps, step_ms = session_steps(session), []
    for configuration in configurations:
        configuration.complete(workload, workload.prompts[0])
    step_milliseconds(steps, repeats=10)
    outcomes = [Outcome(configuration) for configuration in configurations]
    for _ in range(repeats):
        for outcome in outcomes:
            outcome.passes.append([])
        for prompt in workload.prompts:
            for outcome in outcomes:
                results = outcome.configuration.complete(workload, prompt)
                outcome.passes[-1] += [Completion(prompt, turn, result) for turn, result in enumerate(results)]
                advance()
        step_ms.append(step_milliseconds(steps))
    return outcomes, step_ms
