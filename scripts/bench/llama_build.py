"""Finds a build of llama.cpp, and converts the shipped checkpoint to GGUF files with its tools."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.targets import TARGETS

CONVERTER = "convert_hf_to_gguf.py"
PART = "{part}"
WEIGHT_TYPES = "f32", "q8_0", "q4_0", "q4_k_m"
DRAFT_TYPES = "f32", "q8_0"


@dataclass(frozen=True)
class Build:
    """A folder in which CMake built llama.cpp, and the folder of its sources."""

    folder: Path
    source: Path

    @classmethod
    def found(cls, folder: Path) -> "Build":
        """Find a build in ``folder``. Raises FileNotFoundError for a missing file."""
        folder = folder.absolute()
        cache = folder / "CMakeCache.txt"
        if not cache.is_file():
            raise FileNotFoundError(f"{cache} is missing: give the folder that CMake built llama.cpp in")
        source = source_of(cache.read_text(encoding="utf-8"))
        for path in (folder / "bin" / "llama-server", folder / "bin" / "llama-quantize", source / CONVERTER):
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing: build llama.cpp as --help says")
        return cls(folder, source)

    def tool(self, name: str) -> str:
        return str(self.folder / "bin" / name)


def source_of(cmake_cache: str) -> Path:
    """Return the folder of the sources, which CMakeCache.txt names."""
    return Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cmake_cache, re.MULTILINE)[1])


@dataclass(frozen=True)
class GgufFiles:
    """A folder of GGUF files: target and draft, one file for each type of weight."""

    folder: Path

    def target(self, weights: str) -> Path:
        return self.folder / f"target-{weights}.gguf"

    def draft(self, weights: str) -> Path:
        return self.folder / f"draft-{weights}.gguf"


def convert(build: Build, shipped: str, folder: Path, types: Sequence[str]) -> GgufFiles:
    """Write the shipped target in ``types`` and its draft in DRAFT_TYPES into ``folder``: as f32, and quantized from
    it. An existing file is kept."""
    spec, files = TARGETS[shipped], GgufFiles(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        target = with_accepted_tokenizer(spec.checkpoint, Path(temporary))
        for checkpoint, file in ((target, files.target("f32")), (spec.draft, files.draft("f32"))):
            command = [sys.executable, str(build.source / CONVERTER), str(checkpoint), "--outtype", "f32"]
            make(file, [*command, "--target-model-dir", str(target), "--outfile", PART])
    for named, wanted in ((files.target, types), (files.draft, DRAFT_TYPES)):
        for weights in wanted:
            make(named(weights), [build.tool("llama-quantize"), str(named("f32")), PART, weights])
    return files


def epilog(doc: str) -> str:
    """Return a script's docstring without its first paragraph, for ``--help``, with marks by which click keeps its
    lines."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in doc.split("\n\n")[1:])


def make(file: Path, command: Sequence[str]) -> None:
    """Run a command that writes ``PART``, which is then renamed to the file. An existing file is kept."""
    if not file.is_file():
        part = file.with_suffix(".part")
        run([str(part) if word == PART else word for word in command])
        part.rename(file)


def with_accepted_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """Return a copy of the checkpoint with a tokenizer that llama.cpp's converter accepts for a Gemma 4. gemma4-tiny's
    tokenizer is of another kind. Prompts and answers are token ids here, so their text does not matter."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["byte_fallback"] = True
    tokenizer["decoder"] = {"type": "Sequence", "decoders": []}
    path.unlink()
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def run(command: Sequence[str]) -> None:
    """Run a command. Raises ValueError with the last line of its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name} {command[1]} failed: {last_line(done.stdout)}")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it says nothing")
