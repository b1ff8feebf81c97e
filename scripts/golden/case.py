"""Code that the scripts beside this one share: sizes of tiny heads, random weights, and the command that writes the
cases, folders with a checkpoint and the tensors that the reference implementation made with it."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
HIDDEN, VOCAB, DRAFT_VOCAB, MASK_TOKEN = 64, 96, 48, 95
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": VOCAB, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
OUTPUTS, INPUTS = [0, 2, 3], [1, 3, 4]
"""The tapped layers of the target: those whose outputs are the taps, or whose inputs."""
BLOCK, BLOCK_SLOTS = 5, 32
ANCHORS = [2, 5, 6, 9, 14, 21, 26]  # positions inside the first window, at its ends, and after two windows
Make = Callable[..., tuple[nn.Module, dict[str, Tensor]]]


def randomize(model: nn.Module, generator: torch.Generator, tables: tuple = (), biases: tuple = ("bias",)) -> None:
    """Set random weights, none of them at a value that would hide a mistake. Names that end like one of ``tables`` are
    of order 1, vectors near 1, and near 0 if their names end like one of ``biases``."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.copy_(0.3 * noise + (0 if name.endswith(biases) else 1))
        else:
            weight.copy_(noise * (1.0 if name.endswith(tables) else weight.shape[-1] ** -0.5))


def distinct(logits: Tensor, margin: float) -> Tensor:
    """Return the greedy tokens [...] of logits [..., V]."""
    best = logits.topk(2)
    assert (best.values[..., 0] - best.values[..., 1]).min() > margin, "too close to a tie to be compared"
    return best.indices[..., 0]


def check_varied(proposals: Tensor) -> None:
    """Check that each row has several tokens."""
    assert all(len(set(row)) > 2 for row in proposals.tolist()), "blocks with few different tokens would hide mistakes"


def speculators_config(algorithm: str, proposals: int, target: str = "LlamaForCausalLM") -> Any:  # noqa: ANN401
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=proposals)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="tiny-verifier", architectures=[target]),
    )


def load_vocabulary(model: nn.Module, generator: torch.Generator) -> None:
    """Give a head of speculators a draft vocabulary: the frequent half of the target's."""
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = torch.randperm(VOCAB, generator=generator).tolist()
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts)), DRAFT_VOCAB, VOCAB)
    model.load_vocab_mappings(t2d, d2t)


def versions(*packages: str) -> str:
    return ", ".join(f"{name} {version(name)}" for name in packages)


def arguments(kind: str, *sources: str) -> argparse.Namespace:
    """Read the command line. ``sources``: names of flags for checkouts, which are put before the path of imports."""
    parser = argparse.ArgumentParser(description=f"Make golden cases of {kind}. A case's folder is replaced.")
    parser.add_argument("--out", type=Path, default=GOLDEN / kind)
    for name in sources:
        parser.add_argument(f"--{name}", type=Path, required=True, help="a checkout of these sources")
    given = parser.parse_args()
    sys.path[:0] = [str(getattr(given, name.replace("-", "_"))) for name in sources]
    return given


@torch.no_grad()
def write_cases(out: Path, cases: dict[str, tuple], make: Make, made_with: str, shown: str = "proposals") -> None:
    """Write a folder for each case: ``make`` gets the values of the case, of which the last is a seed, and a generator
    of random numbers instead of the seed. It returns the model and its tensors."""
    for name, (*given, seed) in cases.items():
        model, tensors = make(*given, torch.Generator().manual_seed(seed))
        save_case(out / name, model.save_pretrained, tensors, made_with, shown)


def save_case(
    folder: Path, save: Callable[[Path], object], tensors: dict[str, Tensor], made_with: str, shown: str
) -> None:
    """Replace ``folder`` by a checkpoint, which ``save`` writes, and golden.safetensors; print the tensor named
    ``shown``. Source that a trainer copies beside its checkpoints and a generation_config.json are removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save(folder)
    for path in (*folder.glob("*.py"), folder / "generation_config.json"):
        path.unlink(missing_ok=True)
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file(tensors, folder / "golden.safetensors", {"made_with": made_with})
    print(folder.name, shown, tensors[shown].tolist())


def save_linear(folder: Path, config: dict, parts: dict[str, Tensor], dense: Tensor) -> None:
    """Write a checkpoint of one linear with its quantization_config, and its weight as the tool dequantizes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=2) + "\n")
    save_file({f"model.proj.{part}": value.contiguous() for part, value in parts.items()}, folder / "model.safetensors")
    save_file({"model.proj.weight": dense.contiguous()}, folder / "dense.safetensors")
