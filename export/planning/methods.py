"""Decides which methods an artifact has, and how many rows each takes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.configuration.config import NO_HEAD, ExportConfig
from eagle3.export.draft.common.description import DraftDescription
from eagle3.runner.contract import DECODE, DRAFT_DECODE, FORWARD, PREFILL, SPECULATE, TARGET_ROWS, TARGET_VERIFY
from eagle3.targets import TargetSpec
from eagle3.targets.spec import ROLLBACK_ROWS, is_recurrent, sliding_window, states_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_MAX_PREFILL = 1024  # tokens; longer chunks gain little, and their activations take memory
# In tokens. Up to this length the small-M kernel, which single rows need, should be no slower than dequantizing.
FORWARD_ROWS = 128


@dataclass(frozen=True)
class MethodPlan:
    """The lengths of a method in rows: ``min_len`` to ``max_len``, both included."""

    name: str
    min_len: int
    max_len: int

    @property
    def traced_len(self) -> int:
        """The length to trace with, for which kernels of a dynamic length are tuned: a long prefill chunk, a verify
        window, or up to 9 rows for a method that also accepts one row. It is odd, so that it does not equal a size of
        the model by chance."""
        if self.min_len == self.max_len:
            return self.max_len
        return min(self.max_len, 9 if self.min_len == 1 else self.max_len) - 1 | 1


def plan_methods(
    config: ExportConfig,
    spec: TargetSpec,
    target_config: "PreTrainedConfig",
    chain_len: int,
    max_seq_len: int,
    draft: DraftDescription | None = None,
    fused: bool = False,
    verify_rows: int | None = None,
) -> tuple[MethodPlan, ...]:
    """Return the lengths of every method, within the bounds of the target and of the draft.

    Without ``draft``, only the target bounds the lengths. With ``fused`` there is a method ``speculate``. Without
    ``verify_rows``, the verify window is as long as the chain. Raises ValueError with the flag to change.
    """
    shortest, longest = spec.min_forward_len(target_config), spec.max_forward_len(target_config)
    check_states(config, target_config)
    of_target, least = sliding_window(target_config), BACKENDS[config.backend].few_rows(2) + 1
    if 0 < of_target < least:
        raise ValueError(
            f"the target's sliding window is {of_target} tokens, which bounds a prefill chunk, but prefill takes "
            f"{least} tokens or more: such a model cannot be exported; correct sliding_window in config.json if it is "
            "wrong"
        )
    longest = min(longest, (draft_rows(draft, chain_len) if draft else 0) or longest)
    seeds = draft is None or draft.has_cache
    chain_rows = chain_len + 1
    window = verify_rows or chain_rows
    backend = BACKENDS[config.backend]
    if config.draft_window is not None and longest < window:
        raise ValueError(
            f"--draft-window {config.draft_window} leaves {longest} rows, but a verify window has {window}: type "
            f"--draft-window {config.draft_window + window - longest} or more"
        )
    fewest_rows, most_rows = max(2, shortest), min(backend.window_rows[-1], longest)
    # a larger window would make the shortest prefill longer than the sliding window
    if 0 < of_target <= backend.few_rows(most_rows):
        most_rows = min(most_rows, least - 1)
    if window > chain_rows and not fewest_rows <= window <= most_rows:
        raise ValueError(
            f"a verify window of {window} rows, but the target, its head and --backend {config.backend} take "
            f"{fewest_rows} to {most_rows}: type --verify-rows {most_rows} or less"
        )
    if window < chain_rows:
        raise ValueError(
            f"--verify-rows {window} is too short for the head's {chain_len} draft tokens a round, which take "
            f"{chain_rows} rows: type --verify-rows {chain_rows} or more, or --chain-len {window - 1}"
        )
    if window == chain_rows and not fewest_rows <= window <= most_rows:
        raise ValueError(
            f"--chain-len {chain_len} makes a verify window of {window} rows, but the target and "
            f"--backend {config.backend} take {fewest_rows} to {most_rows}: type --chain-len {most_rows - 1} or less"
        )
    block = draft.block_rows if draft else 0
    if block > backend.window_rows[-1]:
        raise ValueError(
            f"the draft's block has {block} rows, but --backend {config.backend} takes {backend.window_rows[-1]}: type "
            "--draft with a head that has smaller blocks"
        )
    min_prefill = max(shortest, backend.few_rows(max(window, block)) + 1) if backend.shares_caches else shortest
    if is_recurrent(target_config):
        check_recurrent(config, target_config)
        if backend.shares_caches:
            min_prefill = max(min_prefill, ROLLBACK_ROWS + 2)  # a traced length of 1 is not dynamic
        else:  # the one method computes windows; a longer chunk is another graph
            longest = min(longest, ROLLBACK_ROWS)
    if config.draft_window is not None and longest < min_prefill:
        raise ValueError(
            f"--draft-window {config.draft_window} leaves chunks of {longest} tokens, but prefill takes {min_prefill} "
            f"or more: type --draft-window {config.draft_window + min_prefill - longest} or more"
        )
    most = min(longest, max_seq_len - 1)
    if most < min_prefill and most == of_target:
        raise ValueError(
            f"{max(window, block)} rows in a round make prefill take {min_prefill} tokens or more, but the target's "
            f"sliding window is {of_target}: type --chain-len {backend.few_rows(2) - 1} or less, without --verify-rows"
        )
    if most < min_prefill:
        raise ValueError(
            f"prefill takes {min_prefill} tokens or more, but --max-seq-len {max_seq_len} and the target leave {most}: "
            f"type --max-seq-len {min_prefill + 1} or more"
        )
    max_prefill = config.max_prefill or min(most, DEFAULT_MAX_PREFILL)
    if not min_prefill <= max_prefill <= most:
        raise ValueError(
            f"prefill chunks of {min_prefill} to {max_prefill} tokens: --max-prefill must be {min_prefill} to {most} "
            f"(the sliding window and --max-seq-len {max_seq_len} bound it)"
        )
    methods = [MethodPlan(PREFILL, min_prefill, max_prefill), MethodPlan(TARGET_VERIFY, 2, window)]
    has_draft = draft is None or draft.kind != NO_HEAD
    if has_draft:
        methods.append(MethodPlan(DRAFT_DECODE, 1, max(max_prefill, window) if seeds else 1))
    if fused:
        methods.append(MethodPlan(SPECULATE, chain_rows, chain_rows))
    if config.with_decode or not backend.shares_caches or not (has_draft or config.with_forward):
        methods.append(MethodPlan(DECODE, 1, 1))
    if config.with_forward:
        methods.append(MethodPlan(FORWARD, 1, min(max_prefill, FORWARD_ROWS)))
    return tuple(methods)


def programs(methods: tuple[MethodPlan, ...], backend: str) -> tuple[MethodPlan, ...]:
    """Return the methods that are traced: those of ``plan_methods``, or one in place of all methods of the target if
    methods share no caches."""
    if BACKENDS[backend].shares_caches:
        return methods
    of_target = [method for method in methods if method.name != DRAFT_DECODE]
    shortest, longest = min(each.min_len for each in of_target), max(each.max_len for each in of_target)
    others = (method for method in methods if method.name == DRAFT_DECODE)
    return MethodPlan(TARGET_ROWS, shortest, longest), *others


def check_states(config: ExportConfig, target_config: "PreTrainedConfig") -> None:
    """Raise ValueError for a target with recurrent or convolution layers that the backend does not compute."""
    kinds = states_of(target_config)
    if not kinds <= BACKENDS[config.backend].states:
        what = min(kinds - BACKENDS[config.backend].states)
        able = ", ".join(name for name, backend in BACKENDS.items() if kinds <= backend.states)
        raise ValueError(
            f"the target ({target_config.model_type}) has layers with {what}, which --backend "
            f"{config.backend} does not compute yet: type --backend {able}"
        )


def check_recurrent(config: ExportConfig, target_config: "PreTrainedConfig") -> None:
    """Raise ValueError for flags that a target with recurrent layers does not support."""
    if config.with_forward:
        raise ValueError(
            f"--with-forward: the target ({target_config.model_type}) has layers with a recurrent state, and "
            "ExecuTorch's own runner does not report rollbacks: leave it out"
        )


def draft_rows(draft: DraftDescription, chain_len: int) -> int:
    """Return the longest forward that the draft's sliding window allows; 0 if it has none.

    The mask rows of a P-EAGLE come after each forward and take part of the sliding window. In a head that drafts a
    block, rows of accepted tokens do not attend, so one forward may write as many of them as the ring has slots. Raises
    ValueError if mask rows fill the window, and for a chain length that the head does not propose.
    """
    masks = draft.proposals(chain_len) - 1
    if draft.block_rows:
        return 2 * draft.window
    if draft.window and draft.window <= masks:
        raise ValueError(
            f"the draft's window is {draft.window} tokens, but --chain-len {chain_len} needs more: type --chain-len "
            f"{draft.window}"
        )
    return draft.window and draft.window - masks


def own_verify_rows(config: ExportConfig, qlinear: str) -> int:
    """Return the rows of a verify window without a head: as many as the kernels take at once."""
    backend = BACKENDS[config.backend]
    return backend.fast_rows.get(qlinear, backend.window_rows[0])


def fused_rounds(
    config: ExportConfig, draft: DraftDescription, chain_len: int, target_bytes: int, verify_rows: int = 0
) -> tuple[bool, tuple[str, ...]]:
    """Return whether to export the method ``speculate``, and a warning if it is the default but impossible.

    Raises ValueError if it is impossible and ``--speculate`` asks for it.
    """
    backend = BACKENDS[config.backend]
    rows, most = draft.fused_rows(chain_len), backend.few_rows(max(chain_len + 1, verify_rows, draft.block_rows))
    wanted = target_bytes < backend.fuses_below if config.speculate is None else config.speculate
    quantized = backend.quantizes and config.draft_qlinear not in (None, "none")
    if not (wanted and quantized and rows > most):
        return wanted, ()
    reason = (
        f"a {draft.kind} of {chain_len} tokens has {rows} rows in that method, but its quantized linears take {most}"
    )
    if config.speculate:
        raise ValueError(f"--speculate: {reason}: type --no-speculate, or leave --draft-qlinear out")
    return False, (f"there will be no method speculate ({reason}): rounds take several calls",)
