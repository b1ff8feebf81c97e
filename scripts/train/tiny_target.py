"""Trains gemma4-tiny's target: a text-only Gemma 4 of 5.5 M parameters, by transformers' own ``Gemma4ForCausalLM``."""

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

CONTEXT = 1024  # the tokens that the model can attend to
PEAK_RATE = 4e-3


def tiny_config(vocab_size: int) -> Gemma4TextConfig:
    """Return the configuration: five sliding layers and one with full attention. Every linear's input width is a
    multiple of 256, for CUDA's INT4 packing."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": vocab_size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 64}
    full = {"global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    table = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": vocab_size, "tie_word_embeddings": True}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "max_position_embeddings": CONTEXT}
    return Gemma4TextConfig(**sizes, **heads, **full, **table, **tokens, final_logit_softcapping=30.0, dtype="bfloat16")


def crops(stream: np.ndarray, length: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``count`` random pieces of the stream, int64 [count, length + 1]."""
    starts = torch.randint(0, len(stream) - length - 1, (count,), generator=generator).tolist()
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))


class Muon(torch.optim.Optimizer):
    """Muon: momentum orthogonalized by Newton-Schulz iterations (https://kellerjordan.github.io/posts/muon), scaled
    like AdamW's steps.

    ``torch.optim.Muon`` iterates in bfloat16, which takes 12 s per step on a processor without bfloat16. This one
    iterates in float32 (0.1 s).
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(mean, group["momentum"])
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x.T if tall else x, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def optimizers(model: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices, and AdamW for the embedding and the vectors."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen and p.requires_grad]
    return [Muon(matrices, lr=rate), torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def update(model: torch.nn.Module, steppers: list[torch.optim.Optimizer], loss: torch.Tensor, rate: float) -> None:
    """Make a step of all optimizers with the learning rate."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = rate
        stepper.step()
        stepper.zero_grad(set_to_none=True)


def schedule(progress: float, warmup: float = 0.02, decay: float = 0.6) -> float:
    """Return the factor of the learning rate at ``progress`` (both 0..1): a warm-up, a plateau, a linear decay to
    2%."""
    if progress < warmup:
        return (progress + 1e-3) / warmup
    return min(1.0, 0.02 + 0.98 * (1 - progress) / decay)


def evaluate(model: torch.nn.Module, stream: np.ndarray, length: int = 512, pieces: int = 48) -> float:
    """Return the mean cross entropy in nats per token over evenly spaced pieces of ``stream``."""
    starts = np.linspace(0, len(stream) - length - 1, pieces).astype(int)
    losses = []
    with torch.no_grad():
        for start in starts:
            piece = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))[None]
            logits = model(piece[:, :-1], use_cache=False).logits.float()
            losses.append(torch.nn.functional.cross_entropy(logits[0], piece[0, 1:]).item())
    return sum(losses) / len(losses)


def train_target(
    folder: Path, streams: tuple[np.ndarray, np.ndarray], tokenizer: Tokenizer, steps: int, seed: int, log: Callable
) -> dict:
    """Train on ``streams`` (train, held out) and write a Hugging Face folder, also at intervals during training.
    Returns the figures of the model card."""
    train, held_out = streams
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Gemma4ForCausalLM(tiny_config(tokenizer.get_vocab_size())).float().train()
    steppers = optimizers(model, PEAK_RATE)
    start, average, seen = time.monotonic(), math.nan, 0
    for step in range(steps):
        length, count = (CONTEXT, 4) if step > 0.85 * steps else (256, 16)  # the last pieces are as long as the context
        piece = crops(train, length, count, generator)
        logits = model(piece[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        update(model, steppers, loss, PEAK_RATE * schedule(step / steps))
        seen += length * count
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if step % 25 == 24:
            rate = seen / (time.monotonic() - start)
            log(f"target step {step + 1}/{steps}, {seen / 1e6:.2f} M tokens, loss {average:.3f}, {rate:.0f} tokens/s")
        if step % 250 == 249:
            log(f"target held-out loss {evaluate(model.eval(), held_out):.3f}")
            save_target(model.train(), tokenizer, folder)
    save_target(model, tokenizer, folder)
    loss = evaluate(Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), held_out)
    log(f"target done, held-out loss {loss:.3f}")
    figures = {"steps": steps, "tokens": seen, "minutes": round((time.monotonic() - start) / 60, 1)}
    return figures | {"train_loss": round(average, 3), "held_out_loss": round(loss, 3)}


def save_target(model: Gemma4ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` in bfloat16 and the tokenizer's files."""
    copy = Gemma4ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | special, indent=2) + "\n")
