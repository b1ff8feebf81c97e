"""Many prompts through one model: JSON lines in, JSON lines out."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle3.runner.contract.console import tell
from eagle3.runner.conversation import Conversation
from eagle3.runner.model import Model, Result
from eagle3.runner.prompts import Prompt, read_prompts
from eagle3.runner.statistics import GenerationStats


def run_batch(
    model: Model, file: Path, output: Path | None, chat: bool, system: str | None, options: dict[str, Any]
) -> None:
    """Each prompt of ``file`` with ``options`` and its own; a JSON line a result, written as soon as it is there.

    Args:
        file: see ``read_prompts``; "-" is stdin
        output: None: stdout
        chat: texts are turns of a conversation

    Raises ValueError for the first line that cannot be run, with its number; the results before it are kept.
    """
    prompts = read_prompts(None if str(file) == "-" else file)
    total = GenerationStats()
    with _opened(output) as results, progress() as bar:
        for prompt in bar.track(prompts, description="generating"):
            try:
                for turn, result in enumerate(answers(model, prompt, chat, system, options | prompt.options)):
                    record = {"line": prompt.line} | ({} if prompt.id is None else {"id": prompt.id}) | {"turn": turn}
                    results.write(json.dumps(record | result.as_json()) + "\n")
                    results.flush()
                    total.add(result.stats)
            except ValueError as error:
                raise ValueError(f"{file} line {prompt.line}: {error}") from error
    tell(
        f"{len(prompts)} prompts, {total.generation_tokens} tokens, {total.decode_tokens_per_second:.0f} tokens/s, "
        f"mean acceptance length {total.mean_acceptance_length:.2f}"
    )


def answers(model: Model, prompt: Prompt, chat: bool, system: str | None, options: dict[str, Any]) -> Iterator[Result]:
    """A result a turn. Raises ValueError for a turn that cannot be run."""
    if prompt.text is not None and (chat or prompt.further_turns):
        conversation = Conversation(model, system, **options)
        for turn in (prompt.text, *prompt.further_turns):
            yield conversation.ask(turn)
    else:
        yield model.generate(prompt.text or prompt.tokens or prompt.messages, **options)


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
    else:
        with output.open("w", encoding="utf-8") as file:
            yield file


def progress() -> Progress:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
