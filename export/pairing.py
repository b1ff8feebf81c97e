"""Whether a draft head fits a target: taps, widths, vocabularies. A wrong pair loads, runs and accepts about 1%."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from eagle3.export.checkpoints.safetensors_folder import TensorHeader, shard_paths
from eagle3.export.draft import DraftDescription
from eagle3.targets.spec import Skeleton

QUANTIZED = ("Int4Tensor", "IntxUnpackedToInt8Tensor")
"""The tensor classes of torchao that ExecuTorch's recipes make and its CUDA backend has layouts for."""


def choose_taps(
    draft: DraftDescription, target_config: Any, given: tuple[int, ...] | None, convention: str | None
) -> tuple[int, ...]:
    """The layers whose inputs are tapped: flags first, then the checkpoint's, then 2, n//2, n-3.

    ``convention`` says what explicit ids mean: the ``input`` of a layer (SafeAILab, vLLM, speculators) or its
    ``output`` (SGLang, TensorRT-LLM). Raises ValueError for ids that no target of this depth has.
    """
    layers = target_config.num_hidden_layers
    ids = given or draft.aux_layers
    explicit = ids is not None
    ids = ids if explicit else (2, layers // 2, layers - 3)
    taps = tuple(tap + 1 for tap in ids) if explicit and convention == "output" else tuple(ids)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers:
        raise ValueError(
            f"aux layers {','.join(map(str, ids))} (convention {convention or 'input'}) must ascend, be unique and lie "
            f"within the target's {layers} layers: type --aux-layers, or --aux-convention input"
        )
    return taps


def check_pair(draft: DraftDescription, target_config: Any, taps: tuple[int, ...]) -> None:
    """Raise ValueError where the draft's tensors cannot belong to this target."""
    hidden, vocabulary = target_config.hidden_size, target_config.vocab_size
    trained_for = f"; the head names {draft.verifier} as its target" if draft.verifier else ""
    if draft.taps_width != len(taps) * hidden:
        if draft.taps_width % hidden:
            raise ValueError(
                f"the draft's fc takes {draft.taps_width} features, no multiple of the target's hidden size {hidden}: "
                f"likely not a matched pair{trained_for}"
            )
        raise ValueError(
            f"the draft's fc takes {draft.taps_width} features = {draft.taps_width // hidden} taps of {hidden}, but "
            f"{len(taps)} aux layers are named ({','.join(map(str, taps))}): type --aux-layers with "
            f"{draft.taps_width // hidden} ids"
        )
    if draft.target_vocab_size != vocabulary:
        raise ValueError(
            f"the draft is for a vocabulary of {draft.target_vocab_size}, the target has {vocabulary}: "
            f"likely not a matched pair{trained_for}"
        )
    if draft.has_embedding:
        rows, width = draft.headers["embed_tokens.weight"].shape
        if (rows, width) != (vocabulary, draft.hidden_size):
            raise ValueError(
                f"the draft's embed_tokens is {rows} x {width}, but target vocabulary x draft hidden size is "
                f"{vocabulary} x {draft.hidden_size}: likely not a matched pair{trained_for}"
            )
    elif draft.hidden_size != hidden:
        raise ValueError(
            f"the draft has no embedding and its hidden size {draft.hidden_size} is not the target's {hidden}, "
            "so it cannot share the target's: the checkpoint lacks embed_tokens.weight"
        )
    check_shapes(draft)
    if draft.maps_vocabulary:
        check_vocabulary_map(draft, vocabulary)
    elif draft.draft_vocab_size != vocabulary:
        raise ValueError(
            f"the draft speaks {draft.draft_vocab_size} tokens, the target {vocabulary}, and no d2t maps them"
        )


def check_target(checkpoint: Path, headers: dict[str, TensorHeader], skeleton: Skeleton, quantized: bool) -> None:
    """Every tensor of the target as its configuration has it, by name. Raises ValueError.

    ``quantized``: weights that torchao quantized are welcome.
    """
    given = {}
    for name, header in headers.items():
        own = skeleton.key_map(name)
        if own is None:
            continue
        if header.dtype not in ("F32", "F16", "BF16", "F64", *(QUANTIZED if quantized else ())):
            raise ValueError(f"{checkpoint}: {name} is {header.dtype}, quantized: name the original checkpoint")
        given[own] = header
    expected = {name: tuple(value.shape) for name, value in skeleton.model.state_dict().items()}
    tied = {to for source, (to, _) in skeleton.tie_map.items() if source in given}
    for name, shape in expected.items():
        if name not in given and name not in tied:
            raise ValueError(f"{checkpoint} lacks {name}, which its config.json implies: is a shard missing?")
        if name in given and given[name].shape != shape:
            raise ValueError(
                f"{checkpoint}: {name} is {list(given[name].shape)}, but config.json implies {list(shape)}"
            )
    unread = sorted(set(given) - set(expected))
    if unread:
        raise ValueError(f"{checkpoint} has {unread[0]}, which a model of its config.json has no place for")


def check_shapes(draft: DraftDescription) -> None:
    """Every tensor of the head as its configuration has it, by name. Raises ValueError."""
    import torch

    from eagle3.export.draft.head import DraftHead

    with torch.device("meta"):
        expected = DraftHead(draft, max_seq_len=1).state_dict()
    for name, value in expected.items():
        header = draft.headers.get(name)
        if header is None:
            raise ValueError(f"{draft.folder} lacks {name}, which its config.json implies")
        if header.shape != tuple(value.shape):
            raise ValueError(
                f"{draft.folder}: {name} is {list(header.shape)}, but config.json implies {list(value.shape)}"
            )
    unread = sorted(set(draft.headers) - set(expected))
    if unread:
        raise ValueError(f"{draft.folder} has {unread[0]}, which an EAGLE-3 head of its config.json has no place for")


def check_vocabulary_map(draft: DraftDescription, vocabulary: int) -> None:
    """``d2t`` is an offset: target id = draft id + d2t[draft id], in range and unique. Raises ValueError."""
    import torch

    (stored,) = (name for name, own in draft.tensor_names.items() if own == "d2t")
    for path in shard_paths(draft.folder):
        with safe_open(path, framework="pt") as file:
            if stored in file.keys():  # noqa: SIM118 (not a dict)
                offsets = file.get_tensor(stored)
    ids = offsets + torch.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= vocabulary or ids.unique().numel() != ids.numel():
        raise ValueError(
            f"{draft.folder}: d2t maps draft ids to {int(ids.min())}..{int(ids.max())}, "
            f"{ids.numel() - ids.unique().numel()} of them twice, but must hit 0..{vocabulary - 1} once each: "
            "d2t holds offsets (target id - draft id), not ids"
        )
