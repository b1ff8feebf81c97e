"""``scripts/bench/bench_llama_cpp.py`` without a llama.cpp: parsing of its output, and the figures."""

import json

import bench_llama_cpp as bench
import bench_llama_steps as steps
import llama_build
import llama_server
import pytest
import torch
from commands import fail_command
from llama_search import Tried
from llama_server import LlamaCppConfiguration, Setting
from random_checkpoints import random_model
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from eagle3.runner.bench.measure import Completion, Configuration, Outcome
from eagle3.runner.model import Result
from eagle3.runner.options import Options
from eagle3.runner.rounds.statistics import GenerationStats
from eagle3.runner.text.prompts import Prompt
from eagle3.targets import TARGETS

LOG = """\
0.10.1 I slot print_timing: id  0 | task 1 | draft acceptance = 0.5 (    2 accepted /     4 generated), mean len =  1.50
0.10.1 T spec common_specu: statistics     draft-eagle3: #calls(b,g,a) =    1      4      4, #gen drafts =      4, \
#acc drafts =     2, #gen tokens =     12, #acc tokens =     2, #mean acc len = 1.50, #acc rate/pos = (0.500, 0.000, \
0.000)
0.10.2 T spec common_specu: statistics     draft-eagle3: #calls(b,g,a) =   17    663    663, #gen drafts =    663, \
#acc drafts =   581, #gen tokens =   1989, #acc tokens =  1527, #mean acc len = 3.30, #acc rate/pos = (0.876, 0.767, \
0.659), dur(b,g,a) = 0.015, 214.512, 0.155 ms
"""


def test_acceptance_is_read_from_the_last_statistics_of_the_log():
    assert llama_server.acceptance(LOG) == [0.876, 0.767, 0.659]
    with pytest.raises(ValueError, match="no statistics"):
        llama_server.acceptance("server is listening")


def test_a_reply_becomes_a_result_timed_from_its_first_token():
    timings = {"prompt_ms": 8.0, "predicted_ms": 2.0, "predicted_n": 5}
    reply = {"tokens": [4, 5, 6, 7, 8], "stop_type": "limit", "timings": timings}
    found = llama_server.result([2, 3], reply, Options())
    assert (found.token_ids, found.finish_reason) == ([4, 5, 6, 7, 8], "length")
    assert found.stats.decode_tokens_per_second == pytest.approx(4 / 0.002)
    assert found.stats.prefill_tokens_per_second == pytest.approx(2 / 0.008)


def outcome(configuration: Configuration | LlamaCppConfiguration, seconds: list[float], tokens: list[int]) -> Outcome:
    """Return an outcome with one prompt per pass."""
    passes = []
    for each in seconds:
        stats = GenerationStats(1, 3, 0, len(tokens), prefill_seconds=0.5, decode_seconds=each)
        if configuration.chain_len:
            stats.record(proposed=2, accepted=1)
        passes.append(
            [Completion(Prompt(1, "x"), 0, Result([1, 2, 3], tokens, None, "length", None, Options(), stats))]
        )
    return Outcome(configuration, passes)


