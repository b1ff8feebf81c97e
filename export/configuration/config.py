"""The flags of one export, as given."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eagle3.export.configuration.hub_names import HubName

NO_HEAD = "none"
"""The value of ``--draft`` for a target without a draft head."""
OWN_LAYER = "mtp"
"""The value of ``--draft`` for the MTP layer that the target's own checkpoint holds."""
CUDA_RECIPES = ("none", "default", "sensitive")
XNNPACK_RECIPES = ("none", "8da4w", "8da8w")
"""ExecuTorch's names for dynamic 8-bit activations with weights of 4 or 8 bits
(``extension/llm/export/quantize.py``)."""
MLX_RECIPES = ("none", "4w", "8w")
"""Weights of 4 or 8 bits, by ExecuTorch's names in the same file; activations keep their dtype."""
GROUPED = "8da4w"  # in this recipe groups of inputs share a scale; 8da8w has one scale for each row
EMBEDDING_RECIPES = ("none", "8w")
KV_CACHES = ("bfloat16", "int8")
INT4_LAYOUTS = ("tiles", "records")
"""The names of ``LAYOUTS`` (``lowering/cuda/kernels/int4/layouts.py``), the default first."""
WEIGHT_TABLES = ("fqn3", "fqn0")
"""The weight tables of ExecuTorch's CUDA runtime: of 1.5, and the later one (``lowering/cuda/weight_table.py``)."""
HOSTS = ("x86_64", "aarch64")
"""The processors that a CUDA artifact's libraries can be compiled for, as ``platform.machine`` names them."""
LONGEST_CHAIN = 15
"""The most draft tokens of a round; a verify window has one row more."""


@dataclass(frozen=True)
class ExportConfig:
    """The flags of one export, as ``eagle3-export --help`` describes them. None means that the target, the draft head
    or the backend decides."""

    target_model: str = "auto"
    output_dir: Path | None = None
    checkpoint: Path | None = None
    draft: Path | None = None
    backend: str = "cuda"
    cuda_arch: str | None = None
    host_arch: str | None = None
    chain_len: int | None = None
    verify_rows: int | None = None
    max_seq_len: int | None = None
    max_prefill: int | None = None
    qlinear: str | None = None
    draft_qlinear: str | None = None
    qembedding: str | None = None
    group_size: int | None = None
    kv_cache: str | None = None
    allow_fallback: bool | None = None
    int4_layout: str | None = None
    weight_table: str | None = None
    aux_layers: tuple[int, ...] | None = None
    aux_convention: str | None = None
    draft_dialect: str | None = None
    norm_before_residual: bool | None = None
    draft_window: int | None = None
    draft_rope_theta: float | str | None = None
    draft_partial_rotary: float | str | None = None
    read: tuple[str, ...] = ()
    """Overrides of how the head's fields are read, each FIELD=VALUE."""
    fit: bool | None = None
    fit_only: bool = False
    text: Path | None = None
    with_decode: bool = False
    with_forward: bool = False
    speculate: bool | None = None
    logits: bool = True
    sessions: bool | None = None
    check: bool = True
    overwrite: bool = False
    config_folder: Path | None = None
    dry_run: bool = False
    random_weights: bool = False
    layers: int | None = None
    repositories: Mapping[str, HubName] = field(default_factory=dict)
    """Maps each field whose path lies in the hub's cache to its name on the hub, with the commit."""

    @property
    def reads_weights(self) -> bool:
        """True if the export reads weights, False if configurations and headers are enough."""
        return not (self.dry_run or self.random_weights)

    @property
    def publisher(self) -> str | None:
        """The organization that published the draft head on the hub; None for a local folder."""
        named = self.repositories.get("draft")
        return named.repository.partition("/")[0] if named else None

    @property
    def int8_caches(self) -> bool:
        """True if the target's layers of full attention keep keys and values in 8 bits."""
        return self.kv_cache == "int8"

    @property
    def folder(self) -> Path:
        """The artifact's folder. Raises ValueError if none has been chosen yet."""
        if self.output_dir is None:
            raise ValueError("output_dir is missing")
        return self.output_dir

    def as_json(self) -> dict[str, Any]:
        """Return the flags in a form that can be typed again, with names on the hub instead of paths into its cache."""
        given = {each.name: self.repositories.get(each.name, getattr(self, each.name)) for each in fields(self)}
        del given["repositories"], given["dry_run"]
        return {name: str(value) if isinstance(value, Path | HubName) else value for name, value in given.items()}
