"""Refuses flags that contradict each other or the backend, before any file is read."""

from pathlib import Path

from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.configuration.config import NO_HEAD, OWN_LAYER, ExportConfig

HEAD_FLAGS = (
    "chain_len", "draft_qlinear", "draft_dialect", "norm_before_residual", "aux_layers", "aux_convention", "speculate",
    "draft_window", "draft_rope_theta", "draft_partial_rotary",
)  # fmt: skip
EAGLE_FLAGS = ("draft_dialect", "norm_before_residual", "draft_window", "draft_rope_theta", "draft_partial_rotary")


def check_flags(config: ExportConfig) -> None:
    """Raise ValueError for a flag that the backend would ignore, and for two flags that exclude each other."""
    if config.with_decode and config.with_forward:
        raise ValueError(
            "--with-forward is for ExecuTorch's own runner, which would take --with-decode's method for its steps and "
            "end the process, since decode returns more than logits: leave one of the two out"
        )
    if config.draft == Path(NO_HEAD):
        for flag in HEAD_FLAGS:
            if getattr(config, flag) is not None and (flag, getattr(config, flag)) != ("speculate", False):
                name = f"--{flag.replace('_', '-')}"
                raise ValueError(f"{name} needs a draft head, and --draft none exports none: leave one of the two out")
    if config.draft == Path(OWN_LAYER):
        for flag in EAGLE_FLAGS:
            if getattr(config, flag) is not None:
                name = f"--{flag.replace('_', '-')}"
                raise ValueError(f"{name} is for EAGLE heads, and --draft mtp is the target's MTP layer: leave it out")
    if config.verify_rows is not None and config.chain_len is not None and config.verify_rows <= config.chain_len:
        raise ValueError(
            f"--verify-rows {config.verify_rows} is too short for --chain-len {config.chain_len}, which verifies "
            f"{config.chain_len + 1} rows: type --verify-rows {config.chain_len + 1} or more"
        )
    if config.draft == Path(NO_HEAD):
        for flag, given in (("--read", config.read), ("--fit", config.fit), ("--fit-only", config.fit_only)):
            if given:
                raise ValueError(f"{flag} needs a draft head, and --draft none exports none: leave one of the two out")
    if config.fit and config.random_weights:
        raise ValueError("--fit measures weights, and --random-weights has none: leave one of the two out")
    if config.text is not None and config.fit is False:
        raise ValueError(
            f"--text {config.text} gives --fit its text, and --no-fit measures nothing: leave one of the two out"
        )
    backend = BACKENDS[config.backend]
    if config.sessions and not backend.sessions:
        raise ValueError(
            f"--sessions: --backend {config.backend} does not export read_state and write_state: leave it out"
        )
    for flag in sorted(frozenset().union(*(each.flags for each in BACKENDS.values())) - backend.flags):
        if getattr(config, flag) is not None:
            name = f"--{flag.replace('_', '-')}"
            raise ValueError(
                f"{name} {getattr(config, flag)} has no effect with --backend {config.backend}: leave it out"
            )
    for flag, recipe in (("--qlinear", config.qlinear), ("--draft-qlinear", config.draft_qlinear)):
        if recipe is not None and recipe not in backend.recipes:
            raise ValueError(
                f"{flag} {recipe}: --backend {config.backend} has no kernels for it; it has them for "
                f"{', '.join(backend.recipes)}"
            )
    grouped = backend.grouped
    if config.group_size is not None and not {config.qlinear, config.draft_qlinear} & set(grouped):
        raise ValueError(
            f"--group-size {config.group_size} is for {' or '.join(grouped)}: type --qlinear {grouped[0]}, or leave it "
            "out"
        )
    for flag in () if backend.shares_caches else ("with_decode", "with_forward", "speculate"):
        if getattr(config, flag):
            raise ValueError(
                f"--{flag.replace('_', '-')} adds a method, and methods for --backend {config.backend} share no "
                "caches: leave it out"
            )
