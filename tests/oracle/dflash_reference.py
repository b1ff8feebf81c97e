"""The part of the reference for a DFlash head that the formulas of all variants share: access to a checkpoint's keys
and tensors."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class Reference:
    """The files of a head, with simple layers. ``config`` is the checkpoint's JSON, ``layer`` transformers'
    configuration of its layers. ``tensors`` are float32, under the checkpoint's names. ``embedding`` and ``lm_head``
    [V, H] are the target's. The target multiplies the rows of its embedding by ``embedding_scale``."""

    config: dict[str, Any]
    layer: "LlamaConfig"
    tensors: dict[str, Tensor]
    embedding: Tensor
    lm_head: Tensor
    embedding_scale: float = 1.0

    @property
    def first_row(self) -> int:
        """The first row of a block that proposes a token."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """The factor by which the head multiplies rows of the embedding."""
        raise NotImplementedError

    def embed(self, tokens: Tensor | int) -> Tensor:
        """Embed tokens [T] -> [T, H], or one token -> [H]."""
        return self.tensors.get("embed_tokens.weight", self.embedding)[tokens] * self.scale

    def in_target(self, scores: Tensor) -> int:
        """Return the best token, as an id of the target."""
        token = int(scores.argmax())
        return token + int(self.tensors["d2t"][token]) if "d2t" in self.tensors else token

    def activation(self, x: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        return ACT2FN[self.layer.hidden_act](x)

    def norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.layer.rms_norm_eps) * self.get(f"{name}.weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.get(f"{name}.weight"), self.bias(name))

    def said(self, key: str) -> Any:  # noqa: ANN401 - of whatever type the JSON has
        return (self.config.get("dflash_config") or {}).get(key, self.config.get(key))

    def bias(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{name}.bias", self.tensors.get(f"model.{name}.bias"))

    def has(self, name: str) -> bool:
        return name in self.tensors or f"model.{name}" in self.tensors

    def get(self, name: str) -> Tensor:
        found = self.tensors.get(name, self.tensors.get(f"model.{name}"))
        if found is None:
            raise KeyError(name)
        return found


class Formulas:
    """The formulas of a variant in plain PyTorch, with which its module is compared. They read the checkpoint
    independently of the reader, so that a mistake in reading shows as well. This base class adds nothing to a
    DFlash."""

    anchor_proposes: ClassVar[bool] = False
    """True if the anchor's row proposes in a file without a key for it."""

    def __init__(self, drafter: Reference):
        self.drafter = drafter

    @property
    def scales_nothing(self) -> bool:
        """True if z-lab's code uses the rows of the embedding unscaled."""
        return False

    @classmethod
    def knows(cls, drafter: Reference) -> bool:  # noqa: ARG003
        """Return True for a checkpoint with this variant's tensors."""
        return False

    def first_row(self) -> int | None:
        """Return the first row that proposes if a key of the variant says so, otherwise None."""
        return None

    def convolved(self, x: Tensor, given: Tensor, name: str, which: int) -> Tensor:  # noqa: ARG002
        """Return x [B, H], the input (``which`` 0) or the output (1) of attention or MLP, with the variant's change.
        ``given`` [B, H] is the normed state before that change."""
        return x

    def scores(
        self,
        logits: Tensor,
        block: Tensor,  # noqa: ARG002
        anchor: int,  # noqa: ARG002
        before: int | None,  # noqa: ARG002
    ) -> Tensor:
        """Return the logits [K, V] of the rows that propose, with the variant's change. ``block`` has the states of all
        rows [B, H]; ``before`` is the token before the anchor in the text, None if there is none."""
        return logits
