"""Functions that the trainings of gemma4-tiny's draft heads share: pieces of text, the loop, the tensors of a folder,
the measured acceptance."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_target import crops, optimizers, schedule, update
from torch import Tensor
from transformers import Gemma4ForCausalLM

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.pipeline import load_speculator, make_metadata
from eagle3.export.planning.plan import make_plan
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.generation import complete
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.targets.attention import EagerAttention

PEAK_RATE, STEP_WEIGHT = 3e-3, 0.8
MEASURED_CHAIN = 3


def greedy_continuations(
    target_folder: Path, stream: np.ndarray, count: int, seed: int, log: Callable[[str], None]
) -> torch.Tensor:
    """Return ``count`` pieces of 64 tokens of text followed by the target's own 193 tokens: int64 [count, 257]."""
    target = Gemma4ForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    generator, pieces = torch.Generator().manual_seed(seed), []
    start = time.monotonic()
    while sum(map(len, pieces)) < count:
        prompts = crops(stream, 64, 64, generator)[:, :64]
        written = target.generate(prompts, max_new_tokens=193, min_new_tokens=193, do_sample=False, pad_token_id=0)
        pieces.append(written)
        log(f"draft data: {sum(map(len, pieces))}/{count} continuations, {time.monotonic() - start:.0f} s")
    return torch.cat(pieces)[:count]


@dataclass(frozen=True)
class Pieces:
    """The batches of a training: 12 completions by the target itself and 4 crops of text."""

    stream: np.ndarray
    written: torch.Tensor
    generator: torch.Generator

    def batch(self) -> torch.Tensor:
        own = self.written[torch.randint(0, len(self.written), (12,), generator=self.generator)]
        return torch.cat((crops(self.stream, 256, 4, self.generator), own))


def train(
    name: str,
    module: torch.nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    pieces: Pieces,
    steps: int,
    save: Callable[[], None],
    log: Callable[[str], None],
) -> dict:
    """Train a draft module on three quarters of the target's own greedy completions and one quarter of text, saving it
    at intervals. Returns the figures that ``training.json`` keeps."""
    steppers = optimizers(module, PEAK_RATE)
    start, average = time.monotonic(), 0.0
    for step in range(steps):
        piece = pieces.batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):  # half the time
            loss = loss_of(piece)
        update(module, steppers, loss, PEAK_RATE * schedule(step / steps))
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
        if step % 25 == 24:
            pace = (time.monotonic() - start) / (step + 1)
            log(f"{name} step {step + 1}/{steps}, loss {average:.3f}, {pace:.2f} s a step")
        if step % 100 == 99 or step == steps - 1:
            save()
    minutes = round((time.monotonic() - start) / 60, 1)
    return {"steps": steps, "minutes": minutes, "loss": round(average, 3), "continuations": len(pieces.written)}


def frozen(target_folder: Path, **options: str) -> Gemma4ForCausalLM:
    """Return the target in float32, whose weights are not trained."""
    return Gemma4ForCausalLM.from_pretrained(target_folder, dtype=torch.float32, **options).eval().requires_grad_(False)


def taught(target: Gemma4ForCausalLM, piece: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the target's hidden states, and its probabilities float32 [B, T, V] of the token after each of a piece."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        seen = target(piece, use_cache=False, output_hidden_states=True)
        return seen.hidden_states, seen.logits.float().softmax(-1)


LAYER = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu"}
LAYER |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LAYER |= {"max_position_embeddings": 1024, "attention_bias": False, "tie_word_embeddings": False}
"""Fields of the layers of a head in speculators' form."""


def save_speculator(
    folder: Path, kind: str, name: str, proposals: int, layer: dict, fields: dict, tensors: dict[str, Tensor]
) -> None:
    """Write a head as speculators writes it: ``kind`` and the class's ``name``, ``fields`` of its own."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": proposals}
    verifier = {"name_or_path": "gemma4-tiny", "architectures": ["Gemma4ForCausalLM"]}
    described = {"algorithm": kind, "default_proposal_method": "greedy", "verifier": verifier}
    described |= {"proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}]}
    config = {"architectures": [name], "speculators_model_type": kind, "speculators_version": "0.9.0"}
    config |= {"dtype": "bfloat16", "target_hidden_size": None, "tie_word_embeddings": False} | fields
    config |= {"transformer_layer_config": LAYER | layer, "speculators_config": described}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_tensors(folder, tensors)


def initial_matrices(shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) * 0.5 / shape[1] ** 0.5 for name, shape in shapes.items()}


def stored(draft: DraftDescription, head: torch.nn.Module) -> dict[str, Tensor]:
    """Return the head's trained tensors under the names of its file."""
    names = {own: name for name, own in draft.tensor_names.items()}
    return {names[own]: value for own, value in head.state_dict().items() if own in names}


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors in bfloat16, as published heads have them. A single metadata key keeps the file
    reproducible."""
    stored = {n: t.detach().to(torch.bfloat16).contiguous() if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def measure_acceptance(target_folder: Path, draft_folder: Path, prompts: list[list[int]], new_tokens: int) -> dict:
    """Return the statistics of the runner's own loop with the eager speculator, in float32, at chain length 3."""
    config = ExportConfig(
        "gemma4-tiny", checkpoint=target_folder, draft=draft_folder, backend="xnnpack", chain_len=MEASURED_CHAIN
    )
    plan = make_plan(config)
    speculator = load_speculator(plan, EagerAttention, torch.float32)
    session = EagerSession(speculator, make_metadata(plan, {}, speculator.draft.ids_in_target()))
    stats = GenerationStats()
    for prompt in prompts:
        stats.add(complete(session, prompt, max_new_tokens=new_tokens).stats)
    return stats.counts()
