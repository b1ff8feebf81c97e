"""Every command of every README runs as printed, in order, in a fresh working copy after ``scripts/quickstart``.

Exports of the shipped model run with ``--dry-run``; the artifact that other tests share then replaces their output.
Benchmarks are shortened. Commands that cannot run here are in ``NOT_RUN`` with the reason, and their flags are parsed
by the command itself.
"""

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest
from commands import run_command
from flag_tables import COMMANDS
from places import ROOT
from terminal import PROMPT, Terminal

from eagle3.runner import load

ROOMS = ("", "export/", "export/draft/", "export/checks/fit/", "export/lowering/cuda/", "export/lowering/edge/")
ROOMS += ("export/lowering/xnnpack/", "runner/", "runner/native/", "runner/serve/", "scripts/", "targets/")
ROOMS += ("targets/gemma4_tiny/", "export/lowering/mlx/")
READMES = (".github/CONTRIBUTING.md", *(f"{room}README.md" for room in ROOMS))
MEASURED = tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[ers]*/**/measured.md")))
"""Pages of figures. Their commands take minutes and are only parsed."""

HUB = "asks the hub for a published model; tests/export/hub/test_hub.py asks a stand-in"
GPU = "takes a GPU, or minutes of compiling for one"
OWN = "takes a checkpoint of one's own"
MAC = "is for a Mac with Apple silicon"
LONG = "takes minutes, or a build of llama.cpp"
NOT_RUN = {
    "flags ─ plan": "a picture",
    "graph TD": "a picture",
    "pip install '.[": "installs packages; their names are looked up in pyproject.toml",
    "eagle3-export --target-model gemma4-31B": HUB,
    "eagle3-export --target-model llama3.1-8B": HUB,
    "eagle3-export --checkpoint Qwen/Qwen3-8B": HUB,
    "eagle3-export --checkpoint ORG/": HUB,
    "eagle3-export --target-model gemma4-tiny --cuda-arch": GPU,
    "eagle3-export --target-model gemma4-tiny --backend mlx": MAC,
    "eagle3-run out-mlx": MAC,
    "eagle3-export --target-model gemma4-tiny --checkpoint COPY": "takes a changed copy of the shipped checkpoint",
    "eagle3-fit my-llama": OWN,
    "eagle3-export --checkpoint my-llama": OWN,
    "eagle3-bench out-heads": "its chain length is longer than that of the shared artifact",
    "eagle3-bench out-long": "takes an artifact of 16,640 slots",
    "python scripts/gpu/gpu_": GPU,
    "python3 scripts/gpu/gpu_": GPU,
    "python scripts/bench/bench_llama_cpp.py": LONG,
    "serve run": "takes a cluster of Ray; tests/runner/serve/test_serve_ray.py starts one where Ray is installed",
    "exported = export(": "exports with the default folder, and asks the hub for Gemma 4 31B",
    "client = openai.OpenAI(": "stands for a program: its messages are left out",
}
"""Maps the beginning of a command, or a line of a Python block, to the reason why it is not run."""

SHORTER = {
    "eagle3-run": ("--max-new-tokens", "16"),
    "eagle3-bench": ("--repeats", "1", "--max-new-tokens", "4"),
}
"""Maps a command to the flags that shorten it to seconds."""
PLACEHOLDERS = {"NAME": "peagle"}
QUICKSTART = "scripts/quickstart"


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language of each block of code, "" for commands, and its text."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield found[1], found[2]


