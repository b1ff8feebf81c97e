"""Layers of the gated delta rule (Qwen3-Next, Qwen3.5): transformers' own forward over states that can roll back.

With queries q and keys k of unit length, a scalar log decay g and a factor beta for each head and token t:

    S_t = exp(g_t) S_(t-1) + k_t u_t^T        u_t = beta_t (v_t - (exp(g_t) S_(t-1))^T k_t)        o_t = S_t^T q_t

(Gated Delta Networks, arXiv 2412.06464). The rank-1 change of a token is (k_t, u_t, g_t). A causal convolution of a few
taps comes before queries, keys and values. Its earlier rows are also kept by position.

transformers' layers ask their cache for a state and for the convolution's earlier rows, and call functions of their
module, which ``delta_rule`` replaces.

Layers of Kimi's delta attention (KDA, Kimi Linear): the gated delta rule with a decay for each key channel.

With queries q and keys k of unit length, log decays g [key size] and a factor beta for each head and token t:

    S_t = diag(exp(g_t)) S_(t-1) + k_t u_t^T    u_t = beta_t (v_t - (diag(exp(g_t)) S_(t-1))^T k_t)    o_t = S_t^T q_t

(Kimi Linear, arXiv 2510.26692). The rank-1 change of a token is (k_t, u_t, g_t). Queries, keys and values go through
one causal convolution each; transformers computes the three as one over all channels, whose inputs are one ring here.

The decays between two rows weigh each product of a query and a key by channel. They are summed from the later row's
side, and never as a difference of two sums from the first row: with strong decays such a difference rounds what is left
of a channel, and its exponential may overflow.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
        """Return what T keys, and after them T queries, read of the rows' keys [value heads, 2 T, T] and of ``state``
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


class KimiDeltaState(GatedDeltaState):
    """The state of one layer, whose log decays are [value heads, T, key size]."""

    @staticmethod
    def sizes_of(mixer: Any) -> StateSizes:  # noqa: ANN401 - a class of transformers
        channels, _, taps = mixer.conv1d.weight.shape
        heads, sizes = (mixer.num_heads, mixer.num_heads), (mixer.head_dim, mixer.head_dim)
        return StateSizes(*heads, *sizes, channels, taps, channel_decays=True)

    def _products(
        self, query: Tensor, key: Tensor, decay: Tensor, state: Tensor, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        decayed = key.unsqueeze(1) * channel_decays_between(decay, masks)  # the keys as each row sees them
        pairs = torch.stack((key, query), dim=2)  # [heads, T, 2, d_k]
        dots = torch.matmul(pairs, decayed.transpose(2, 3))
        both = torch.cat((key, query), dim=1) * decay.cumsum(1).exp().repeat(1, 2, 1)
        return torch.cat((dots[:, :, 0], dots[:, :, 1]), dim=1), torch.bmm(both, state)

    def _behind(self, state: Tensor, key: Tensor, update: Tensor, decay: Tensor) -> Tensor:
        key = (key * channel_decays_behind(decay)).transpose(1, 2)
        return state * decay.sum(1).exp().unsqueeze(-1) + torch.bmm(key, update)


def channel_decays_behind(decay: Tensor) -> Tensor:
    """Return the factors by which the change of each row decays until the last row, from the logarithms ``decay``; both
    [heads, T, key size]."""
    later = F.pad(decay, (0, 0, 0, 1))[:, 1:]
    return later.flip(1).cumsum(1).flip(1).exp()


def channel_decays_between(decay: Tensor, masks: Masks) -> Tensor:
    """Return the factors [heads, T, T, key size] by which a change decays from the row of its column to the row of its
    line, from the logarithms ``decay`` [heads, T, key size]; zeros above the diagonal."""
    below = masks.lower - masks.unit
    since = (decay.unsqueeze(2) * below.unsqueeze(-1)).cumsum(1)
    return since.exp() * masks.lower.unsqueeze(-1)
