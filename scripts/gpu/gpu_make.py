"""Makes, without a GPU, all that ``gpu_run.py`` takes to a borrowed one.

    python scripts/gpu/gpu_make.py .work/gpu              # hours of two cores; goes on where it was interrupted
    python scripts/gpu/gpu_make.py .work/gpu packages     # one part

A part is a file, which is written whole or not at all. One that is there and can be read is not made again; one that
fails is named, and the others are still made. The small pairs lie in the working folder with the tokens of their
modules, and travel in one archive, since their code is alike. At the end the script prints what travels, and how to
leave out of the sources what is not read there.
"""

import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import IO, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu_stand_in"))

import click
from gpu_run import EXPECTED, LAYOUTS, PACKAGES, PAIRS, SMALL

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKED = (
    "executorch",
    "flatbuffers",
    "ruamel.yaml",
    "tabulate",
    "llguidance",
    "click",
    "rich",
    "markdown-it-py",
    "mdurl",
)
"""The packages that the runner imports besides PyTorch and transformers. Their Python files travel, the tables that
these read, libraries that are for every version of Python, and the program by which ExecuTorch reads a ``.ptd``."""
TAKEN = (".py", ".yaml", ".fbs", ".abi3.so", "METADATA", "flatc")
LEFT_OUT = "backends", "examples", "tests", "test"
"""The folders of ExecuTorch's package and below that are not imported there: half of its size."""
DICTIONARY = 128 << 20
"""The bytes within which an archive finds what is the same: those of all small pairs."""
NOT_READ = "/tests/golden/", "/tests/export/", "/tests/runner/", "*.safetensors", "*.gguf"
"""The sources that the other machine does not read, as patterns of ``git sparse-checkout``."""
LIMIT = 40 << 20
"""The most bytes that should travel."""
TOKENS, PROMPTS = 24, 3
"""The new tokens behind each random prompt of a pair, and the number of prompts."""
TINY_TOKENS, TINY_PROMPTS = 64, 8
FLAGS = ("--qlinear", "none", "--max-seq-len", "192", "--chain-len", "2")
EXPORTED = {
    "eagle1": "llama3.1-8B", "dflash2": "dflash2", "delta-rule-mtp": "qwen3.5-9B", "delta-rule-dflash": "dflash",
}  # fmt: skip
"""Pairs that the tests' ``family_exports`` export to the CPU, by the names there."""
FAMILIES = {
    "mamba2": "bamba", "mamba2-attention": "falcon_h1", "mamba2-experts": "nemotron_h", "short-conv": "lfm2",
    "kimi": "kimi_linear",
}  # fmt: skip
"""Pairs of a random family and an EAGLE-3 head, by the families' names."""
OTHERS = ("mlp", "mtp")
"""An MLP speculator of a Llama, and the golden MTP head of speculators for a Qwen3 of four layers."""


