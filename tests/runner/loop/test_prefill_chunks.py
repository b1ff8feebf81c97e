"""A long prompt is computed in chunks, between which a generation can be stopped or wait for another one."""

import asyncio

import pytest
from served import serviced

from eagle3.runner import load
from eagle3.runner.model import Model

LONG = [(7 * index) % 900 + 5 for index in range(900)]


@pytest.fixture
def model(session, artifact):
    return Model(session.metadata, lambda: session, artifact)


def test_a_stream_can_stop_between_the_chunks_of_its_prompt(model):
    said = model.generate(LONG, max_new_tokens=20)
    model.forget()
    with model.stream(LONG, max_new_tokens=20) as stream:
        pieces = []
        while (piece := stream.advance()) is not None:
            pieces.append(piece)
    chunks = [piece for piece in pieces if not piece.token_ids]
    assert len(chunks) >= 900 // model.metadata.max_prefill - 1 > 3
    assert stream.result.token_ids == said.token_ids and stream.result.stats.prompt_tokens == 900
    model.forget()
    assert all(piece.token_ids or piece.text for piece in model.stream(LONG, max_new_tokens=20))


def test_a_client_that_disconnects_during_a_long_prompt_frees_the_model(model, artifact, monkeypatch):
    session, calls = model.session, []
    prefill = session.prefill

    async def left() -> int:
        with serviced([model], artifact) as service:
            monkeypatch.setattr(
                session, "prefill", lambda *given: calls.append(1) or service.jobs.leave(job) or prefill(*given)
            )
            [job] = await service.jobs.submit(LONG, [{"max_new_tokens": 9}])
            async for _ in job.deltas():
                pass
            return len(job.outcome.token_ids)

    assert asyncio.run(left()) == 0
    assert 1 <= len(calls) <= 2  # the prompt has fifteen chunks


def test_another_request_is_served_between_the_chunks_of_a_long_prompt(artifact):
    with load(artifact) as one, load(artifact) as other:
        order = []

        def noted(session, name):
            prefill = session.prefill

            def called(*given):
                order.append(name)
                return prefill(*given)

            session.prefill = called

        noted(one.session, "prefill")
        noted(other.session, "prefill")

        async def both() -> list[str]:
            with serviced([one, other], artifact) as service:
                given = {"max_new_tokens": 200, "ignore_eos": True}
                [first] = await service.jobs.submit(one.encode("def main("), [given])
                events = first.deltas()
                await anext(events)
                [second] = await service.jobs.submit(LONG, [{"max_new_tokens": 2}])
                async for _ in events:
                    order.append("round")
                async for _ in second.deltas():
                    pass

        asyncio.run(both())
    between = "".join("p" if each == "prefill" else "r" for each in order[1:])
    assert "ppp" not in between.rstrip("p"), between
