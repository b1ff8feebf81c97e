"""``scripts/gpu/gpu_run.py`` without a GPU: both commands on the strict stand-in, and what follows a fault."""

import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gpu_carry
import gpu_make
import gpu_run
import gpu_tournament
import pytest
import torch
from artifact_tokens import with_tokens
from gpu_cubins import MANIFEST, Cubins
from gpu_run import AGAIN, EXPECTED, LAYOUTS, SMALL, Record
from gpu_variants import VARIANTS
from machine_code.sass import read_codes
from places import ROOT
from small_tournament import LINEARS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubins")
    gpu_tournament.compile_all(folder, LINEARS)
    return folder


def sources(folder: Path) -> Path:
    """Copy what travels of the sources."""
    for file in gpu_make.travelling():
        place = folder / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    return folder


@pytest.fixture(scope="module")
def rehearsed(compiled, host_artifact, cuda_artifact, records_artifact, tmp_path_factory):
    """Run both commands in an empty folder without a network. Returns the printed text and the steps of each."""
    place = tmp_path_factory.mktemp("rehearsal")
    folder, root = place / "made", sources(place / "sources")
    (folder / "wide").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:  # archives that are not compressed, to save the time
        patch.setattr(gpu_make, "compressed", Path.open)
        patch.setattr(
            gpu_carry.tarfile,
            "open",
            lambda name=None, mode="r", **given: OPEN(name, mode.replace("w:xz", "w"), **given),
        )
        patch.setattr(gpu_carry, "SAMPLE", 1 << 30)
        patch.setattr(gpu_carry, "RECORD", 1 << 30)
        gpu_make.pack(gpu_make.contents(compiled), folder / "tournament.tar.xz")
        gpu_carry.pack.callback(cuda_artifact, folder / "wide" / "tiles.tar.xz")
        gpu_carry.pack.callback(records_artifact, folder / "wide" / "records.tar.xz")
        host = with_tokens(host_artifact, place / "pairs" / "tiny-records")
        cuda = shutil.copytree(cuda_artifact, place / "pairs" / "mlp")
        shutil.copy(host / EXPECTED, cuda)
        gpu_make.Making(place / "pairs", "sm_90", 0).small(folder / SMALL)
    gpu_make.Making(place, "sm_90", 0).probe(folder / "read_probe.cubin")
    (place / "work" / "wide" / "records").mkdir(parents=True)  # an empty folder is no artifact

    def run(plan: str, *flags: str) -> tuple[str, dict]:
        command = [*NO_NETWORK, sys.executable, root / "tests" / "helpers" / "rehearsal.py", plan, folder, *flags]
        command += ["--work", place / "work", "--output-dir", place / "found"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place)
        return done.stdout, json.loads((place / "found" / f"{plan}.json").read_text())["steps"]

    return {"A": run("A"), "B": run("B"), "again": run("B", "--only", "unpack"), "root": root, "found": place / "found"}


OPEN = tarfile.open
ALONE = ["unshare", "-n"]
NO_NETWORK = ALONE if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0 else []
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@NO_GPU
@pytest.mark.whole
def test_both_commands_run_to_their_end_on_the_stand_in_without_a_network(rehearsed):
    """Nothing is refused by the stand-in. It computes nothing, so products and tokens of CUDA code are wrong, and those
    of code compiled for the CPU are right."""
    (said, first), (more, second) = rehearsed["A"], rehearsed["B"]
    assert "the stand-in refused" not in said + more, said + more
    assert f"sources {rehearsed['root']}" in said
    wrong = {name: step["status"] for name, step in first.items() if step["status"] != "ok"}
    assert wrong.keys() == {"tournament: prefill"} and "errors, as shares" in wrong["tournament: prefill"], said
    assert first["rounds: compared"]["facts"].keys() == set(LAYOUTS)
    assert {f"tournament: alone, {variant.name}" for variant in VARIANTS} <= first.keys()  # what gpu_estimate.py reads
    assert {name.split(":")[0] for name in first} == gpu_run.PLANS["A"].keys()
    statuses = {name: step["status"] for name, step in second.items()}
    assert statuses["pairs: tiny-records"] == statuses["prefill: tiles"] == statuses["soak: records"] == "ok", more
    assert statuses["pairs: mlp"].startswith("FAILED: parts at token 0"), more
    assert statuses["pairs: kimi"] == "not run: small.tar.xz has no kimi"
    assert second["soak: records"]["facts"]["rounds"] >= 20
    assert len(list(rehearsed["found"].iterdir())) <= 8


@NO_GPU
@pytest.mark.whole
def test_a_command_that_is_given_again_keeps_what_was_ok(rehearsed):
    said, steps = rehearsed["again"]
    assert "pairs: tiny-records" in steps and "pairs: mlp" not in steps and "unpack: tiles" in steps
    assert not any(line.startswith("unpack ") for line in said.splitlines())


@pytest.mark.whole
def test_only_kernels_that_wait_for_earlier_launches_are_launched_early(compiled):
    manifest = json.loads((compiled / MANIFEST).read_text())["kernels"]
    assert {about["early"] for about in manifest.values()} == {True, False}
    for key, about in manifest.items():
        code = (compiled / f"{key}.cubin").read_bytes()
        assert about["early"] == (about["constants"].get("EARLY") is True)
        assert b"/tmp" not in code and str(Path.home()).encode() not in code