class Making(NamedTuple):
    """The folder for checkpoints and artifacts, and the flags of every export. A part is written into a file that has
    the name of the final one."""

    work: Path
    arch: str
    layers: int

    def packages(self, archive: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in PACKED:
                of = distribution(name)
                for file in of.files or ():
                    if file.parts[0] != ".." and file.name.endswith(TAKEN) and not {*LEFT_OUT} & {*file.parts}:
                        place = Path(folder, file)
                        place.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(of.locate_file(file), place)
            pack(contents(Path(folder)), archive)

    def probe(self, cubin: Path) -> None:
        from eagle3.export.patching.toolchain import cuda_home

        home = Path(cuda_home())
        call(home / "bin" / "nvcc", "-cubin", f"-arch={self.arch}", "-I", home / "include", "-o", cubin,
             HERE / "read_probe.cu")  # fmt: skip

    def tournament(self, archive: Path) -> None:
        call(sys.executable, HERE / "gpu_tournament.py", archive)

    def pair(self, file: Path) -> None:
        name = file.parent.name
        checkpoints = self.work / "checkpoints" / name
        shutil.rmtree(checkpoints, ignore_errors=True)
        checkpoints.mkdir(parents=True)
        flags = save(name, checkpoints)
        self.export(name, *flags, *FLAGS)
        self.tokens(file, TOKENS, PROMPTS)

    def tiny(self, file: Path) -> None:
        from eagle3.runner.text.text import Text

        name = file.parent.name
        self.export(name, "--target-model", "gemma4-tiny", "--int4-layout", name.removeprefix("tiny-"))
        lines = (ROOT / "scripts" / "prompts.jsonl").read_text().splitlines()[:TINY_PROMPTS]
        text = Text(self.work / name)
        self.tokens(file, TINY_TOKENS, [text.encode(json.loads(line)["prompt"]) for line in lines])

    def export(self, name: str, *flags: str) -> None:
        """Export into the folder of that name, unless an earlier export is there, which is whole or not there."""
        if not (self.work / name / "export.json").is_file():
            where = "--cuda-arch", self.arch, "--overwrite", "--output-dir", self.work / name
            call(sys.executable, "-m", "eagle3.export.cli", *flags, *where)

    def tokens(self, file: Path, tokens: int, prompts: list[list[int]] | int) -> None:
        """Write the tokens of an artifact's module into ``file``, in a folder of the artifact's name."""
        from gpu_expected import expected

        file.write_text(json.dumps(expected(self.work / file.parent.name, tokens, prompts)))

    def small(self, archive: Path) -> None:
        """Pack the pairs that are made, files of one name beside each other."""
        made = [self.work / name for name in PAIRS if is_made(self.work / name / EXPECTED)]
        files = sorted(((file.name, file) for folder in made for file in folder.iterdir()), reverse=True)
        pack(((file, f"{file.parent.name}/{name}") for name, file in files), archive)

    def wide(self, archive: Path) -> None:
        layout = archive.name.removesuffix(".tar.xz")
        where = "--layers", self.layers, "--cuda-arch", self.arch, "--folder", self.work / "wide", "--pack"
        call(sys.executable, HERE.parent / "bench" / "bench_export.py", *where, "--int4-layout", layout)
        shutil.move(self.work / "wide" / str(self.layers) / "artifact.tar.xz", archive)


PARTS: dict[str, dict[str, Callable[[Making, Path], None]]] = {
    "packages": {PACKAGES: Making.packages},
    "probe": {"read_probe.cubin": Making.probe},
    "tournament": {"tournament.tar.xz": Making.tournament},
    "tiny": {f"tiny-{layout}/{EXPECTED}": Making.tiny for layout in LAYOUTS},
    "pairs": {f"{name}/{EXPECTED}": Making.pair for name in (*EXPORTED, *FAMILIES, *OTHERS)},
    "small": {SMALL: Making.small},
    "wide": {f"wide/{layout}.tar.xz": Making.wide for layout in LAYOUTS},
}
"""The files of each part, and what makes them."""
NOT_CARRIED = "tiny", "pairs"
"""The parts whose files stay in the working folder, until the part ``small`` packs their artifacts."""


def save(name: str, folder: Path) -> list[str]:
    """Write the checkpoints of a pair and return the flags of its export. The target's end tokens are removed, so that
    a text ends where it is told to."""
    from family_exports import DRAFTS, OWN_LAYER, TARGET_OF, family_model, random_family, taps
    from mtp_heads import GOLDEN
    from random_checkpoints import random_model, save_random_draft, save_random_mlp

    of, target, draft, named = EXPORTED.get(name), folder / "target", folder / "draft", "auto"
    if of:
        model, named = family_model(of), TARGET_OF.get(of, of)
    elif name in FAMILIES:
        model = random_family(FAMILIES[name])
    else:
        named = {"mlp": "llama3.1-8B", "mtp": "qwen3-4B"}[name]
        model = random_model(named, **({"num_hidden_layers": 4} if name == "mtp" else {}))
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.bos_token_id = None
    model.save_pretrained(target)
    if of:
        DRAFTS[of](draft, model.config)
    elif name == "mlp":
        save_random_mlp(draft, model.config)
    elif name == "mtp":
        shutil.copytree(GOLDEN / "qwen3", draft)
    else:
        save_random_draft(draft, model.config, taps(model.config))
    head = "mtp" if of in OWN_LAYER else str(draft)
    return ["--target-model", named, "--checkpoint", str(target), "--draft", head]


def contents(folder: Path) -> list[tuple[Path, str]]:
    """Return what lies in a folder, with its names."""
    return [(path, path.name) for path in sorted(folder.iterdir())]


def pack(files: Iterable[tuple[Path, str]], archive: Path) -> None:
    """Write an archive of files and folders under the names given."""
    with compressed(archive, "wb") as file, tarfile.open(fileobj=file, mode="w") as packed:
        for path, name in files:
            packed.add(path, name)


def compressed(archive: Path, mode: str) -> IO[bytes]:
    last = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": DICTIONARY}
    return lzma.open(archive, mode, filters=[{"id": lzma.FILTER_X86}, last])


def is_made(file: Path) -> bool:
    """Return True if a file is there and, if it is an archive, can be read to its end and has something in it."""
    if not file.is_file() or not file.stat().st_size:
        return False
    if not file.name.endswith(".tar.xz"):
        return True
    try:
        with tarfile.open(file) as packed:
            return any(member.size for member in packed.getmembers())
    except (OSError, tarfile.TarError, EOFError):
        return False


def is_older(archive: Path, work: Path) -> bool:
    """Return True if the tokens of a pair were written after the archive of the pairs."""
    written = ((work / name / EXPECTED).stat().st_mtime for name in PAIRS if is_made(work / name / EXPECTED))
    return max(written, default=0.0) > archive.stat().st_mtime


def call(*command: object) -> None:
    """Run a command, which prints to this one's output. Raises ClickException if it fails."""
    words = [str(word) for word in command]
    if code := subprocess.run(words).returncode:
        raise click.ClickException(f"{' '.join(words)} ended with {code}: see above")


def check_ignored(folder: Path) -> None:
    """Raise ClickException for a folder in the tree that git does not ignore: its gigabytes would travel too."""
    command = ["git", "-C", str(ROOT), "check-ignore", "-q", str(folder / "file")]
    if folder.is_relative_to(ROOT) and subprocess.run(command).returncode:
        raise click.ClickException(f"git does not ignore {folder}: type .work/gpu, or a folder outside of the sources")


def travelling() -> list[Path]:
    """Return the files of the sources without ``NOT_READ``."""
    left_out = [f":!{pattern.strip('/')}" for pattern in NOT_READ]
    command = ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard", "--", ".", *left_out]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
    return [path for name in listed if name and (path := ROOT / name).is_file()]


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--work", type=click.Path(path_type=Path), help="For checkpoints and artifacts. [FOLDER-work]")
@click.option("--cuda-arch", "arch", default="sm_90", show_default=True, help="The architecture of the GPU.")
@click.option("--layers", default=12, show_default=True, help="Layers of Gemma 4 31B, at most 60.")
def main(folder: Path, parts: tuple[str, ...], work: Path | None, arch: str, layers: int) -> None:
    folder = folder.resolve()
    work = (work or folder.with_name(f"{folder.name}-work")).resolve()
    for each in (folder, work):
        check_ignored(each)
        each.mkdir(parents=True, exist_ok=True)
    making, missing = Making(work, arch, layers), []
    for part, (name, make) in ((each, item) for each in parts or PARTS for item in PARTS[each].items()):
        file, fresh = (work if part in NOT_CARRIED else folder) / name, work / "fresh" / name
        if not is_made(file) or name == SMALL and is_older(file, work):
            try:
                for each in (file, fresh):
                    each.parent.mkdir(parents=True, exist_ok=True)
                make(making, fresh)
                shutil.move(fresh, file)
            except Exception as error:  # the other parts are still made
                missing.append(name)
                click.echo(f"{name} is not made: {type(error).__name__}: {error}", err=True)
                continue
        click.echo(f"{name}: {file.stat().st_size / 1e6:.2f} MB")
    carried = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    sources = sum(each.stat().st_size for each in travelling())
    left_out = " ".join(f"'!{pattern}'" for pattern in NOT_READ)
    click.echo(f"{folder}: {carried / 1e6:.1f} MB, with the sources {(carried + sources) / 1e6:.1f} MB travel, if the "
               "sources are without what is not read there:")  # fmt: skip
    click.echo(f"  git sparse-checkout set --no-cone '/*' {left_out}")
    click.echo("  git sparse-checkout disable    # afterwards")
    if carried + sources > LIMIT:
        missing.append(f"room: more than {LIMIT >> 20} MiB travel")
    if missing:
        raise click.ClickException(f"missing: {', '.join(missing)}")


if __name__ == "__main__":
    main()
