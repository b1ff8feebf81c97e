"""``scripts/bench/bench_llama_cpp.py`` with a fake llama-server of given speeds (``fake_llama_server.py``): parsing,
search, figures; and its GGUF file of random weights."""

import json
import re
import stat
import sys
from functools import partial
from itertools import product
from pathlib import Path

import bench_llama_cpp as bench
import pytest
import torch
from bench_llama_cpp import LlamaCppConfiguration, Setting, convert, finalists, started
from click.testing import CliRunner
from commands import run_command
from places import HELPERS
from random_checkpoints import random_model
from scripted import scripted_metadata
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from eagle3.runner.commands.bench_measure import Completion, Configuration, Outcome, Workload
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.text.prompts import Prompt

LOG = """\
0.10.1 I slot print_timing: id  0 | task 1 | draft acceptance = 0.5 (    2 accepted /     4 generated), mean len =  1.50
0.10.1 T spec common_specu: statistics     draft-eagle3: #calls(b,g,a) =    1      4      4, #gen drafts =      4, \
#acc drafts =     2, #gen tokens =     12, #acc tokens =     2, #mean acc len = 1.50, #acc rate/pos = (0.500, 0.000, \
0.000)
0.10.2 T spec common_specu: statistics     draft-eagle3: #calls(b,g,a) =   17    663    663, #gen drafts =    663, \
#acc drafts =   581, #gen tokens =   1989, #acc tokens =  1527, #mean acc len = 3.30, #acc rate/pos = (0.876, 0.767, \
0.659), dur(b,g,a) = 0.015, 214.512, 0.155 ms
"""


CONVERT = """
import json, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert given["--outtype"] == "f32"
part = "target" if sys.argv[1] == given["--target-model-dir"] else "draft"
open(given["--outfile"], "w").write(json.dumps({"part": part, "type": "f32"}))
"""
QUANTIZE = """
import json, sys
full, file, kind = sys.argv[1:]
found = json.load(open(full))
assert found["type"] == "f32"
json.dump(found | {"type": kind}, open(file, "w"))
"""
SLOW = {"default": 500, "speeds": {}}


