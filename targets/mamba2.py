"""Layers of Mamba 2 (Bamba, Granite 4, Falcon-H1, Nemotron-H): transformers' own forward, with states that roll back.

With a step dt, a rate A < 0 and a factor D for each head, B and C for each group of heads, and an input x:

    S_t = exp(dt_t A) S_(t-1) + B_t (dt_t x_t)^T        y_t = S_t^T C_t + D x_t

(state space duality, arXiv 2405.21060). In the terms of ``recurrent.py`` the query is C, the key is B, the log decay is
dt A, and the value dt x is itself the update: it does not depend on the state. A causal convolution of a few taps comes
before x, B and C.

transformers' layers ask their cache for a state and for the convolution's earlier rows, and call functions of their
module, which ``scan`` and ``step`` replace.
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
    decay_behind,
    decay_between,
)

BLOCK = 64
"""Rows: outputs within a block are computed from its rows in pairs, outputs across blocks from the states between
them."""


class Mamba2State(RecurrentState):
    """The state of one layer."""

    def __init__(self, mixer: Any):  # noqa: ANN401 - a class of transformers
        channels, _, taps = mixer.conv1d.weight.shape
        heads, sizes = (mixer.n_groups, mixer.num_heads), (mixer.ssm_state_size, mixer.head_dim)
        super().__init__(StateSizes(*heads, *sizes, channels, taps))
        limit: tuple[float, float] = mixer.time_step_limit or (0.0, float("inf"))
        self.shortest, self.longest = limit

    def steps(self, dt: Tensor, bias: Tensor) -> Tensor:
        """Return the steps [T, heads] for the projections ``dt`` [T, heads], in float32.

        transformers bounds them in its function for chunks, and not in the one for single rows.
        """
        steps = F.softplus(dt.float() + bias.float())
        if self.shortest > 0:
            steps = steps.clamp(min=self.shortest)
        return steps.clamp(max=self.longest) if self.longest < float("inf") else steps

    def _window(self, given: Given, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        query, key, update, decay = given
        dots = self._for_values(torch.bmm(query, key.transpose(1, 2))) * decay_between(decay, masks.lower)
        reads = torch.bmm(self._for_values(query), state) * decay.cumsum(-1).exp().unsqueeze(-1)
        return reads + torch.bmm(dots, update), update

    def _bulk(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of committed rows, and the state after them. The last block is filled up with rows that
        change nothing.

        There is a block more than needed, since the traced length of a dimension that may be 1 is not dynamic.
        """
        length = given[0].shape[1]
        count = (length + 2 * BLOCK - 1) // BLOCK
        query, key, update = (self._blocks(each, count) for each in given[:3])
        decay = F.pad(given[3], (0, count * BLOCK - length)).unflatten(-1, (-1, BLOCK))
        index = torch.arange(BLOCK)
        lower = (index[:, None] >= index[None, :]).float()
        dots = self._for_values(torch.matmul(query, key.transpose(2, 3))) * decay_between(decay, lower)
        changes = torch.matmul(self._for_values(key).transpose(2, 3), update * decay_behind(decay).unsqueeze(-1))
        states = self._between_blocks(torch.cat((state.unsqueeze(1), changes), dim=1), decay.sum(-1))
        reads = torch.matmul(self._for_values(query), states[:, :-1]) * decay.cumsum(-1).exp().unsqueeze(-1)
        out = reads + torch.matmul(dots, update)  # [heads, blocks, BLOCK, d_v]
        return out.flatten(1, 2).index_select(1, torch.arange(length)), states[:, -1]

    def _blocks(self, rows: Tensor, count: int) -> Tensor:
        """Return [heads, T, size] as [heads, count, BLOCK, size], filled up with zeros."""
        return F.pad(rows, (0, 0, 0, count * BLOCK - rows.shape[1])).unflatten(1, (-1, BLOCK))

    def _between_blocks(self, changes: Tensor, decay: Tensor) -> Tensor:
        """Return the states before each block and after the last one [heads, blocks + 1, d_k, d_v], from the first
        state followed by the change of each block, of the same shape, and the log decays [heads, blocks] over the
        blocks."""
        index = torch.arange(changes.shape[1])
        lower = (index[:, None] >= index[None, :]).float()
        passed = decay_between(F.pad(decay, (1, 0)), lower)
        return torch.bmm(passed, changes.flatten(2)).view(changes.shape)


def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - as transformers calls it
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    dt_bias: Tensor,
    initial_states: tuple[Mamba2State, RecurrentRows],
    **_given: object,
) -> tuple[Tensor, None]:
    """Replaces transformers' function for chunks: arguments [1, T, heads, d_v], ``dt`` [1, T, heads], ``A``, ``D`` and
    ``dt_bias`` [heads], ``B`` and ``C`` [1, T, groups, d_k]."""
    state, rows = initial_states
    x, steps = hidden_states[0].float(), state.steps(dt[0], dt_bias)
    query, key, update = (
        each.transpose(0, 1).contiguous() for each in (C[0].float(), B[0].float(), x * steps[..., None])
    )
    out = state((query, key, update, (steps * A).T), rows)
    # Falcon-H1 views the result, which needs it contiguous.
    return (out.transpose(0, 1) + D.float()[:, None] * x).contiguous().unsqueeze(0), None


def step(
    state: tuple[Mamba2State, RecurrentRows],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    dt_bias: Tensor,
    z: Tensor | None = None,
    **_given: object,
) -> Tensor:
    """Replaces transformers' function for a single row, whose arguments lack the dimension of rows; those of a head are
    repeated for each channel. With ``z`` the output is gated."""
    arguments = (hidden_states[None], dt[None, ..., 0], A[:, 0, 0], B[None], C[None], D[:, 0], dt_bias[:, 0])
    out = scan(*arguments, state)[0][0]
    return out if z is None else out * F.silu(z.float())
