"""``scripts/bench/llama_search.py`` and the whole comparison, with a fake server of given speeds
(``fake_llama_server.py``)."""

import json
import stat
import sys
from itertools import product
from pathlib import Path

import bench_llama_cpp as bench
import llama_search
import llama_server
import pytest
from commands import fail_command, run_command
from llama_build import Build, convert
from llama_search import Tried, comparable, grid, search
from llama_server import LlamaCppConfiguration, Server, ServerError, Setting
from places import HELPERS
from scripted import scripted_metadata

from eagle3.runner.bench.measure import Workload
from eagle3.runner.model import Model
from eagle3.runner.text.prompts import Prompt
from eagle3.targets import TARGETS

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
        (folder / "bin").mkdir()
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
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    return FakeBuild(folder)


@pytest.fixture
def server(fake_build, tmp_path):
    build = Build.found(fake_build.folder)
    files = convert(build, "gemma4-tiny", tmp_path / "files", ["q8_0", "q4_0"])
    model = Model(scripted_metadata(max_seq_len=96), lambda: None)
    return Server(build, files, threads=2, cache="f32", model=model, logs=tmp_path)


WORKLOAD = Workload(Path("prompts"), [Prompt(1, tokens=[4, 5]), Prompt(2, tokens=[6])], {"max_new_tokens": 64}, False)


def searched(server: Server, settings: list[Setting]) -> list[Tried]:
    return search(settings, server.started, WORKLOAD, lambda: None)


def test_the_grid_has_every_chain_length_draft_and_sampling_once():
    plain, *drafting = grid("q4_0")
    assert plain == Setting("q4_0")
    assert len(set(drafting)) == len(drafting) == 7 * 2 * 2
    assert {each.chain_len for each in drafting} == set(range(1, 8))
    assert {each.draft for each in drafting} == {"f32", "q8_0"}
    assert all(each.weights == "q4_0" for each in drafting)


def test_the_search_finds_the_planted_settings(server, fake_build, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_N_MAX", "3")  # an option of the user's own servers
    speeds = {"q8_0 6 q8_0 off": 900, "q8_0 7 f32 on": 800, "q8_0 1 q8_0 on": 700, "q8_0 2 f32 off": 600}
    fake_build.plan(speeds=speeds | {"q8_0 0": 1000})
    tried = searched(server, grid("q8_0"))
    assert len(tried) == 29
    assert {round(each.tokens_per_second, 6) for each in tried} == {1000, 900, 800, 700, 600, 500}
    found = comparable(tried)
    assert found == {
        "q8_0": [
            Setting("q8_0"),
            Setting("q8_0", 6, "q8_0", False),
            Setting("q8_0", 7, "f32"),
            Setting("q8_0", 1, "q8_0"),
            Setting("q8_0", 2, "f32", False),
        ]
    }
    served = fake_build.served
    assert len({each["setting"] for each in served}) == 29
    assert [each["setting"] for each in served[:29]] == [each["setting"] for each in served[29:]]
    assert {(each["threads"], each["context"]) for each in served} == {("2", "96")}


def test_a_stall_in_one_of_two_runs_does_not_decide_the_search(monkeypatch):
    slow_first, slow_later, failing = grid("q8_0")[1:4]
    speeds = {slow_first: [75, 900], slow_later: [800, 81], failing: [950, None]}

    def tried(setting, start, workload):
        speed = speeds[setting].pop(0)
        return Tried(setting, speed, None if speed else "it ended")

    monkeypatch.setattr(llama_search, "_tried", tried)
    found = search(list(speeds), None, WORKLOAD, lambda: None)
    assert [each.tokens_per_second for each in found] == [900, 800, None]
    assert found[2].failure == "it ended"


def test_among_equally_fast_settings_the_first_of_the_grid_are_chosen(server, fake_build):
    fake_build.plan(speeds={"q4_0 3 q8_0 on": 501})
    best, *others = comparable(searched(server, grid("q4_0")))["q4_0"][1:]
    assert best == Setting("q4_0", 3, "q8_0")
    assert others == [Setting("q4_0", 1, "f32"), Setting("q4_0", 1, "f32", False), Setting("q4_0", 1, "q8_0")]


def test_settings_whose_servers_fail_are_left_out_with_the_reason(server, fake_build):
    names = "q8_0 1 f32 on", "q8_0 1 f32 off", "q8_0 1 q8_0 on"
    fake_build.plan(speeds=dict.fromkeys(names, 900), starts_not=names[:1], ends=names[1:2], refuses=names[2:])
    tried = searched(server, grid("q8_0")[:5])
    assert [each.failure is None for each in tried] == [True, False, False, False, True]
    plain, starts_not, ends, refuses, last = tried
    assert starts_not.failure == "llama-server does not start: 0.00.1 E unable to allocate the context"
    assert ends.failure.startswith("llama-server gave no answer to line 1 (")
    assert ends.failure.endswith("GGML_ASSERT(n_tokens > 0) failed")
    assert "refuses the prompt of line 1: " in refuses.failure
    assert "failed to process batch" in refuses.failure
    assert comparable(tried) == {"q8_0": [plain.setting, last.setting]}


def test_a_weight_type_without_working_settings_is_left_out(server, fake_build):
    fake_build.plan(starts_not=["q8_0 0", "q4_0 1 f32 off"])
    tried = searched(server, grid("q8_0")[:2] + grid("q4_0")[:3])
    assert comparable(tried) == {"q4_0": grid("q4_0")[:2]}
    with pytest.raises(
        ValueError, match=r"1 of llama.cpp's 2 settings fail .* the first, q8_0, no speculation: .*alloc"
    ):
        comparable(tried[:2])


def test_a_server_that_does_not_end_is_killed(server, fake_build, monkeypatch):
    fake_build.plan()
    tool = fake_build.folder / "bin" / "llama-server"
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif __name__"
    tool.write_text(tool.read_text().replace("if __name__", deaf))
    monkeypatch.setattr(llama_server, "STOP_SECONDS", 0.2)
    with server.started(Setting("q8_0")) as configuration:
        pass
    with pytest.raises(ServerError, match="^llama.cpp q8_0, no speculation: llama-server gave no answer to line 1"):
        configuration.complete(WORKLOAD, WORKLOAD.prompts[0])


def test_llama_server_prompts_beyond_the_context_are_refused_before_tokenizing(server):
    model = Model(scripted_metadata(max_seq_len=96), lambda: None, TARGETS["gemma4-tiny"].checkpoint)
    configuration = LlamaCppConfiguration(Setting("q8_0"), model, 1, server.logs / "log")
    with pytest.raises(ValueError, match="the prompt has 3,000,000 characters, the artifact's context 96 tokens"):
        configuration.complete(WORKLOAD, Prompt(1, "x" * 3_000_000))


# --- the whole script, over an artifact


@pytest.fixture
def few_prompts(monkeypatch, tmp_path):
    """Run the benchmark with few prompts, and keep the pool of threads: methods that other tests loaded in this process
    use the present pool, and would wait for ever after it is freed."""
    monkeypatch.setattr(bench, "use_threads", lambda count: None)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def main(argv=None):\\n    "}\n{"prompt": "import os\\n"}\n')
    monkeypatch.setattr(bench, "PROMPTS", file)


@pytest.mark.whole
@pytest.mark.usefixtures("few_prompts")
def test_the_best_setting_is_that_of_the_repeated_measurement(artifact, fake_build, tmp_path):
    finalists = {"f32 6 q8_0 off": 900, "f32 5 q8_0 off": 800, "f32 4 f32 on": 700, "f32 3 f32 on": 600}
    fake_build.plan(speeds=finalists | {"f32 5 q8_0 off 128": 1000, "f32 1 f32 on 128": 9000, "f32 0": 250})
    asked = artifact, fake_build.folder, "--repeats", 2, "--threads", 1
    report = json.loads(run_command(bench.main, *asked, "--json", "--folder", tmp_path / "files").stdout)
    names = [figures["way"] for figures in report["ways"]]
    assert names[:3] == [str(artifact), str(artifact), "llama.cpp f32, no speculation"]
    assert [figures["chain_len"] for figures in report["ways"][2:]] == [0, 6, 5, 4, 3]
    found = report["ours_to_llama_cpp"]["f32"]
    assert Setting(**found["best_setting"]) == Setting("f32", 5, "q8_0", False)
    ours = report["ways"][1]["decode_tokens_per_second"]["median"]
    assert found["with_speculation"]["median"] == pytest.approx(ours / 1000, rel=0.01)
    assert report["ways"][4]["ratio_to_no_speculation"] == {"median": 4, "min": 4, "max": 4}
    assert len(report["search"]) == 29
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
        "draft-f32.gguf",
        "draft-q8_0.gguf",
        "target-f32.gguf",
    ]


