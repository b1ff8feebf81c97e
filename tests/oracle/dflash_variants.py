"""The formulas of DFlash's variants, and the shapes of their tensors in a small copy."""

from typing import Any, NamedTuple

import torch
from dflash_reference import Formulas, Reference
from torch import Tensor
from torch.nn import functional as F

TYPE, W1 = "markov_head_type", "markov_head.markov_w1.weight"
SHIFT, PREFIX = "shift_label", "pure_draft_prefix_len"


class MarkovFormulas(Formulas):
    """DSpark's formulas, a row at a time."""

    anchor_proposes = True

    @classmethod
    def knows(cls, drafter: Reference) -> bool:
        return W1 in drafter.tensors or drafter.said("projector_type") == "dspark"

    @property
    def scales_nothing(self) -> bool:
        return W1 in self.drafter.tensors

    def scores(self, logits: Tensor, block: Tensor, anchor: int, before: int | None) -> Tensor:  # noqa: ARG002
        if W1 not in self.drafter.tensors:
            return logits
        token, rows, memory = anchor, [], None
        for scores, state in zip(logits, block[self.drafter.first_row :], strict=True):
            bias, memory = self._bias_behind(token, state, memory)
            rows.append(scores + bias)
            token = self.drafter.in_target(rows[-1])
        return torch.stack(rows)

    def _bias_behind(self, token: int, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias of the row after ``token``, and the recurrent state after that row."""
        drafter = self.drafter
        before, kind = drafter.get(W1)[token], drafter.said(TYPE)
        if kind == "gated":
            before = before * torch.sigmoid(drafter.linear(torch.cat([state, before]), "markov_head.gate_proj"))
        elif kind == "rnn":
            memory = torch.zeros_like(before) if memory is None else memory
            joint = drafter.linear(torch.cat([memory, before, state]), "markov_head.joint_proj")
            gate, candidate, before = joint.chunk(3)
            memory = torch.sigmoid(gate) * memory + torch.sigmoid(-gate) * torch.tanh(candidate)
            before = torch.tanh(before)
        return drafter.linear(before, "markov_head.markov_w2"), memory


class DFlash2Formulas(Formulas):
    """DFlash2's formulas, a row at a time."""

    scales_nothing = True

    @classmethod
    def knows(cls, drafter: Reference) -> bool:
        return "candidate_selector.successor_codebook" in drafter.tensors

    def convolved(self, x: Tensor, given: Tensor, name: str, which: int) -> Tensor:
        """Return the convolution of x [B, H]: row r is the sum over t of x[r - t] * (base kernel[t] + the part of the
        kernel from row r of ``given``)."""
        base = self.drafter.get(f"{name}.base_kernel")[which]
        added = F.linear(given, self.drafter.get(f"{name}.kernel_projection.weight"))
        added = added.view(len(x), 2, len(base), -1)[:, which]
        added = added.repeat_interleave(self.drafter.said("conv_group_size"), dim=-1)
        rows = [
            sum(
                (x[row - tap] * (base[tap] + added[row, tap]) for tap in range(min(row + 1, len(base)))),
                x.new_zeros(()),
            )
            for row in range(len(x))
        ]
        return torch.stack(rows)

    def scores(self, logits: Tensor, block: Tensor, anchor: int, before: int | None) -> Tensor:  # noqa: ARG002
        drafter, token, rows = self.drafter, anchor, []
        book, other = (drafter.get(f"candidate_selector.{each}_codebook") for each in ("predecessor", "successor"))
        for scores, state in zip(logits, block[drafter.first_row :], strict=True):
            best = scores.topk(drafter.said("selector_top_k")).indices
            context = book[token] * drafter.linear(state, "candidate_selector.hidden_projection")
            chosen = scores[best] + other[best] @ context
            rows.append(torch.full_like(scores, float(chosen.min() - 1)).index_copy(0, best, chosen))
            token = drafter.in_target(rows[-1])
        return torch.stack(rows)


class RefinerFormulas(Formulas):
    """xPress's formulas: a pass computes each row's logits from the previous row's token in the pass before."""

    @classmethod
    def knows(cls, drafter: Reference) -> bool:
        return "refiner_head.mix_l" in drafter.tensors

    def scores(self, logits: Tensor, block: Tensor, anchor: int, before: int | None) -> Tensor:
        drafter, at, refined = self.drafter, "refiner_head", logits
        linear, first, given = drafter.linear, drafter.first_row, [anchor if before is None else before, anchor]
        passes = drafter.said("num_jacobi_passes")
        whole = linear(block.mean(0), f"{at}.down_g")
        mix, table = (
            drafter.get(f"{at}.mix_l"),
            drafter.get(f"{at}.token_embed.weight"),
        )  # [rank, row, mixed row]
        for _ in range(6 if passes is None else passes):
            proposed = [drafter.in_target(row) for row in refined]
            behind = (given if first else given[1:]) + proposed[:-1]
            inner = [
                linear(torch.cat([linear(state, f"{at}.down_h"), whole, table[token]]), f"{at}.in_proj")
                for state, token in zip(block, behind, strict=True)
            ]
            rows = []
            for row, own in enumerate(inner):
                x = own + sum((mix[:, row, seen] * inner[seen] for seen in range(row + 1)), torch.zeros_like(own))
                gate = linear(x, f"{at}.mlp_gate")
                x = x + linear(gate * torch.sigmoid(gate) * linear(x, f"{at}.mlp_up"), f"{at}.mlp_down")
                rows.append(linear(x, f"{at}.readout"))
            refined = logits + torch.stack(rows)[first:]
        return refined


class DominoFormulas(Formulas):
    """Domino's formulas, which compute each row from the beginning. The rows of the GRU's weights belong to the gates
    reset, update and new."""

    @classmethod
    def knows(cls, drafter: Reference) -> bool:
        return any(name.endswith("prefix_gru.weight_ih_l0") for name in drafter.tensors)

    def first_row(self) -> int:
        return 0 if self.drafter.said(SHIFT) in (True, None) else 1

    def scores(self, logits: Tensor, block: Tensor, anchor: int, before: int | None) -> Tensor:  # noqa: ARG002
        tokens, rows = [anchor], []
        for scores, state in zip(logits, block[self.first_row() :], strict=True):
            rows.append(scores + self._bias_behind(tokens, state))
            tokens.append(self.drafter.in_target(rows[-1]))
        return torch.stack(rows)

    def _bias_behind(self, tokens: list[int], state: Tensor) -> Tensor | float:
        """Return the bias of a row, given ``tokens``: the anchor and the tokens that earlier rows chose."""
        first = self.drafter.said(PREFIX)
        if len(tokens) <= (1 if first is None else first):
            return 0.0
        of_token, of_memory = (self._get(f"prefix_gru.weight_{each}_l0").unflatten(0, (3, -1)) for each in ("ih", "hh"))
        memory = torch.zeros(of_memory.shape[-1])
        for token in tokens:
            x = self.drafter.embed(token)
            reset, update = (torch.sigmoid(of_token[gate] @ x + of_memory[gate] @ memory) for gate in (0, 1))
            new = torch.tanh(of_token[2] @ x + reset * (of_memory[2] @ memory))
            memory = new + update * (memory - new)
        inner = self._get("embed_proj.0.weight") @ torch.cat([state, memory])
        return self._get("embed_proj.2.weight") @ (inner * torch.sigmoid(inner))

    def _get(self, end: str) -> Tensor:
        """Return the tensor whose name ends with ``end``; the prefix differs by system."""
        return next(tensor for name, tensor in self.drafter.tensors.items() if name.endswith(end))


class Sizes(NamedTuple):
    """The sizes of a small copy."""

    hidden: int
    vocabulary: int
    spoken: int
    """The size of the draft's vocabulary."""
    layers: int
    rows: int
    """The rows of a block."""


def _of_dspark(variant: Any, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    size, rank = sizes.hidden, variant.rank
    shapes = {"markov_w1": (sizes.vocabulary, rank), "markov_w2": (sizes.spoken, rank)}
    linears = {"gate_proj": (rank, size + rank), "joint_proj": (3 * rank, 2 * rank + size)}
    found = {f"markov_head.{name}.weight": shape for name, shape in (shapes | linears).items()}
    return found | {f"markov_head.{name}.bias": shape[:1] for name, shape in linears.items()}


def _of_dflash2(variant: Any, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    size, rank = sizes.hidden, variant.selector_rank
    shapes: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (rank, size)}
    shapes |= {f"candidate_selector.{each}_codebook": (sizes.vocabulary, rank) for each in ("predecessor", "successor")}
    for at in (f"layers.{index}.{part}_conv" for index in range(sizes.layers) for part in ("attention", "mlp")):
        shapes[f"{at}.base_kernel"] = (2, variant.conv_taps, size)
        shapes[f"{at}.kernel_projection.weight"] = (2 * variant.conv_taps * (size // variant.conv_group), size)
    return shapes


def _of_xpress(variant: Any, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    size, rank, wide = sizes.hidden, variant.rank, variant.rank * variant.mlp_ratio
    shapes = {"down_h": (rank, size), "down_g": (rank, size), "in_proj": (rank, 3 * rank)}
    shapes |= {"mlp_gate": (wide, rank), "mlp_up": (wide, rank), "mlp_down": (rank, wide)}
    shapes |= {"token_embed": (sizes.vocabulary, rank), "readout": (sizes.spoken, rank)}
    found: dict[str, tuple[int, ...]] = {f"refiner_head.{name}.weight": shape for name, shape in shapes.items()}
    return found | {"refiner_head.mix_l": (rank, sizes.rows, sizes.rows)}


def _of_domino(variant: Any, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    gates = 3 * variant.size
    shapes = {"prefix_gru.weight_ih_l0": (gates, sizes.hidden), "prefix_gru.weight_hh_l0": (gates, variant.size)}
    shapes |= {
        "embed_proj.0": (variant.rank, sizes.hidden + variant.size),
        "embed_proj.2": (sizes.spoken, variant.rank),
    }
    return {f"domino_head.{name}.weight": shape for name, shape in shapes.items()}


FORMULAS: tuple[type[Formulas], ...] = (DFlash2Formulas, MarkovFormulas, RefinerFormulas, DominoFormulas)
SHAPES = {"DFlash2": _of_dflash2, "DSpark": _of_dspark, "xPress": _of_xpress, "Domino": _of_domino}
