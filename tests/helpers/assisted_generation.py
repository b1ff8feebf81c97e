"""Runs transformers' own assisted generation with a Gemma 4 assistant, as the reference for proposals.

transformers' assistant attends to the slot of the newest token, which does not yet hold that token's keys (after a
rejection it holds another token's), and to rejected slots of sliding layers. ``proposed`` removes these slots, so that
the assistant attends to the same slots as the exported head.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator


def proposed(model, assistant, prompt: list[int], new_tokens: int, chain_len: int) -> tuple[list[int], list[list[int]]]:
    """Generate, and return the new tokens and the proposals of each round."""
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = chain_len, "constant"
    with recorded(model.config.sliding_window) as rounds:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(torch.tensor([prompt]), assistant_model=assistant, **options)
    return out[0, len(prompt) :].tolist(), rounds


@contextmanager
def recorded(window: int):
    rounds, candidates = [], Generator.get_candidates

    def cut(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **others):
        if not is_first_iteration:
            states = model_outputs.shared_kv_states
            behind = states["full_attention"][0].shape[2] - (input_ids.shape[1] - 1)
            for kind, pair in states.items():
                end = pair[0].shape[2] - behind
                start = max(0, end - window) if kind == "sliding_attention" else 0
                states[kind] = tuple(each[:, :, start:end] for each in pair)
        given = input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches
        ids, logits = candidates(self, *given, **others)
        if not is_first_iteration:
            rounds.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    with patch.object(Generator, "get_candidates", cut):
        yield rounds
