"""The state that the traces name is all that a generation writes, and carries a dialogue from one module to another,
for every kind of head and layer."""

from dataclasses import replace

import pytest
import torch
from family_exports import DRAFTS, WITH_FORWARD, character_tokenizer, family_model, family_plan
from random_checkpoints import random_model, save_random_draft

from eagle3.export import ExportConfig
from eagle3.export.pipeline import load_speculator, make_metadata, trace
from eagle3.export.planning.methods import MethodPlan
from eagle3.export.planning.plan import make_plan
from eagle3.export.speculator import state
from eagle3.export.speculator.state import ReadState, WriteState, read_rows, state_buffers, write_rows, written_buffers
from eagle3.runner.contract import DRAFT_DECODE, PREFILL, READ_STATE, WRITE_STATE
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.runner.loop.state import as_bytes, read_pieces, write_pieces
from eagle3.targets.attention import EagerAttention

FIRST = ("qwen3.5-9B", "dspark", "gpt-oss-20b")
"""A gated delta rule with an MTP layer; a block of tokens with a cache of tokens; sliding windows and an xPress."""
INT8 = "int8 caches"


def plan_of(name, folder):
    """Save a random target and head, and return their plan."""
    if name == INT8:
        model = random_model("llama3.1-8B")
        model.save_pretrained(folder / "target")
        save_random_draft(folder / "draft", model.config, (0, 2, 3), window=12)
        paths = {"checkpoint": folder / "target", "draft": folder / "draft"}
        return make_plan(ExportConfig("llama3.1-8B", **paths, cuda_arch="sm_90", kv_cache="int8", max_seq_len=128))
    model = family_model(name)
    model.save_pretrained(folder / "target")
    DRAFTS[name](folder / "draft", model.config)
    if name in WITH_FORWARD:
        character_tokenizer().save(str(folder / "target" / "tokenizer.json"))
    return family_plan(name, folder)


class WithState(EagerSession):
    """An eager module with the methods of its state."""

    def __init__(self, plan, kept=None):
        speculator = load_speculator(plan, EagerAttention, torch.float32)
        if kept is None:
            methods = (
                MethodPlan(PREFILL, 20, 20),
                MethodPlan(DRAFT_DECODE, 1, 1),
            )  # a chunk that recurrent layers commit
            programs = {each.name: trace(speculator, each, plan.draft.hidden_size, torch.float32) for each in methods}
            kept = state_buffers(programs, speculator)
        super().__init__(speculator, make_metadata(plan, {}, speculator.draft.ids_in_target(), kept))
        self.kept, self.speculator = kept, speculator
        self.state = {
            READ_STATE: ReadState(speculator, kept, read_rows),
            WRITE_STATE: WriteState(speculator, kept, write_rows),
        }

    def _call(self, name, *inputs):
        return self.state[name](*inputs) if name in self.state else super()._call(name, *inputs)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", [INT8, *FIRST, *(name for name in DRAFTS if name not in FIRST)])
def test_a_dialogue_goes_on_in_another_module(name, tmp_path, monkeypatch):
    monkeypatch.setattr(state, "PIECE_BYTES", 1)  # pieces of the fewest rows
    plan = plan_of(name, tmp_path)
    first = WithState(plan)
    others = [WithState(plan, first.kept), WithState(plan, first.kept)]
    begin = {each: value.clone() for each, value in first.speculator.named_buffers()}
    cached, text = CachedTokens(), [(7 * at + at * at) % 90 + 3 for at in range(30)]
    for turn in range(4):
        other, theirs = others[turn % 2], CachedTokens()
        complete(other, text[::-1], max_new_tokens=5, stop_ids=[])  # another dialogue
        if turn:
            pieces = [as_bytes(piece).clone() for piece in read_pieces(first, cached.counters.slots)]
            left = iter(pieces)
            write_pieces(other, cached.counters.slots, lambda piece, left=left: piece.copy_(next(left)))
            assert next(left, None) is None
            theirs.restore(cached.tokens, cached.counters)
        said = complete(other, text, max_new_tokens=9, stop_ids=[], cached=theirs)
        expected = complete(first, text, max_new_tokens=9, stop_ids=[], cached=cached)
        assert said.token_ids == expected.token_ids and said.stats.counts() == expected.stats.counts()
        assert expected.stats.reused_prompt_tokens >= 20 * min(turn, 1) and theirs.counters == cached.counters
        text = text + expected.token_ids + text[3 : 11 + turn]
    assert max(group.pieces(200) for group in first.metadata.state_groups) > 4
    kept = {each.name.removeprefix("speculator.") for each in first.kept}
    now = dict(first.speculator.named_buffers())
    assert {each for each, value in begin.items() if not torch.equal(value, now[each])} <= kept


@pytest.mark.parametrize("backend", ["cuda", "xnnpack"])
def test_the_methods_are_exported_unless_they_are_left_out(backend):
    config = ExportConfig("gemma4-tiny", cuda_arch="sm_90" if backend == "cuda" else None, output_dir=None)
    plans = (make_plan(replace(config, backend=backend, sessions=asked)) for asked in (None, True, False))
    assert [plan.sessions for plan in plans] == [True, True, False]


def test_buffers_are_found_whatever_writes_them():
    class Written(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("by_row", "through_a_view", "by_index", "whole", "both", "read"):
                self.register_buffer(name, torch.zeros(4, 8))

        def forward(self, rows, value):
            self.by_row.index_copy_(1, rows, value)
            self.through_a_view[1].index_copy_(0, rows, value[0])
            self.by_index[0, rows] = value[0]
            self.whole.copy_(self.read + 1)
            self.both.index_copy_(1, rows, value)
            self.both.zero_()
            return value + self.read[:, :2]

    program = torch.export.export(Written(), (torch.arange(2), torch.ones(4, 2)), strict=False)
    axes = dict.fromkeys(("through_a_view", "by_index", "whole", "both")) | {"by_row": 1}
    assert written_buffers({"method": program}) == axes
