"""MTP heads of speculators equal its own class (scripts/golden/make_mtp_golden.py), and those of a target's own layer
equal transformers, which reads the same file."""

from types import SimpleNamespace

import pytest
import torch
from draft_oracle import check_draft
from mtp_heads import CASES, GOLDEN, ON_THE_CPU, OWN, plan_of, published, save_target, transformers_head
from mtp_oracle import drafter_of
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.cache_utils import DynamicCache

from eagle3.export.draft.kinds import MTP
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.pairing import check_pair
from eagle3.export.planning.taps import choose_taps
from eagle3.targets.attention import EagerAttention
from eagle3.targets.text_part import is_part

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
TARGET = Qwen3Config(hidden_size=64, vocab_size=96, num_hidden_layers=4)
WINDOWS = (5, 1, 7, 2, 9)  # rows of each call; 24 in all


class Case:
    """A golden head with its target's embedding and lm_head, and its golden numbers."""

    def __init__(self, name: str):
        self.draft, self.golden = read_draft(GOLDEN / name), load_file(GOLDEN / name / "golden.safetensors")
        embedding, lm_head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
        embedding.weight, lm_head.weight = (nn.Parameter(self.golden[name]) for name in ("embedding", "lm_head"))
        target = SimpleNamespace(embed_tokens=embedding, lm_head=lm_head)
        self.head = load_draft(self.draft, 40, torch.float32, EagerAttention, target)

    @torch.no_grad()
    def run(self, start: int, end: int, states=None, **options):
        rows = slice(start, end)
        given = self.golden["states"] if states is None else states
        return self.head(self.golden["tokens"][:, rows], given[:, rows], torch.arange(start, end), **options)

    def check(self, start: int, end: int, logits, state) -> None:
        torch.testing.assert_close(logits, self.golden["logits"][:, start:end], **CLOSE)
        torch.testing.assert_close(state, self.golden["recurrent"][:, start:end], **CLOSE)

    @torch.no_grad()
    def check_chain(self) -> None:
        """Draft from the last slot; each step uses the feature of the step before."""
        logits, state = self.run(23, 24, last=True)
        for step, token in enumerate(self.golden["chain_ids"]):
            torch.testing.assert_close(logits[0, 0], self.golden["chain_logits"][step], **CLOSE)
            torch.testing.assert_close(state[0, 0], self.golden["chain_recurrent"][step], **CLOSE)
            assert self.head.target_ids(logits).item() == token
            logits, state = self.head(token[None, None], state, torch.tensor([24 + step]), last=True)


@pytest.mark.parametrize("name", CASES)
def test_an_mtp_head_equals_speculators_when_seeded_chained_and_rolled_back(name):
    """Rows of rejected tokens, and the chain drafted after them, leave no trace. The head takes the last layer's output
    before the norm, as speculators trains it; a target's own layer takes the state after the norm."""
    case, start = Case(name), 0
    check_pair(case.draft, TARGET, (4,))
    assert (case.draft.kind, case.draft.dialect, case.draft.chain_len) == (MTP, "speculators", 3)
    assert choose_taps(case.draft, TARGET, None, None).layers == (4,)
    wrong = torch.randn(case.golden["states"].shape, generator=torch.Generator().manual_seed(1))
    for rows in WINDOWS:
        case.check(start, start + rows, *case.run(start, start + rows))
        case.run(start, min(start + rows + 3, 24), wrong)
        case.check(start, start + rows, *case.run(start, start + rows))
        start += rows
    case.check_chain()
    case.check_chain()


@pytest.mark.parametrize("name", CASES)
def test_a_fused_round_with_an_mtp_head_continues_from_the_accepted_row(name):
    case = Case(name)
    case.run(0, 10)
    for accepted in (3, 0):
        wrong = case.golden["states"].clone()
        wrong[:, 11 + accepted :] = 7.0
        case.check(10 + accepted, 11 + accepted, *case.run(10, 14, wrong, accepted=torch.tensor([accepted])))