def test_ratios_are_computed_within_a_pass_and_llama_cpps_best_setting_is_named(tmp_path):
    (tmp_path / "log").write_text(LOG)
    ours = Configuration("out", None, 0), Configuration("out", None, 2)
    settings = [
        Setting("q4_0"),
        Setting("q4_0", 2, "f32"),
        Setting("q4_0", 6, "q8_0", False),
        Setting("q4_0", 7, "f32"),
    ]
    settings += [Setting("q4_k_m"), Setting("q4_k_m", 1, "q8_0")]
    configurations = [*ours, *(LlamaCppConfiguration(setting, None, 0, tmp_path / "log") for setting in settings)]
    seconds = [
        [2.0, 4.0, 2.0],
        [1.0, 1.0, 1.0],
        *([1.0, 2.0, 2.0], [0.25, 9.0, 9.0], [0.5, 1.0, 4.0], [0.5, 1.0, 4.0]),
        *([2.0, 2.0, 2.0], [4.0, 4.0, 4.0]),
    ]
    same, other = [7, 8, 9], [7, 8, 1]
    tokens = [same] * (len(configurations) - 1) + [other]
    report = bench.make_report(list(map(outcome, configurations, seconds, tokens)))

    one, two = (report["ours_to_llama_cpp"][weights] for weights in ("q4_0", "q4_k_m"))
    assert Setting(**one["best_setting"]) == settings[2]  # the best median, not the fastest pass
    assert one["without_speculation"] == {"median": 0.5, "min": 0.5, "max": 1.0}
    assert one["with_speculation"] == one["with_speculation_to_its_best"] == {"median": 1.0, "min": 0.5, "max": 4.0}
    assert Setting(**two["best_setting"]) == Setting("q4_k_m")  # speculation makes it slower
    assert two["without_speculation"] == {"median": 1.0, "min": 0.5, "max": 1.0}
    assert two["with_speculation"]["median"] == 4.0
    assert two["with_speculation_to_its_best"]["median"] == 2.0

    plain, drafting, *_, theirs = report["ways"]
    assert plain["decode_tokens_per_second"]["median"] == 1.0  # two tokens after the first, in 2 s
    assert drafting["acceptance_rate_per_position"] == [1.0, 0.0]
    assert theirs["acceptance_rate_per_position"] == [0.876, 0.767, 0.659]
    assert drafting["ratio_to_no_speculation"]["median"] == 2.0
    assert theirs["ratio_to_no_speculation"]["median"] == 0.5  # relative to its own type of weight, not to q4_0
    assert report["ways"][2]["divergence"] is None
    assert theirs["divergence"]["position"] == 2

    tried = [Tried(settings[1], 8.0).as_json(), Tried(settings[2], failure="gone").as_json()]
    text = bench.as_text(report | {"asked": {"threads": 1}, "machine": "a machine", "search": tried}).splitlines()
    assert "llama.cpp at its best: q4_0, draft q8_0, no backend sampling, chain length 6" in text
    assert "ours to llama.cpp q4_0, with speculation to its best: 1.00 (0.50..4.00)" in text
    assert [line.split() for line in text if line.startswith("q4_0, ")] == [
        ["q4_0,", "draft", "f32,", "backend", "sampling", "8", "-"],
        ["q4_0,", "draft", "q8_0,", "no", "backend", "sampling", "-", "-"],
    ]
    assert text[-1] == "left out: q4_0, draft q8_0, no backend sampling, chain length 6: gone"
    assert text[-2].startswith("llama.cpp q4_k_m, draft q8_0, backend sampling, chain length 1: differs from out, ")


def test_the_converted_target_differs_only_in_its_tokenizer(tmp_path):
    checkpoint = TARGETS["gemma4-tiny"].checkpoint
    before = (checkpoint / "tokenizer.json").read_bytes()
    llama_build.with_accepted_tokenizer(checkpoint, tmp_path)
    assert (checkpoint / "tokenizer.json").read_bytes() == before
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    assert made["model"]["vocab"] == json.loads(before)["model"]["vocab"]
    assert (tmp_path / "model.safetensors").samefile(checkpoint / "model.safetensors")


def test_a_folder_without_a_llama_cpp_build_is_refused(tmp_path):
    _, line = fail_command(bench.main, tmp_path, tmp_path)
    assert "CMakeCache.txt is missing: give the folder that CMake built llama.cpp in" in line
    (tmp_path / "CMakeCache.txt").write_text("A:BOOL=ON\nCMAKE_HOME_DIRECTORY:INTERNAL=/sources of it\n")
    _, line = fail_command(bench.main, tmp_path, tmp_path)
    assert "llama-server is missing" in line


def test_the_gguf_for_step_times_has_the_checkpoints_own_weights(tmp_path):
    model = random_model("qwen3-4B", num_hidden_layers=2).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "target")
    steps.write_gguf(tmp_path / "target", model.config, tmp_path / "bf16.gguf")
    read = load_gguf_checkpoint(tmp_path / "bf16.gguf", return_tensors=True, model_to_load=model)
    assert read["config"]["num_hidden_layers"] == 2
    expected = model.state_dict()
    for name, value in read["tensors"].items():
        assert torch.equal(value.bfloat16(), expected[name]), name
    assert len(read["tensors"]) == len({value.data_ptr() for value in expected.values()})


def test_step_times_need_a_build_with_llama_bench(tmp_path):
    code, line = fail_command(steps.main, tmp_path, "--folder", tmp_path / "work")
    assert code and "CMakeCache.txt is missing: give the folder that CMake built llama.cpp in" in line
