"""Copies an artifact that is compiled for the CPU, with the tokens that a stage on a GPU compares it with."""

import json
import shutil
from pathlib import Path

from proposed import proposed

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.generation import complete

PROMPTS, TOKENS = ([5, 7, 11], [40, 41, 42, 43, 44, 45]), 8
EXPECTED = "expected.json"


def with_tokens(artifact: Path, copy: Path) -> Path:
    """Write into the new folder ``copy`` the artifact and the tokens of its own three methods."""
    shutil.copytree(artifact, copy)
    session, said = open_session(open_artifact(copy), "torch"), []
    session.has_speculate = False
    for prompt in PROMPTS:
        with proposed(session) as proposals:
            found = complete(session, prompt, max_new_tokens=TOKENS, stop_ids=[])
        said.append({"prompt": prompt, "margins": [1.0] * TOKENS, "token_ids": found.token_ids})
        said[-1] |= {"stats": found.stats.counts(), "proposals": proposals}
    session.close()
    (copy / EXPECTED).write_text(json.dumps(said))
    return copy
