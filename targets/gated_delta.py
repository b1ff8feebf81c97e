"""Layers of the gated delta rule (Qwen3-Next, Qwen3.5): transformers' own forward over states that can roll back.

With queries q and keys k of unit length, a scalar log decay g and a factor beta for each head and token t:

    S_t = exp(g_t) S_(t-1) + k_t u_t^T        u_t = beta_t (v_t - (exp(g_t) S_(t-1))^T k_t)        o_t = S_t^T q_t

(Gated Delta Networks, arXiv 2412.06464). The rank-1 change of a token is (k_t, u_t, g_t). A causal convolution of a few
taps comes before queries, keys and values. Its earlier rows are also kept by position.

transformers' layers ask their cache for a state and for the convolution's earlier rows, and call functions of their
module. ``use_gated_delta`` replaces those functions while a target's forward runs.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.targets.recurrent import Masks, RecurrentRows, Ring, window_masks
from eagle3.targets.spec import ROLLBACK_ROWS

ROW_RULE, CHUNK_RULE = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"
CONVOLUTION = "causal_conv1d_fn"
REPLACED = (ROW_RULE, CHUNK_RULE, CONVOLUTION)
"""The names of the functions that such a layer calls in its class's module."""
UNIT_EPS = 1e-6  # the epsilon of transformers' l2norm of queries and keys


def is_gated_delta(layer: nn.Module) -> bool:
    """Return True if a decoder layer of transformers mixes tokens by the gated delta rule."""
    mixer = getattr(layer, "linear_attn", None)
    return mixer is not None and all(hasattr(sys.modules[type(mixer).__module__], name) for name in REPLACED)


