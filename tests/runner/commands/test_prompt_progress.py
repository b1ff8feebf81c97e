"""A line on a terminal shows how much of a long prompt has been read."""

import time

import pytest
from scripted import ThreeMethods

from eagle3.runner.commands import printing
from eagle3.runner.commands.printing import print_pieces
from eagle3.runner.model import Model


class Slow(ThreeMethods):
    def prefill(self, tokens, input_pos):
        time.sleep(0.1)  # ten times the interval, for a busy machine
        return self._session.prefill(tokens, input_pos)


@pytest.fixture
def said(session, capfd, monkeypatch):
    """A function that generates from a prompt of several chunks, and returns the text on stderr."""
    monkeypatch.setattr(printing, "INTERVAL", 0.01)

    def run(patience: float) -> str:
        monkeypatch.setattr(printing, "PATIENCE", patience)
        model = Model(session.metadata, lambda: Slow(session))
        prompt = list(range(4, 4 + 3 * session.metadata.max_prefill))
        print_pieces(model, model.stream(prompt, max_new_tokens=2), lambda piece: "piece ")
        out, err = capfd.readouterr()
        assert out.startswith("piece ")
        return err

    return run


def test_a_long_prompt_shows_its_progress_on_a_terminal_only(said, session, monkeypatch):
    assert said(patience=0.0) == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    total, chunk = 3 * session.metadata.max_prefill, session.metadata.max_prefill
    line = said(patience=0.0)
    assert "reading the prompt" in line and f"{total}" in line and f"{chunk + 1}" in line
    assert "reading" not in said(patience=60.0)
