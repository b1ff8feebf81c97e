"""The artifact's folder appears whole or not at all, and what was there is never lost."""

import os
import subprocess

import pytest

from eagle3.export import artifact
from eagle3.export.artifact import check_output, full_disk_named, whole_folder, write_record
from eagle3.runner.contract import MODEL_FILE


def make(folder, text, overwrite=False):
    with whole_folder(folder, overwrite) as partial:
        (partial / MODEL_FILE).write_text(text)
        write_record(partial, {})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_artifact_takes_the_old_ones_place(tmp_path):
    make(tmp_path / "out", "old")
    make(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / MODEL_FILE).read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_what_came_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(FileExistsError, match="--overwrite"), whole_folder(out, overwrite=False) as partial:
        (partial / MODEL_FILE).write_text("new")
        out.mkdir()
        (out / "precious").write_text("mine")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["precious"]


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("after", [True, False], ids=["after the rename", "before the rename"])
def test_a_failure_within_the_swap_brings_the_old_one_back(fails_at, after, tmp_path, monkeypatch):
    make(tmp_path / "out", "old")
    calls = []

    def rename(source, target):
        calls.append(source)
        if len(calls) == fails_at and not after:
            raise KeyboardInterrupt
        os.replace(source, target)
        if len(calls) == fails_at and after:
            raise KeyboardInterrupt

    monkeypatch.setattr(artifact.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]
    done = fails_at == 2 and after
    assert (tmp_path / "out" / MODEL_FILE).read_text() == ("new" if done else "old")


def test_only_an_artifact_is_ever_replaced(tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    check_output(out, overwrite=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="notes.txt"):
        check_output(out, overwrite=True)
    (out / "notes.txt").unlink()
    (out / "export.json").write_text("{}")
    with pytest.raises(FileExistsError, match="did not write"):
        check_output(out, overwrite=True)


def test_a_linked_folder_stays_a_link(tmp_path):
    make(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / MODEL_FILE).read_text() == "new"
    assert names(tmp_path) == ["link", "real"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("through_a_compiler", [False, True])
def test_a_full_disk_is_named_with_what_is_needed_and_what_is_free(tmp_path, through_a_compiler):
    def write():
        if not through_a_compiler:
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"weights")
        done = subprocess.run(["cp", "/etc/passwd", "/dev/full"], capture_output=True, text=True)
        raise RuntimeError(f"C++ compile error: {done.stderr}")

    pattern = r"takes about 19\.0 GB, free for output \(.*\): .* GB, .* --output-dir, or set TMPDIR"
    with pytest.raises(OSError, match=pattern), whole_folder(tmp_path / "out", False) as partial:
        (partial / MODEL_FILE).write_text("half")
        with full_disk_named(tmp_path / "out", int(19e9)):
            write()
    assert names(tmp_path) == []


def test_other_failures_pass_as_they_are(tmp_path):
    with pytest.raises(KeyError, match="other"), full_disk_named(tmp_path / "out", 1):
        raise KeyError("other")
