"""``scripts/gpu/gpu_carry.py`` unpacks the artifact's files, with weights of the right sizes."""

import json
import shutil

import gpu_carry
import pytest
from click.testing import CliRunner

from eagle3.export.lowering.cuda.kernels.int4.records import layout as record_layout
from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE, Extent, read_ptd_index
from eagle3.runner.contract import EXPORT_RECORD


def run(*command):
    return CliRunner().invoke(gpu_carry.main, [str(part) for part in command], catch_exceptions=False)


@pytest.mark.whole
def test_an_artifact_is_packed_with_samples_of_its_weights(cuda_artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_carry, "WRITTEN", 2 * gpu_carry.SAMPLE)  # so that a weight is written in several pieces
    packed, found = tmp_path / "packed.tar.xz", tmp_path / "found"
    for command in (["pack", cuda_artifact, packed], ["unpack", packed, found]):
        done = run(*command)
        assert done.exit_code == 0, done.output
    assert {path.name for path in found.iterdir()} == {path.name for path in cuda_artifact.iterdir()}
    for path in cuda_artifact.iterdir():
        if path.name != WEIGHTS_FILE:
            assert (found / path.name).read_bytes() == path.read_bytes()
    index = read_ptd_index(cuda_artifact / WEIGHTS_FILE)
    assert read_ptd_index(found / WEIGHTS_FILE) == index
    true, filled = ((folder / WEIGHTS_FILE).read_bytes() for folder in (cuda_artifact, found))
    assert len(true) == len(filled)
    for place in index.values():
        sample = true[place.offset : place.offset + gpu_carry.kept_of(place)]
        several = sample * (place.size // max(len(sample), 1) + 1)
        assert filled[place.offset : place.offset + place.size] == several[: place.size]
    assert any(place.size > 2 * gpu_carry.WRITTEN for place in index.values())
    for checksum, is_linked in ((None, True), ("of other weights", False)):
        if checksum:
            record = json.loads((found / EXPORT_RECORD).read_text())
            record["files"][WEIGHTS_FILE]["sha256"] = checksum
            (found / EXPORT_RECORD).write_text(json.dumps(record))
        another = tmp_path / f"linked-{is_linked}"
        assert run("unpack", packed, another, "--like", found).exit_code == 0
        assert (another / WEIGHTS_FILE).samefile(found / WEIGHTS_FILE) is is_linked
        assert (another / WEIGHTS_FILE).read_bytes() == filled
        assert {path.name for path in another.iterdir()} == {path.name for path in cuda_artifact.iterdir()}


def test_a_weight_in_records_keeps_a_whole_record_and_others_whole_blocks():
    assert gpu_carry.RECORD == record_layout.RECORD
    for size, kept in ((48 * gpu_carry.RECORD, gpu_carry.RECORD), (1 << 20, gpu_carry.SAMPLE), (100, 100), (0, 0)):
        assert gpu_carry.kept_of(Extent(0, size)) == kept


def refused(*command):
    done = run(*command)
    assert done.exit_code == 1
    return done.output.strip()


@pytest.mark.whole
def test_invalid_folders_and_archives_are_refused_in_one_line(cuda_artifact, tmp_path):
    (tmp_path / "empty").mkdir()
    text = tmp_path / "text.tar.xz"
    text.write_text("no tar")
    assert refused("pack", tmp_path / "empty", tmp_path / "a.tar.xz").endswith("it is no CUDA artifact")
    assert "there is no folder" in refused("pack", cuda_artifact, tmp_path / "none" / "a.tar.xz")
    assert refused("unpack", text, tmp_path).endswith("is there already")
    assert "is not what pack wrote" in refused("unpack", text, tmp_path / "new")
    whole = tmp_path / "whole.tar.xz"
    assert run("pack", cuda_artifact, whole).exit_code == 0
    text.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    whole.unlink()
    assert "is not what pack wrote" in refused("unpack", text, tmp_path / "new")
    assert not (tmp_path / "new").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["empty", text.name]


@pytest.mark.whole
def test_an_archive_in_the_artifacts_own_folder_does_not_contain_itself(cuda_artifact, tmp_path):
    copied, packed = tmp_path / "artifact", tmp_path / "artifact" / "packed.tar.xz"
    shutil.copytree(cuda_artifact, copied)
    assert run("pack", copied, packed).exit_code == 0 and run("unpack", packed, tmp_path / "found").exit_code == 0
    assert {path.name for path in (tmp_path / "found").iterdir()} == {path.name for path in cuda_artifact.iterdir()}
