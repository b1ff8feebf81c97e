"""MTP heads: a decoder layer of the target's own kind over a token's embedding and the previous position's state.

    x = layer(eh_proj(cat[enorm(embed(token)), hnorm(f)]));  f' = norm(x);  logits = lm_head(f')

Embedding and lm_head are the target's. f' is the next step's f: the state after the head's last norm, in every source
below. The first f is a state of the target, and there the sources differ:

- **A target's own layer** takes the state after the target's last norm, which is what lm_head takes: transformers'
  ``MTPCandidateGenerator`` (its ``hidden_states[-1]`` is normed), vLLM (``gpu_model_runner`` hands on what the model's
  forward returns; deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py), llama.cpp (its pull requests 24025 for
  Qwen3.5, 25980 for GLM 5.2, though 24025 says in passing that DeepSeek and GLM take the state before it).
- **A head of speculators** (``MTPDraftModel``) takes the state before that norm. It is trained on the last layer's
  output as vLLM's ``extract_hidden_states`` captures it (``--target-layer-ids N`` of N layers; speculators' pull
  request 313 says that the final norm is not applied), and ``MTPDraftModel`` applies none of the target's.

All these sources concatenate the token first, unlike DeepSeek's paper (Megatron-LM's issue 1588). vLLM replaces the
embedding of slot 0 by zeros; the others and this package do not, since it affects one key of thousands. Slot p is
rotated by p, as in vLLM; transformers rotates by p + 1, which is equivalent, since only differences matter. vLLM fed x
instead of f' to later steps before its pull request 45895.
"""
