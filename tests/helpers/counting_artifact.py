"""A program whose target and draft head count with whole numbers, so that a fault in a loop shows in its counts.

The target's next token is a sum over all tokens so far, modulo the vocabulary. A feature is that sum and its position.
The head continues the sum, and is right in most cases. It is wrong if its slots so far do not continue each other, or
if a slot was given the feature of another position: one wrong slot costs every later proposal. A trained head attends
to many slots, and a wrong one often leaves its proposals as they are.
"""

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import Tensor, nn
from torch.export import Dim

from eagle3.export.lowering.xnnpack.lowering import lower
from eagle3.runner.contract import (
    DECODE,
    DRAFT_DECODE,
    MODEL_FILE,
    PREFILL,
    SPECULATE,
    TARGET_VERIFY,
    Metadata,
    format_version,
    row_bounds,
)

SLOTS, VOCABULARY, CHAIN, WIDTH = 128, 97, 3, 3


def added(sums: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """The sums after ``tokens`` at ``places``."""
    return (sums + (tokens + 1) * (places % 7 + 1)) % VOCABULARY


class Counting(nn.Module):
    def __init__(self, cache: bool, proposals: int):
        super().__init__()
        self.cache, self.proposals = cache, proposals
        self.register_buffer("text", torch.zeros(2, SLOTS, 1, 1))  # the second of a batch of two is read
        for name in ("slot_before", "slot_after", "slot_wrong"):
            self.register_buffer(name, torch.zeros(SLOTS, dtype=torch.long))
        self.register_buffer("places", torch.arange(SLOTS))

    def target(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        rows = tokens[0].float()
        rows, slots = torch.stack((rows * 0, rows))[:, :, None, None], torch.stack((input_pos, input_pos))
        torch.ops.llama.update_cache_with_indices(rows, self.text, 0, slots)
        text = self.text[1, :, 0, 0].long()
        seen = (self.places[None] <= input_pos[:, None]).long()
        sums = (((text + 1) * (self.places % 7 + 1))[None] * seen).sum(-1) % VOCABULARY
        return sums[None], torch.stack((sums, input_pos, input_pos), -1)[None].float()

    def slots(self, tokens: Tensor, given: Tensor, input_pos: Tensor) -> Tensor:
        """Write slots with ``tokens`` [T] and features ``given`` [T, 3]. Returns the sums after the tokens, [T]."""
        sums, places, _ = given.unbind(-1)
        after = added(sums, tokens, places + 1)
        if self.cache:
            self.slot_before[input_pos] = sums
            self.slot_after[input_pos] = after
            self.slot_wrong[input_pos] = (places != input_pos).long()
        return after

    def faults(self, slot: Tensor, first: Tensor) -> Tensor:
        """The number of wrong slots up to ``slot`` [1]; without a cache 1 if this is not the slot ``first`` [1]."""
        if not self.cache:
            return (slot != first).long()
        broken = (self.slot_before[1:] != self.slot_after[:-1]).long() + self.slot_wrong[1:]
        return (broken * (self.places[1:] <= slot).long()).sum(0, keepdim=True) + self.slot_wrong[:1]

    def proposed(self, sums: Tensor, places: Tensor, faults: Tensor) -> Tensor:
        """The token after ``sums`` [1], wrong in a sixth of the cases."""
        return (sums + faults + ((sums * 5 + places) % 6 == 0).long()) % VOCABULARY

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        ids, feature = self.target(tokens, input_pos)
        return ids[:, -1:], feature

    target_verify = target
    decode = prefill

    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        given = feature[0].long()
        sums, places, first = self.slots(tokens[0], given, input_pos)[-1:], given[-1:, 1], given[-1:, 2]
        own = torch.stack((sums, places + 1, first), -1)[None].float()
        faults, ids = self.faults(input_pos[-1:], first), []
        for _ in range(self.proposals):
            ids.append(self.proposed(sums, places, faults))
            places = places + 1
            sums = added(sums, sums, places + 1)
        return torch.stack(ids, -1), own

    def speculate(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        ids, feature = self.target(tokens, input_pos)
        same = (tokens[0, 1:] == ids[0, :-1]).long()
        accepted, reached = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long)
        for row in range(CHAIN):
            reached = reached * same[row : row + 1]
            accepted = accepted + reached
        sums = self.slots(ids[0], feature[0].long(), input_pos).index_select(0, accepted)
        slot = input_pos[:1] + accepted
        window = [ids[0].index_select(0, accepted)]
        for _ in range(CHAIN):
            window.append(self.proposed(sums, slot, self.faults(slot, slot)))
            slot = slot + 1
            sums = self.slots(window[-1], torch.stack((sums, slot, slot), -1), slot)
        following = torch.cat(window)[None]
        return torch.cat((ids, following)), following, input_pos + accepted + 1


class Method(nn.Module):
    def __init__(self, model: Counting, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *inputs):
        return getattr(self.model, self.name)(*inputs)


def save_counting(folder, cache=True, proposals=1, speculate=False, decode=True) -> None:
    """Write the program into ``folder``. It takes and gives ids alone, without logits and tokenizer."""
    version = format_version(proposals, False, False, speculate, cache)
    metadata = Metadata(
        max_seq_len=SLOTS,
        vocab_size=VOCABULARY,
        n_layers=1,
        min_prefill=4,
        max_prefill=8,
        sliding_window=0,
        chain_len=CHAIN,
        draft_vocab_size=VOCABULARY,
        bos_id=-1,
        eos_ids=(0,),
        manifest={"format_version": version, "backend": "xnnpack"},
        use_kv_cache=True,
        use_sdpa_with_kv_cache=False,
        enable_dynamic_shape=True,
        proposals=proposals,
        draft_sliding_window=0,
        has_draft_cache=cache,
    )
    names = [PREFILL, TARGET_VERIFY, DRAFT_DECODE, *[DECODE] * decode, *[SPECULATE] * speculate]
    model = Counting(cache, proposals)
    programs = {name: traced(Method(model, name), *row_bounds(metadata)[name]) for name in names}
    (folder / MODEL_FILE).write_bytes(lower(programs, metadata.constant_methods()).buffer)


def traced(method: Method, fewest: int, most: int):
    rows = torch.arange(most)
    inputs = (rows[None], torch.zeros(1, most, WIDTH), rows) if method.name == DRAFT_DECODE else (rows[None], rows)
    shapes = None
    if fewest < most:
        dim = Dim("rows", min=fewest, max=most)
        shapes = (tuple({max(0, min(each.ndim, 2) - 1): dim} for each in inputs),)
    with torch.no_grad():
        return torch.export.export(method, inputs, dynamic_shapes=shapes, strict=False)
