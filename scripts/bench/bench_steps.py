"""Runs a CPU artifact: memory, milliseconds per call, and the speedup for an assumed acceptance length.

    python scripts/bench/bench_steps.py ARTIFACT --acceptance 3.3

``bench_export.py --backend xnnpack`` exports a model of a published size and runs this on it. With --session it
compares the seconds of a prefill of --prompt tokens with those of saving and restoring its state.
"""

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as eagle3-run does

import torch

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.runner.session_file import resume, save
from eagle3.runner.system.machine import linux_bytes

PROMPT = 64
"""Default number of tokens in the cache when a call is timed; ``prefill_ms`` is the time of a chunk of this size."""


class Timed:
    """Times calls of a session over random tokens, each at the first free position. Before that, chunks of ``PROMPT``
    tokens are prefilled, at least ``prompt`` tokens in all.

    A recurrent target commits the rows of earlier calls, and cannot go back before them. So its prefill is timed after
    a new start, and its verify behind the row of a decode, which it commits."""

    def __init__(self, session: Session, prompt: int = PROMPT):
        self.session, metadata = session, session.metadata
        self.chunk = max(metadata.min_prefill, min(PROMPT, metadata.max_prefill))
        self.at = self.chunk * math.ceil(prompt / self.chunk)
        if self.at + metadata.chain_len >= metadata.max_seq_len:
            raise click.UsageError(f"a prompt of {prompt} tokens leaves no room in a context of {metadata.max_seq_len}")
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(metadata.vocab_size, (1, metadata.max_seq_len), generator=generator)
        self.recurrent = metadata.rollback_rows is not None
        self._prefilled(self.at - self.chunk)
        self.feature = session.prefill(*self._rows(self.at - self.chunk, self.chunk)).feature[:, -1:]

    def _prefilled(self, end: int) -> None:
        for start in range(0, end, self.chunk):
            self.session.prefill(*self._rows(start, self.chunk))

    def prefill(self) -> float:
        if self.recurrent:
            self._prefilled(self.at - self.chunk)
        return self._timed(self.session.prefill, *self._rows(self.at - self.chunk, self.chunk))

    def verify(self, rows: int) -> float:
        return self._timed(self.session.target_verify, *self._rows(self.at + self.recurrent, rows))

    def decode(self) -> float:
        return self._timed(self.session.decode, *self._rows(self.at, 1))

    def draft(self, rows: int) -> float:
        tokens, positions = self._rows(self.at, rows)
        return self._timed(self.session.draft_decode, tokens, self.feature.repeat(1, rows, 1), positions)

    def _rows(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions."""
        rows = slice(start, start + count)
        return self.tokens[:, rows].contiguous(), self.session.positions[rows]

    def _timed(self, method: Callable, *given: torch.Tensor) -> float:
        """Return the milliseconds of a call."""
        start = time.perf_counter()
        method(*given)
        return 1e3 * (time.perf_counter() - start)


def measure(artifact: Path, acceptance: float, repeats: int, prompt: int) -> dict[str, float]:
    """Measure memory and times of an artifact. Milliseconds are medians; the calls are timed in turn. A round is a
    verify, a draft call over the accepted tokens, and one of a row for each further proposal."""
    before = held()
    start = time.perf_counter()
    session = open_session(open_artifact(artifact))
    if not session.has_decode:
        raise click.UsageError(f"{artifact} has no method decode: export it with --with-decode")
    loaded = time.perf_counter() - start
    timed, chain = Timed(session, prompt), session.metadata.chain_len
    calls = {
        "prefill": timed.prefill,
        "decode": timed.decode,
        "verify": lambda: timed.verify(chain + 1),
        "draft_accepted": lambda: timed.draft(max(1, round(acceptance))),
        "draft_row": lambda: timed.draft(1),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2 * repeats):  # the first half to warm up
        for name, call in calls.items():
            took[name].append(call())
    ms = {name: statistics.median(times[repeats:]) for name, times in took.items()}
    whole = ms["verify"] + ms["draft_accepted"] + (chain - 1) * ms["draft_row"]
    return {
        "load_seconds": loaded,
        **{f"{name}_mib": after - before[name] for name, after in held().items()},
        **{f"{name}_ms": value for name, value in ms.items()},
        "verify_decodes": ms["verify"] / ms["decode"],
        "round_ms": whole,
        "speedup": acceptance * ms["decode"] / whole,
    }


def measure_session(artifact: Path, prompt: int) -> dict[str, float]:
    """Return the seconds of a prefill of ``prompt`` random tokens, of saving the state in a file, and of restoring it
    in another session of the same artifact, and the bytes of the file. Each session has prefilled some tokens before,
    so that its methods are loaded."""
    opened = open_artifact(artifact)
    first, other = open_session(opened), open_session(opened)
    tokens = torch.randint(first.metadata.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    for session in (first, other):
        complete(session, tokens[:PROMPT], max_new_tokens=1, stop_ids=[])
        session.read_state(torch.zeros(len(session.metadata.state_groups), dtype=torch.long))
    cached, restored, seconds = CachedTokens(), CachedTokens(), {}

    def timed(name: str, function: Callable, *given: object, **options: object) -> object:
        start = time.perf_counter()
        result = function(*given, **options)
        seconds[f"{name}_seconds"] = time.perf_counter() - start
        return result

    with tempfile.TemporaryDirectory(dir=artifact.parent) as folder:
        file = Path(folder) / "session"
        timed("prefill", complete, first, tokens, max_new_tokens=1, stop_ids=[], cached=cached)
        timed("save", save, file, first, cached, "00" * 32)
        timed("restore", resume, file, other, restored, "00" * 32)
        size = file.stat().st_size
    if restored.tokens != cached.tokens:
        raise click.ClickException(f"{len(restored.tokens)} of {len(cached.tokens)} tokens were restored")
    return {
        "tokens": prompt,
        **seconds,
        "file_bytes": size,
        "ratio": seconds["restore_seconds"] / seconds["prefill_seconds"],
    }


def held() -> dict[str, float]:
    """Return the memory of this process in MiB: its own, and files mapped into it."""
    names = {"private": "RssAnon", "mapped": "RssFile"}
    return {name: (linux_bytes("/proc/self/status", key) or 0) / 2**20 for name, key in names.items()}


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--acceptance", default=3.0, show_default=True, help="Assumed acceptance length, for the speedup.")
@click.option("--repeats", default=15, show_default=True)
@click.option("--prompt", default=PROMPT, show_default=True, help="Tokens in the cache when a call is timed.")
@click.option("--session", is_flag=True, help="Measure saving and restoring the state of such a prompt instead.")
def main(artifact: Path, acceptance: float, repeats: int, prompt: int, session: bool) -> None:
    """Measure an artifact that has the method decode (or, with --session, read_state), and print one JSON object."""
    found = measure_session(artifact, prompt) if session else measure(artifact, acceptance, repeats, prompt)
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
