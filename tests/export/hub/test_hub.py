"""Names on the Hugging Face hub are found and downloaded, or refused in one line; a stand-in for the hub answers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import fail_command, run_command
from gguf_files import gemma4_gguf
from hub_commands import CPU, HEAD, TARGET, fetched, flags
from huggingface_hub import constants, hf_hub_download
from safetensors.torch import load_file, save_file
from stand_in_hub import TOKEN, commit_of
from transformers import Gemma4ForCausalLM

from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.configuration.hub_names import HubName, hub_name
from eagle3.export.exporting import output_name
from eagle3.export.hub.sources import find_sources, names_of, with_shipped_head
from eagle3.export.pipeline import make_manifest
from eagle3.export.planning.plan import make_plan
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]
KEPT = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def refused(*args) -> str:
    """Return the one error line of a command that must leave the folder unchanged."""
    result = CliRunner().invoke(export_main, [str(arg) for arg in args])
    assert result.exit_code == 1
    assert not any(Path.cwd().iterdir())
    line = result.stderr.splitlines()[-1]  # progress bars and the twin check's line may come before
    assert line.startswith("Error: ")
    return line


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def same_files(folder: Path, original: Path) -> bool:
    return all((folder / name).read_bytes() == (original / name).read_bytes() for name in names_in(folder))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("google/gemma-4-31B-it", HubName("google/gemma-4-31B-it")),
        ("org/name@v1.0:a/file-00001-of-00002.gguf", HubName("org/name", "v1.0", "a/file-00001-of-00002.gguf")),
        ("name", None),
        ("./name", None),
        ("a/b/c", None),
        ("org/name.gguf", None),
        ("org/na--me", None),
    ],
)
def test_hub_names_are_distinguished_from_paths(text, name):
    assert hub_name(text) == name
    assert name is None or str(name) == text


def test_only_files_that_an_export_reads_are_downloaded(hub, tmp_path):
    folder = Path(shutil.copytree(TINY.checkpoint, tmp_path / "full"))
    weights = (folder / "model.safetensors").read_bytes()
    for name in ("pytorch_model.bin", "consolidated.safetensors", "tiny.gguf", "onnx/model.safetensors", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(weights)
    hub.add(TARGET, folder)
    hub.add(HEAD, TINY.draft)
    here = fetched(flags())
    assert names_in(here.checkpoint) == KEPT | {"model.safetensors"}
    assert names_in(here.draft) == {"config.json", "model.safetensors"}
    assert same_files(here.checkpoint, TINY.checkpoint) and same_files(here.draft, TINY.draft)
    assert sum(request.bytes for request in hub.asked(".safetensors")) == sum(
        (part / "model.safetensors").stat().st_size for part in (TINY.checkpoint, TINY.draft)
    )


def test_the_files_in_the_index_of_a_sharded_checkpoint_are_downloaded(hub_pair, tmp_path):
    folder = Path(shutil.copytree(TINY.checkpoint, tmp_path / "sharded"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: files[number % 2] for number, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"of an earlier upload")
    hub_pair.add("org/sharded", folder)
    here = fetched(flags("org/sharded"))
    assert names_in(here.checkpoint) == KEPT | {*files, "model.safetensors.index.json"}
    assert same_files(here.checkpoint, folder)
    assert make_plan(here).target_headers == make_plan(flags(TINY.checkpoint, TINY.draft)).target_headers
    hub_pair.requests.clear()
    assert not find_sources(flags("org/sharded")).missing
    assert hub_pair.requests == []
    (here.checkpoint / files[1]).unlink()
    assert find_sources(flags("org/sharded")).missing[0].missing == (files[1],)


def test_cached_files_are_used_offline(hub_pair, monkeypatch):
    fetched(flags())
    hub_pair.requests.clear()
    assert not find_sources(flags()).missing
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    run_command(export_main, "--checkpoint", TARGET, "--draft", HEAD, *CPU, "--dry-run")
    assert hub_pair.requests == []


@pytest.fixture
def left_by_another_tool(hub_pair):
    """A cache made by a tool that fetches single files and does not store the list of the repository's files."""
    fetched(flags(TINY.checkpoint))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        hf_hub_download(TARGET, name)
    hub_pair.requests.clear()
    return hub_pair