def command_lines(block: str) -> list[str]:
    """Return the commands of a block, with continued lines joined."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def quickstart_lines() -> list[str]:
    """Return the commands that ``scripts/quickstart`` runs, and those that it suggests."""
    lines = command_lines((ROOT / QUICKSTART).read_text())
    found = [line.removeprefix("run ") for line in lines if line.startswith("run eagle3-")]
    return found + [line.strip().removeprefix(".venv/bin/") for line in lines if line.startswith("  .venv/bin/")]


def not_run(text: str) -> str | None:
    """Return the entry of NOT_RUN for a command or a Python block."""
    return next((each for each in NOT_RUN for line in text.splitlines() if line.startswith(each)), None)


def parse(words: list[str]) -> None:
    """Let the command itself parse its flags; check that installed extras exist."""
    if words[0] == "pip":
        (extra,) = re.findall(r"\.\[(\w+)\]", words[-1])
        assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    elif words[0] in COMMANDS or words[0] == "python":
        main, arguments = click_command(words)
        context = main.make_context(words[0], arguments)
        if isinstance(main, click.Group):
            name, command, arguments = main.resolve_command(context, arguments)
            command.make_context(name, arguments)
    elif words[0] == "python3":  # a script for a machine that may lack click
        importlib.import_module(Path(words[1]).stem).parser().parse_args(words[2:])
    elif "/" in words[0]:
        assert os.access(ROOT / words[0], os.X_OK)


def click_command(words: list[str]):
    """Return the command of a line and its arguments."""
    if words[0] == "python":
        return importlib.import_module(Path(words[1]).stem).main, words[2:]
    return COMMANDS[words[0]], words[1:]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A fresh working copy as the working folder; commands in a shell are those of this Python."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = listed.stdout.split("\0") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    for name in filter(None, names):
        if (ROOT / name).is_file() and not name.startswith((".venv", "out")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(ROOT / name, tmp_path / name) if same_disk(tmp_path) else shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def same_disk(folder: Path) -> bool:
    return folder.stat().st_dev == ROOT.stat().st_dev


def run_line(line: str, artifact: Path) -> None:
    """Run a command as printed."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    if words[0] == QUICKSTART:
        shutil.rmtree("out", ignore_errors=True)
        for each in quickstart_lines():
            run_line(each, artifact)
    elif words[0] == "eagle3-export" and "--list-targets" not in words:
        run_command(COMMANDS[words[0]], *words[1:], "--dry-run")  # refuses an existing folder
        made = Path(words[words.index("--output-dir") + 1])
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(artifact, made)
    elif words[0] == "eagle3-serve":
        serve(words)
    elif words[0] == "eagle3-run" and "--chat" in words and not any(word.startswith("--prompt") for word in words):
        terminal = Terminal(*words[1:])
        terminal.until(PROMPT)
        terminal.type("import os\n")
        terminal.until(PROMPT)
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    elif {"|", ">"} & set(words) or words[0] not in COMMANDS:
        shorter = shlex.join(next((SHORTER[word] for word in words if word in SHORTER), ()))
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", f"{line} {shorter}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        main, arguments = click_command(words)
        run_command(main, *arguments, *SHORTER.get(words[0], ()))


def serve(words: list[str]) -> None:
    """Start a server on a free port, and end it when it listens."""
    with_port = [*words[1:], "--port", "0"]
    program = "import sys; from eagle3.runner.serve.cli import main; sys.exit(main())"
    started = subprocess.Popen([sys.executable, "-c", program, *with_port], stderr=subprocess.PIPE, text=True)
    try:
        url = re.search(r" at (http://127.0.0.1:\d+)", started.stderr.readline())[1]
        assert httpx.get(f"{url}/health").status_code == 200
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.stderr.close()


@pytest.mark.parametrize("page", MEASURED)
def test_the_commands_of_measured_figures_have_flags_that_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for name in ("out-measured", "out-heads", "out-wide", "out-cuda"):
        (tmp_path / name).mkdir()
    (tmp_path / "four.jsonl").touch()
    for _, block in blocks((ROOT / page).read_text()):
        for line in command_lines(block):
            parse(shlex.split(line, comments=True))


@pytest.mark.first(1)
@pytest.mark.parametrize("readme", READMES)
def test_the_commands_of_a_readme_run_as_printed_in_their_order(readme, artifact, copy):
    shutil.copytree(artifact, "out")  # as quickstart leaves it
    for language, block in blocks((ROOT / readme).read_text()):
        if language == "python":
            run_python(block)
        elif language in ("cmake", "cpp", "nginx"):
            continue  # tests of the native runner and of the server use them
        elif not_run(block.splitlines()[0]) and NOT_RUN[not_run(block.splitlines()[0])] == "a picture":
            continue
        else:
            assert language == "", f"{readme}: say what a block of {language} is"
            for line in command_lines(block):
                if not_run(line):
                    words = shlex.split(line, comments=True)
                    parse(words)
                    if "--output-dir" in words or "unpack" in words:  # a later command reads this folder
                        made = words.index("--output-dir") + 1 if "--output-dir" in words else -1
                        Path(words[made]).mkdir()
                else:
                    run_line(line, artifact)


def run_python(block: str) -> None:
    """Run a Python block after code that opens the artifact and defines a text and a schema."""
    program = compile(block, "README", "exec")
    if not not_run(block):
        with load("out") as model:
            exec(program, {"model": model, "text": "def main(", "schema": {"type": "object"}})


def test_every_readme_is_tested_and_every_entry_of_not_run_is_used():
    every = {
        str(path.relative_to(ROOT))
        for top in ("export", "runner", "targets", "scripts")
        for path in (ROOT / top).rglob("README.md")
    }
    assert every | {"README.md", ".github/CONTRIBUTING.md"} == set(READMES)
    used = set()
    for readme in (*READMES, *MEASURED):
        for language, block in blocks((ROOT / readme).read_text()):
            for text in [block] if language == "python" else command_lines(block):
                used.add(not_run(text))
    assert NOT_RUN.keys() <= used
