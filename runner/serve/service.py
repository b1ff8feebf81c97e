"""The parts that endpoints share: the jobs of the model's process, texts and dialogues, and the jobs of a request."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

from eagle3.runner.contract import Metadata
from eagle3.runner.serve.dialogue import AUTO, Dialogue, Turn
from eagle3.runner.serve.errors import ModelNotFound, Refused
from eagle3.runner.serve.grammars import GrammarRefused, GrammarTrials
from eagle3.runner.serve.jobs import Job, Jobs
from eagle3.runner.serve.metrics import Metrics
from eagle3.runner.serve.protocol import Echo
from eagle3.runner.serve.protocol import Request as Asked
from eagle3.runner.serve.requests import with_own_seeds
from eagle3.runner.system.command import tell
from eagle3.runner.text.checks import check_ids
from eagle3.runner.text.text import TOKENIZER_FILE, Text

NO_MODEL = "dummy"
"""The name that huggingface_hub's client sends if none was given."""


@dataclass
class Service:
    """A served model."""

    jobs: Jobs
    text: Text
    dialogue: Dialogue
    model_id: str
    metrics: Metrics
    defaults: dict[str, Any] = field(default_factory=dict)
    """The values of fields that a request leaves out."""
    parsing: int = 0
    """The number of requests whose bodies are being parsed."""

    @property
    def metadata(self) -> Metadata:
        return self.jobs.metadata

    def check_model(self, asked: str | None) -> None:
        """Raise ModelNotFound if a request names another model; it need not name any."""
        if asked not in (None, self.model_id, NO_MODEL):
            raise ModelNotFound(asked, self.model_id)

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Return token ids of a text, or the given ones. Raises ValueError if there are none, or for ids outside the
        vocabulary."""
        ids = self.text.encode(prompt) if isinstance(prompt, str) else prompt
        if not prompt or not ids:
            raise ValueError("the prompt is empty: give some text")
        check_ids(ids, self.metadata.vocab_size)
        return ids

    @asynccontextmanager
    async def generations(
        self,
        request: Request,
        prompt: list[int],
        options: dict[str, Any],
        count: int,
        form: str = "structured_outputs",
        echo: Echo | None = None,
    ) -> AsyncIterator[list[Job]]:
        """Start ``count`` generations of a prompt; leaving this context ends them within a round.

        ``form`` is the request's field with the grammar. Raises ``Refused`` for options that the model does not accept,
        ``Busy`` if too many jobs wait.
        """
        earlier = request.scope.setdefault("jobs", [])
        try:
            jobs = await self.jobs.submit(prompt, with_own_seeds(options, count), echo, earlier)
        except GrammarRefused as error:
            raise Refused(str(error), form) from None
        except ValueError as error:
            raise Refused(str(error)) from None
        earlier += jobs
        try:
            yield jobs
        finally:
            for job in jobs:
                self.jobs.leave(job)

    def reasoning_end(self, turn: Turn) -> int | None:
        """Return the token that ends reasoning."""
        return None if turn.marks is None else self.text.tokenizer.token_to_id(turn.marks.end_token)


def make_service(
    metadata: Metadata,
    folder: Path,
    send: Callable[[int, Asked | None], None],
    model_id: str | None,
    parallel: int,
    max_queue: int,
    defaults: dict[str, Any],
    tool_parser: str = AUTO,
) -> Service:
    """Return a service whose jobs are sent by ``send``. Raises FileNotFoundError for an artifact without a
    tokenizer."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {file.name}, which a server needs: copy or export it again")
    name = model_id or str(metadata.manifest.get("target") or folder.name)
    text, metrics = Text(folder), Metrics(name)
    trials = GrammarTrials(file, metadata) if metadata.has_logits and metadata.eos_ids else None
    jobs = Jobs(metadata, trials, send, metrics.add, parallel, max_queue)
    metrics.watch(lambda: jobs.running, lambda: jobs.waiting)
    dialogue = Dialogue(text, metadata, folder, tool_parser)
    if dialogue.unread:
        tell(
            f"the {' and the '.join(dialogue.unread)} of this model's chat template are in a markup that this "
            "server does not read: they are answered as text, with their marks"
        )
    return Service(jobs, text, dialogue, name, metrics, defaults)