class GatedDeltaState(nn.Module):
    """The state of one layer, in float32: ``state`` and ``saved`` [value heads, d_k, d_v]."""

    state: Tensor
    saved: Tensor
    saved_conv: Tensor

    def __init__(self, mixer: Any):  # noqa: ANN401 - a class of transformers
        super().__init__()
        self.key_heads, self.value_heads = mixer.num_k_heads, mixer.num_v_heads
        taps, channels = mixer.conv1d.weight.shape[-1], mixer.conv1d.weight.shape[0]
        self.earlier = taps - 1
        size = self.value_heads, mixer.head_k_dim, mixer.head_v_dim
        self.register_buffer("state", torch.zeros(size), persistent=False)
        self.register_buffer("saved", torch.zeros(size), persistent=False)
        self.register_buffer("saved_conv", torch.zeros(self.earlier, channels), persistent=False)
        self.conv = Ring(ROLLBACK_ROWS + self.earlier, channels)
        # Key, update and log decay of a token are stored in one row. It must be written after the earlier rows were
        # read, and it is, since the update depends on them. With separate rings, a backend might write keys in place
        # before it reads the keys that they replace.
        self.parts = self.key_heads * mixer.head_k_dim, self.value_heads * mixer.head_v_dim, self.value_heads
        self.changes = Ring(ROLLBACK_ROWS, sum(self.parts))

    def with_earlier(self, mixed: Tensor, rows: RecurrentRows) -> Tensor:
        """Return the earlier rows of the convolution's inputs followed by ``mixed`` [1, channels, T], and keep the new
        ones."""
        positions = rows.before[-self.earlier :]
        earlier = self.conv.read(positions, positions >= 0)
        if rows.from_saved is not None:
            earlier = torch.where(rows.from_saved[:, None], self.saved_conv, earlier)
        both = torch.cat((earlier.to(mixed.dtype), mixed[0].T))  # [taps - 1 + T, channels]
        if rows.is_chunk:
            kept = both[rows.length - ROLLBACK_ROWS :]
            self.conv.write(rows.input_pos[-1:] + torch.arange(1 - kept.shape[0], 1), kept.float())
            self.saved_conv.copy_(kept[: self.earlier])
        else:  # the earlier rows are written again, so that the write depends on the read
            self.conv.write(torch.cat((positions, rows.input_pos)), both.float())
        return both.T.unsqueeze(0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, rows: RecurrentRows
    ) -> Tensor:
        """Run the rows of a forward.

        Args:
            query, key: [key heads, T, d_k], of unit length, ``query`` scaled
            value: [value heads, T, d_v]
            decay, beta: [value heads, T]; ``decay`` is the logarithm

        Returns:
            [value heads, T, d_v]
        """
        state = self.state
        if rows.from_saved is not None:
            state = torch.where(rows.from_saved[:, None, None], self.saved, state)
        state = self._at_first_row(state, rows)
        if not rows.is_chunk:
            out, update = self._window(query, key, value, decay, beta, state, rows.masks)
            self._keep(rows.input_pos, key, update, decay)
            self.state.copy_(state)
            return out
        bulk = rows.length - ROLLBACK_ROWS
        given = (query, key, value, decay, beta)
        of_first = (each[:, :bulk] for each in given)
        out, state = self._bulk((*of_first,), state)
        query, key, value, decay, beta = (each[:, bulk:] for each in given)
        tail, update = self._window(query, key, value, decay, beta, state, rows.masks)
        self._keep(rows.input_pos[-1:] + torch.arange(1 - ROLLBACK_ROWS, 1), key, update, decay)
        self.state.copy_(state)
        self.saved.copy_(state.clone())  # the two buffers must not come from one tensor, which breaks to_edge
        return torch.cat((out, tail), dim=1)

    def _at_first_row(self, state: Tensor, rows: RecurrentRows) -> Tensor:
        """Return ``state`` after the live changes before the first row, which one product for each head commits."""
        key, update, decay = self.changes.read(rows.before, rows.live).split(self.parts, dim=-1)
        key, update = (
            each.unflatten(-1, (heads, -1)).transpose(0, 1)
            for each, heads in ((key, self.key_heads), (update, self.value_heads))
        )
        state = torch.where(rows.started[:, None, None], state, torch.zeros(()))
        return self._behind(state, key, update, decay.T)

    def _behind(self, state: Tensor, key: Tensor, update: Tensor, decay: Tensor) -> Tensor:
        """Return the state after the changes of T rows, by one product for each head of [d_k, T] and [T, d_v]."""
        after = decay.flip(-1).cumsum(-1).flip(-1) - decay  # the decay of a change from its row to the last row
        key = self._for_values(key).transpose(1, 2)
        return state * decay.sum(-1).exp()[:, None, None] + torch.bmm(key, update * after.exp().unsqueeze(-1))

    def _window(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and updates [value heads, T, d_v] of up to ``ROLLBACK_ROWS`` rows that follow ``state``.

        The updates solve update_i + sum over j < i of a_ij update_j = beta_i (v_i - decay_i S^T k_i). The inverse of
        this triangular system is built from blocks that double in size, which is as accurate as substitution. (Its
        Neumann series is not accurate: it is off by 1e-2 if keys are equal.)
        """
        length = key.shape[1]
        until = decay.cumsum(-1)
        between = ((until[:, :, None] - until[:, None, :]) * masks.lower).exp() * masks.lower
        both = torch.cat((key, query), dim=1)  # [key heads, 2 T, d_k]
        dots = self._for_values(torch.bmm(both, key.transpose(1, 2))) * between.repeat(1, 2, 1)
        reads = torch.bmm(self._for_values(both), state) * until.exp().repeat(1, 2).unsqueeze(-1)
        system = dots[:, :length] * beta.unsqueeze(-1)
        inverse = masks.unit.expand(self.value_heads, length, length)
        for pairs in masks.pairs:
            inverse = inverse - torch.bmm(torch.bmm(inverse, system * pairs), inverse)
        update = torch.bmm(inverse, (value - reads[:, :length]) * beta.unsqueeze(-1))
        return reads[:, length:] + torch.bmm(dots[:, length:], update), update

    def _bulk(self, given: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [value heads, T, d_v] of committed rows, and the state after them. ``given`` holds query,
        key, value, decay and beta, as in ``forward``."""
        query, key, value, decay, beta = given
        outs = []
        for start in range(0, key.shape[1], ROLLBACK_ROWS):
            part = slice(start, start + ROLLBACK_ROWS)
            rows = query[:, part], key[:, part], value[:, part], decay[:, part], beta[:, part]
            out, update = self._window(*rows, state, window_masks(torch.arange(rows[1].shape[1])))
            outs.append(out)
            state = self._behind(state, key[:, part], update, decay[:, part])
        return torch.cat(outs, dim=1), state

    def _keep(self, positions: Tensor, key: Tensor, update: Tensor, decay: Tensor) -> None:
        self.changes.write(
            positions, torch.cat((key.transpose(0, 1).flatten(1), update.transpose(0, 1).flatten(1), decay.T), dim=-1)
        )

    def _for_values(self, heads: Tensor) -> Tensor:
        """Repeat [key heads, ...] for the value heads that share each key head."""
        groups = self.value_heads // self.key_heads
        return heads if groups == 1 else heads.repeat_interleave(groups, dim=0)


def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: tuple[GatedDeltaState, RecurrentRows],
    use_qk_l2norm_in_kernel: bool = False,
    **_given: object,
) -> tuple[Tensor, None]:
    """Replaces transformers' functions for the rule: arguments [1, T, heads, d], ``g`` and ``beta`` [1, T, value
    heads]."""
    if not use_qk_l2norm_in_kernel:
        raise ValueError("its delta rule does not normalize queries and keys, which ours does")
    state, rows = initial_state
    dtype = value.dtype
    query, key, value = (each[0].transpose(0, 1).float().contiguous() for each in (query, key, value))
    decay, beta = g[0].T.float(), beta[0].T.float()
    out = state(_unit(query) * query.shape[-1] ** -0.5, _unit(key), value, decay, beta, rows)
    return out.transpose(0, 1).unsqueeze(0).to(dtype), None