def test_a_partial_cache_of_another_tool_is_completed(left_by_another_tool):
    assert set(find_sources(flags()).missing[0].missing) == KEPT - {"config.json", "tokenizer.json"}
    assert names_in(fetched(flags()).checkpoint) > KEPT
    assert left_by_another_tool.asked("model.safetensors") == []


def test_a_partial_cache_of_another_tool_is_used_if_the_hub_does_not_answer(left_by_another_tool, monkeypatch):
    left_by_another_tool.down = True
    assert not find_sources(flags()).missing
    assert "answered 503" in refused("--checkpoint", "org/other", "--draft", HEAD, *CPU)
    asked = len(left_by_another_tool.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    make_plan(fetched(flags()))
    assert len(left_by_another_tool.requests) == asked


@pytest.mark.parametrize(("said", "how"), [("HF_HUB_OFFLINE is set", "offline"), ("cannot be reached", "no server")])
def test_missing_files_offline_are_refused_with_the_reason(said, how, hub_pair, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refused("--checkpoint", TARGET, "--draft", HEAD, *CPU)
    assert said in line and f"--checkpoint {TARGET}: no such path exists here" in line
    assert f"does not hold {TARGET} completely" in line and "correct the path" in line


@pytest.mark.parametrize(
    ("typed", "named", "missing", "how"),
    [
        ((), "--target-model qwen3-4B", "Qwen/Qwen3-4B", "offline"),
        (("--checkpoint", TINY.checkpoint), "--target-model qwen3-4B", "AngelSlim/", "no server"),
        (("--checkpoint", TINY.checkpoint, "--draft", "2"), "--draft 2", "z-lab/", "no repository"),
    ],
)
def test_no_error_blames_a_path_that_was_not_typed(typed, named, missing, how, hub, monkeypatch):
    if how != "no repository":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refused("--target-model", "qwen3-4B", *typed, *CPU, "--dry-run")
    assert line.startswith(f"Error: {named}: ") and missing in line
    assert "path" not in line.replace(constants.HF_HUB_CACHE, "")


@pytest.mark.parametrize(
    ("flag", "path", "name"),
    [
        ("--checkpoint", "org/name/tree/v1.0", "org/name@v1.0"),
        ("--checkpoint", "org/name/blob/main/a-Q4_K_M.gguf?download=true", "org/name:a-Q4_K_M.gguf"),
        ("--draft", "org/name/", "org/name"),
    ],
)
def test_the_error_for_a_repositorys_address_says_the_name_to_type(flag, path, name):
    typed = {"--checkpoint": TINY.checkpoint, "--draft": TINY.draft, flag: f"https://huggingface.co/{path}"}
    line = fail_command(export_main, *(each for pair in typed.items() for each in pair), "--dry-run")[1]
    assert line.endswith(f"not its address: type {flag} {name}")


def test_a_revision_is_its_own_checkpoint_and_its_commit_is_recorded(hub_pair, tmp_path):
    older = Path(shutil.copytree(TINY.checkpoint, tmp_path / "older"))
    (older / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    commit = hub_pair.add(TARGET, older, "v1.0")
    assert commit != commit_of(TINY.checkpoint)
    here = fetched(flags(f"{TARGET}@v1.0"))
    plan = make_plan(here)
    assert plan.eos_ids == (1, 5)
    manifest = make_manifest(plan)
    assert manifest["repositories"] == {
        "checkpoint": {"id": TARGET, "commit": commit},
        "draft": {"id": HEAD, "commit": commit_of(TINY.draft)},
    }
    assert manifest["draft"] == HEAD
    written = plan.config.as_json()
    assert (written["checkpoint"], written["target_model"]) == (f"{TARGET}@{commit}", "auto")
    json.dumps(written)
    assert fetched(flags(written["checkpoint"])).checkpoint == here.checkpoint
    assert make_plan(fetched(flags())).eos_ids != (1, 5)


def test_weights_are_fetched_at_the_plans_commit_even_if_the_branch_moved(hub_pair, tmp_path):
    sources = find_sources(flags())
    newer = Path(shutil.copytree(TINY.checkpoint, tmp_path / "newer"))
    (newer / "generation_config.json").write_text("{}")
    hub_pair.repositories[TARGET] = {"main": newer, "before": TINY.checkpoint}
    with sources.downloaded().local() as here:
        assert here.checkpoint.name == commit_of(TINY.checkpoint)
        assert same_files(here.checkpoint, TINY.checkpoint)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("org/nothing", "has no repository org/nothing that this user may see"),
        (f"{TARGET}@v9", f"{TARGET} has no revision v9"),
        (f"{TARGET}:nothing.gguf", f"{TARGET} has no nothing.gguf and no other"),
        (f"{TARGET}:model.safetensors", f"type {TARGET} for the whole model"),
    ],
)
def test_names_that_are_not_on_the_hub_are_refused_with_the_reason(typed, says, hub_pair):
    assert says in refused("--checkpoint", typed, "--draft", HEAD, *CPU)


def test_a_gated_repository_says_where_to_ask_and_is_read_with_a_token(hub_pair, monkeypatch):
    hub_pair.gated.add(TARGET)
    line = refused("--checkpoint", TARGET, "--draft", HEAD, *CPU, "--dry-run")
    assert f"{TARGET} is gated: accept its terms on {hub_pair.endpoint}/{TARGET}" in line
    assert "hf auth login" in line
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert "is gated" in refused("--checkpoint", TARGET, "--draft", HEAD, *CPU)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert same_files(fetched(flags()).checkpoint, TINY.checkpoint)


def test_an_interrupted_download_continues_where_it_stopped(hub_pair, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    whole = (TINY.checkpoint / "model.safetensors").stat().st_size
    hub_pair.cut["model.safetensors"] = whole // 2
    sources = find_sources(flags(draft=TINY.draft)).downloaded()
    with sources.local() as here:
        assert same_files(here.checkpoint, TINY.checkpoint)
    sent = [(request.range, request.bytes) for request in hub_pair.asked("model.safetensors") if request.bytes]
    assert len(sent) == 2 and sent[0] == (None, whole // 2)
    assert sent[1][0].startswith("bytes=") and sum(bytes for _, bytes in sent) < whole * 1.1


def test_a_download_whose_length_differs_from_the_header_is_refused(hub_pair):
    hub_pair.told_sizes["model.safetensors"] = told = 20_000_000
    line = refused("--checkpoint", TARGET, "--draft", TINY.draft, *CPU)
    assert "model.safetensors" in line and str(told) in line


def test_a_download_whose_length_differs_from_the_listing_is_refused(hub_pair):
    hub_pair.listed_sizes["model.safetensors"] = 20_000_000
    for _ in range(2):  # the downloaded file stays in the cache
        line = refused("--checkpoint", TARGET, "--draft", TINY.draft, *CPU)
        assert "has 10706092 bytes, the hub lists 20000000" in line and "remove " in line


def test_a_header_of_more_bytes_than_the_file_has_is_refused_in_a_dry_run(hub_pair):
    hub_pair.told_sizes["model.safetensors"] = 1000
    line = refused("--checkpoint", TARGET, "--draft", TINY.draft, *CPU, "--dry-run")
    assert "has 1000 bytes on the hub, its header describes" in line


def test_a_full_disk_is_reported_before_the_download(hub_pair):
    hub_pair.told_sizes["model.safetensors"] = 10**15
    line = refused("--checkpoint", TARGET, "--draft", TINY.draft, *CPU)
    assert "the download takes 1,000,000.0 GB" in line and "HF_HOME" in line
    assert sum(request.bytes for request in hub_pair.asked("model.safetensors")) <= 200_000
    planned = run_command(export_main, "--checkpoint", TARGET, "--draft", TINY.draft, *CPU, "--dry-run")
    assert f"Warning: {line.removeprefix('Error: ')}" in planned.stderr


def test_a_wrong_pair_is_refused_before_the_weights_are_downloaded(hub_pair, tmp_path, checkpoints):
    _, folder = checkpoints("qwen3-4B")
    hub_pair.add("org/qwen", folder)
    line = refused("--checkpoint", "org/qwen", "--draft", HEAD, *CPU)
    assert "pair" in line and "eagle3-headers" not in line
    assert sum(request.bytes for request in hub_pair.asked(".safetensors")) < 300_000
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("target", "typed"),
    [
        ("llama3.1-8B", "2"),
        ("auto", "EAGLE3-LLaMA3.1-Instruct-8B"),
        ("auto", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    ],
)
def test_a_head_is_chosen_by_number_by_name_or_by_full_repository(typed, target):
    checkpoint = None if target != "auto" else "meta-llama/Llama-3.1-8B-Instruct"
    named, given = names_of(flags(checkpoint, typed, target))
    assert named["draft"] == HubName("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
    assert "draft" in given


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        ("llama3.1-8B", "4", "llama3.1-8B has 3 heads"),
        ("gemma4-tiny", "1", "gemma4-tiny has no heads"),
        ("phi4", None, "no draft head is known for phi4: type --draft FOLDER or ORG/NAME, --draft none"),
    ],
)
def test_a_head_that_the_targets_entry_lacks_is_refused(target, draft, says):
    with pytest.raises(ValueError, match=says):
        names_of(flags(None, draft, target))


@pytest.fixture
def named(hub_pair, monkeypatch):
    """Let qwen3-4B's entry name the repository of a random checkpoint of its family, and a head like the shipped
    one."""
    hub_pair.add(TARGETS["qwen3-4B"].repository, TINY.checkpoint)
    hub_pair.add(TARGETS["qwen3-4B"].heads[0], TINY.draft)
    return hub_pair


def test_a_named_targets_repositories_are_fetched_only_with_download(named):
    named_flags = ("--target-model", "qwen3-4B", *CPU)
    line = refused(*named_flags)
    assert "Qwen/Qwen3-4B (10.8 MB) and AngelSlim/Qwen3-4B_eagle3 (3.8 MB), which the cache lacks" in line
    assert "--download to fetch 14.6 MB" in line
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*"))
    given = flags(None, None, "qwen3-4B")
    with find_sources(given, download=True).downloaded().local() as here:
        assert same_files(here.checkpoint, TINY.checkpoint) and same_files(here.draft, TINY.draft)
    named.requests.clear()
    assert not find_sources(given).missing
    assert named.requests == []


@pytest.mark.parametrize("split", [False, True])
def test_a_gguf_file_on_the_hub_uses_the_config_of_another_repository(split, hub_pair, tmp_path):
    folder = tmp_path / "gguf"
    folder.mkdir()
    name = "q/tiny-00001-of-00002.gguf" if split else "tiny-Q8_0.gguf"
    (folder / name).parent.mkdir(exist_ok=True)
    model = Gemma4ForCausalLM.from_pretrained(TINY.checkpoint)
    gemma4_gguf(folder / name, model, {".weight": "Q8_0"})
    if split:
        shutil.copyfile(folder / name, folder / name.replace("00001-of", "00002-of"))
    (folder / "other.gguf").write_bytes(b"GGUF")
    hub_pair.add("org/tiny-GGUF", folder)
    assert f"type org/tiny-GGUF:FILE with one of other.gguf, {name}" in refused(
        "--checkpoint", "org/tiny-GGUF", "--draft", HEAD, *CPU
    )
    given = ("--checkpoint", f"org/tiny-GGUF:{name}", "--config", TARGET, "--draft", HEAD, *CPU)
    assert "type --download to fetch" in refused(*given, "--dry-run")
    here = fetched(flags(f"org/tiny-GGUF:{name}", config_folder=Path(TARGET)))
    assert here.checkpoint.read_bytes() == (folder / name).read_bytes()
    assert len(list(here.checkpoint.parent.glob("*.gguf"))) == 1 + split
    assert names_in(here.config_folder) == KEPT
    assert here.as_json()["checkpoint"] == f"org/tiny-GGUF@{commit_of(folder)}:{name}"
    if not split:  # the downloaded files are planned without --download
        run_command(export_main, *given, "--dry-run")


def test_a_pickled_checkpoint_is_downloaded_for_a_dry_run_with_download(hub_pair, tmp_path):
    import torch

    folder = Path(shutil.copytree(TINY.draft, tmp_path / "pickled"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    hub_pair.add("org/pickled", folder)
    given = ("--target-model", "gemma4-tiny", "--draft", "org/pickled", *CPU, "--dry-run")
    assert "has pickled weights" in refused(*given)
    assert "org/pickled@" in run_command(export_main, *given, "--download").stdout


@pytest.mark.parametrize("spoil", ["nothing", "adapter", "index"])
def test_a_repository_without_weights_says_what_it_has(spoil, hub_pair, tmp_path):
    folder = Path(shutil.copytree(TINY.draft, tmp_path / "spoiled"))
    left = "adapter_model.safetensors" if spoil == "adapter" else "eagle.safetensors"
    (folder / "model.safetensors").rename(folder / left)
    if spoil == "index":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    says = {"nothing": "but eagle.safetensors", "adapter": "only a LoRA adapter", "index": "names model-00001-of-00002"}
    hub_pair.add("org/spoiled", folder)
    assert says[spoil] in refused("--target-model", "gemma4-tiny", "--draft", "org/spoiled", *CPU)


@pytest.mark.parametrize(
    ("file", "says"), [("eagle3.gguf", "GGUF heads are not read"), ("params.json", "Mistral's own")]
)
def test_a_hub_head_in_an_unsupported_format_is_named(file, says, hub_pair, tmp_path):
    (tmp_path / "head").mkdir()
    for name in (file, "consolidated.safetensors"):
        (tmp_path / "head" / name).write_bytes(b"{}")
    hub_pair.add("org/form", tmp_path / "head")
    for name in ("org/form", *(["org/form:eagle3.gguf"] if file == "eagle3.gguf" else [])):
        assert says in refused("--target-model", "gemma4-tiny", "--draft", name, *CPU)


def test_the_hub_is_not_asked_if_only_paths_are_given(hub_pair, monkeypatch):
    given = ("--checkpoint", TINY.checkpoint, "--draft", TINY.draft, *CPU, "--dry-run")
    run_command(export_main, *given, "--download")
    run_command(export_main, "--target-model", "gemma4-tiny", *CPU, "--dry-run")
    assert hub_pair.requests == []


@pytest.mark.parametrize(
    ("target", "checkpoint", "backend", "arch", "name"),
    [
        ("gemma4-31B", None, "cuda", "sm_90", "gemma4-31B-cuda-sm_90"),
        ("auto", "Qwen/Qwen3-8B@main", "xnnpack", None, "Qwen3-8B-xnnpack"),
        ("auto", "org/name:a/model-Q4_K_M.gguf", "xnnpack", None, "model-Q4_K_M-xnnpack"),
        ("auto", "/models/my.gguf", "cuda", "sm_80", "my-cuda-sm_80"),
    ],
)
def test_the_default_output_folder_is_named_after_target_and_backend(target, checkpoint, backend, arch, name):
    assert output_name(target, checkpoint and Path(checkpoint), backend, arch) == Path(name)


def test_list_targets_shows_repositories_and_heads():
    text = run_command(export_main, "--list-targets").stdout
    assert "google/gemma-4-31B-it" in text and "--draft 1  RedHatAI/gemma-4-31B-it-speculator.eagle3" in text
    listed = json.loads(run_command(export_main, "--list-targets", "--json").stdout)
    assert list(listed) == list(TARGETS)
    for name, entry in listed.items():
        assert (entry["repository"], tuple(entry["heads"])) == (TARGETS[name].repository, TARGETS[name].heads)


def test_a_shipped_head_is_chosen_by_its_number_or_name():
    text = run_command(export_main, "--list-targets").stdout
    drafts = TARGETS["gemma4-tiny"].drafts
    for number, folder in enumerate(drafts, 1):
        assert f"--draft {number}  {folder.name} (shipped)" in text
        for written in (str(number), folder.name):
            assert with_shipped_head(ExportConfig("gemma4-tiny", draft=Path(written))).draft == folder
    assert with_shipped_head(ExportConfig("gemma4-tiny", draft=Path("ORG/NAME"))).draft == Path("ORG/NAME")
    assert with_shipped_head(ExportConfig("gemma4-tiny")).draft is None
    code, line = fail_command(export_main, "--target-model", "gemma4-tiny", "--draft", "9", "--dry-run")
    assert code == 1 and "--draft 9: gemma4-tiny has 4 heads: eagle3-export --list-targets lists them" in line


@pytest.mark.whole
def test_the_hubs_environment_variables_are_used(hub_pair, tmp_path):
    """HF_ENDPOINT, HF_HOME and HF_TOKEN are set in a separate process."""
    hub_pair.gated.add(TARGET)
    heeded = {"HF_ENDPOINT": hub_pair.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    command = [sys.executable, "-m", "eagle3.export.cli", "--checkpoint", TARGET, "--draft", HEAD, *CPU[:2], "--json"]
    env = os.environ | heeded
    run = subprocess.run([*command, "--dry-run"], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["target"] == "auto"
    assert facts["repositories"]["checkpoint"]["commit"] == commit_of(TINY.checkpoint)
    assert (tmp_path / "home" / "hub" / "models--org--tiny").is_dir()
    assert not any(Path.cwd().iterdir())
