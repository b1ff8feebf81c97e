"""Prepares everything that a borrowed GPU decides, and decides it there in a few commands of at most 10 minutes each.

    python scripts/gpu/gpu_half_hour.py make .gpu                          # without a GPU: 1 to 2 hours of two cores
    scripts/gpu/there .gpu python scripts/gpu/gpu_half_hour.py run .gpu tournament small     # with one
    scripts/gpu/there .gpu python scripts/gpu/gpu_half_hour.py run .gpu rounds
    scripts/gpu/there .gpu python scripts/gpu/gpu_half_hour.py run .gpu prefill soak

``make`` writes packed files and leaves out what is there already, so that it may be interrupted. The sources and this
folder, some 50 MB, are all that the other machine needs besides PyTorch. The parts of a run:

tournament  times each kernel of few rows and its variants, checks their bits, and prints which to choose
small       compares small pairs and gemma4-tiny in two layouts with their modules, token for token
rounds      times a round of Gemma 4 31B, kernel by kernel, for each layout of weights
prefill     times prefills of 32 to 1,024 tokens with each of these artifacts
soak        generates with gemma4-tiny for 10,000 rounds, and compares memory at the beginning and at the end
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import click

HERE = Path(__file__).parent
BENCH = HERE.parent / "bench" / "bench_export.py"
WHEELS = "executorch", "torchao", "gguf", "ruamel.yaml", "flatbuffers", "tabulate", "llguidance"
"""The runner imports these packages besides PyTorch and transformers; their versions are those of this machine."""
LAYOUTS = ("tiles", "records")
TINY = {f"tiny-{layout}": ("--int4-layout", layout) for layout in LAYOUTS}
PAIRS, EXPECTED = "small.tar.xz", ".expected.json"


class Made:
    """The folder of packed files, and the folder for everything that they are made from."""

    def __init__(self, folder: Path, work: Path, arch: str, layers: int, python: str):
        self.folder, self.work, self.arch, self.layers, self.python = folder, work, arch, layers, python

    def wheels(self) -> None:
        target = ["--python-version", self.python, "--only-binary", ":all:"]
        wanted = [f"{name}=={version(name)}" for name in WHEELS]
        call(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", self.folder / "wheels", *target, *wanted)

    def tournament(self) -> None:
        call(sys.executable, HERE / "gpu_tournament.py", "make", self.folder / "tournament.tar.xz")

    def small(self) -> None:
        place = self.work / "small"
        call(sys.executable, HERE / "small_pairs.py", place, "--cuda-arch", self.arch)
        for name, flags in TINY.items():
            if not (place / name / "export.json").is_file():
                command = "-m", "eagle3.export.cli", "--target-model", "gemma4-tiny", "--cuda-arch", self.arch
                call(sys.executable, *command, *flags, "--overwrite", "--output-dir", place / name)
        wanted = {*TINY, *names_of_pairs(place)}
        with tarfile.open(self.folder / PAIRS, "w:xz") as packed:
            for path in sorted(place.iterdir()):
                if path.name.removesuffix(EXPECTED) in wanted:
                    packed.add(path, path.name)

    def wide(self) -> None:
        flags = [part for layout in LAYOUTS for part in ("--int4-layout", layout)]
        where = "--layers", self.layers, "--cuda-arch", self.arch, "--folder", self.work / "wide", "--pack"
        call(sys.executable, BENCH, *where, *flags)
        for packed in (self.work / "wide" / str(self.layers)).glob("*.tar.xz"):
            (self.folder / "wide").mkdir(exist_ok=True)
            shutil.copy(packed, self.folder / "wide")


MADE: dict[str, tuple[str, Callable[[Made], None]]] = {
    "wheels": ("wheels", Made.wheels),
    "tournament": ("tournament.tar.xz", Made.tournament),
    "small": (PAIRS, Made.small),
    "wide": ("wide", Made.wide),
}
"""The name of each part's file or folder, and what makes it."""


