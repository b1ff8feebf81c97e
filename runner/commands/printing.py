"""Prints a generation's text while it is generated, and formats its statistics for a person."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Piece, Result


def print_pieces(model: Model, pieces: Iterable[Piece], written: Callable[[Piece], str]) -> None:
    """Print ``written(piece)`` for each piece of the model, and the progress of a long prompt before the first. An
    exception in the middle of a line also ends the line, so that the error message begins on a line of its own."""
    pieces, last = iter(pieces), "\n"
    try:
        with prompt_progress(model):
            first = list(islice(pieces, 1))
        for piece in chain(first, pieces):
            text = written(piece)
            sys.stdout.write(text)
            sys.stdout.flush()
            last = text[-1:] or last
    except OSError:  # stdout itself failed, so it cannot take a line end either
        raise
    except Exception:
        if last != "\n":
            click.echo()
        raise


def summary(result: Result) -> str:
    """Return a line about a generation: tokens, seconds, rounds, acceptance, seed."""
    stats = result.stats
    parts = [f"{len(result.token_ids)} tokens in {stats.seconds:.2f} s ({result.finish_reason})"]
    if stats.num_drafts:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
        parts += [
            f"{stats.num_drafts} rounds",
            f"mean acceptance length {stats.mean_acceptance_length:.2f} (by position: {rates})",
        ]
    if stats.num_lookup_drafts:
        parts.append(
            f"{stats.num_lookup_drafts} rounds by the lookup ({stats.num_lookup_accepted_tokens} of its "
            f"{stats.num_lookup_draft_tokens} tokens accepted)"
        )
    if result.options.temperature:
        parts.append(f"seed {result.options.seed}")
    return ", ".join(parts)


def table(stats: GenerationStats) -> str:
    """Return lines that say where the time went: first token, decoding, each method, the loop."""
    reused = f", {stats.reused_prompt_tokens} reused" if stats.reused_prompt_tokens else ""
    lines = [
        f"time to first token {1000 * stats.time_to_first_token:.1f} ms ({stats.prompt_tokens} prompt tokens{reused}, "
        f"{stats.prefill_tokens_per_second:.0f} tokens/s)",
    ]
    if stats.time_per_output_token:  # there are tokens after the first
        rate = f"{stats.decode_tokens_per_second:.0f} tokens/s"
        lines.append(f"decode {rate}, {1000 * stats.time_per_output_token:.3f} ms a token")
    rounds = stats.num_drafts + stats.num_undrafted
    for name, seconds in stats.method_seconds.items():
        calls = stats.method_calls[name]
        each = f"{name:<14} {calls:>6} x {1000 * seconds / calls:.3f} ms"
        lines.append(f"  {each}" + (f", {1000 * seconds / rounds:.3f} ms a round" if rounds else ""))
    lines.append(f"  the loop itself {stats.loop_share:.1%}")
    return "\n".join(lines)


PATIENCE = 1.0
"""Seconds after which the line appears, so that short prompts show none."""
INTERVAL = 0.1


@contextmanager
def prompt_progress(model: Model) -> Iterator[None]:
    """Show, within this context, a line on stderr with the number of the prompt's tokens that the model's caches hold.
    Nothing is shown if stderr is not a terminal."""
    console, over = Console(stderr=True), threading.Event()
    if not console.is_terminal:
        yield
        return

    def show() -> None:
        if over.wait(PATIENCE):
            return
        columns = TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("", total=None)
            while not over.wait(INTERVAL):
                if (stream := model.current) is not None:
                    held = min(len(model.cached.tokens), stream.prompt_tokens)
                    bar.update(task, total=stream.prompt_tokens, completed=held, refresh=True)

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()
