"""The measured configurations and their prompts, which are checked before the first one runs."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.runner.batch.batch import check_prompt, generate_turns
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


def check_greedy(workload: Workload) -> None:
    """Raise ValueError if transformers' greedy decoding is not the same computation."""
    if not all(options.plain and not options.stop for options in workload.all_options):
        raise ValueError(
            "--checkpoint compares with transformers' greedy decoding: leave --temperature, --repetition-penalty, "
            "--logit-bias and --stop out, in the prompts' own options too"
        )


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
