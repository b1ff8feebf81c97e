"""``scripts/gpu_carry.py``: what is unpacked has the artifact's files, and weights of its sizes."""

import gpu_carry
from click.testing import CliRunner

from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE, read_ptd_index


def test_an_artifact_is_carried_by_samples_of_its_weights(cuda_artifact, tmp_path):
    packed, found = tmp_path / "packed.tar.xz", tmp_path / "found"
    for command in (["pack", cuda_artifact, packed], ["unpack", packed, found]):
        done = CliRunner().invoke(gpu_carry.main, [str(part) for part in command], catch_exceptions=False)
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
        sample = true[place.offset : place.offset + min(place.size, gpu_carry.SAMPLE)]
        several = sample * (place.size // max(len(sample), 1) + 1)
        assert filled[place.offset : place.offset + place.size] == several[: place.size]
    assert any(place.size > 2 * gpu_carry.SAMPLE for place in index.values())
