"""Make the golden fixtures under tests/golden/eagle3/: tiny random EAGLE-3 draft heads and their outputs.

The numbers come from the reference drafter, speculators 0.9.0's `Eagle3DraftModel`, so that our own draft head
can be compared with it without installing it. Each case is a folder with the checkpoint as speculators'
`save_pretrained` writes it (config.json, model.safetensors) and golden.safetensors, all fp32 or int64 (T = 12):

    tokens          [1, T]      target-vocabulary ids embedded in each draft slot
    taps            [1, T, 3H]  the target's hidden states at the three aux layers, concatenated
    positions       [T]         rotary positions of speculators, which counts slots from 1; only differences matter
    feature         [1, T, H]   the layer's input beside the embedding in the first step (the output of fc)
    logits_0        [1, T, 48]  draft-vocabulary logits of the first step, every slot
    recurrent_0     [1, T, H]   the feature that the first step passes to the next one
    chain_ids       [3]         a greedy chain from the last slot, as target-vocabulary ids
    chain_logits    [3, 48]     its logits; row 0 is logits_0's last row
    chain_recurrent [3, H]      its recurrent states; row 0 is recurrent_0's last row

Chain row j > 0 is a separate slot, j after the last slot. It embeds chain_ids[j - 1], takes chain_recurrent[j - 1] as
its feature and attends to every slot up to itself. If the layer has a sliding window of W slots, every slot, including
those of a chain, attends to the last W slots including itself: slot q to q - W + 1 .. q. That is speculators' mask in
the first step and vLLM's in every step. speculators trains its later steps without moving the start of the window (W +
j slots in step j). They therefore cannot serve as the chain of a case with a window. In such a case the proposals run
as slots of a first step.

speculators pins older versions than ours, so it needs a venv of its own. The last bit of its results depends on the
processor; with ATEN_CPU_CAPABILITY=avx2, any x86 with AVX2 gives these fixtures.

    python -m venv golden-env
    golden-env/bin/pip install torch==2.13.0 "transformers>=5.17,<=5.19" safetensors
    golden-env/bin/pip install "loguru<=0.7.3" openai "datasets>=4,<=5.1"
    golden-env/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    ATEN_CPU_CAPABILITY=avx2 HF_HUB_OFFLINE=1 golden-env/bin/python scripts/golden/make_draft_golden.py \\
        --out tests/golden/eagle3
"""

import case
import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig, Qwen3Config

WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
THREE_LAYERS = {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True}
BEFORE, AFTER = {"norm_before_residual": True}, {"norm_before_residual": False}
CASES = {  # configuration of the layers, options, seed: the first from 704 on without a repeated token and a near-tie
    "llama_nbr_true": (LlamaConfig, {}, BEFORE, 704),
    "llama_nbr_false": (LlamaConfig, {}, AFTER, 704),
    "qwen3_nbr_true": (Qwen3Config, {}, BEFORE, 704),
    "llama_eagle31": (LlamaConfig, {}, BEFORE | {"norm_before_fc": True, "norm_output": True}, 708),
    "llama_fc_norm": (LlamaConfig, {}, AFTER | {"fc_norm": True}, 771),
    "llama_window": (LlamaConfig, WINDOW, BEFORE, 706),
    "qwen3_window": (Qwen3Config, WINDOW, AFTER, 710),
    "llama_three_layers": (LlamaConfig, THREE_LAYERS, BEFORE, 745),
    "qwen3_biases": (Qwen3Config, {"attention_bias": True}, BEFORE, 853),
}
SLOTS, CHAIN = 12, 3
LAYER = case.SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
LAYER |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LAYER |= {"attn_implementation": "eager"}  # without it speculators uses flex attention; it is not saved


def build_model(layer_class: type, layer: dict, options: dict, generator: torch.Generator) -> Eagle3DraftModel:
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_class(**LAYER | layer),
        draft_vocab_size=case.DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=case.INPUTS,
        speculators_config=case.speculators_config("eagle3", CHAIN),
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    case.load_vocabulary(model, generator)
    case.randomize(model, generator, tables=("embed_tokens.weight",), biases=())
    return model


