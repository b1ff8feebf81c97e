"""Runs a file of prompts through one model: JSON lines in, JSON lines out.

1. All lines are read and checked. Each line that cannot be run is reported before anything is computed.
2. The results that ``--output`` already holds are kept.
3. The other prompts are run. Each result is written as soon as it is complete.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle3.runner.commands.batch_output import opened, read_earlier, request_digest
from eagle3.runner.commands.printing import table
from eagle3.runner.conversation import Conversation
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.system.command import one_line, tell
from eagle3.runner.system.text_input import source_name
from eagle3.runner.text.prompts import Fault, Prompt, read_lines

MOST_REPORTED = 20
"""The most errors of lines that are reported one by one."""
KEEP_GOING = "--keep-going runs the other prompts"


@dataclass(frozen=True)
class Batch:
    """Checks and runs the prompts of a file. ``options`` (``eagle3.runner.options``) apply to all prompts that do not
    set their own. ``chat``: texts are turns of a conversation that begins with the system prompt ``system``."""

    model: Model
    chat: bool
    system: str | None
    options: dict[str, Any]

    def check(self, prompt: Prompt) -> str:
        """Check a prompt and return its ``request_digest``. Raises ValueError if the prompt cannot be run."""
        options = prompt.own_options(self.options)
        check_prompt(self.model, prompt, self.chat, self.system, options)
        template = [self.chat, self.system] if prompt.text is not None else None
        return request_digest(self.model.metadata, prompt, template, Options.of(**options))

    def run(self, prompts: Sequence[Prompt], replies: Mapping[int, Sequence[str | None]]) -> Iterator["Outcome"]:
        """Generate the missing turns of each prompt, in order. ``replies``: the turns that are known, by line."""
        for prompt in prompts:
            turn = len(known := replies.get(prompt.line, []))
            options = prompt.own_options(self.options)
            try:
                for result in generate_turns(self.model, prompt, self.chat, self.system, options, known):
                    yield Outcome(prompt, turn, result)
                    turn += 1
            except (ValueError, RuntimeError) as error:
                yield Outcome(prompt, turn, error)


@dataclass(frozen=True)
class Outcome:
    """The result of a turn of a prompt, or the reason why this turn and later ones have none."""

    prompt: Prompt
    turn: int
    result: Result | ValueError | RuntimeError

    @property
    def is_last(self) -> bool:
        return self.turn == len(self.prompt.further_turns) or isinstance(self.result, Exception)


Compute = Callable[[Batch, Sequence[Prompt], Mapping[int, Sequence[str | None]]], Iterator[Outcome]]
"""A function like ``Batch.run`` that computes anywhere and in any order."""


def run_batch(
    model: Model,
    file: Path,
    output: Path | None,
    chat: bool,
    system: str | None,
    options: dict[str, Any],
    keep_going: bool = False,
    show_stats: bool = False,
    compute: Compute | None = None,
) -> None:
    """Run the prompts of ``file`` whose results are not yet in ``output``.

    Args:
        file: see ``read_prompts``; "-" is stdin
        output: the file that results are appended to; None is stdout
        chat: texts are turns of a conversation
        options: generation options of all prompts; ``seed`` is mixed with each prompt's line (``Prompt.own_options``)
        keep_going: skip the prompts that cannot be run
        show_stats: print where the time went
        compute: the function that runs the prompts; None runs them through ``model``, one after the other

    Raises:
        ValueError: a line cannot be run (raised before anything is computed); a prompt fails (the results before it are
            kept); with ``keep_going``, any prompt failed (raised at the end); ``output`` holds other results
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
        if missing and compute is None:
            _ = model.session  # loads the methods here, so that an error in them is not reported for a prompt
        going = bar.add_task("generating", total=len(missing))
        for outcome in (compute or Batch.run)(batch, missing, earlier.texts) if missing else ():
            prompt, result = outcome.prompt, outcome.result
            if isinstance(result, Exception):
                reason = f"{name} line {prompt.line}: {one_line(result)}"
                if not keep_going:
                    raise ValueError(f"{reason} ({KEEP_GOING})") from result
                tell(f"Error: {reason}")
                failed, done = failed + 1, done - 1
            else:
                record: dict[str, Any] = {"line": prompt.line} | ({} if prompt.id is None else {"id": prompt.id})
                record |= {"turn": outcome.turn, "request": digests[prompt.line]} | result.as_json()
                results.write(json.dumps(record) + "\n")
                results.flush()
                total.add(result.stats)
            bar.advance(going, outcome.is_last)
    _tell_total(total, done, sum(map(bool, earlier.texts.values())), output)
    if show_stats and total.generations:
        tell(table(total))
    if failed:
        raise ValueError(f"{failed} of {len(lines)} prompts of {name} could not be run: see the errors above")


def _checked(batch: Batch, lines: Sequence[Prompt | Fault]) -> tuple[list[Prompt], dict[int, str], list[Fault]]:
    """Return the prompts that can be run, their digests by line, and the faults of the other lines."""
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
    """Report the faults. Raises ValueError unless ``keep_going``; a single fault is then the message itself."""
    errors = [f"{name} line {fault.line}: {fault.reason}" for fault in faults]
    if len(errors) == 1 and not keep_going:
        raise ValueError(f"{errors[0]} (nothing was run; {KEEP_GOING})")
    for line in errors[:MOST_REPORTED]:
        tell(f"Error: {line}")
    if len(errors) > MOST_REPORTED:
        tell(f"Error: {len(errors) - MOST_REPORTED} more lines of {name} cannot be run")
    if not keep_going:
        raise ValueError(f"{len(errors)} of {count} prompts of {name} cannot be run (nothing was run; {KEEP_GOING})")


def _tell_total(total: GenerationStats, done: int, before: int, output: Path | None) -> None:
    parts = [f"{done} prompts"]
    if before:
        parts.append(f"{before} of them in {output} before")
    if total.generations:
        rate, length = total.decode_tokens_per_second, total.mean_acceptance_length
        parts += [f"{total.generation_tokens} tokens", f"{rate:.0f} tokens/s", f"mean acceptance length {length:.2f}"]
    tell(", ".join(parts))


def check_prompt(model: Model, prompt: Prompt, chat: bool, system: str | None, options: dict[str, Any]) -> None:
    """Raise ValueError if a prompt cannot be run, FileNotFoundError if it is text and the artifact has no tokenizer.

    A dialogue is checked twice: its first turn alone, and all turns with replies of one character.
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


def generate_turns(
    model: Model,
    prompt: Prompt,
    chat: bool,
    system: str | None,
    options: dict[str, Any],
    replies: Sequence[str | None] = (),
) -> Iterator[Result]:
    """Yield the result of each turn after those whose ``replies`` are known. Raises ValueError if a turn cannot be
    run."""
    if prompt.text is not None and (chat or prompt.further_turns):
        conversation = Conversation(model, system, **options)
        turns = [prompt.text, *prompt.further_turns]
        for turn, reply in zip(turns, replies, strict=False):
            conversation.messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
        for turn in turns[len(replies) :]:
            yield conversation.ask(turn)
    else:
        yield model.generate(prompt.first_turn, **options)


def progress() -> Progress:
    """Return a progress bar on stderr; it is disabled if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
