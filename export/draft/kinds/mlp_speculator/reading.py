"""Reads an MLP speculator, as fms-extras and compatible tools save it, and refuses one that does not fit its target."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import Source
from eagle3.export.draft.common.checks import check_named_once
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.field import STATE
from eagle3.export.draft.kinds import MLP_SPECULATOR

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EPSILON = 1e-6
FIELDS = (STATE,)
_ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
_STAGE = re.compile(r"(?:emb|ln|head|proj)\.(\d+)\.")
_NAMES = {
    r"emb\.(\d+)\.weight": r"stages.\1.embed_tokens.weight",
    r"ln\.(\d+)\.weight": r"stages.\1.norm.weight",
    r"ln\.(\d+)\.bias": r"stages.\1.shift",
    r"head\.(\d+)\.weight": r"stages.\1.lm_head.weight",
}


@dataclass(frozen=True, kw_only=True)
class SpeculatorDescription(DraftDescription):
    """The description of an MLP speculator. ``layer.hidden_size`` is the width of its own states."""

    stages: int
    """The number of tokens that it can propose, ``n_predict``."""
    width: int
    """The target's, ``emb_dim``."""
    tied: bool
    """True if all stages have the same weights, except the first projection."""
    scales_input: bool
    takes_final_state: bool = True

    @property
    def hidden_size(self) -> int:
        return self.width

    @property
    def longest_chain(self) -> int:
        return self.stages

    def proposals(self, chain_len: int) -> int:
        return chain_len


def read(config: Fields, source: Source) -> SpeculatorDescription:
    """Describe the speculator with the configuration ``config``. Raises ValueError with one line."""
    from transformers import PreTrainedConfig

    file, folder = config.file, config.file.parent
    named = config.get("architectures") or [_ARCHITECTURE]
    if _ARCHITECTURE not in named:
        raise ValueError(
            f"{file} has the architecture {', '.join(named)}, but the only MLP speculator that is read is "
            f"{_ARCHITECTURE}"
        )
    tied = config.boolean("tie_weights", False)  # the first projection is never tied
    stages = config.count("n_predict", 3, least=2 if tied else 1)
    width, vocabulary = config.count("emb_dim", 4096), config.count("vocab_size", 32000)
    inner = config.count("inner_dim", 0, least=0) or width
    headers = source.headers()
    names = {name: name.removeprefix("speculator.") for name in headers}
    names = {name: own for name, own in names.items() if not (tied and _is_copy(own))}
    names = {name: _own_name(own) for name, own in names.items()}
    check_named_once(folder, names)
    return SpeculatorDescription(
        kind=MLP_SPECULATOR,
        dialect="fms-extras",
        source=source,
        layer=PreTrainedConfig(hidden_size=inner, vocab_size=vocabulary, num_hidden_layers=0),
        tensor_names=names,
        headers={own: headers[name] for name, own in names.items()},
        target_vocab_size=vocabulary,
        chain_len=stages,
        stages=stages,
        width=width,
        tied=tied,
        scales_input=config.boolean("scale_input", False),
    )


def _own_name(name: str) -> str:
    for pattern, own in _NAMES.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(own)
    return name


def _is_copy(own: str) -> bool:
    """Return True for a tied tensor of a later stage: a copy of the first stage's, or, for projections, of the second
    stage's."""
    stage = _STAGE.match(own)
    return stage is not None and int(stage[1]) > (1 if own.startswith("proj.") else 0)


def check_pair(
    draft: SpeculatorDescription,
    target_config: "PreTrainedConfig",
    taps: tuple[int, ...],  # noqa: ARG001 - it has none
    trained_for: str,
) -> None:
    """Raise ValueError if the width of the states is not the target's, or if stages differ that ``config.json`` calls
    tied."""
    if draft.hidden_size != target_config.hidden_size:
        raise ValueError(
            f"the draft takes states of {draft.hidden_size} (emb_dim), but the target's hidden size is "
            f"{target_config.hidden_size}: likely not a matched pair{trained_for}"
        )
    for name, header in draft.source.headers().items() if draft.tied else ():
        own = name.removeprefix("speculator.")
        first = name.replace(own, _STAGE.sub("ln.0.", own, count=1))
        if own.startswith("ln.") and _is_copy(own) and not _equal(draft.source, name, first, header.shape):
            raise ValueError(
                f"{draft.folder}: tie_weights is true, but {name} differs from {first}: the configuration belongs to "
                "another head"
            )


def _equal(source: Source, name: str, first: str, shape: tuple[int, ...]) -> bool:
    held = source.headers().get(first)
    return held is not None and held.shape == shape and bool((source.tensor(name) == source.tensor(first)).all())
