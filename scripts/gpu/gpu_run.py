"""Runs on a borrowed GPU what ``gpu_make.py`` has prepared, in two commands of about four minutes each.

    python3 scripts/gpu/gpu_run.py A .work/gpu      # reading, the tournament of kernels, rounds of both layouts
    python3 scripts/gpu/gpu_run.py B .work/gpu      # small pairs, prefills, ten thousand rounds

That machine needs Python 3.12, PyTorch with CUDA, Triton and transformers; the folder has what else is imported.

A stage (``gpu_stages.py``) is a list of steps, and runs in a process of its own with a limit in seconds. A step ends as
ok, as not run because a part is missing, or as FAILED. After a failure the stage goes on in a new process, since a
fault on a GPU ends the use of it in the process. The results are written after each step, into ``PLAN.json`` and
``PLAN.txt`` of ``$OUT``. The same command, given again on the same machine, repeats only what was not ok.
"""

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLANS = {
    "A": {"probe": 40, "tournament": 170, "unpack": 90, "rounds": 200},
    "B": {"pairs": 200, "unpack": 90, "prefill": 100, "soak": 100},
}
"""The stages of each command, in order, and the most seconds that each may take."""
LIMIT = 560
"""The most seconds of a command."""
RUNNING, OK = "running", "ok"
AGAIN = 3
"""The exit code of a stage's process after a failed step."""
PACKAGES, SMALL = "packages.tar.xz", "small.tar.xz"
LAYOUTS = ("tiles", "records")
PAIRS = (
    "delta-rule-mtp", "delta-rule-dflash", "mamba2", "mamba2-attention", "mamba2-experts", "short-conv", "kimi",
    "eagle1", "mlp", "dflash2", "mtp", *(f"tiny-{layout}" for layout in LAYOUTS),
)  # fmt: skip
"""The small pairs, recurrent layers first, which no GPU has run; and gemma4-tiny in each layout."""
EXPECTED = "expected.json"
"""The file in a pair's folder with the tokens of its module."""
Step = dict[str, Any]


class Record:
    """The steps of a command, by stage and name, in a JSON file and a copy of it. A step has a ``status``, its
    ``seconds``, and ``facts``."""

    def __init__(self, file: Path, copy: Path):
        self.file, self.copy = file, copy

    def read(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.is_file() else {"machine": None, "steps": {}}

    def write(self, found: dict[str, Any]) -> None:
        """Write atomically, so that the file stays complete if this process is killed."""
        for place in (self.file, self.copy):
            fresh = place.with_name(f"{place.name}.new")
            fresh.write_text(json.dumps(found, indent=1) + "\n")
            fresh.replace(place)

    def begin(self, machine: dict[str, Any]) -> None:
        """Keep the earlier steps that were ok, if they ran on the same machine."""
        found = self.read()
        kept = found["steps"] if found["machine"] == machine else {}
        kept = {name: step for name, step in kept.items() if step["status"] == OK}
        self.write({"date": time.strftime("%Y-%m-%d"), "machine": machine, "steps": kept})

    @property
    def steps(self) -> dict[str, Step]:
        return self.read()["steps"]

    def set(
        self, stage: str, name: str, status: str, seconds: float = 0.0, facts: dict[str, Any] | None = None
    ) -> None:
        found = self.read()
        found["steps"][f"{stage}: {name}"] = {"status": status, "seconds": round(seconds, 1), "facts": facts or {}}
        self.write(found)
        if status != RUNNING:
            said = json.dumps(facts) if facts else ""
            said = said if len(said) < 400 else f"{said[:400]} ..."
            print(f"{stage:<10} {name:<52} {seconds:7.1f} s  {status}  {said}", flush=True)

    def facts(self, stage: str, name: str) -> dict[str, Any] | None:
        """Return the facts of a step that was ok, None for any other."""
        step = self.steps.get(f"{stage}: {name}", {"status": ""})
        return step["facts"] if step["status"] == OK else None


# --- The command: a process for each stage


def play(stage: str, seconds: float, command: list[str], record: Record, log: Path) -> None:
    """Run the steps of a stage that are not recorded yet, in as many processes as it takes."""
    end = time.monotonic() + seconds
    while True:
        before, printed = record.steps, log.stat().st_size if log.is_file() else 0
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*command, "--stage", stage], stdout=file, stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                code = process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
        with log.open("rb") as file:
            file.seek(printed)
            print(file.read().decode(errors="replace"), end="", flush=True)
        why = f"FAILED: its process ended with {code}" if code is not None else f"FAILED: no end in {seconds:.0f} s"
        broken = [name for name, step in record.steps.items() if step["status"] == RUNNING]
        for name in broken:
            record.set(stage, name.removeprefix(f"{stage}: "), why)
        if code is None:
            record.set(stage, "the rest", "not run: no time left")
        elif code and not broken and record.steps == before:
            record.set(stage, "all", why)
            return
        if not code:
            return


