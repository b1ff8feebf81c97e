"""Runs the plan and the twin check for every class of the installed transformers that generates text from text or
images.

``python scripts/survey/survey_targets.py`` writes its list into ``targets/README.md``. Each class gets its default
configuration, with the text part reduced to a twin's sizes, and a checkpoint of zeros that takes no space on disk. The
outcome is a passed twin check, or a line with the reason of a refusal. Anything else is a bug of this project, and the
exit code is 1. ``--only NAME`` (repeatable) prints the outcomes of the named model types only.
"""

import json
import re
import struct
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import click
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from eagle3.export import ExportConfig, prepare
from eagle3.export.twin.shrink import shrink
from eagle3.targets.text_part import text_config_of, whole_config

README = Path(__file__).parents[2] / "targets" / "README.md"
BEGIN, END = "<!-- survey: begin -->", "<!-- survey: end -->"
RIGHT, REFUSED, NO_MODEL, WRONG = "right", "refused", "no model", "wrong"
SIGLIP = {"model_type": "siglip_vision_model"}
GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
GLM = {"text_config": {"rope_parameters": GLM_ROPE}}
GIVEN = {
    "aya_vision": {"vision_config": SIGLIP},
    "granite4_vision": {"vision_config": SIGLIP},
    **dict.fromkeys(("glm4v", "glm46v", "glmga"), GLM),
    "glm4v_moe": {"text_config": {"head_dim": 128, "rope_parameters": GLM_ROPE | {"mrope_section": [16, 8, 8]}}},
}
"""Fields for classes whose defaults do not make a model."""
CONTEXT = 128  # the context of every target and head, in tokens
MOST_BYTES = 16e9  # the most bytes of a checkpoint, whose file is mapped into memory


class Outcome(NamedTuple):
    model_type: str
    name: str
    """Name of transformers' class."""
    what: str
    line: str


