"""With a DFlash head, every block of a generation equals the formulas, on every path of the loop."""

import json

import pytest
import torch
from dflash_formulas import Drafter
from dflash_heads import GOLDEN, KINDS, SLIDING, plan_of, save_pair
from eager import eager_session
from generations import assert_the_same_windows, prompt_of, same_tokens_behind_a_kept_prefix, same_tokens_by_every_path
from random_checkpoints import random_model, save_random_dflash, save_random_domino, save_random_xpress
from safetensors.torch import load_file
from scripted import ThreeMethods
from traced_for_cuda import traced, wide_model

from eagle3.export.draft.reading import read_draft
from eagle3.runner.contract import DRAFT_DECODE, SPECULATE
from eagle3.runner.loop.generation import complete
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("dflash"))


@pytest.fixture(scope="module", params=KINDS)
def session(request, folder):
    session = eager_session(plan_of(folder, request.param))
    session.folder = folder / request.param
    return session


class ByFormulas(ThreeMethods):
    """A session that compares every block with the formulas, for the features written last at each position."""

    def __init__(self, session):
        super().__init__(session)
        draft, weights = read_draft(session.folder), session._speculator.target
        config, tensors = (
            json.loads((session.folder / "config.json").read_text()),
            load_file(session.folder / "model.safetensors"),
        )
        self.drafter = Drafter(config, draft.layer, tensors, weights.embed_tokens.weight, weights.lm_head.weight)
        self.d2t, self.features, self.blocks = tensors.get("d2t"), torch.zeros(0, 64), 0
        self.text = {}  # tokens by position, without the first

    def draft_decode(self, tokens, feature, input_pos):
        step = self._session.draft_decode(tokens, feature, input_pos)
        self.features = torch.cat([self.features[: int(input_pos[0])], feature[0]])
        self.text |= zip((input_pos + 1).tolist(), tokens[0].tolist(), strict=True)
        logits, _ = self.drafter(self.features, int(tokens[0, -1]), self.text.get(int(input_pos[-1])))
        torch.testing.assert_close(step.logits[0], logits, atol=1e-4, rtol=1e-4)
        ids = logits.argmax(-1)
        assert step.ids[0].tolist() == (ids if self.d2t is None else ids + self.d2t[ids]).tolist()
        self.blocks += 1
        return step


@pytest.mark.first(1)
@pytest.mark.parametrize("length", [40, 3])  # past the windows, and within them
def test_every_dflash_block_of_a_generation_equals_its_formulas(length, session):
    """Blocks are seeded in chunks, chained, and rolled back after accepted windows of several lengths. A bias restricts
    the target to four tokens, so that many are accepted."""
    checked, prompt = ByFormulas(session), prompt_of(length)
    plain = complete(checked, prompt, chain=0, max_new_tokens=20, stop_ids=[]).token_ids
    assert complete(checked, prompt, max_new_tokens=20, stop_ids=[]).token_ids == plain
    sampling = Sampling(temperature=1.0, seed=2, logit_bias={token: 50.0 for token in (10, 12, 13, 14)})
    biased = [
        complete(
            checked,
            prompt,
            chain=chain,
            max_new_tokens=40,
            stop_ids=[],
            choice=Sampler(sampling, session.metadata, prompt),
        )
        for chain in (0, None)
    ]
    assert biased[0].token_ids == biased[1].token_ids and biased[1].stats.num_accepted_tokens > 5
    assert checked.blocks > 30


def test_dflash_drafts_a_round_in_one_call_and_has_a_cache(session):
    metadata = session.metadata
    assert metadata.has_draft_cache and metadata.proposals == metadata.chain_len == read_draft(session.folder).chain_len
    run = complete(ThreeMethods(session), prompt_of(12), max_new_tokens=20, stop_ids=[])
    assert run.stats.method_calls[DRAFT_DECODE] == run.stats.num_drafts + 1  # the last round drafts for the next


@pytest.mark.first(1)
def test_every_path_of_the_loop_gives_the_same_tokens_with_dflash(session):
    prompt = prompt_of(30)
    plain = same_tokens_by_every_path(session, prompt)
    same_tokens_behind_a_kept_prefix(session, prompt, plain, reused=len(prompt) - 2)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["dflash2", "dspark", "dspark_rnn", "xpress", "domino"])
def test_dflash_variants_give_the_tokens_of_plain_decoding_and_draft_by_their_formulas(name, tmp_path):
    """Blocks are seeded, chained and rolled back, by the three methods and by fused rounds."""
    random_model("llama3.1-8B", num_hidden_layers=4).save_pretrained(tmp_path / "target")
    longest = read_draft(GOLDEN / name).longest_chain
    session = eager_session(plan_of(tmp_path, "", draft=GOLDEN / name, chain_len=longest))
    session.folder = GOLDEN / name
    checked, prompt, options = ByFormulas(session), prompt_of(20), {"max_new_tokens": 16, "stop_ids": []}
    plain = complete(checked, prompt, chain=0, **options).token_ids
    three, fused = complete(checked, prompt, **options), complete(session, prompt, **options)
    assert plain == three.token_ids == fused.token_ids and three.stats.counts() == fused.stats.counts()
    assert checked.blocks > 8
    assert_the_same_windows(session, prompt)


def test_a_dflash_generation_reaches_the_last_position_of_the_context(folder):
    """The block after the last position is beyond the context, but has slots in the caches."""
    session = eager_session(plan_of(folder, "full", max_seq_len=24))
    tokens = complete(session, prompt_of(9), max_new_tokens=99, stop_ids=[]).token_ids
    assert len(tokens) == 24 - 9


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("save", "keys", "linears", "chain_len"),
    [
        (save_random_xpress, {"rank": 256}, 7, 3),  # the table of tokens of its refiner is an 8-bit embedding
        (save_random_dflash, {}, 0, 15),
        (save_random_domino, {"gru": 64, "rank": 32, "sample_from_anchor": True}, 4, 15),  # of its GRU and its bias
    ],
)
def test_the_linears_of_a_block_of_16_rows_use_the_small_m_kernels_on_cuda(save, keys, linears, chain_len, tmp_path):
    """The rows of the block decide, not those of the window, even if fewer of its tokens are verified."""
    model = wide_model("llama3.1-8B", num_hidden_layers=3)
    model.save_pretrained(tmp_path / "target")
    layer = SLIDING | {"sliding_window": 20}
    save(tmp_path / "head", model.config, (0, 2, 3), block=16, layer=layer, **keys)
    flags = {"draft_qlinear": "default", "speculate": True, "chain_len": chain_len, "max_prefill": None}
    methods = (DRAFT_DECODE,) if linears else (DRAFT_DECODE, SPECULATE)
    for name, _, counted in traced(plan_of(tmp_path, "head", **flags), *methods):
        assert not counted["large_m"] and not counted["dequantize"]
        assert name == SPECULATE or counted["small_m"] == 2 * 7 + 1 + linears