def _unit(x: Tensor) -> Tensor:
    return x * (x.pow(2).sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_given: object
) -> Tensor:
    """Replaces transformers' causal convolution of [1, channels, T] by ``weight`` [channels, taps] with products of
    shifted rows, since a grouped convolution of a few taps is slow on the CPU. Products and sums are in float32."""
    if activation not in (None, "silu"):
        raise ValueError(f"its convolution is followed by {activation}, ours by silu")
    taps, rows, weight = weight.shape[-1], hidden_states[0].T.float(), weight.float()  # [T, channels]
    padded = F.pad(rows, (0, 0, taps - 1, 0))
    length = rows.shape[0]
    out = padded[:length] * weight[:, 0]
    for tap in range(1, taps):
        out = out + padded[tap : tap + length] * weight[:, tap]
    out = out if bias is None else out + bias
    return (F.silu(out) if activation else out).to(hidden_states.dtype).T.unsqueeze(0)


@contextmanager
def use_gated_delta(mixers: Iterable[nn.Module]) -> Iterator[None]:
    """Replace the functions that transformers' layers call, in the modules of their classes."""
    ours = {ROW_RULE: _rule, CHUNK_RULE: _rule, CONVOLUTION: _convolution}
    modules = _modules(mixers)
    with _replaced((module, name, ours[name]) for module in modules for name in REPLACED if hasattr(module, name)):
        yield


@contextmanager
def token_by_token(model: nn.Module) -> Iterator[None]:
    """Make transformers' own layers in ``model`` compute all rows by their rule for single rows.

    Their rule for chunks gives states that differ from it by 1e-4 of their standard deviation in float32.
    """
    mixers = [layer.linear_attn for layer in model.modules() if is_gated_delta(layer)]
    with _replaced((module, CHUNK_RULE, getattr(module, ROW_RULE)) for module in _modules(mixers)):  # type: ignore[arg-type]
        yield


def _modules(mixers: Iterable[nn.Module]) -> list[ModuleType]:
    return [sys.modules[name] for name in sorted({type(mixer).__module__ for mixer in mixers})]


@contextmanager
def _replaced(parts: Iterable[tuple[ModuleType, str, Any]]) -> Iterator[None]:
    kept = []
    try:
        for module, name, other in parts:
            kept.append((module, name, getattr(module, name)))
            setattr(module, name, other)
        yield
    finally:
        for module, name, original in kept:
            setattr(module, name, original)
