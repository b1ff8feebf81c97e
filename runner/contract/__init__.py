"""The contract between exporter and runner: the only place for method names and metadata keys.

The exporter writes metadata through ``Metadata.constant_methods``, and the runner reads it through ``Metadata.read``.
Neither spells a name itself. The table has the inputs and outputs of the methods. The batch size is 1, ids and
positions are int64, and H is the draft's hidden size:

==================  =============================================  ================================================
method              inputs                                         outputs
==================  =============================================  ================================================
``prefill``         tokens [1,T], input_pos [T]                    greedy next token [1,1], feature [1,T,H],
                                                                   logits [1,1,V]
``target_verify``   tokens [1,C], input_pos [C]                    greedy ids [1,C], feature [1,C,H], logits [1,C,V]
``draft_decode``    tokens [1,T], feature [1,T,H], input_pos [T]   proposed target ids [1,K], recurrent [1,1,H],
                                                                   logits [1,K,V_draft]
``decode``          as ``prefill`` with T = 1                      as ``prefill``
``speculate``       tokens [1,C], input_pos [C]                    greedy ids and next window [2,C], that window
                                                                   [1,C], its positions [C]
``forward``         tokens [1,T], input_pos [T], T from 1          logits [1,1,V] of the last row, and nothing else
``read_state``      pieces [G]                                     a piece of each buffer of the state
``write_state``     pieces [G], a piece of each buffer             pieces + 1 [G]
==================  =============================================  ================================================

K is 1. If the draft head proposes all tokens of a round in one forward (P-EAGLE, DFlash, MLP speculators), K is
``chain_len``, and ``get_proposals`` returns it. Logits are float32 and the last output; ``get_has_logits`` says if they
are there. The draft's logits are over its own vocabulary. If its ids differ from the target's, ``get_draft_ids`` maps
them. That method exists only with logits, because the proposals are mapped already. Each of these additions has a
format version, so a runner that does not know it refuses the artifact with one line.

A draft head may attend to the target's caches and have none of its own (``get_has_draft_cache`` is False). It needs no
seeding: ``draft_decode`` takes one row, and only the row before the newest token. All steps of a round have that row's
position, because the steps write nothing into a cache.

There may be no draft head (``get_has_draft`` is False, ``--draft none``). Then there is no ``draft_decode``, the
target's methods return no feature, and prompt lookup is the only proposer.

Recurrent layers of a target can roll back ``get_rollback_rows`` rows (see ``Metadata.rollback_rows``). A call commits
every position before its first row. A call of more rows also commits all of them but the last ``get_rollback_rows``.

``target_verify`` takes up to ``get_verify_rows`` rows, or ``chain_len`` + 1 if there is no such key.

``speculate`` is a fused round: a whole greedy round at the artifact's own chain length, with a verify window of C
tokens. It verifies ``tokens``, seeds the draft with the accepted ones, and drafts the next window. It returns that
window twice: beside the ids, so that the host reads both in one copy, and as its own next inputs, which can stay on the
device. It writes target slots up to the window's last position, and draft slots up to ``chain_len - 1`` positions
further. All of them must be in the context.

Methods of some backends share no caches. Then one method, ``target_rows``, computes all rows of the target, and
``get_served_by`` names it for each method that it stands for. It takes tokens [1,T] and input_pos [T], T from 1 to the
longest chunk of ``prefill``. It returns the greedy ids [1,R] and logits [1,R,V] of the last R rows, R being the longest
verify window, and the feature [1,T,H]. If T is less than R, the first row stands in for the rows before it.

``forward`` is for ExecuTorch's own runner (``extension/llm/runner``), which decodes without speculation over the same
cache. Our runner does not call it. ExecuTorch's runner has other names for lengths, see ``Metadata.forward_len``. If
there is a method ``decode``, that runner calls it for each step and expects logits alone. An artifact therefore has at
most one of the two.

``read_state`` and ``write_state`` carry the state, which is every buffer that a method writes (caches, rings, recurrent
states), out of the program and back, a piece at a time (see ``StateGroup``). The dtype and shape of a buffer's piece
are those of its input of ``write_state``. A program without ``get_state_groups`` has neither method.
"""

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

PREFILL, TARGET_VERIFY, DRAFT_DECODE = "prefill", "target_verify", "draft_decode"
METHODS = (PREFILL, TARGET_VERIFY, DRAFT_DECODE)
"""Every artifact with a draft head has these; without one, the first two."""
DECODE, FORWARD, SPECULATE = "decode", "forward", "speculate"
"""Methods that exist only with ``--with-decode``, ``--with-forward``, and ``--speculate`` (the default for CUDA, and on
the CPU for small models)."""

TARGET_ROWS = "target_rows"
"""The only method of the target if methods share no caches."""

READ_STATE, WRITE_STATE = "read_state", "write_state"
"""Methods that exist unless the export had ``--no-sessions``."""