@pytest.mark.whole
def test_the_kernels_of_a_prefill_are_compiled_with_wgmma_and_without(compiled):
    manifest = json.loads((compiled / MANIFEST).read_text())["kernels"]
    prefill = {key: about["constants"] for key, about in manifest.items() if "int4_matmul" in key}
    assert {(key.endswith("-own"), constants["BLOCK_M"]) for key, constants in prefill.items()} == {
        (True, 128), (False, 64)
    }  # fmt: skip
    codes = read_codes((compiled / f"{key}.cubin").read_bytes() for key in prefill)
    for key in prefill:
        loops = codes[(compiled / f"{key}.cubin").read_bytes()].loops
        assert {loop.warp_group for loop in loops if loop.multiply_adds} == {key.endswith("-own")}


@pytest.mark.whole
def test_a_launch_that_was_not_compiled_is_named(compiled):
    with pytest.raises(ValueError, match="make the cubins again with the same sources"):
        Cubins(compiled, None, lambda: 0).function("int4-0")


# --- A stage's processes

STAGE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {gpu!r})
from gpu_run import RUNNING, Record
record = Record(Path({file!r}), Path({copy!r}))
for name in {names!r}:
    if "some: " + name in record.steps:
        continue
    record.set("some", name, RUNNING)
    if name == "dies":
        os._exit(7)
    if name == "hangs":
        time.sleep(60)
    record.set("some", name, "FAILED: wrong" if name == "fails" else "ok")
    if name == "fails":
        sys.exit({again})
"""


@pytest.fixture
def played(tmp_path):
    """A function that plays a stage of steps with the given names, and returns their statuses."""
    record = Record(tmp_path / "A.json", tmp_path / "copy.json")

    def play(*names: str, seconds: float = 30) -> dict[str, str]:
        given = {"gpu": str(ROOT / "scripts" / "gpu"), "file": str(record.file), "copy": str(record.copy)}
        script = tmp_path / "stage.py"
        script.write_text(STAGE.format(**given, names=names, again=AGAIN))
        gpu_run.play("some", seconds, [sys.executable, str(script)], record, tmp_path / "A.txt")
        assert json.loads(record.copy.read_text()) == record.read()
        return {name.removeprefix("some: "): step["status"] for name, step in record.steps.items()}

    return play


def test_after_a_step_that_fails_or_kills_its_process_the_next_ones_run(played, tmp_path, capsys):
    found = played("first", "fails", "dies", "last")
    assert found == {"first": "ok", "fails": "FAILED: wrong", "dies": "FAILED: its process ended with 7", "last": "ok"}
    said = capsys.readouterr().out
    assert said.count("some ") == 4 and "last" in said and "FAILED: wrong" in (tmp_path / "A.txt").read_text()


def test_a_stage_that_does_not_end_is_stopped_and_what_was_done_is_kept(played):
    begin = time.monotonic()
    found = played("first", "hangs", "last", seconds=3)
    assert found == {"first": "ok", "hangs": "FAILED: no end in 3 s", "the rest": "not run: no time left"}
    assert time.monotonic() - begin < 30


def test_a_stage_that_cannot_begin_is_named(tmp_path):
    record = Record(tmp_path / "A.json", tmp_path / "copy.json")
    gpu_run.play("some", 30, [sys.executable, "-c", "raise SystemExit(5)"], record, tmp_path / "A.txt")
    assert record.steps["some: all"]["status"] == "FAILED: its process ended with 5"


def test_only_steps_that_were_ok_on_the_same_machine_are_kept(tmp_path):
    record = Record(tmp_path / "A.json", tmp_path / "copy.json")
    record.begin({"gpu": "one"})
    for name, status in (("right", "ok"), ("wrong", "FAILED: by half"), ("missing", "not run: no file")):
        record.set("some", name, status, 1.0, {"ms": 3})
    assert record.facts("some", "right") == {"ms": 3} and record.facts("some", "wrong") is None
    record.begin({"gpu": "one"})
    assert record.steps.keys() == {"some: right"}
    record.begin({"gpu": "another"})
    assert record.steps == {}


def test_an_archive_is_unpacked_whole_or_refused_by_name(tmp_path):
    folder, work = tmp_path / "folder", tmp_path / "work"
    for each in (folder, work):
        each.mkdir()
    with pytest.raises(ValueError, match="none.tar.xz is missing or broken: .*No such file"):
        gpu_run.unpacked(folder, work, "none.tar.xz")
    (tmp_path / "file").write_bytes(bytes(10**5))
    with tarfile.open(folder / "small.tar.xz", "w:xz") as packed:
        packed.add(tmp_path / "file", "file")
    whole = (folder / "small.tar.xz").read_bytes()
    (folder / "small.tar.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="small.tar.xz is missing or broken"):
        gpu_run.unpacked(folder, work, "small.tar.xz")
    assert list(work.iterdir()) == []
    (folder / "small.tar.xz").write_bytes(whole)
    (work / "small").mkdir()
    for _ in range(2):  # the second time it is there
        assert (gpu_run.unpacked(folder, work, "small.tar.xz") / "file").stat().st_size == 10**5
