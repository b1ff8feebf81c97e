"""A file of packed weights is written by the first start and mapped by later ones, and gives the same tokens."""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import fail_command

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.hosts import packed_file
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.generation import complete
from eagle3.runner.system.cpu_features import processor

PROMPT = [2, 45, 17, 300, 11, 9, 8, 7, 6, 5, 4, 3]
STARTED = """
import json, sys
from pathlib import Path
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.generation import complete
packed = Path(sys.argv[2]) if len(sys.argv) > 2 else None
session = open_session(open_artifact(Path(sys.argv[1])), packed_weights=packed)
private = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
tokens = complete(session, %s, max_new_tokens=20).token_ids
print(json.dumps([tokens, 1024 * private, str(packed) in open("/proc/self/maps").read()]))
"""


def started(artifact: Path, *packed: Path) -> tuple[list[int], int, bool]:
    """Start a process. Returns its tokens, its private bytes before them, and True if a file of ``packed`` is
    mapped."""
    command = [sys.executable, "-c", STARTED % PROMPT, str(artifact), *map(str, packed)]
    return tuple(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


@pytest.fixture(scope="module")
def tokens(session) -> list[int]:
    return complete(session, PROMPT, max_new_tokens=20).token_ids


@pytest.fixture(scope="module")
def packed(artifact, tmp_path_factory) -> Path:
    """A folder with the artifact's packed weights."""
    folder = tmp_path_factory.mktemp("packed")
    started(artifact, folder)
    return folder


def state(folder: Path) -> tuple[int, int]:
    (file,) = folder.iterdir()
    return file.stat().st_mtime_ns, file.stat().st_size


def test_a_later_start_maps_the_packed_file_and_gives_the_same_tokens(artifact, packed, tokens):
    before, weights = state(packed), (artifact / "model.pte").stat().st_size
    alone, own_bytes, _ = started(artifact)
    said, private_bytes, is_mapped = started(artifact, packed)
    assert said == alone == tokens and is_mapped and state(packed) == before
    assert own_bytes - private_bytes > weights / 4


@pytest.mark.whole
def test_processes_map_the_packed_file_at_once_and_a_writer_disturbs_none(artifact, packed, tokens, tmp_path):
    with closing(open_session(open_artifact(artifact), packed_weights=packed)) as session:
        assert complete(session, PROMPT, max_new_tokens=20).token_ids == tokens
        assert started(artifact, packed)[::2] == (tokens, True)
    (tmp_path / next(packed.iterdir()).name).touch()
    writer = open_session(open_artifact(artifact), packed_weights=tmp_path)
    beside = started(artifact, tmp_path)
    assert beside[0] == tokens == complete(writer, PROMPT, max_new_tokens=20).token_ids
    writer.close()


def test_a_truncated_packed_file_is_written_again(artifact, packed, tokens, tmp_path):
    (whole,) = packed.iterdir()
    cut = tmp_path / whole.name
    cut.write_bytes(whole.read_bytes()[:5000])
    assert started(artifact, tmp_path)[0] == tokens
    assert packed_file.is_whole(cut) and cut.stat().st_size == whole.stat().st_size


def test_another_processor_executorch_or_program_has_a_file_of_its_own(artifact, tmp_path, monkeypatch):
    model = artifact / "model.pte"
    names = {packed_file.PackedFile(model, tmp_path).path}
    monkeypatch.setattr(packed_file, "processor", lambda: "another")
    names.add(packed_file.PackedFile(model, tmp_path).path)
    monkeypatch.setattr(packed_file, "version_of", lambda _: "1.5.9")
    names.add(packed_file.PackedFile(model, tmp_path).path)
    monkeypatch.setattr(packed_file, "program_bytes", lambda _: b"another")
    names.add(packed_file.PackedFile(model, tmp_path).path)
    assert len(names) == 4


def test_a_processor_is_identified_by_its_kinds_of_core(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nCPU part\t: 0xd0b\ncpu MHz: 5\n\nprocessor\t: 1\nCPU part\t: 0xd05\n")
    assert processor(file) == "CPU part: 0xd05\nCPU part: 0xd0b"


def test_packed_weights_that_cannot_be_written_are_refused_in_one_line(artifact, tmp_path, monkeypatch):
    command = run_main, artifact, "--prompt-tokens", "1,2", "--packed-weights", tmp_path
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
        assert "1 bytes free, packed weights take up to 3" in fail_command(*command)[1]
    monkeypatch.setattr(packed_file, "VERSION", "1.4.")
    assert "cannot keep packed weights in a file" in fail_command(*command)[1]
    assert list(tmp_path.iterdir()) == []


def test_a_run_loads_only_the_methods_that_it_calls(artifact):
    session = open_session(open_artifact(artifact), lazily=True)
    assert not session._methods
    generation = complete(session, PROMPT, max_new_tokens=20)
    called = {name for name, count in session.calls.items() if count}
    assert set(session._methods) == called and "decode" not in called and session.has_decode
    stats = generation.stats
    assert session.load_seconds > 0 and sum(stats.method_seconds.values()) <= stats.seconds
    assert stats.seconds < session.load_seconds + sum(stats.method_seconds.values())
    session.close()
    with pytest.raises(ValueError, match="is closed"):
        session.decode(None, None)