class Run:
    """The packed files, a folder for what is unpacked, and one for what was found."""

    def __init__(self, folder: Path, work: Path, found: Path):
        self.folder, self.work, self.found = folder, work, found

    def tournament(self) -> None:
        archive, json_file = self.folder / "tournament.tar.xz", self.found / "tournament.json"
        self.call("tournament", HERE / "gpu_tournament.py", "run", archive, "--json", json_file)

    def small(self) -> None:
        place = self.unpacked_pairs()
        pairs = sorted(place / name for name in names_of_pairs(place))
        self.call("pairs", HERE / "check_on_gpu.py", "compare", *pairs)
        self.check("tiny", "--only", "tiny", *(part for name in TINY for part in ("--elsewhere", place / name)))

    def rounds(self) -> None:
        self.check("rounds", "--only", "round", *self.unpacked_wide())

    def prefill(self) -> None:
        self.check("prefill", "--only", "prefill", *self.unpacked_wide())

    def soak(self) -> None:
        place = self.unpacked_pairs()
        self.check("soak", "--only", "soak", *(part for name in TINY for part in ("--elsewhere", place / name)))

    def unpacked_pairs(self) -> Path:
        place = self.work / "small"
        if not place.is_dir():
            with tarfile.open(self.folder / PAIRS) as packed:
                packed.extractall(place, filter="data")
        return place

    def unpacked_wide(self) -> Iterator[str | Path]:
        """Yield the flags that name all wide artifacts, the default first."""
        place = self.work / "wide"
        done: list[Path] = []
        for name in LAYOUTS:
            packed, artifact = self.folder / "wide" / f"{name}.tar.xz", place / name
            if not packed.is_file():
                click.echo(f"{packed} is missing: {name} is left out")
                continue
            if not artifact.is_dir():
                like = [part for other in done for part in ("--like", other)]
                call(sys.executable, HERE / "gpu_carry.py", "unpack", packed, artifact, *like)
            done.append(artifact)
            yield from ("--wide", artifact)

    def check(self, name: str, *flags: str | Path) -> None:
        self.call(name, HERE / "gpu_check.py", "--output-dir", self.found, *flags)

    def call(self, name: str, script: Path, *flags: str | Path) -> None:
        """Run a script and keep what it prints in a file. What fails is said, and the next part still runs."""
        command = [sys.executable, str(script), *map(str, flags)]
        with (self.found / f"{name}.txt").open("w") as file:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                click.echo(line, nl=False)
                file.write(line)
                file.flush()
        if code := process.wait():
            click.echo(f"{name}: {script.name} ended with {code}")


RUN: dict[str, Callable[[Run], None]] = {
    "tournament": Run.tournament, "small": Run.small, "rounds": Run.rounds, "prefill": Run.prefill, "soak": Run.soak,
}  # fmt: skip


def names_of_pairs(place: Path) -> list[str]:
    return [path.name.removesuffix(EXPECTED) for path in place.glob(f"*{EXPECTED}")]


def call(*command: object) -> None:
    """Run a command, which prints to this one's output. Raises ClickException if it fails."""
    words = [str(word) for word in command]
    if code := subprocess.run(words).returncode:
        raise click.ClickException(f"{' '.join(words)} ended with {code}: see above")


def note_gpu(found: Path) -> None:
    """Write what nvidia-smi says of the GPU into ``found``, if it is there."""
    if smi := shutil.which("nvidia-smi"):
        asked = "name,driver_version,clocks.sm,clocks.mem,ecc.mode.current"
        done = subprocess.run([smi, f"--query-gpu={asked}", "--format=csv"], stdout=subprocess.PIPE, text=True)
        (found / "gpu.txt").write_text(done.stdout)
        click.echo(done.stdout, nl=False)


@click.group(help=__doc__.replace("\n\n    ", "\n\n\b\n    ").replace("\n\ntournament", "\n\n\b\ntournament"))
def main() -> None:
    pass


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("parts", nargs=-1, type=click.Choice(list(MADE)))
@click.option(
    "--work", type=click.Path(path_type=Path, file_okay=False), help="Checkpoints and artifacts. [FOLDER-work]"
)
@click.option("--cuda-arch", "arch", default="sm_90", show_default=True, help="The architecture of the GPU.")
@click.option("--layers", default=12, show_default=True, help="Layers of Gemma 4 31B, at most 60.")
@click.option("--python", default="3.12", show_default=True, help="The other machine's Python, for the wheels.")
def make(folder: Path, parts: tuple[str, ...], work: Path | None, arch: str, layers: int, python: str) -> None:
    """Make PARTS (default: all) in FOLDER, without a GPU."""
    work = work or folder.with_name(f"{folder.name}-work")
    for each in (folder, work):
        each.mkdir(parents=True, exist_ok=True)
    making = Made(folder.resolve(), work.resolve(), arch, layers, python)
    for part in parts or MADE:
        name, run = MADE[part]
        if (folder / name).exists():
            click.echo(f"{part}: is there")
            continue
        run(making)
        click.echo(f"{part}: made, {size_of(folder / name) / 1e6:.1f} MB")
    click.echo(f"{folder}: {size_of(folder) / 1e6:.1f} MB")


@main.command("run")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("parts", nargs=-1, type=click.Choice(list(RUN)))
@click.option("--output-dir", "found", type=click.Path(path_type=Path, file_okay=False), help="[$OUT, or FOLDER-found]")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="What is unpacked. [a folder in /tmp]")
def run_parts(folder: Path, parts: tuple[str, ...], found: Path | None, work: Path | None) -> None:
    """Run PARTS (default: all) on this machine's GPU with the files in FOLDER."""
    found = found or Path(os.environ.get("OUT") or folder.with_name(f"{folder.name}-found"))
    work = work or Path(tempfile.gettempdir()) / "eagle3-half-hour"
    for each in (found, work):
        each.mkdir(parents=True, exist_ok=True)
    note_gpu(found)
    running = Run(folder.resolve(), work.resolve(), found.resolve())
    for part in parts or RUN:
        RUN[part](running)


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file())


if __name__ == "__main__":
    main()
