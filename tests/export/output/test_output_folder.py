"""The artifact's folder appears complete or not at all, an earlier folder is never lost, and one export writes at a
time."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3.export.lowering.backend import files_of
from eagle3.export.output import folder as output_folder
from eagle3.export.output.contents import write_files, write_record
from eagle3.export.output.folder import check_output, full_disk_named, whole_folder
from eagle3.export.output.progress import Progress
from eagle3.export.report import result_text
from eagle3.runner.contract import MODEL_FILE


def make(folder, text, overwrite=False):
    with whole_folder(folder, overwrite) as partial:
        (partial / MODEL_FILE).write_text(text)
        write_record(partial, {}, {})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_artifact_replaces_the_old_one(tmp_path):
    make(tmp_path / "out", "old")
    make(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / MODEL_FILE).read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_a_folder_that_appeared_during_the_export_is_not_replaced(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(FileExistsError, match="--overwrite"), whole_folder(out, overwrite=False) as partial:
        (partial / MODEL_FILE).write_text("new")
        out.mkdir()
        (out / "precious").write_text("mine")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["precious"]


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("after", [True, False], ids=["after the rename", "before the rename"])
def test_a_failed_swap_restores_the_old_artifact(fails_at, after, tmp_path, monkeypatch):
    make(tmp_path / "out", "old")
    calls = []

    def rename(source, target):
        calls.append(source)
        if len(calls) == fails_at and not after:
            raise KeyboardInterrupt
        os.replace(source, target)
        if len(calls) == fails_at and after:
            raise KeyboardInterrupt

    monkeypatch.setattr(output_folder.os, "rename", rename)
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
    with pytest.raises(
        FileExistsError, match="notes.txt, which eagle3-export did not write .export.json does not list"
    ):
        check_output(out, overwrite=True)
    (out / "notes.txt").unlink()
    (out / "export.json").write_text("{}")
    with pytest.raises(FileExistsError, match="did not write"):
        check_output(out, overwrite=True)


def forge(out: Path, **files) -> None:
    """Write a record that lists all files in ``out``; ``files`` replace its correct entries."""
    listed = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for path in out.iterdir()
        if path.is_file()
    }
    (out / "export.json").write_text(json.dumps({"files": listed | files}))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"bytes": 4}, "is not the record of an export"),
        ({"bytes": 5, "sha256": sha256(b"mine").hexdigest()}, "4 bytes, but 5 in export.json"),
        ({"bytes": 4, "sha256": sha256(b"else").hexdigest()}, "sha256"),
    ],
)
def test_a_forged_record_does_not_make_a_folder_replaceable(entry, says, tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    (out / "thesis.txt").write_text("mine")
    forge(out, **{"thesis.txt": entry})
    with pytest.raises(FileExistsError, match="did not write") as refused:
        check_output(out, overwrite=True)
    assert says in str(refused.value)
    assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_record_that_lists_files_of_no_export_is_invalid(kind, tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    (tmp_path / "elsewhere").write_text("mine")
    make_it = {"folder": Path.mkdir, "link": lambda path: path.symlink_to(tmp_path / "elsewhere"), "pipe": os.mkfifo}
    make_it[kind](out / "a")
    forge(out, a={"bytes": 4, "sha256": sha256(b"mine").hexdigest()})
    with pytest.raises(FileExistsError, match="holds a, which eagle3-export did not write"):
        check_output(out, overwrite=True)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": []}', b'{"files": {"a": 1}}', b"[" * 10_000, b"\xff"])
def test_a_garbled_record_does_not_make_a_folder_an_artifact(content, tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    (out / "export.json").write_bytes(content)
    with pytest.raises(FileExistsError, match="did not write"):
        check_output(out, overwrite=True)


def test_an_artifact_that_changed_during_the_export_is_not_replaced(tmp_path):
    make(tmp_path / "out", "old")
    model = tmp_path / "out" / MODEL_FILE
    with pytest.raises(FileExistsError, match="sha256"), whole_folder(tmp_path / "out", overwrite=True) as partial:
        (partial / MODEL_FILE).write_text("new")
        write_record(partial, {}, {})
        model.write_text("own")
    assert model.read_text() == "own"
    assert names(tmp_path) == ["out"]


def test_the_recorded_sha256_of_a_program_is_that_of_the_written_file(tmp_path):
    class Data(list):
        def write_to_file(self, file):
            for part in self:
                file.write(memoryview(part))

    program = Data([b"program", b"", bytes(1 << 20)])
    program._tensor_data = {"weights": Data([os.urandom(1 << 20), b"pad"]), "caches.ptd": Data()}
    digests = write_files(files_of(program), tmp_path)
    assert digests == {path.name: sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert sorted(digests) == ["caches.ptd", "model.pte", "weights.ptd"]
    assert (tmp_path / MODEL_FILE).stat().st_size == 7 + (1 << 20)
    files = write_record(tmp_path, {}, digests | {"caches.ptd": "known"})["files"]
    assert files["caches.ptd"] == {"bytes": 0, "sha256": "known"}
    assert files["weights.ptd"] == {"bytes": 3 + (1 << 20), "sha256": digests["weights.ptd"]}


def test_an_empty_output_folder_is_used_with_its_permissions(tmp_path):
    out = tmp_path / "out"
    out.mkdir(mode=0o700)
    make(out, "new")
    assert (out / MODEL_FILE).read_text() == "new"
    assert out.stat().st_mode & 0o777 == 0o700
    assert names(tmp_path) == ["out"]


# --- folders that cannot be replaced


@pytest.mark.parametrize("given", [".", "../..", "{here}/../here/.", "{link}", "/"])
def test_the_working_folder_and_its_parents_are_refused_at_once(given, tmp_path, monkeypatch):
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    folder = Path(given.format(here=here, link=tmp_path / "link"))
    with pytest.raises(OSError, match="--output-dir .*NAME") as refused:
        check_output(folder, overwrite=True)
    assert "working folder" in str(refused.value) or given == "/"
    check_output(folder / "NAME", overwrite=False)


def test_a_deleted_working_folder_does_not_stop_an_export(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    make(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"]


def test_a_mount_point_as_output_folder_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(output_folder.os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(OSError, match="mount point.*--output-dir .*/out/NAME"):
        check_output(tmp_path / "out", overwrite=False)
    check_output(tmp_path / "out" / "NAME", overwrite=False)


MOUNT = ("unshare", "--mount", "--map-root-user")


@pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*MOUNT, "true"], capture_output=True).returncode != 0,
    reason="no mounts here",
)
@pytest.mark.parametrize("kind", ["-t tmpfs none", "--bind {0}/of"])
def test_a_real_mount_point_is_refused_before_heavy_imports(kind, tmp_path):
    out = tmp_path / "with space"
    for folder in (out, tmp_path / "of"):
        folder.mkdir()
    program = (
        "import sys; from eagle3.export.cli import main\n"
        "try: main(['--target-model', 'gemma4-tiny', '--output-dir', sys.argv[1]])\n"
        "finally: print(sorted({'torch', 'transformers', 'executorch'} & set(sys.modules)))"
    )
    script = f'mount {kind.format(tmp_path)} "$1" && exec "$0" -c "$2" "$1"'
    done = subprocess.run([*MOUNT, "sh", "-c", script, sys.executable, out, program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1 and f"type --output-dir {out}/NAME" in done.stderr
    assert done.stdout == "[]\n"


def test_an_output_folder_with_an_invalid_parent_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        with pytest.raises(OSError, match="file is a file, so .* --output-dir"):
            check_output(folder, overwrite=False)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="--output-dir"):
        check_output(tmp_path / "loop", overwrite=False)
    monkeypatch.setattr(output_folder.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(PermissionError, match=f"has no permission for {tmp_path}: .* --output-dir"):
        check_output(tmp_path / "a" / "out", overwrite=False)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_turns_into_another_error_still_interrupts(number, tmp_path, caplog):
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out", False):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            logging.getLogger("torch").exception("while tracing")
            raise RuntimeError("while tracing") from error
    logging.getLogger("torch").error("later")
    assert [record.message for record in caplog.records] == ["later"]
    assert names(tmp_path) == []


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with whole_folder(tmp_path / "out", False):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert names(tmp_path) == ["out"]


# --- one export at a time


def elsewhere(out: Path, *commands: str, overwrite=False) -> subprocess.Popen:
    """Start another process that writes ``out`` and runs ``commands`` there; the export has begun when this returns."""
    program = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom eagle3.export.output import folder\n"
        f"with folder.whole_folder(Path(sys.argv[1]), {overwrite}) as partial:\n"
        "    (partial / 'model.pte').write_text('other')\n"
        "    print('begun', flush=True)\n    sys.stdin.readline()\n" + "".join(f"    {line}\n" for line in commands)
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_second_export_to_a_folder_is_refused_and_the_first_continues(tmp_path):
    out = tmp_path / "out"
    other = elsewhere(out)
    with pytest.raises(BlockingIOError, match=f"{out} .in .out.partial.: .*--output-dir"):
        make(out, "second")
    make(tmp_path / "beside", "third")
    other.communicate("go on\n")
    assert other.returncode == 0
    assert (out / MODEL_FILE).read_text() == "other"
    assert names(tmp_path) == ["beside", "out"]


def test_the_next_export_removes_leftovers_of_a_killed_one(tmp_path):
    out = tmp_path / "out"
    other = elsewhere(out)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    (left,) = names(tmp_path)
    assert left == ".out.partial"
    theirs = (".out.partial-mine", ".out.replaced-mine", ".output.partial", "out.partial")
    for name in theirs:  # folders with other names, or of an export into another folder
        (tmp_path / name).mkdir()
    make(out, "new")
    assert names(tmp_path) == sorted([*theirs, "out"])


KILL_BETWEEN_THE_RENAMES = (
    "rename, calls = os.rename, []",
    "def killed(*names):",
    "    calls.append(names) or (os.kill(os.getpid(), signal.SIGKILL) if len(calls) > 1 else rename(*names))",
    "os.rename = killed",
)


@pytest.mark.parametrize("what", [{}, {"overwrite": True}])
def test_an_artifact_set_aside_by_a_killed_export_is_restored(what, tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    other = elsewhere(out, *KILL_BETWEEN_THE_RENAMES, overwrite=True)
    other.communicate("go on\n")
    assert other.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".out.partial", ".out.replaced"]
    if what:
        make(out, "new", **what)
    else:
        with pytest.raises(FileExistsError, match="--overwrite"):
            make(out, "new")
    assert (out / MODEL_FILE).read_text() == ("new" if what else "old")
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("there", ["an empty folder", "a new artifact", "something else"])
def test_an_artifact_set_aside_is_removed_only_if_a_new_one_exists(there, tmp_path):
    out, aside = tmp_path / "out", tmp_path / ".out.replaced"
    make(out, "old")
    out.rename(aside)
    if there == "a new artifact":
        make(tmp_path / "other", "new")
        (tmp_path / "other").rename(out)
    else:
        out.mkdir()
    if there == "something else":
        (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        make(out, "newer")
    assert aside.exists() == (there == "something else")
    assert names(out) == (["notes.txt"] if there == "something else" else ["export.json", MODEL_FILE])


def test_a_folder_with_the_name_of_the_replaced_one_is_refused_at_once_and_kept(tmp_path, monkeypatch):
    """As a killed export leaves it that was removing the earlier artifact, its record first."""
    monkeypatch.setattr(output_folder, "PATIENCE", 0.05)
    make(tmp_path / "out", "old")
    aside = tmp_path / ".out.replaced"
    aside.mkdir()
    (aside / "mine").write_text("mine")
    with (
        pytest.raises(FileExistsError, match=f"{aside} exists, and .*: remove it"),
        whole_folder(tmp_path / "out", overwrite=True),
    ):
        raise AssertionError("the export began")
    assert names(aside) == ["mine"] and (tmp_path / "out" / MODEL_FILE).read_text() == "old"


def test_a_folder_with_the_name_of_the_replaced_one_that_appears_later_is_kept(tmp_path):
    make(tmp_path / "out", "old")
    with pytest.raises(OSError), whole_folder(tmp_path / "out", overwrite=True):
        (tmp_path / ".out.replaced").mkdir()
        (tmp_path / ".out.replaced" / "mine").write_text("mine")
    assert names(tmp_path / ".out.replaced") == ["mine"]
    assert (tmp_path / "out" / MODEL_FILE).read_text() == "old"


def test_an_artifact_is_not_lost_if_a_folder_appears_between_the_renames(tmp_path, monkeypatch):
    make(tmp_path / "out", "old")

    def rename(source, target):
        os.replace(source, target)
        if Path(target).name == ".out.replaced":
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "mine").write_text("mine")

    monkeypatch.setattr(output_folder.os, "rename", rename)
    with pytest.raises(OSError):
        make(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == [".out.replaced", "out"] and names(tmp_path / "out") == ["mine"]
    assert (tmp_path / ".out.replaced" / MODEL_FILE).read_text() == "old"


def test_nothing_is_removed_behind_a_link_with_the_name_of_the_partial_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / ".out.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError, match="is no folder of an export"):
        make(tmp_path / "out", "new")
    assert names(tmp_path / "mine") == ["notes.txt"]


@pytest.mark.parametrize("how", ["no fcntl", "no locks"])
def test_without_file_locks_nothing_is_removed(how, tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    if how == "no fcntl":
        monkeypatch.setattr(output_folder, "fcntl", None)
    else:
        monkeypatch.setattr(output_folder.fcntl, "flock", unsupported)
    make(tmp_path / "out", "new")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / MODEL_FILE).write_text("other")
    with pytest.raises(FileExistsError, match="if no other export writes it, remove it"):
        make(tmp_path / "out", "newer", overwrite=True)
    assert (tmp_path / ".out.partial" / MODEL_FILE).read_text() == "other"
    assert (tmp_path / "out" / MODEL_FILE).read_text() == "new"


def test_a_look_at_the_lock_does_not_stop_an_export(tmp_path):
    """Another process may hold the lock for a moment to see whether an export runs."""
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    looking = os.open(partial, os.O_RDONLY)
    output_folder.fcntl.flock(looking, output_folder.fcntl.LOCK_SH)
    threading.Timer(0.2, os.close, (looking,)).start()
    make(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"]


def test_a_folder_that_its_export_has_renamed_is_not_taken(tmp_path, monkeypatch):
    """The lock of a finished export belongs to the artifact, which must not be written again."""
    partial, opened = tmp_path / ".out.partial", os.open

    def renamed_behind(path, flags):
        descriptor = opened(path, flags)
        if not (tmp_path / "out").exists():
            partial.rename(tmp_path / "out")
        return descriptor

    monkeypatch.setattr(output_folder.os, "open", renamed_behind)
    make(tmp_path / "out", "new")
    assert (tmp_path / "out" / MODEL_FILE).read_text() == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(("files", "says"), [({"tokenizer.json": {}}, "--prompt TEXT"), ({}, "--prompt-tokens 1,2,3")])
def test_the_suggested_next_commands_fit_the_artifact(files, says, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    plan = SimpleNamespace(config=SimpleNamespace(folder=tmp_path))
    assert result_text(plan, {"stages": [], "files": files}).endswith(f"Next: eagle3-run {tmp_path} {says}")


def test_a_linked_folder_stays_a_link(tmp_path):
    make(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / MODEL_FILE).read_text() == "new"
    assert names(tmp_path) == ["link", "real"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("through_a_compiler", [False, True])
def test_a_full_disk_is_reported_with_the_needed_and_the_free_bytes(tmp_path, through_a_compiler):
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


def test_lines_are_printed_as_they_are(capsys):
    line = "pip install 'eagle3-export[mlx]' :sparkles: lets any machine check them"
    Progress().say(line)
    assert capsys.readouterr().err == f"{line}\n"