@pytest.mark.parametrize("name", CASES)
def test_the_formulas_of_an_mtp_head_equal_speculators(name):
    case = Case(name)
    drafter = drafter_of(name, case.golden["embedding"], case.golden["lm_head"])
    with torch.no_grad():
        logits, states = drafter(case.golden["tokens"][0], case.golden["states"][0])
    torch.testing.assert_close(logits, case.golden["logits"][0], **CLOSE)
    torch.testing.assert_close(states, case.golden["recurrent"][0], **CLOSE)


# --- a target's own layer


def test_latent_attention_with_values_wider_than_keys_is_computed(tmp_path):
    draft = plan_of(save_target(tmp_path, "deepseek_v3", v_head_dim=32)).draft
    compared = check_draft(draft, 0)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4


@pytest.fixture(scope="module", params=OWN)
def own(request, tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp(request.param), request.param)
    flags = ON_THE_CPU if "linear_attention" in OWN[request.param].get("layer_types", ()) else {}
    return SimpleNamespace(folder=folder, plan=plan_of(folder, **flags))


@pytest.mark.first(2)
def test_the_twin_of_a_targets_own_mtp_layer_equals_its_formulas(own):
    draft = own.plan.draft
    assert (draft.kind, draft.dialect, draft.takes_final_state) == (MTP, "the target's own checkpoint", True)
    compared = check_draft(draft, 0)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4 and compared["tokens"] > 30


def test_an_mtp_layer_is_found_and_read_in_the_multimodal_class(own, tmp_path):
    """Qwen3.5 is published as a part of a multimodal model. Without ``--draft`` the layer is found as well."""
    if not own.plan.target_config.model_type.startswith("qwen3_5"):
        pytest.skip("is published in the class of the text model")
    whole = published(own.folder, tmp_path)
    plan = plan_of(whole, None, **ON_THE_CPU)
    assert is_part(plan.target_config) and plan.draft.kind == MTP
    compared = check_draft(plan.draft, 0)
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4 and compared["tokens"] > 30
    target = SimpleNamespace(embed_tokens=nn.Embedding(96, 64), lm_head=nn.Linear(64, 96, bias=False))
    heads = [load_draft(each.draft, 40, torch.float32, EagerAttention, target) for each in (own.plan, plan)]
    first, second = (head.state_dict() for head in heads)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def test_a_targets_own_mtp_layer_equals_transformers_seeded_chained_and_rolled_back(own):
    """transformers reads the same file by its own rules. The compared states are those that it passes to its MTP
    model."""
    main = AutoModelForCausalLM.from_pretrained(own.folder, attn_implementation="eager").float()
    reference = transformers_head(main, own.folder)
    tokens = torch.randint(0, 96, (1, 25), generator=torch.Generator().manual_seed(3))
    states = main(tokens, output_hidden_states=True).hidden_states[-1][:, :24]
    assert torch.equal(states, main.model(tokens).last_hidden_state[:, :24])  # after the norm
    target = SimpleNamespace(embed_tokens=main.get_input_embeddings(), lm_head=main.lm_head)
    head = load_draft(own.plan.draft, 40, torch.float32, EagerAttention, target)

    def wanted(tokens, features):
        positions = torch.arange(tokens.shape[1])[None]
        return reference.forward_layer(0, features, positions, DynamicCache(config=reference.config), input_ids=tokens)

    ids, start = tokens[:, 1:], 0
    expected = wanted(ids, states)
    for rows in WINDOWS:
        end = start + rows
        past = min(end + 3, 24)
        head(ids[:, start:past], torch.full_like(states[:, start:past], 2.0), torch.arange(start, past))
        logits, state = head(ids[:, start:end], states[:, start:end], torch.arange(start, end))
        torch.testing.assert_close(state, expected[:, start:end], **CLOSE)
        torch.testing.assert_close(logits, main.lm_head(expected[:, start:end]), **CLOSE)
        start = end
    rows, features = ids, states
    for step in range(3):  # from its own features
        state, token = state[:, -1:], logits[:, -1:].argmax(-1)
        rows, features = torch.cat([rows, token], dim=1), torch.cat([features, state], dim=1)
        logits, state = head(token, state, torch.tensor([24 + step]), last=True)
        torch.testing.assert_close(state, wanted(rows, features)[:, -1:], **CLOSE)
