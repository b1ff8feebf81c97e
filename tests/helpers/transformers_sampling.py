"""Computes the part of a distribution that transformers' logits processors keep."""

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle3.runner.sampling.arrays import Device
from eagle3.runner.sampling.options import Sampling

CPU_TENSORS = Device(torch.device("cpu"))  # PyTorch's implementation, which accelerators use


def by_transformers(logits: torch.Tensor, sampling: Sampling, tokens: list[int]) -> torch.Tensor:
    """Return probabilities [1, R, V] by transformers' processors, in the order that ``generate`` applies them."""
    chain = []
    if sampling.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    rows = []
    for row in logits[0]:
        scores, ids = row[None].clone(), torch.tensor([tokens])
        for processor in chain:
            scores = processor(ids, scores)
        rows.append(scores.softmax(-1))
    return torch.cat(rows)[None]
