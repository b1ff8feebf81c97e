"""Layers of Kimi's delta attention (KDA, Kimi Linear): the gated delta rule with a decay for each key channel.

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

from eagle3.targets.gated_delta import GatedDeltaState
from eagle3.targets.recurrent import Masks, StateSizes


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
