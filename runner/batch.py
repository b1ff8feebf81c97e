"""Many prompts through one model: JSON lines in, JSON lines out.

1. All lines are read and checked: what cannot be run is told, a line each, before anything is computed.
2. What ``--output`` holds already is left as it is.
3. The other prompts are run; each result is written as soon as it is there.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle3.runner.batch_output import opened, read_earlier, request_digest
from eagle3.runner.console.command import one_line, tell
from eagle3.runner.console.text_input import source_name
from eagle3.runner.conversation import Conversation
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.prompts import Fault, Prompt, read_lines
from eagle3.runner.statistics import GenerationStats
from eagle3.runner.summary import table

MOST_TOLD = 20
"""Lines that cannot be run are told one by one up to so many."""
KEEP_GOING = "--keep-going runs the other prompts"


@dataclass(frozen=True)
class Batch:
    """What is asked of a model: the prompts of a file, with ``options`` (``eagle3.runner.options``) and their own.
    ``chat``: texts are turns of a conversation, behind the system prompt ``system``."""

    model: Model
    chat: bool
    system: str | None
    options: dict[str, Any]

    def check(self, prompt: Prompt) -> str:
        """Returns ``request_digest``. Raises ValueError for a prompt that cannot be run."""
        options = prompt.own_options(self.options)
        check_prompt(self.model, prompt, self.chat, self.system, options)
        template = [self.chat, self.system] if prompt.text is not None else None
        return request_digest(self.model.metadata, prompt, template, Options.of(**options))

    def answers(self, prompt: Prompt, said: Sequence[str | None]) -> Iterator[Result]:
        return answers(self.model, prompt, self.chat, self.system, prompt.own_options(self.options), said)


def run_batch(
    model: Model,
    file: Path,
    output: Path | None,
    chat: bool,
    system: str | None,
    options: dict[str, Any],
    keep_going: bool = False,
    show_stats: bool = False,
) -> None:
    """Run the prompts of ``file`` that ``output`` has no results of.

    Args:
        file: see ``read_prompts``; "-" is stdin
        output: results are appended; None: stdout
        chat: texts are turns of a conversation
        options: of all prompts; ``seed`` is mixed with each prompt's line (``Prompt.own_options``)
        keep_going: run what can be run
        show_stats: tell where the time went

    Raises:
        ValueError: a line that cannot be run, before anything is computed, or that fails later, the results before it
            are kept; with ``keep_going`` at the end, where any failed; an ``output`` that holds anything else
    """
    batch, source = Batch(model, chat, system, options), None if str(file) == "-" else file
    lines = read_lines(source)
    prompts, digests, faults = _checked(batch, lines)
    name = source_name(source)
    if faults:
        _tell_faults(name, faults, len(lines), keep_going)
    earlier = read_earlier(output, digests)
    total, failed, done = GenerationStats(), len(faults), len(prompts)
    missing = [each for each in prompts if len(earlier.texts.get(each.line, [])) <= len(each.further_turns)]
    with opened(output, earlier) as results, progress() as bar:
        if missing:
            _ = model.session  # what does not load is no prompt's fault
        for prompt in bar.track(missing, description="generating"):
            said = earlier.texts.get(prompt.line, [])
            try:
                for turn, result in enumerate(batch.answers(prompt, said), len(said)):
                    record = {"line": prompt.line} | ({} if prompt.id is None else {"id": prompt.id}) | {"turn": turn}
                    record |= {"request": digests[prompt.line]} | result.as_json()
                    results.write(json.dumps(record) + "\n")
                    results.flush()
                    total.add(result.stats)
            except (ValueError, RuntimeError) as error:
                reason = f"{name} line {prompt.line}: {one_line(error)}"
                if not keep_going:
                    raise ValueError(f"{reason} ({KEEP_GOING})") from error
                tell(f"Error: {reason}")
                failed, done = failed + 1, done - 1
    _tell_total(total, done, sum(map(bool, earlier.texts.values())), output)
    if show_stats and total.generations:
        tell(table(total))
    if failed:
        raise ValueError(f"{failed} of {len(lines)} prompts of {name} could not be run, as was told above")


def _checked(batch: Batch, lines: Sequence[Prompt | Fault]) -> tuple[list[Prompt], dict[int, str], list[Fault]]:
    """The prompts that can be run, their digests by line, and why the other lines cannot."""
    prompts, digests, faults = [], {}, []
    for each in lines:
        try:
            if isinstance(each, Fault):
                raise ValueError(each.reason)
            digests[each.line] = batch.check(each)
            prompts.append(each)
        except (ValueError, FileNotFoundError) as error:
            faults.append(Fault(each.line, one_line(error)))
    return prompts, digests, faults


def _tell_faults(name: str, faults: Sequence[Fault], count: int, keep_going: bool) -> None:
    """Raises ValueError unless the others are to be run; it is the only line where there is one fault."""
    told = [f"{name} line {fault.line}: {fault.reason}" for fault in faults]
    if len(told) == 1 and not keep_going:
        raise ValueError(f"{told[0]} (nothing was run; {KEEP_GOING})")
    for line in told[:MOST_TOLD]:
        tell(f"Error: {line}")
    if len(told) > MOST_TOLD:
        tell(f"Error: {len(told) - MOST_TOLD} more lines of {name} cannot be run")
    if not keep_going:
        raise ValueError(f"{len(told)} of {count} prompts of {name} cannot be run (nothing was run; {KEEP_GOING})")


def _tell_total(total: GenerationStats, done: int, before: int, output: Path | None) -> None:
    parts = [f"{done} prompts"]
    if before:
        parts.append(f"{before} of them in {output} before")
    if total.generations:
        rate, length = total.decode_tokens_per_second, total.mean_acceptance_length
        parts += [f"{total.generation_tokens} tokens", f"{rate:.0f} tokens/s", f"mean acceptance length {length:.2f}"]
    tell(", ".join(parts))


def check_prompt(model: Model, prompt: Prompt, chat: bool, system: str | None, options: dict[str, Any]) -> None:
    """Raises ValueError for a prompt that cannot be run, FileNotFoundError for text without a tokenizer.

    Of a dialogue that is so of its first turn, and of all turns where answers take a character each.
    """
    if prompt.text is None or not (chat or prompt.further_turns):
        model.stream(prompt.first_turn, **options)
        return
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt.text})
    model.stream(messages, **options)
    for turn in prompt.further_turns:
        messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": turn}]
    if prompt.further_turns:
        model.stream(messages, **options)


def answers(
    model: Model,
    prompt: Prompt,
    chat: bool,
    system: str | None,
    options: dict[str, Any],
    said: Sequence[str | None] = (),
) -> Iterator[Result]:
    """A result a turn, behind the turns whose answers are ``said``. Raises ValueError for a turn that cannot be run."""
    if prompt.text is not None and (chat or prompt.further_turns):
        conversation = Conversation(model, system, **options)
        turns = [prompt.text, *prompt.further_turns]
        for turn, answer in zip(turns, said, strict=False):
            conversation.messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        for turn in turns[len(said) :]:
            yield conversation.ask(turn)
    else:
        yield model.generate(prompt.first_turn, **options)


def progress() -> Progress:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
