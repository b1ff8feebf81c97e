"""The messages between the front and the model's process: one for a job, one for a round, one to cancel.

Each message is a pair of a job's number and one of the classes here; None in place of a ``Request`` cancels the job.
They pass over a socket to the model's process of ``eagle3-serve``, or as arguments to a replica of Ray Serve. Nothing
here imports torch, so that the front does not either.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eagle3.runner.loop.results import ABORT, TokenLogprobs
from eagle3.runner.loop.statistics import GenerationStats

REFUSED, GRAMMAR, FAILED = "refused", "grammar", "failed"
"""Kinds of an ``Ended`` with an error: the model does not accept the request; its grammar failed; another error."""


@dataclass(frozen=True)
class Echo:
    """The echo of a prompt at the beginning of an answer.

    ``logprobs``: the number of most likely tokens for each token of the prompt, None for no log-probabilities;
    ``alone``: nothing is generated.
    """

    logprobs: int | None = None
    alone: bool = False


@dataclass(frozen=True)
class Request:
    """A generation: token ids and the library's options."""

    tokens: list[int]
    options: dict[str, Any]
    echo: Echo = Echo()
    prompt: str = ""
    """The text of the tokens for a router that compares beginnings of prompts (Ray); "" if there is no router."""
    group: int = 0
    """The same number for all generations of one HTTP request; those of others are run in between."""


class Started(NamedTuple):
    """The job left the queue."""


class Echoed(NamedTuple):
    """The log-probabilities of the next tokens of the prompt, which come before the first ``Delta``."""

    logprobs: list[TokenLogprobs]


@dataclass(frozen=True)
class Delta:
    """The tokens of one round."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """One entry per token of ``token_ids``; empty if the request does not ask for log-probabilities."""
    proposed: int = 0
    accepted: int = 0
    """The round's counts, as ``Piece`` has them."""


@dataclass(frozen=True)
class Outcome:
    """The generated tokens, and the reason why they ended."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ABORT
    stats: GenerationStats = field(default_factory=GenerationStats)


class Ended(NamedTuple):
    """The last message on a job. ``outcome`` is None if nothing was computed for it; ``error``: the kind and the text
    of the error that ended it, None without an error."""

    outcome: Outcome | None
    error: tuple[str, str] | None = None


Event = Started | Echoed | Delta | Ended