def run(plan: str, folder: Path, work: Path, found: Path, only: list[str]) -> int:
    """Run a plan. Returns the number of steps that are not ok."""
    begin, log = time.monotonic(), found / f"{plan}.txt"
    record, machine = Record(work / f"{plan}.json", found / f"{plan}.json"), this_machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    record.begin(machine)
    prepare(folder, work)
    command = [sys.executable, sys.argv[0], plan, str(folder), "--work", str(work), "--output-dir", str(found)]
    for stage, most in PLANS[plan].items():
        left = LIMIT - (time.monotonic() - begin)
        if only and stage not in only:
            continue
        if left < 10:
            record.set(stage, "all", "not run: no time left")
        else:
            play(stage, min(most, left), command, record, log)
    wrong = {name: step for name, step in record.steps.items() if step["status"] != OK}
    print(f"{plan}: {len(record.steps)} steps in {time.monotonic() - begin:.0f} s, {len(wrong)} of them not ok")
    for name, step in wrong.items():
        print(f"  {name}: {step['status']}")
    return len(wrong)


def prepare(folder: Path, work: Path) -> None:
    """Unpack the packages, and make the folder by which this project's sources are found under their name."""
    home = work / "home"
    home.mkdir(exist_ok=True)
    (home / "eagle3").unlink(missing_ok=True)
    (home / "eagle3").symlink_to(ROOT)
    try:
        unpacked(folder, work, PACKAGES)
    except ValueError as error:
        print(f"{error}; only what is installed here is used", flush=True)


def unpacked(folder: Path, work: Path, name: str) -> Path:
    """Return the folder of an archive's contents. Raises ValueError if the archive is missing or broken."""
    place = work / name.removesuffix(".tar.xz")
    if place.is_dir() and any(place.iterdir()):  # an empty folder is nothing
        return place
    with tempfile.TemporaryDirectory(dir=work) as fresh:
        try:
            with tarfile.open(folder / name) as packed:
                packed.extractall(Path(fresh) / "whole", filter="data")
            place.parent.mkdir(parents=True, exist_ok=True)
            (Path(fresh) / "whole").rename(place)
        except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as error:
            raise ValueError(f"{name} is missing or broken: {error}") from error
    return place


def this_machine() -> dict[str, Any]:
    machine: dict[str, Any] = {"sources": str(ROOT), "python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers"):
        try:
            machine[name] = version(name)
        except PackageNotFoundError:
            machine[name] = None
    if smi := shutil.which("nvidia-smi"):
        asked = "name,driver_version,clocks.max.sm,clocks.max.mem,ecc.mode.current"
        done = subprocess.run([smi, f"--query-gpu={asked}", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True)
        machine["gpu"] = done.stdout.strip()
    return machine


# --- A stage's own process


def run_stage(stage: str, record: Record, folder: Path, work: Path) -> int:
    """Run the steps of a stage that are not recorded. Returns AGAIN after a step that broke."""
    add_paths(work)
    from gpu_stages import STAGES, Given, NotRun, Wrong

    try:
        steps: dict[str, Callable[[], Any]] = STAGES[stage](Given(folder, work, record))
    except NotRun as reason:
        record.set(stage, "all", f"not run: {reason}")
        return 0
    for name, call in steps.items():
        if f"{stage}: {name}" in record.steps:
            continue
        record.set(stage, name, RUNNING)
        start = time.monotonic()
        status, facts, code = OK, {}, 0
        try:
            facts = call()
        except NotRun as reason:
            status = f"not run: {reason}"
        except Wrong as fault:
            status, facts = f"FAILED: {fault}", fault.facts
        except Exception as error:
            traceback.print_exc()
            status, code = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}", AGAIN
        record.set(stage, name, status, time.monotonic() - start, facts)
        if code:
            return code
    return 0


def add_paths(work: Path) -> None:
    """Let this process import the sources of this folder, and what no package that is installed here has."""
    tests = (str(ROOT / "tests" / name) for name in ("helpers", "gpu_stand_in"))
    sys.path[:0] = [str(work / "home"), str(HERE), *tests]
    sys.path.append(str(work / PACKAGES.removesuffix(".tar.xz")))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=list(PLANS))
    parser.add_argument("folder", type=Path, help="what gpu_make.py wrote")
    parser.add_argument("--only", action="append", default=[], help="run this stage; may be repeated [all]")
    parser.add_argument("--output-dir", type=Path, help="for PLAN.json and PLAN.txt [$OUT, or FOLDER-found]")
    parser.add_argument("--work", type=Path, help="for what is unpacked [a folder in /tmp]")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = parser().parse_args()
    if unknown := set(given.only) - PLANS[given.plan].keys():
        parser().error(f"{given.plan} has no stage {min(unknown)}: it has {', '.join(PLANS[given.plan])}")
    folder = given.folder.resolve()
    found = given.output_dir or Path(os.environ.get("OUT") or folder.with_name(f"{folder.name}-found"))
    work = given.work or Path(tempfile.gettempdir()) / "eagle3-gpu"
    for each in (found, work):
        each.mkdir(parents=True, exist_ok=True)
    if given.stage:
        record = Record(work.resolve() / f"{given.plan}.json", found.resolve() / f"{given.plan}.json")
        sys.exit(run_stage(given.stage, record, folder, work.resolve()))
    sys.exit(min(run(given.plan, folder, work.resolve(), found.resolve(), given.only), 1))


if __name__ == "__main__":
    main()
