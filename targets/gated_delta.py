"""Layers of the gated delta rule (Qwen3-Next, Qwen3.5): transformers' own forward over states that can roll back.

With queries q and keys k of unit length, a scalar log decay g and a factor beta for each head and token t:

    S_t = exp(g_t) S_(t-1) + k_t u_t^T        u_t = beta_t (v_t - (exp(g_t) S_(t-1))^T k_t)        o_t = S_t^T q_t

(Gated Delta Networks, arXiv 2412.06464). The rank-1 change of a token is (k_t, u_t, g_t). A causal convolution of a few
taps comes before queries, keys and values. Its earlier rows are also kept by position.

transformers' layers ask their cache for a state and for the convolution's earlier rows, and call functions of their
module, which ``delta_rule`` replaces.
"""

from typing import Any

import torch
from torch import Tensor

from eagle3.targets.recurrent import (
    Given,
    Masks,
    RecurrentRows,
    RecurrentState,
    StateSizes,
    decay_between,
    window_masks,
)
from eagle3.targets.spec import ROLLBACK_ROWS

UNIT_EPS = 1e-6  # the epsilon of transformers' l2norm of queries and keys


class GatedDeltaState(RecurrentState):
    """The state of one layer. The last of the inputs of its rows is beta."""

    def __init__(self, mixer: Any):  # noqa: ANN401 - a class of transformers
        super().__init__(self.sizes_of(mixer))

    @staticmethod
    def sizes_of(mixer: Any) -> StateSizes:  # noqa: ANN401 - a class of transformers
        channels, _, taps = mixer.conv1d.weight.shape
        heads, sizes = (mixer.num_k_heads, mixer.num_v_heads), (mixer.head_k_dim, mixer.head_v_dim)
        return StateSizes(*heads, *sizes, channels, taps)

    def _window(self, given: Given, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        """Return outputs and updates of rows that follow ``state``.

        The updates solve update_i + sum over j < i of a_ij update_j = beta_i (v_i - decay_i S^T k_i). The inverse of
        this triangular system is built from blocks that double in size, which is as accurate as substitution. (Its
        Neumann series is not accurate: it is off by 1e-2 if keys are equal.)
        """
        query, key, value, decay, beta = given
        length = key.shape[1]
        dots, reads = self._products(query, key, decay, state, masks)
        system = dots[:, :length] * beta.unsqueeze(-1)
        inverse = masks.unit.expand(self.value_heads, length, length)
        for pairs in masks.pairs:
            inverse = inverse - torch.bmm(torch.bmm(inverse, system * pairs), inverse)
        update = torch.bmm(inverse, (value - reads[:, :length]) * beta.unsqueeze(-1))
        return reads[:, length:] + torch.bmm(dots[:, length:], update), update

    def _products(
        self, query: Tensor, key: Tensor, decay: Tensor, state: Tensor, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Return what T keys, and behind them T queries, read of the rows' keys [value heads, 2 T, T] and of ``state``
        [value heads, 2 T, value size], decayed up to their own rows."""
        between = decay_between(decay, masks.lower)
        both = torch.cat((key, query), dim=1)  # [key heads, 2 T, d_k]
        dots = self._for_values(torch.bmm(both, key.transpose(1, 2))) * between.repeat(1, 2, 1)
        reads = torch.bmm(self._for_values(both), state) * decay.cumsum(-1).exp().repeat(1, 2).unsqueeze(-1)
        return dots, reads

    def _bulk(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for start in range(0, given[0].shape[1], ROLLBACK_ROWS):
            rows = tuple(each[:, start : start + ROLLBACK_ROWS] for each in given)
            _, key, _, decay, _ = rows
            out, update = self._window(rows, state, window_masks(torch.arange(key.shape[1])))
            outs.append(out)
            state = self._behind(state, key, update, decay)
        return torch.cat(outs, dim=1), state


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: tuple[GatedDeltaState, RecurrentRows],
    use_qk_l2norm_in_kernel: bool = False,
    **_given: object,
) -> tuple[Tensor, Tensor]:
    """Replaces transformers' functions for the rule: arguments [1, T, heads, d], ``beta`` [1, T, value heads], ``g`` as
    ``beta``, or [1, T, value heads, key size] where each key channel has a decay of its own."""
    if not use_qk_l2norm_in_kernel:
        raise ValueError("its delta rule does not normalize queries and keys, which ours does")
    state, rows = initial_state
    dtype = value.dtype
    query, key, value = (each[0].transpose(0, 1).float().contiguous() for each in (query, key, value))
    decay, beta = (each[0].transpose(0, 1).float() for each in (g, beta))
    out = state((_unit(query) * query.shape[-1] ** -0.5, _unit(key), value, decay, beta), rows)
    return out.transpose(0, 1).unsqueeze(0).to(dtype), state.state


def _unit(x: Tensor) -> Tensor:
    return x * (x.pow(2).sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
