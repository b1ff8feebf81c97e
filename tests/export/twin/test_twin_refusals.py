"""Refusals of the twin check name the file's field and value, and report a full disk as such. Families that once failed
with an error inside torch are computed or refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_configs import FAMILIES, SIZE
from transformers import CONFIG_MAPPING

from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.twin.target import check_target
from eagle3.targets import spec_for

LONG = SIZE | {"max_position_embeddings": 4096}
DEEPSEEK = FAMILIES["deepseek_v3"]
MIMO = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 16}
MIMO |= {"v_head_dim": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}


def written(folder: Path, kind: str, **fields) -> Path:
    """Write a configuration of a class with these keys in the file, even if the class has no such fields."""
    folder.mkdir(exist_ok=True)
    CONFIG_MAPPING[kind](**LONG | fields).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def checked(folder: Path) -> dict:
    text = read_target_config(folder, "auto")
    return check_target(spec_for("auto", text.model_type), "auto", folder, text)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("deepseek_v2", DEEPSEEK | {"topk_method": "group_limited_greedy", "n_shared_experts": 0, "v_head_dim": 32}),
        ("deepseek_v2", DEEPSEEK | {"q_lora_rank": None}),
        ("mimo_v2_flash", MIMO),
        ("persimmon", {"num_key_value_heads": 2}),
    ],
    ids=["groups", "whole queries", "mimo_v2_flash", "persimmon"],
)
def test_kv_heads_and_complex_rotations_follow_the_class(kind, fields, tmp_path):
    assert checked(written(tmp_path, kind, **fields))["logits"] < 1e-4


def test_an_expert_activation_with_weights_is_refused_by_its_field(tmp_path):
    folder = written(tmp_path, "qwen3_moe", **FAMILIES["qwen3_moe"], hidden_act="xielu")
    with pytest.raises(ValueError, match=r"hidden_act = 'xielu'.*weights of its own \(alpha_p, alpha_n\)"):
        checked(folder)


def test_a_value_with_which_transformers_itself_fails_is_named(tmp_path):
    folder = written(tmp_path, "deepseek_v2", **DEEPSEEK, topk_method="noaux_tc")
    with pytest.raises(ValueError, match="with topk_method = 'noaux_tc' transformers cannot build or run"):
        checked(folder)


PHIMOE = {"num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": 1024}
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 2048}


def test_a_refusal_of_the_twin_check_prints_the_value_of_the_file(tmp_path):
    """The message has the file's value, although the small copy has an original length below 100."""
    with pytest.raises(ValueError, match="original_max_position_embeddings = 2048"):
        checked(written(tmp_path, "phimoe", **PHIMOE, rope_parameters=ROPE))


def in_a_full_folder(program: str, *args: Path, full: Path) -> subprocess.CompletedProcess:
    """Run a program whose TMPDIR is a file system of 16 KiB."""
    full.mkdir()
    mount = 'mount -t tmpfs -o size=16k none "$TMPDIR" && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(command, env=os.environ | {"TMPDIR": str(full)}, capture_output=True, text=True, timeout=600)


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


TARGET = """
import sys
from pathlib import Path
from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.twin.target import check_target
from eagle3.targets import spec_for
folder = Path(sys.argv[1])
text = read_target_config(folder, "auto")
check_target(spec_for("auto", text.model_type), "auto", folder, text)
"""


@pytest.mark.whole
@pytest.mark.skipif(not can_mount(), reason="this user may mount no file system of its own")
def test_a_full_folder_of_temporary_files_is_reported_as_such(tmp_path):
    folder = written(tmp_path / "target", "llama")
    done = in_a_full_folder(TARGET, folder, full=tmp_path / "full")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"OSError: {tmp_path / 'full'} is full") and "set TMPDIR" in last