TWO_ROWS, DRAFT_STEP = "two_rows", "draft_step"
"""Calls that the check of an export times beside whole methods: a verify of two rows, a draft step of one."""

MODEL_FILE, EXPORT_RECORD = "model.pte", "export.json"
PROGRAM_SUFFIX = ".pte"
HOST_MODEL_FILE = "model.{}.pte"
"""The program of a CUDA artifact for another processor than that of ``model.pte``, such as ``model.aarch64.pte``."""
LAUNCHES = "launches"
"""Key in the record of a CUDA artifact: the kernel launches of each method."""
WORKSPACE = "workspace_bytes"
"""Key in the same record: for each method, the most bytes of GPU memory that intermediate tensors hold at a time during
its longest call."""
LACKING = "lacking"
"""Key in the record of a CUDA artifact: later architectures that cannot run a block of its kernels, and why."""
OUTSIDE = "outside_delegates"
"""Key in the record of an artifact for MLX: the operations that ExecuTorch's own kernels compute, by method."""
FORMAT_VERSION, PARALLEL_VERSION, LOGITS_VERSION, SPECULATE_VERSION, NO_DRAFT_CACHE_VERSION = 1, 2, 3, 4, 5
NO_DRAFT_VERSION, ROLLBACK_VERSION, STATE_VERSION = 6, 7, 8
NEWEST_VERSION = STATE_VERSION


def format_version(
    proposals: int,
    has_logits: bool,
    has_forward: bool,
    has_speculate: bool,
    has_draft_cache: bool = True,
    has_draft: bool = True,
    has_states: bool = False,
    has_sessions: bool = False,
) -> int:
    """Return the lowest format version whose runners can read such an artifact. Every runner that reads logits reads
    ``get_max_context_len`` too.
    """
    if has_sessions:
        return STATE_VERSION
    if has_states:
        return ROLLBACK_VERSION
    if not has_draft:
        return NO_DRAFT_VERSION
    if not has_draft_cache:
        return NO_DRAFT_CACHE_VERSION
    if has_speculate:
        return SPECULATE_VERSION
    if has_logits or has_forward:
        return LOGITS_VERSION
    return FORMAT_VERSION if proposals == 1 else PARALLEL_VERSION


RUNTIMES = ("executorch", "torch", "auto")
"""The hosts that run an artifact's methods: ``executorch.runtime``, or PyTorch itself (CUDA artifacts)."""


CUDA_GRAPHS = ("auto", "off")
""""auto": the PyTorch host captures rounds as CUDA graphs if possible. "off": never."""


class MissingMetadata(Exception):
    """A ``.pte`` lacks one of the contract's constant methods; the message names it."""


