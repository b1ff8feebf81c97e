"""Measures how 8-bit KV caches change the tokens of a target, with the eager module on the CPU.

    python scripts/bench/bench_kv_cache.py [--tokens 32768] [--target-model NAME --checkpoint FOLDER] [--json]

The text is source of Python's standard library that gemma4-tiny was not trained on, in pieces of the context's length.
In each piece the target predicts every next token, with each form of the caches. The comparison with float32 weights
and caches gives the share of positions with another most likely token, and the regret of that token: the difference of
its log-probability in float32 to the best one, in nats. Then the target continues the first half of each piece
greedily, and the tokens before the first difference are counted. Two forms serve as a comparison: bfloat16 throughout,
in which every artifact for CUDA computes, and caches in float8 (e4m3) with a scale for each token and head, which the
export does not offer.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer
from torch import Tensor

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.targets import TapTarget
from eagle3.targets.attention import SMALLEST, EagerAttention

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
from tiny_corpus import encode_documents, standard_library  # noqa: E402

FLOAT8 = torch.float8_e4m3fn
FORMS = {
    "int8": (torch.float32, "int8"),
    "float8": (torch.float32, FLOAT8),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, int8": (torch.bfloat16, "int8"),
    "bfloat16, float8": (torch.bfloat16, FLOAT8),
}
"""The dtype of weights and activations, and the caches: a value of ``--kv-cache``, or ``FLOAT8``."""
NEW_TOKENS = 128


class Float8Attention(EagerAttention):
    """Rounds keys and values of full-attention layers to float8. Those of sliding layers are not rounded, as with
    ``--kv-cache int8``."""

    def written(self, input_pos: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
        if self.shape.window or key is None or value is None:
            return super().written(input_pos, key, value)
        return super().written(input_pos, in_float8(key), in_float8(value))


def in_float8(heads: Tensor) -> Tensor:
    """Round heads [..., head_dim] to float8 with a scale each."""
    scale = heads.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / torch.finfo(FLOAT8).max
    return ((heads / scale).to(FLOAT8).float() * scale).to(heads.dtype)


@dataclass
class Found:
    positions: int = 0
    regrets: list[float] = field(default_factory=list)
    """The regrets of the positions with another most likely token than in float32."""
    before: list[int] = field(default_factory=list)
    """The number of tokens of each continuation before the first difference; ``NEW_TOKENS`` if there is none."""

    def as_json(self) -> dict[str, float]:
        return {
            "positions": self.positions,
            "other": len(self.regrets) / self.positions,
            "mean_regret": sum(self.regrets) / self.positions,
            "largest_regret": max(self.regrets, default=0.0),
            "median_before_first_other": median(self.before),
            "continuations_equal": sum(count == NEW_TOKENS for count in self.before) / len(self.before),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-model", default="gemma4-tiny")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    config = ExportConfig(
        given.target_model,
        checkpoint=given.checkpoint,
        draft=Path("none"),
        backend="xnnpack",
        max_seq_len=given.max_seq_len,
        with_decode=True,
    )
    plan = make_plan(config)
    found = compare(plan, list(pieces(plan, given.tokens)))
    if given.json:
        print(json.dumps({name: each.as_json() for name, each in found.items()}))
        return
    print("| weights, caches | another token | mean regret | largest | tokens before the first other | none other |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, each in found.items():
        said = each.as_json()
        print(
            f"| {name} | {said['other']:.2%} of {said['positions']:,} | {said['mean_regret']:.5f} "
            f"| {said['largest_regret']:.2f} | {said['median_before_first_other']:.0f} of {NEW_TOKENS} "
            f"| {said['continuations_equal']:.0%} |"
        )


def pieces(plan: Plan, tokens: int) -> Iterator[list[int]]:
    """Yield lists of token ids from the text, each as long as the context, up to ``tokens`` in total."""
    tokenizer = Tokenizer.from_file(str(plan.checkpoint / "tokenizer.json"))
    stream = encode_documents(tokenizer, standard_library().held_out).tolist()
    length = plan.max_seq_len
    for start in range(0, min(tokens, len(stream) - length), length):
        yield stream[start : start + length]


@torch.no_grad()
def compare(plan: Plan, texts: list[list[int]]) -> dict[str, Found]:
    exact = load(plan, torch.float32, None)
    others = {name: load(plan, *form) for name, form in FORMS.items()}
    found = {name: Found() for name in FORMS}
    for text in texts:
        wanted = predictions(plan, exact, text)
        best = wanted.argmax(-1, keepdim=True)
        half = len(text) // 2
        count = min(NEW_TOKENS, len(text) - half)
        greedy = continuation(plan, exact, text[:half], count)
        for name, target in others.items():
            chosen = predictions(plan, target, text).argmax(-1, keepdim=True)
            regret = wanted.gather(1, best) - wanted.gather(1, chosen)
            found[name].positions += len(text)
            found[name].regrets += regret[chosen != best].tolist()
            said = continuation(plan, target, text[:half], count)
            before = next((i for i, pair in enumerate(zip(said, greedy, strict=True)) if pair[0] != pair[1]), None)
            found[name].before.append(NEW_TOKENS if before is None else before)
    return found


def load(plan: Plan, dtype: torch.dtype, kv_cache: str | torch.dtype | None) -> TapTarget:
    if kv_cache == FLOAT8:
        return load_speculator(plan, Float8Attention, dtype).target
    plan = replace(plan, config=replace(plan.config, kv_cache=kv_cache))
    return load_speculator(plan, EagerAttention, dtype).target


def predictions(plan: Plan, target: TapTarget, text: list[int]) -> Tensor:
    """Return the log-probabilities of the token after each position: float32 [T, V]."""
    most = plan.method("prefill").max_len
    scored = []
    for start in range(0, len(text), most):
        tokens = torch.tensor([text[start : start + most]])
        state, _ = target(tokens, torch.arange(start, start + tokens.shape[1]), ())
        scored.append(target.logits(state)[0].float().log_softmax(-1))
    return torch.cat(scored)


def continuation(plan: Plan, target: TapTarget, prompt: list[int], count: int) -> list[int]:
    said = [int(predictions(plan, target, prompt)[-1].argmax())]
    while len(said) < count:
        position = torch.tensor([len(prompt) + len(said) - 1])
        state, _ = target(torch.tensor([said[-1:]]), position, ())
        said.append(int(target.logits(state[:, -1:]).argmax()))
    return said


if __name__ == "__main__":
    main()
