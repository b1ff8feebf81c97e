"""Measures how 8-bit KV caches change the tokens of a target, with the eager module on the CPU.

    python scripts/bench/bench_kv_cache.py [--tokens 32768] [--target-model NAME --checkpoint FOLDER]

The text is source of Python's standard library that gemma4-tiny was not trained on, in pieces of the context's length.
In each piece the target predicts every next token, with each form of the caches. The comparison with float32 weights
and caches gives the share of positions with another most likely token, and the regret of that token: the difference of
its log-probability in float32 to the best one, in nats. Then the target continues the first half of each piece
greedily, and the tokens before the first difference are counted. bfloat16 throughout, in which every
artifact for CUDA computes, serves as a comparison.
"""

import argparse
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
from eagle3.targets.attention import EagerAttention

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
from tiny_corpus import encode_documents, standard_library  # noqa: E402

FORMS = {"float32, int8": (torch.float32, "int8"), "bfloat16": (torch.bfloat16, None)}
FORMS |= {"bfloat16, int8": (torch.bfloat16, "int8")}
"""The dtype of weights and activations, and the value of ``--kv-cache``."""
NEW_TOKENS = 128


@dataclass
class Found:
    positions: int = 0
    regrets: list[float] = field(default_factory=list)
    """The regrets of the positions with another most likely token than in float32."""
    before: list[int] = field(default_factory=list)
    """The number of tokens of each continuation before the first difference; ``NEW_TOKENS`` if there is none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-model", default="gemma4-tiny")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=32768)
    given = parser.parse_args()
    asked = {"draft": Path("none"), "backend": "xnnpack", "with_decode": True}
    plan = make_plan(ExportConfig(given.target_model, checkpoint=given.checkpoint, **asked))
    print("| weights, caches | another token | mean regret | largest | tokens before the first other | none other |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, found in compare(plan, list(pieces(plan, given.tokens))).items():
        same = sum(count == NEW_TOKENS for count in found.before) / len(found.before)
        print(
            f"| {name} | {len(found.regrets) / found.positions:.2%} of {found.positions:,} "
            f"| {sum(found.regrets) / found.positions:.5f} | {max(found.regrets, default=0):.2f} "
            f"| {median(found.before):.0f} of {NEW_TOKENS} | {same:.0%} |"
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


def load(plan: Plan, dtype: torch.dtype, kv_cache: str | None) -> TapTarget:
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
