"""The parts that endpoints share: the model, its engine and its dialogue, and how a request becomes jobs."""

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
    """One served model."""

    engine: Engine
    dialogue: Dialogue
    model_id: str
    metrics: Metrics
    defaults: dict[str, Any] = field(default_factory=dict)
    """Fields of requests where they leave them out."""

    @property
    def model(self) -> Model:
        return self.engine.model

    def check_model(self, asked: str | None) -> None:
        """Raises ModelNotFound for another model than this; a request need not name one."""
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
        """``count`` generations of a prompt. Left before they end, they end within a round. ``form``: the field that
        the grammar is of.

        Raises ``Refused`` for options that the model does not take, ``Busy`` where too many wait.
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
