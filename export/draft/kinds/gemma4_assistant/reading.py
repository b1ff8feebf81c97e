"""Reads a checkpoint of an assistant, as transformers' ``Gemma4AssistantForCausalLM`` saves it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.export.checkpoints.json_fields import count, number, read_object
from eagle3.export.checkpoints.source import Source
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds.gemma4_assistant import GEMMA4_ASSISTANT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
ORDERING = "masked_embedding.token_ordering"
_NAMES = {r"model\.(layers\..*|norm\.weight)": r"\1", r"masked_embedding\.(.*)": r"\1"}
_UNREAD = r".*rotary_emb\..*inv_freq"


@dataclass(frozen=True, kw_only=True)
class AssistantDescription(DraftDescription):
    """The description of a Gemma 4 assistant. ``layer`` is transformers' text configuration of its layers, ``config``
    the whole configuration."""

    config: "PreTrainedConfig"
    takes_final_state: bool = True
    embeds_as_target: bool = True
    """True if tokens are embedded by the target's module, including its scale. If False, the rows of the embedding are
    used unscaled."""

    @property
    def hidden_size(self) -> int:
        """The width of a feature, which is the target's. The width of the head's layers is ``layer.hidden_size``."""
        return self.config.backbone_hidden_size

    @property
    def ordered(self) -> bool:
        """True if only the tokens of the best centroids are scored."""
        return self.config.use_ordered_embeddings


def read(folder: Path, config: dict[str, Any], source: Source) -> AssistantDescription:
    """Describe the assistant in ``folder``. Raises ValueError with one line if transformers cannot read its
    ``config.json`` as an assistant, or if a tensor occurs twice."""
    whole = _configuration(folder)
    text, headers = whole.get_text_config(), source.headers()
    number(vars(text), "rms_norm_eps", None, folder / "config.json", most=1)
    vocabulary = "embed_tokens.weight" if whole.use_ordered_embeddings else LM_HEAD
    given = EMBEDDING if whole.tie_word_embeddings and EMBEDDING in headers else LM_HEAD
    left_out = {EMBEDDING, LM_HEAD} - {given}  # a tied copy or an unused embedding
    names = {name: own_name(name, vocabulary) for name in headers if name not in left_out}
    names = {name: own for name, own in names.items() if not re.fullmatch(_UNREAD, name)}
    return AssistantDescription(
        kind=GEMMA4_ASSISTANT,
        dialect="transformers",
        source=source,
        layer=text,
        config=whole,
        tensor_names=names,
        headers={own: headers[name] for name, own in names.items()},
        target_vocab_size=text.vocab_size,
        chain_len=_chain_len(folder, config),
    )


def own_name(name: str, vocabulary: str) -> str:
    """Return the module's name of a tensor. ``vocabulary`` is the name of the table whose rows score tokens."""
    if name in (EMBEDDING, LM_HEAD):
        return vocabulary
    for pattern, own in _NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, own, name)
    return name


def _configuration(folder: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.get_text_config().per_layer_config  # noqa: B018 - raises if the layers cannot be made from it
    except Exception as error:  # transformers validates field by field, with errors of its own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{folder / 'config.json'}: transformers cannot read it as an assistant ({reason[:200]})"
        ) from error
    if not hasattr(config, "backbone_hidden_size"):
        raise ValueError(
            f"{folder / 'config.json'} names a Gemma 4 assistant in architectures, but its model_type is "
            f"{config.model_type}: correct one of them"
        )
    return config


def _chain_len(folder: Path, config: dict[str, Any]) -> int:
    """Return the draft tokens a round that the folder suggests, by default 3."""
    file = folder / "generation_config.json"
    given = read_object(file) if file.is_file() else config
    return count(given, "num_assistant_tokens", 3, file)
