"""The parts that endpoints share: the model, its engine, its dialogue, and the jobs of a request."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from eagle3.runner.model import Model
from eagle3.runner.serve.dialogue import Dialogue, Turn
from eagle3.runner.serve.engine import Echo, Engine, Job
from eagle3.runner.serve.errors import ModelNotFound, Refused
from eagle3.runner.serve.grammars import GrammarRefused
from eagle3.runner.serve.metrics import Metrics
from eagle3.runner.serve.requests import with_own_seeds


@dataclass
class Service:
    """A served model with its engine and its dialogue."""

    engine: Engine
    dialogue: Dialogue
    model_id: str
    metrics: Metrics
    defaults: dict[str, Any] = field(default_factory=dict)
    """The values of fields that a request leaves out."""

    @property
    def model(self) -> Model:
        return self.engine.model

    def check_model(self, asked: str | None) -> None:
        """Raise ModelNotFound if a request names another model; it need not name any."""
        if asked is not None and asked != self.model_id:
            raise ModelNotFound(asked, self.model_id)

    @asynccontextmanager
    async def jobs(
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
        try:
            jobs = await self.engine.submit(prompt, with_own_seeds(options, count), echo)
        except GrammarRefused as error:
            raise Refused(str(error), form) from None
        except (ValueError, FileNotFoundError) as error:
            raise Refused(str(error)) from None
        request.scope.setdefault("jobs", []).extend(jobs)
        try:
            yield jobs
        finally:
            for job in jobs:
                job.left = True

    def reasoning_end(self, turn: Turn) -> int | None:
        """Return the token that ends reasoning."""
        return None if turn.marks is None else self.model.text.tokenizer.token_to_id(turn.marks.end_token)
