"""Dialogues that take turns at a server compute only their new tokens, also after the server has been started again."""

import pytest
from commands import fail_command
from served import served

from eagle3.runner.kept import KeptDialogues
from eagle3.runner.serve.cli import main

STARTS = ("Write a function that adds two numbers.", "Read a file and print its lines, one by one, with numbers.")


def reply(server, messages: list[dict]) -> int:
    """Append the next answer to ``messages``. Returns how many tokens of the prompt were cached."""
    given = {"messages": messages, "max_tokens": 16}
    said = server.post("/chat/completions", given).json()
    messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
    return said["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_dialogues_that_take_turns_reuse_their_own_tokens(model, artifact, tmp_path, on_disk):
    texts = [[{"role": "user", "content": start * 2}] for start in STARTS]
    model.forget()
    lines, folder = [], tmp_path / "sessions" if on_disk else None
    cached = []
    for turns in (2, 1):
        kept = KeptDialogues(1 << 30, lines.append, folder)
        kept.open(model)
        with served([model], artifact, kept=kept) as server:
            for _ in range(turns):
                for messages in texts:
                    cached.append(reply(server, messages))
                    messages.append({"role": "user", "content": "Shorter."})
        model.forget()
    assert cached[0] == 0 and min(cached[2:4]) > 32 and not lines
    assert (min(cached[4:]) > max(cached[2:4])) == on_disk


def test_sizes_and_folders_are_refused_in_a_line(artifact, tmp_path):
    for size in ("-1", "2X", "", "nan"):
        code, says = fail_command(main, artifact, "--sessions-size", size)
        assert code == 2 and "is no size such as 500M or 2G" in says
    (tmp_path / "file").write_text("")
    code, says = fail_command(main, artifact, "--sessions", tmp_path / "file")
    assert code == 2 and "is a file" in says
