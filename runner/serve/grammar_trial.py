"""Runs as a process that test-compiles grammars, each in a fork of its own, within limits of time and memory.

llguidance cannot be interrupted: a schema of 4 kB may take minutes. This file imports no other module of this package,
so that the process is small. Each line of JSON on stdin is one grammar; the line on stdout is its result.
"""

import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SECONDS = 0.5
"""The most seconds of processor time per grammar."""
WALL_SECONDS = 3.0
"""The seconds of wall time after which a loaded machine reports that it is busy."""
BUSY = "busy"
BYTES = 1 << 28
"""The most bytes of memory per grammar, including its first mask."""


def main() -> None:
    from llguidance import LLTokenizer

    file, vocab_size, eos_ids = sys.argv[1:]
    text = Path(file).read_text(encoding="utf-8")
    tokenizer = LLTokenizer(text, n_vocab=int(vocab_size), eos_token=json.loads(eos_ids))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(tried(tokenizer, json.loads(line))) + "\n")
        sys.stdout.flush()


def tried(tokenizer: "LLTokenizer", grammar: str) -> str:
    """Return the reason why a grammar is refused, "" if it is accepted, BUSY if that is unknown."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        os.close(receiving)
        _try(tokenizer, grammar, sending)
    os.close(sending)
    try:
        ready, _, _ = select.select([receiving], [], [], WALL_SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        found = b""
        while ready and (more := os.read(receiving, 1 << 16)):
            found += more
    finally:
        os.close(receiving)
        _, status = os.waitpid(child, 0)
    if found:
        return json.loads(found)
    if not ready:
        return BUSY
    if os.WTERMSIG(status) == signal.SIGPROF:
        return f"it takes more than {SECONDS} s to compile, which is the limit"
    return f"it takes more than {BYTES >> 20} MiB to compile, which is the limit"


def _try(tokenizer: "LLTokenizer", grammar: str, sending: int) -> None:
    """Compile a grammar and compute its first mask, in the forked process, which then ends."""
    try:
        from llguidance import LLMatcher, LLParserLimits

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the output of a panic in Rust
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # the signal ends the process by default
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not matcher.is_error():
            matcher.compute_ff_tokens()
            matcher.compute_bitmask()
        os.write(sending, json.dumps(matcher.get_error()[:2000] if matcher.is_error() else "").encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
