"""Exports every family with layers that keep a state to the CPU, and compares its tokens with transformers'.

    python scripts/survey/check_recurrent.py [--only FAMILY] [--dtype float32] [--eager]

Each family is a random model of a few layers (``tests/helpers/family_configs.py``), saved in float32 and in bfloat16.
The artifact continues three texts: one of fewer rows than a window, one of several chunks, and one that passes the
sliding windows. It then plays a dialogue whose second turn keeps the whole first one, and whose third turn edits the
answer before. The right tokens are the greedy ones of transformers' model, which computes the whole text for each.
``--eager`` runs the module that would be lowered, which takes seconds instead of minutes.
"""

import argparse
import random
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from family_configs import FAMILIES, family_config

from eagle3.export import ExportConfig, export, prepare
from eagle3.export.pipeline import load_speculator, make_metadata
from eagle3.export.twin.randomize import randomize
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import EagerSession, Session
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.targets.attention import EagerAttention
from eagle3.targets.spec import states_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTHS = (5, 60, 150)
NEW, CONTEXT = 16, 512
NEAR_TIE = 2e-4
"""A choice that leads by less may flip (standard deviations of the logits): transformers' own rules differ by 1e-4."""
MAMBA_2 = ("bamba", "granitemoehybrid", "nemotron_h")
"""Model types that compute their layer types from other fields."""
TURNS = ((40, 0), (30, 0), (25, 40), (30, 3))
"""For each turn of the dialogue, its new tokens and the number of earlier ones, at the end, that it leaves out."""


def recurrent_families() -> list[str]:
    return [name for name in FAMILIES if " " not in name and states_of(family_config(name))]


def one_layer_a_kind(config: PreTrainedConfig) -> PreTrainedConfig:
    """Leave one layer of each kind in a configuration that lists its layers, in place, to save time."""
    if "layer_types" not in config.to_diff_dict() or config.model_type in MAMBA_2:
        return config
    first = [config.layer_types.index(kind) for kind in dict.fromkeys(config.layer_types)]
    config.num_hidden_layers = len(first)
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, [getattr(config, name)[index] for index in first])
    return config


def random_model(family: str, dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    """Save a random model in ``dtype``, and return transformers' own reading of it in float32."""
    torch.manual_seed(5)
    config = one_layer_a_kind(family_config(family))
    config.max_position_embeddings = CONTEXT
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().requires_grad_(False)
    randomize(model, seed=5)
    model.to(dtype).save_pretrained(folder)
    # not model.float(): buffers that are no part of a checkpoint (Falcon-H1's multipliers) would stay rounded
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return read.eval().requires_grad_(False)


def greedy(model: PreTrainedModel, text: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens, and the lead of each before the second choice in standard deviations."""
    tokens: list[int] = []
    leads: list[float] = []
    for _ in range(count):
        logits = model(torch.tensor([text + tokens]), use_cache=False).logits[0, -1]
        first, second = logits.topk(2).values
        tokens.append(int(logits.argmax()))
        leads.append(float((first - second) / logits.std()))
    return tokens, leads


def wrong_texts(session: Session, model: PreTrainedModel) -> list[str]:
    """Return the texts whose tokens are not transformers'."""
    dice, cached, wrong = random.Random(3), CachedTokens(), []

    def fresh(count: int) -> list[int]:
        return [dice.randrange(model.config.vocab_size) for _ in range(count)]

    def compare(name: str, text: list[int]) -> tuple[list[int], int]:
        found = complete(session, text, max_new_tokens=NEW, stop_ids=[], cached=cached)
        right, leads = greedy(model, text, NEW)
        if found.token_ids != right:
            at = next(index for index in range(NEW) if found.token_ids[index] != right[index])
            if leads[at] > NEAR_TIE:
                wrong.append(f"{name}, token {at + 1}")
        return right, found.stats.reused_prompt_tokens

    for length in LENGTHS:
        cached.clear()
        compare(f"text of {length}", fresh(length))
    cached.clear()
    text, reused = [], []
    for number, (new, left_out) in enumerate(TURNS, 1):
        text = text[: len(text) - left_out] + fresh(new)
        answer, kept = compare(f"turn {number}", text)
        text += answer
        reused.append(kept)
    if not all(reused[1:2]):
        wrong.append(f"nothing of the first turn was reused {reused}")
    return wrong


def checked(family: str, dtype: str, eager: bool) -> tuple[str, ...]:
    """Export a family, or only load the module that is lowered, and return its line of the table."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as made, torch.no_grad():
        model = random_model(family, DTYPES[dtype], Path(made, "target"))
        paths = {"checkpoint": Path(made, "target"), "draft": Path("none"), "output_dir": Path(made, "out")}
        longest = min(24, getattr(model.config, "sliding_window", None) or 24)
        lengths = {"max_seq_len": CONTEXT, "max_prefill": longest, "verify_rows": 6}
        config = ExportConfig("auto", backend="xnnpack", **paths, **lengths)
        if eager:
            plan = prepare(config).plan
            speculator = load_speculator(plan, EagerAttention, torch.float32)
            session: Session = EagerSession(speculator, make_metadata(plan, {}))
        else:
            export(config)
            session = open_session(open_artifact(Path(made, "out")))
        wrong = wrong_texts(session, model)
        session.close()
    states = ", ".join(sorted(states_of(family_config(family))))
    return family, dtype, states, "; ".join(wrong) or "right", f"{time.perf_counter() - began:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=recurrent_families(), action="append")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append")
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print("family | checkpoint | states | tokens | seconds")
    right = True
    for dtype, family in product(given.dtype or DTYPES, given.only or recurrent_families()):
        row = checked(family, dtype, given.eager)
        print(*row, sep=" | ", flush=True)
        right &= row[3] == "right"
    sys.exit(not right)


if __name__ == "__main__":
    main()