def forward(
    model: Eagle3DraftModel, tokens: torch.Tensor, taps: torch.Tensor, recurrent: torch.Tensor
) -> dict[str, list[torch.Tensor]]:
    """Run the public forward for CHAIN steps; return the inputs and outputs of its submodules in each step.

    Step j of slot p embeds tokens[p + j], takes the slot's state of step j - 1 and attends to the first step of the
    slots up to p (to the last W of them) and to the slot's own later steps. Without a sliding window, these steps are
    the chain from slot p, given the tokens after it. With a sliding window, each chain step is the first step of a
    further slot after the last one. These slots have no taps; their features are ``recurrent``.
    """
    seen = {"features": [], "positions": [], "logits": []}
    taps = torch.nn.functional.pad(taps, (0, 0, 0, len(recurrent)))
    hooks = [
        model.fc.register_forward_hook(lambda _, _args, fused: torch.cat([fused[:, :SLOTS], recurrent[None]], dim=1)),
        model.layers[0].register_forward_pre_hook(lambda _, args: seen["features"].append(args[0][..., case.HIDDEN :])),
        model.rotary_emb.register_forward_pre_hook(lambda _, args: seen["positions"].append(args[1])),
        model.lm_head.register_forward_hook(lambda _, _args, output: seen["logits"].append(output)),
    ]
    proposed = model(taps, tokens, document_ids=torch.zeros_like(tokens), ttt_steps=CHAIN + 1)
    for hook in hooks:
        hook.remove()
    assert torch.equal(torch.stack(proposed), torch.stack(seen["logits"]).argmax(-1))
    return seen


def one_pass(model: Eagle3DraftModel, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return the logits of one causal pass through the model's own submodules, with its sliding window if it has one.
    Positions count from 0."""
    x = torch.cat([model.embed_tokens(tokens), features], dim=-1)
    length = tokens.shape[1]
    closed = torch.full((length, length), -torch.inf)
    mask = (closed.triu(1) + closed.tril(-(model.sliding_window or length)))[None, None]
    rotary = model.rotary_emb(x, torch.arange(length)[None])
    for layer in model.layers:
        x = layer(x, attention_mask=mask, position_embeddings=rotary)
    return model.lm_head(model.norm(x))


def make(layer_class: type, layer: dict, options: dict, generator: torch.Generator) -> tuple:
    model = build_model(layer_class, layer, options, generator)
    tokens = torch.randint(case.VOCAB, (1, SLOTS), generator=generator)
    taps = torch.randn(1, SLOTS, len(case.INPUTS), case.HIDDEN, generator=generator)
    taps = (taps * torch.tensor([0.5, 1.0, 2.0])[:, None]).flatten(2)
    chain_ids, recurrent, last = [], torch.empty(0, case.HIDDEN), SLOTS - 1
    first = forward(model, tokens, taps, recurrent)

    windowed = model.uses_sliding_window_attn
    chain = [(0, last + j) if windowed else (j, last) for j in range(CHAIN)]  # the chain's steps and slots, see forward
    for step, (at, slot) in enumerate(chain):  # proposals follow the last slot
        rows = torch.cat([tokens, torch.tensor([chain_ids], dtype=torch.int64)], dim=1)
        seen = forward(model, rows, taps, recurrent)
        best = case.distinct(seen["logits"][at][0, slot], 0.05)
        chain_ids.append(int(best + model.d2t[best]))
        recurrent = torch.stack([seen["features"][j + 1][0, p] for j, p in chain[: step + 1]])
    assert len(set(chain_ids)) == CHAIN, "a repeated proposal would hide mistakes"
    logits = torch.stack([seen["logits"][j][0, p] for j, p in chain])

    again = one_pass(model, rows, torch.cat([first["features"][0], recurrent[None, :-1]], dim=1))
    torch.testing.assert_close(again[:, :SLOTS], first["logits"][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again[0, last:], logits, atol=1e-5, rtol=1e-5)
    result = {"tokens": tokens, "taps": taps, "positions": first["positions"][0][0], "feature": first["features"][0]}
    result |= {"logits_0": first["logits"][0], "recurrent_0": first["features"][1]}
    result |= {"chain_ids": torch.tensor(chain_ids), "chain_logits": logits, "chain_recurrent": recurrent}
    return model, result


if __name__ == "__main__":
    made_with = case.versions("speculators", "torch", "transformers")
    case.write_cases(case.arguments("eagle3").out, CASES, make, made_with, "chain_ids")
