"""Reads about a hundred draft heads as their trainers write them, and prints which are read and which are refused.

``python scripts/survey/survey_heads.py`` writes each configuration of ``head_configs.py`` and ``more_head_configs.py``
with the sizes of its target over tensors that take no space on disk, reads it, and compares a small copy with random
weights with the formulas of its kind. A refused head must be refused for the expected reason. A head that is read must
have the RoPE, window and feature of its trainer's code; a value that a file leaves open must be reported. Anything else
is a fault of this project, and the exit code is 1. ``--only WORD`` prints the heads with that word in their trainer or
name.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "oracle"))

import click
import head_configs
import more_head_configs
import torch
from draft_oracle import check_draft
from head_sizes import SIZES, HeadConfig, Sizes
from survey_targets import save_zeros, silence

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.rope_reading import BASE_DOUBT
from eagle3.export.draft.reading import read_draft

Shapes = dict[str, tuple[int, ...]]
READ, REFUSED, WRONG = "read", "refused", "WRONG"


def heads() -> Iterator[HeadConfig]:
    yield from head_configs.heads()
    yield from more_head_configs.heads()


def save_head(head: HeadConfig, folder: Path) -> None:
    """Write a head with its target's sizes."""
    sizes = SIZES[head.target]
    config = json.loads(json.dumps(head.fields))
    nested = "transformer_layer_config" in config
    fields = config["transformer_layer_config"] if nested else config.get("model", config)
    own = {"hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "num_attention_heads": sizes.heads}
    own |= {"num_key_value_heads": sizes.kv_heads, "vocab_size": sizes.vocab, "hidden_act": "silu"}
    own |= {"max_position_embeddings": 40960, "num_hidden_layers": 1}
    if sizes.hidden != sizes.heads * sizes.head_dim or nested:
        own["head_dim"] = sizes.head_dim
    fields |= {key: value for key, value in own.items() if key not in fields}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_zeros(shapes_of(head, sizes, fields["num_hidden_layers"]), folder)


def shapes_of(head: HeadConfig, sizes: Sizes, depth: int) -> Shapes:
    """Return the tensors of a head in the form that its trainer saves."""
    form = head.form
    if form in ("dflash", "dspark", "domino"):
        return _dflash(form, sizes, depth, len(head.fields["dflash_config"]["target_layer_ids"]))
    hidden, eagle1 = sizes.hidden, form.startswith("eagle") or form == "transformer."
    spoken = head.fields.get("draft_vocab_size", sizes.vocab) or sizes.vocab
    shapes: Shapes = {"fc.weight": (hidden, (2 if eagle1 else 5 if form == "five taps" else 3) * hidden)}
    for index in range(depth if "peagle" in form else 1):
        shapes |= _layer(f"layers.{index}", sizes, 2 * hidden if not (eagle1 or index) else hidden)
        shapes |= {f"layers.{index}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {} if eagle1 and "normed" not in form else {f"layers.{index}.input_layernorm.weight": (hidden,)}
    if not eagle1:
        shapes |= {f"{name}.weight": (hidden,) for name in ("layers.0.hidden_norm", "norm")}
        shapes |= {"lm_head.weight": (spoken, hidden)}
    if form not in ("midlayer", "eagle", "eagle biases", "transformer.", "final"):
        shapes["embed_tokens.weight"] = (sizes.vocab, hidden)
    if spoken != sizes.vocab and not eagle1:
        shapes |= {"d2t": (spoken,), "t2d": (sizes.vocab,)}
    if "normed" in form:
        shapes["norm.weight"] = (hidden,)
    if "fc_norm" in form:
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(3)}
    if form == "norm_before_fc":
        shapes["input_norm.weight"] = (3 * hidden,)
    if form in ("qk_norm", "five taps"):
        shapes |= {f"layers.0.self_attn.{name}_norm.weight": (sizes.head_dim,) for name in "qk"}
    if form == "eagle biases":
        rows = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
        shapes |= {f"layers.0.self_attn.{name}_proj.bias": (rows[name] * sizes.head_dim,) for name in rows}
    if "peagle" in form:
        shapes["mask_hidden"] = (1, 1, 3 * hidden)
    if form == "final":
        del shapes["fc.weight"], shapes["layers.0.hidden_norm.weight"]
    return {_named(name, form): shape for name, shape in shapes.items()}


def _named(name: str, form: str) -> str:
    if form in ("midlayer", "fc_norm"):
        return name.replace("layers.0.", "midlayer.")
    if form == "transformer.":
        return name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.")
    return f"model.{name}" if form.startswith("model.") else name


def _layer(at: str, sizes: Sizes, inputs: int) -> Shapes:
    queries, keys, hidden = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.hidden
    shapes: Shapes = {
        f"{at}.self_attn.q_proj.weight": (queries, inputs),
        f"{at}.self_attn.o_proj.weight": (hidden, queries),
    }
    shapes |= {f"{at}.self_attn.{name}_proj.weight": (keys, inputs) for name in "kv"}
    shapes |= {f"{at}.mlp.{name}_proj.weight": (sizes.inner, hidden) for name in ("gate", "up")}
    return shapes | {f"{at}.mlp.down_proj.weight": (hidden, sizes.inner)}


def _dflash(form: str, sizes: Sizes, depth: int, taps: int) -> Shapes:
    hidden = sizes.hidden
    shapes: Shapes = {"fc.weight": (hidden, taps * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("norm", "hidden_norm")}
    for at in (f"layers.{index}" for index in range(depth)):
        shapes |= _layer(at, sizes, hidden)
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (sizes.head_dim,) for name in "qk"}
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if form == "dspark":
        shapes |= {
            "markov_head.markov_w1.weight": (sizes.vocab, 256),
            "markov_head.markov_w2.weight": (sizes.vocab, 256),
        }
        shapes |= {"confidence_head.proj.weight": (1, hidden + 256), "confidence_head.proj.bias": (1,)}
    if form == "domino":
        gru, rank = 1024, 256
        shapes |= {"prefix_gru.weight_ih_l0": (3 * gru, hidden), "prefix_gru.weight_hh_l0": (3 * gru, gru)}
        shapes |= {"embed_proj.0.weight": (rank, hidden + gru), "embed_proj.2.weight": (sizes.vocab, rank)}
    return shapes


def outcome(head: HeadConfig) -> tuple[str, str]:
    """Return the outcome of reading a head, and its line."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "head")
        folder.mkdir()
        save_head(head, folder)
        try:
            draft = read_draft(folder)
            taps = 0 if draft.takes_final_state else len(draft.aux_layers or (0, 0, 0))
            check_draft(draft, taps)
        except (ValueError, FileNotFoundError) as error:
            line = str(error).replace(f"{made}/", "")
            right = head.refused is not None and head.refused in line and "\n" not in line
            return REFUSED if right else WRONG, line
        except Exception as error:
            return WRONG, f"{type(error).__name__}: {error}"
        said = "; ".join(draft.warnings).replace(f"{made}/", "")
        faults = list(differences(head, draft)) + (["read"] if head.refused else [])
        return (WRONG, f"{', '.join(faults)}; {said}") if faults else (READ, f"{described(draft)}; {said}".rstrip("; "))


def described(draft: DraftDescription) -> str:
    taps = "the final state" if draft.takes_final_state else f"taps {list(draft.aux_layers or ('2', 'n/2', 'n-3'))}"
    return f"{draft.kind} of {draft.dialect}, RoPE {draft.layer.rope_parameters['rope_theta']:.10g}, {taps}"


def differences(head: HeadConfig, draft: DraftDescription) -> Iterator[str]:
    """Yield each property of a head whose reading differs from the trainer's computation."""
    rope: dict[str, Any] = draft.layer.rope_parameters
    windows = draft.windows if isinstance(draft, EagleDescription) else (draft.layer.sliding_window or 0,)
    facts = {
        "base": (rope["rope_theta"], head.base),
        "rotated part": (rope.get("partial_rotary_factor") or 1.0, 1.0),
        "window": (max(windows), head.window),
        "normed feature": (getattr(draft, "feeds_normed", False), head.normed),
        "a line on the base": (any(BASE_DOUBT in line for line in draft.warnings), head.untold),
    }
    yield from (f"{what} is {found}, not {right}" for what, (found, right) in facts.items() if found != right)


@click.command()
@click.option("--only", default="", metavar="WORD", help="Heads with this word in their trainer or name.")
def main(only: str) -> None:
    """Print a line for each head, and the counts."""
    silence()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for head in heads():
        if only.lower() in f"{head.trainer} {head.name}".lower():
            what, line = outcome(head)
            counts[what] += 1
            print(what, f"{head.trainer}: {head.name}", line, sep="  ", flush=True)
    refused, wrong = f"{counts[REFUSED]} refused for their own reason", f"{counts[WRONG]} wrong"
    print(f"{counts.total()} heads: {counts[READ]} read, {refused}, {wrong}")
    sys.exit(counts[WRONG] > 0)


if __name__ == "__main__":
    main()