@pytest.mark.whole
@pytest.mark.usefixtures("few_prompts")
def test_a_finalist_that_fails_is_named_and_the_next_fastest_takes_its_place(artifact, fake_build):
    speeds = {"q4_0 6 q8_0 on": 900, "q4_0 5 q8_0 on": 800, "q4_0 4 f32 on": 700, "q4_0 3 f32 on": 600}
    fake_build.plan(speeds=speeds | {"q4_0 2 f32 off": 550}, ends=["q4_0 6 q8_0 on 128"])
    shown = run_command(bench.main, artifact, fake_build.folder, "--repeats", 1, "--type", "q4_0").stdout
    assert "llama.cpp at its best: q4_0, draft q8_0, backend sampling, chain length 5" in shown
    assert "left out: q4_0, draft q8_0, backend sampling, chain length 6: llama-server gave no answer" in shown
    rows = [line.split("   ") for line in shown.splitlines() if line.startswith("llama.cpp q4_0, ") and "   " in line]
    assert [row[0] for row in rows] == [
        "llama.cpp q4_0, no speculation",
        "llama.cpp q4_0, draft q8_0, backend sampling",
        "llama.cpp q4_0, draft f32, backend sampling",
        "llama.cpp q4_0, draft f32, backend sampling",
        "llama.cpp q4_0, draft f32, no backend sampling",
    ]


@pytest.mark.usefixtures("few_prompts")
def test_a_search_in_which_every_setting_fails_gives_one_error_line(artifact, fake_build):
    drafting = product(range(1, 8), ("f32", "q8_0"), ("on", "off"))
    fake_build.plan(starts_not=["f32 0", *(" ".join(map(str, ("f32", *each))) for each in drafting)])
    code, line = fail_command(bench.main, artifact, fake_build.folder)
    assert code == 1
    assert line.startswith("Error: 29 of llama.cpp's 29 settings fail")
    assert line.endswith("f32, no speculation: llama-server does not start: 0.00.1 E unable to allocate the context")