class FakeBuild:
    """A build folder like CMake's, with fast fake tools; ``plan`` sets the behaviour of its server."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={folder}\n")
        (folder / "convert_hf_to_gguf.py").write_text(CONVERT)
        server = (HELPERS / "fake_llama_server.py").read_text()
        for name, text in (("llama-server", server), ("llama-quantize", QUANTIZE)):
            tool = folder / "bin" / name
            tool.write_text(f"#!{sys.executable} -IS\n{text}")
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    def plan(self, **given) -> None:
        (self.folder / "bin" / "plan.json").write_text(json.dumps(SLOW | given))

    @property
    def served(self) -> list[dict]:
        """Return the arguments of the servers that were started, in order."""
        return list(map(json.loads, (self.folder / "bin" / "served.jsonl").read_text().splitlines()))


@pytest.fixture
def fake_build(tmp_path):
    return FakeBuild(tmp_path / "llama.cpp")


@pytest.fixture
def start(fake_build, tmp_path):
    convert(fake_build.folder, tmp_path / "files", ["q8_0"])
    model = Model(scripted_metadata(max_seq_len=96), lambda: None)
    return partial(started, build=fake_build.folder, files=tmp_path / "files", model=model)


WORKLOAD = Workload(Path("prompts"), [Prompt(1, tokens=[4, 5]), Prompt(2, tokens=[6])], {"max_new_tokens": 64}, False)


def test_acceptance_is_read_from_the_last_statistics_of_the_log():
    assert bench.acceptance(LOG) == [0.876, 0.767, 0.659]
    with pytest.raises(ValueError, match="no statistics"):
        bench.acceptance("server is listening")


def test_a_reply_becomes_a_result_timed_from_its_first_token():
    timings = {"prompt_ms": 8.0, "predicted_ms": 2.0, "predicted_n": 5}
    reply = {"tokens": [4, 5, 6, 7, 8], "stop_type": "limit", "timings": timings}
    found = bench.result([2, 3], reply, Options())
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
    settings = [
        Setting("q4_0"),
        Setting("q4_0", 2, "f32"),
        Setting("q4_0", 6, "q8_0", False),
        Setting("q4_0", 7, "f32"),
    ]
    settings += [Setting("q4_k_m"), Setting("q4_k_m", 1, "q8_0")]
    ways = [Configuration("out", None, 0), Configuration("out", None, 2)]
    ways += [
        LlamaCppConfiguration(each, f"llama.cpp {each}", each.chain_len, None, "", tmp_path / "log")
        for each in settings
    ]
    seconds = [[2.0, 4.0, 2.0], [1.0, 1.0, 1.0], [1.0, 2.0, 2.0], [0.25, 9.0, 9.0], [0.5, 1.0, 4.0], [0.5, 1.0, 4.0]]
    seconds += [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]]
    tokens = [[7, 8, 9]] * (len(ways) - 1) + [[7, 8, 1]]
    rows, lines = bench.compared(list(map(outcome, ways, seconds, tokens)))
    assert lines[-4:] == [  # the best median, not the fastest pass; with q4_k_m speculation makes it slower
        f"llama.cpp at its best: {settings[2]}",
        "ours to llama.cpp q4_0: without speculation 0.50 (0.50..1.00), with speculation 1.00 (0.50..4.00), "
        "to its best 1.00 (0.50..4.00)",
        f"llama.cpp at its best: {settings[4]}",
        "ours to llama.cpp q4_k_m: without speculation 1.00 (0.50..1.00), with speculation 4.00, to its best 2.00",
    ]
    plain, drafting, *_, theirs = (list(row.values()) for row in rows)
    assert plain == ["out", "0", "1.0 (0.5..1.0)", "1.00", ""]  # two tokens after the first, in 2 s
    assert drafting == ["out", "2", "2.0", "2.00 (2.00..4.00)", "1.000 0.000"]
    assert theirs[3:] == ["0.50", "0.876 0.767 0.659"]  # relative to its own type of weight, not to q4_0
    assert [line.partition(": ")[2][:9] for line in lines[:8]] == ["identical"] * 7 + ["differs f"]


def test_the_search_finds_the_planted_settings(start, fake_build, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_N_MAX", "3")  # an option of the user's own servers
    speeds = {"q8_0 6 q8_0 off": 900, "q8_0 7 f32 on": 800, "q8_0 1 q8_0 on": 700, "q8_0 2 f32 off": 600}
    fake_build.plan(speeds=speeds | {"q8_0 0": 400})
    assert finalists("q8_0", start, WORKLOAD) == [
        Setting("q8_0"),
        Setting("q8_0", 6, "q8_0", False),
        Setting("q8_0", 7, "f32"),
        Setting("q8_0", 1, "q8_0"),
        Setting("q8_0", 2, "f32", False),
    ]
    served = fake_build.served
    assert len({each["setting"] for each in served}) == 29
    assert [each["setting"] for each in served[:29]] == [each["setting"] for each in served[29:]]
    assert {each["context"] for each in served} == {"96"}


def test_settings_whose_servers_fail_are_left_out_with_the_reason(start, fake_build, monkeypatch, capsys):
    monkeypatch.setattr(bench, "CHAIN_LENGTHS", [1])
    names = "q8_0 1 f32 on", "q8_0 1 f32 off", "q8_0 1 q8_0 on"
    fake_build.plan(speeds=dict.fromkeys(names, 900), starts_not=names[:1], ends=names[1:2], refuses=names[2:])
    assert finalists("q8_0", start, WORKLOAD) == [Setting("q8_0"), Setting("q8_0", 1, "q8_0", False)]
    starts_not, ends, refuses = capsys.readouterr().err.splitlines()
    assert starts_not.endswith("llama-server does not start: 0.00.1 E unable to allocate the context")
    assert "no answer to line 1 (" in ends and ends.endswith("GGML_ASSERT(n_tokens > 0) failed")
    assert "no answer to line 1 (Server error '500" in refuses


@pytest.fixture
def few_prompts(monkeypatch, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def main(argv=None):\\n    "}\n{"prompt": "import os\\n"}\n')
    monkeypatch.setattr(bench, "PROMPTS", file)


@pytest.mark.whole
@pytest.mark.usefixtures("few_prompts")
def test_the_best_setting_is_that_of_the_repeated_measurement(artifact, fake_build, tmp_path):
    finalists = {"f32 6 q8_0 off": 900, "f32 5 q8_0 off": 800, "f32 4 f32 on": 700, "f32 3 f32 on": 600}
    fake_build.plan(speeds=finalists | {"f32 5 q8_0 off 128": 1000, "f32 1 f32 on 128": 9000, "f32 0": 250})
    asked = artifact, fake_build.folder, "--repeats", 2, "--folder", tmp_path / "files"
    text = run_command(bench.speculation, *asked).stdout
    assert f"llama.cpp at its best: {Setting('f32', 5, 'q8_0', False)}" in text
    table = [line for line in text.splitlines() if line.startswith("llama.cpp f32") and "token" not in line]
    (best,) = (re.split(" {3,}", line) for line in table if "chain length 5" in line)
    assert best[1:4] == ["5", "1000", "4.00"]
    assert [line.partition("chain length ")[2][:1] for line in table] == ["", "6", "5", "4", "3"]


@pytest.mark.usefixtures("few_prompts")
def test_a_search_in_which_every_setting_fails_gives_an_error_line(artifact, fake_build):
    drafting = product(range(1, 8), ("f32", "q8_0"), ("on", "off"))
    fake_build.plan(starts_not=["f32 0", *(" ".join(map(str, ("f32", *each))) for each in drafting)])
    done = CliRunner().invoke(bench.speculation, [str(artifact), str(fake_build.folder)])
    *left_out, line = done.stderr.splitlines()
    assert (done.exit_code, len(left_out)) == (1, 29)
    assert line == "Error: llama.cpp in f32 does not run with speculation and without: see above"


def test_a_folder_without_a_llama_cpp_build_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="llama-bench is missing: build llama.cpp"):
        bench.tool(tmp_path, "llama-bench")


def test_the_gguf_for_step_times_has_the_checkpoints_own_weights(tmp_path):
    model = random_model("qwen3-4B", num_hidden_layers=2).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "target")
    bench.write_gguf(tmp_path / "target", model.config, tmp_path / "bf16.gguf")
    read = load_gguf_checkpoint(tmp_path / "bf16.gguf", return_tensors=True, model_to_load=model)
    assert read["config"]["num_hidden_layers"] == 2
    expected = model.state_dict()
    for name, value in read["tensors"].items():
        assert torch.equal(value.bfloat16(), expected[name]), name
    assert len(read["tensors"]) == len({value.data_ptr() for value in expected.values()})