class StateGroup(NamedTuple):
    """Buffers of the state that are read and written in step. Each has ``rows`` rows. Piece i of a buffer holds the
    rows from min(i * ``piece_rows``, ``rows`` - ``piece_rows``) on, ``piece_rows`` of them."""

    rows: int
    piece_rows: int
    by_position: bool
    """True if position p of a text is in row p or p + 1, modulo ``rows``, so that a short text fills the first pieces
    only."""
    buffers: int
    """The number of buffers. The buffers of all groups, group after group, are the outputs of ``read_state``."""

    def pieces(self, slots: int) -> int:
        """Return how many pieces hold the state of a text that was written at positions 0 to ``slots`` - 1."""
        rows = min(self.rows, slots + 1) if self.by_position else self.rows
        return -(-rows // self.piece_rows)


def _key(name: str, default: object = MISSING, compare: bool = True) -> Any:  # noqa: ANN401 - as dataclasses.field
    return field(default=default, compare=compare, metadata={"method": name})


@dataclass(frozen=True)
class Metadata:
    """The constant methods of an artifact; lengths are in tokens. A program may lack those that have a default."""

    max_seq_len: int = _key("get_max_seq_len")
    """Slots of the KV caches."""
    vocab_size: int = _key("get_vocab_size")
    n_layers: int = _key("get_n_layers")
    min_prefill: int = _key("get_min_prefill_chunk")
    max_prefill: int = _key("get_max_prefill_chunk")
    sliding_window: int = _key("get_sliding_window")  # 0: none
    chain_len: int = _key("get_chain_len")
    draft_vocab_size: int = _key("get_draft_vocab_size")
    bos_id: int = _key("get_bos_id")  # -1: none
    eos_ids: tuple[int, ...] = _key("get_eos_ids")
    manifest: dict[str, Any] = _key("get_manifest")
    use_kv_cache: bool = _key("use_kv_cache")
    use_sdpa_with_kv_cache: bool = _key("use_sdpa_with_kv_cache")
    enable_dynamic_shape: bool = _key("enable_dynamic_shape")
    proposals: int = _key("get_proposals", default=1)
    """Tokens that one call of ``draft_decode`` proposes."""
    draft_sliding_window: int | None = _key("get_draft_sliding_window", default=None)
    """The longest of the draft's sliding windows, 0 if it has none; None if an earlier exporter did not record it."""
    has_draft: bool = _key("get_has_draft", default=True)
    """False if there is no draft head: no ``draft_decode``, no features, a chain length of 0."""
    has_draft_cache: bool = _key("get_has_draft_cache", default=True)
    """False if the draft attends to the target's caches alone."""
    has_logits: bool = _key("get_has_logits", default=False)
    draft_ids: "Tensor | None" = _key("get_draft_ids", default=None, compare=False)
    """int64 [draft_vocab_size]: the target's id of each draft id; None if the ids are the same, or without logits."""
    verify_rows: int | None = _key("get_verify_rows", default=None)
    """The rows of the longest verify window; None means the chain length + 1."""
    rollback_rows: int | None = _key("get_rollback_rows", default=None)
    """The last rows of a call that a target with recurrent layers can roll back; None means that every position may be
    written again at any time.
    """
    served_by: dict[str, str] | None = _key("get_served_by", default=None)
    """Maps each method that is not in the program to the method that computes it; None if there is no such method."""
    forward_len: int | None = _key("get_max_context_len", default=None)
    """The longest chunk of ``forward``, None without that method. With it, the constant methods have the meaning that
    ExecuTorch's runner expects: ``get_max_seq_len`` is this length, and ``get_max_context_len`` is the number of
    slots."""

    state: tuple[int, ...] | None = _key("get_state_groups", default=None)
    """The fields of each ``StateGroup``, one group after the other; None without ``read_state`` and ``write_state``."""

    @property
    def state_groups(self) -> list[StateGroup]:
        """The groups of the state; [] if the artifact cannot give its state."""
        numbers = self.state or ()
        groups = (numbers[at : at + 4] for at in range(0, len(numbers), 4))
        return [
            StateGroup(rows, piece_rows, bool(by_position), count) for rows, piece_rows, by_position, count in groups
        ]

    @property
    def window(self) -> int:
        """The most rows of ``target_verify``."""
        return self.chain_len + 1 if self.verify_rows is None else self.verify_rows

    def method_for(self, name: str) -> str:
        """Return the method of the program that computes the method ``name`` of the contract."""
        return (self.served_by or {}).get(name, name)

    @property
    def usual_window(self) -> int:
        """The rows of a verify window with the head's proposals; without a head, the rows of the longest window."""
        return self.chain_len + 1 if self.has_draft else self.window

    def constant_methods(self) -> dict[str, Any]:
        """Map names to values, for ``to_edge_transform_and_lower(constant_methods=...)``. Defaults are left out."""
        values = {
            f.metadata["method"]: getattr(self, f.name)
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) is not f.default
        }
        if self.forward_len is not None:
            values |= {"get_max_seq_len": self.forward_len, "get_max_context_len": self.max_seq_len}
        if self.served_by is not None:
            values["get_served_by"] = json.dumps(self.served_by)
        if self.state is not None:
            values["get_state_groups"] = list(self.state)
        return values | {"get_eos_ids": list(self.eos_ids), "get_manifest": json.dumps(self.manifest)}

    @classmethod
    def read(cls, names: set[str], call: Callable[[str], list[Any]]) -> "Metadata":
        """Read the metadata of a program with the methods ``names``; ``call`` returns the outputs of one.

        Raises MissingMetadata for the first method that is missing, ValueError for another format version.
        """
        values: dict[str, Any] = {}
        for f in fields(cls):
            method = f.metadata["method"]
            if method not in names and f.default is not MISSING:
                continue
            if method not in names:
                raise MissingMetadata(
                    f"the program has no constant method {method!r}: not made by eagle3-export, or by another version"
                )
            outputs = call(method)
            values[f.name] = tuple(outputs) if f.name in ("eos_ids", "state") else outputs[0]
        if "forward_len" in values:
            values |= {"forward_len": values["max_seq_len"], "max_seq_len": values["forward_len"]}
        values["manifest"] = json.loads(values["manifest"])
        if "served_by" in values:
            values["served_by"] = json.loads(values["served_by"])
        version = values["manifest"].get("format_version")
        if version not in range(FORMAT_VERSION, NEWEST_VERSION + 1):
            raise ValueError(
                f"the artifact has format version {version}, this runner reads {FORMAT_VERSION} to "
                f"{NEWEST_VERSION}: export it again, or install the eagle3-export that made it"
            )
        return cls(**values)


def row_bounds(metadata: Metadata) -> dict[str, tuple[int, int]]:
    """Return (fewest, most) rows that each method of the contract takes."""
    window = metadata.chain_len + 1
    return {
        PREFILL: (metadata.min_prefill, metadata.max_prefill),
        TARGET_VERIFY: (2, metadata.window),
        DRAFT_DECODE: (1, max(metadata.max_prefill, metadata.window) if metadata.has_draft_cache else 1),
        SPECULATE: (window, window),
        DECODE: (1, 1),
        TARGET_ROWS: (1, metadata.max_prefill),
        **({FORWARD: (1, metadata.forward_len)} if metadata.forward_len else {}),
    }