def classes() -> Iterator[tuple[str, str]]:
    """Yield (model type, class name), each pair once."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    every = [(kind, names) for mapping in mappings for kind, names in mapping.items()]
    several = {(kind, name) for kind, names in every if not isinstance(names, str) for name in names}
    yield from sorted(several | {(kind, names) for kind, names in every if isinstance(names, str)})


def tiny(model_type: str, name: str) -> PreTrainedConfig:
    """Return the class's default configuration with a twin's sizes."""
    config = CONFIG_MAPPING[model_type](**deepcopy(GIVEN.get(model_type, {})))
    config.architectures = [name]
    text = text_config_of(config)
    with suppress(Exception):  # the class keeps its sizes, and its plan reports why no twin is possible
        text = shrink(text)
    config = whole_config(text)
    config.architectures = [name]
    for part in (config, config.get_text_config()):
        _leave_out_default_ids(part, config.get_text_config().vocab_size)
    return config


def _leave_out_default_ids(config: PreTrainedConfig, vocabulary: int) -> None:
    """Remove end tokens outside of a vocabulary of this many tokens, in place: a class has them where a file has none
    (CWM), and an export refuses a file that has them."""
    ends = getattr(config, "eos_token_id", None)
    if max(ends if isinstance(ends, list) else [ends or 0], default=0) >= vocabulary:
        config.eos_token_id = None


def save_model(config: PreTrainedConfig, name: str, folder: Path) -> None:
    """Write a checkpoint of zeros under the names that transformers gives its tensors."""
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config)
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    save_zeros({name: tuple(value.shape) for name, value in tensors.items() if name not in tied}, folder)
    config.save_pretrained(folder)


def save_zeros(shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Write float32 zeros as a sparse file, which takes no space on disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    if end > MOST_BYTES:
        raise ValueError(f"no twin of it could be made, and its checkpoint has {end / 1e9:,.0f} GB")
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end)


def save_draft(config: PreTrainedConfig, folder: Path) -> None:
    """Write a draft head in the layout of SafeAILab's original heads, for a text configuration."""
    hidden, vocabulary, heads = config.hidden_size, config.vocab_size, 4
    size = hidden // heads * heads
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (vocabulary, hidden), "norm": (hidden,)}
    shapes |= {f"midlayer.self_attn.{name}_proj": (size, 2 * hidden) for name in "qkv"}
    shapes |= {"midlayer.self_attn.o_proj": (hidden, size)}
    shapes |= {f"midlayer.mlp.{name}_proj": (hidden, hidden) for name in ("gate", "up", "down")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"midlayer.{name}": (hidden,) for name in norms}
    save_zeros({f"{name}.weight": shape for name, shape in shapes.items()}, folder)
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    fields |= {"hidden_size": hidden, "intermediate_size": hidden, "head_dim": hidden // heads}
    fields |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": CONTEXT}
    fields |= {"vocab_size": vocabulary, "draft_vocab_size": vocabulary, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": False}))


def outcome(model_type: str, name: str) -> Outcome:
    def found(what: str, error: Exception | None = None) -> Outcome:
        line = "" if error is None else str(error)
        return Outcome(model_type, name, what, line if what == REFUSED else " ".join(line.split()))

    with tempfile.TemporaryDirectory() as made:
        target, draft = Path(made, "target"), Path(made, "draft")
        target.mkdir()
        draft.mkdir()
        try:
            config = tiny(model_type, name)
            save_model(config, name, target)
            save_draft(config.get_text_config(), draft)
        except Exception as error:  # raised by transformers itself
            return found(NO_MODEL, error)
        given = {"checkpoint": target, "draft": draft, "backend": "xnnpack", "aux_layers": (0, 1, 2)}
        try:
            prepare(ExportConfig(output_dir=Path(made, "out"), **given, max_seq_len=CONTEXT, dry_run=True))
        except (ValueError, FileNotFoundError) as error:
            line = str(error).replace(f"{made}/", "")
            what = WRONG if "\n" in line or len(line) > 600 else REFUSED
            return found(what, ValueError(line))
        except Exception as error:
            return found(WRONG, ValueError(f"{type(error).__name__}: {error}"))
        return found(RIGHT)


def listing(outcomes: Iterable[Outcome]) -> str:
    outcomes = list(outcomes)
    lines = [f"transformers {transformers.__version__}, {len(outcomes)} classes.", ""]
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        groups[reason(each)].append(each)
    for text, members in sorted(groups.items(), key=lambda item: (item[1][0].what != RIGHT, -len(item[1]), item[0])):
        names = ", ".join(dict.fromkeys(f"`{each.model_type}`" for each in members))
        lines.append(f"- {text}: {names}")
    return "\n".join(lines)


def with_list(readme: str, made: str) -> str:
    """Return a README's text with the list between its markers replaced. What a person wrote stands outside them, and
    stays. Raises ValueError for a text without both markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README} lacks {END if begin else BEGIN}: write both markers where the list belongs")
    return f"{before}{begin}\n{made}\n{end}{after}"


SAME_REASON = (
    (r"transformers' \w+ has no (model[\w.]*), .*", r"the class has no `\1`, which every target has"),
    (r".* has no (\w+), which every supported decoder has.*", r"its configuration has no `\1`"),
    (r".* keeps a state that is not one of (.*?): .*", r"its layers keep a state that is not one of \1"),
    (r"layer_types has (\w+), but only .*", r"layers of `\1`"),
    (r"\w+ has no text decoder and lm_head .*", "no text decoder and `lm_head` could be told from the rest"),
    (
        r"target has .*, which a model of its config.json .*",
        "a tensor that a model of its `config.json` has no place for",
    ),
    (r"auto would not compute .*", "a small copy differs from transformers' model"),
    (r"auto cannot compute .*: (its attention .*?), which .*", r"\1"),
    (r"rope_parameters has no entry for (\w+): .*", r"`rope_parameters` has no entry for `\1`"),
    (r"transformers cannot build or run a model from it .*", "transformers cannot run a model of its defaults"),
)
"""Patterns of refusals that name their class, and the reason that several classes share."""


def reason(found: Outcome) -> str:
    """Return the outcome with its reason, without the parts that differ between classes."""
    if found.what != REFUSED:
        return "**works**" if found.what == RIGHT else found.what
    for pattern, shared in SAME_REASON:
        if match := re.fullmatch(pattern, found.line):
            return f"{found.what}: {match.expand(shared)}"
    return f"{found.what}: {found.line}"


@click.command()
@click.option("--only", multiple=True, metavar="MODEL_TYPE")
def main(only: tuple[str, ...]) -> None:
    """Write the list, or print single outcomes."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    found = []
    for model_type, name in classes():
        if only and model_type not in only:
            continue
        found.append(outcome(model_type, name))
        print(*found[-1], sep="  ", flush=True)
    if not only:
        README.write_text(with_list(README.read_text(), listing(found)))
    sys.exit(any(each.what == WRONG for each in found))


if __name__ == "__main__":
    main()
