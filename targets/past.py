"""Stands in for transformers' cache while a target's layers run."""

from typing import Any

from torch import Tensor, nn

from eagle3.targets.recurrent import RecurrentRows, RecurrentState
from eagle3.targets.short_conv import ShortConvState
from eagle3.targets.state_mixers import mixer_with_state


class Past:
    """Stands in for transformers' cache, which Llama 4's layers ask for positions and recurrent layers ask for their
    state. ``kv_attention`` holds the keys and values, ``kept_state`` a state."""

    layers = ()
    """Mllama asks which layers hold states of an image; none do."""

    def __init__(self, input_pos: Tensor, decoder: nn.ModuleList, rows: RecurrentRows | None):
        self._input_pos, self._decoder, self._rows = input_pos, decoder, rows

    def get_seq_length(self, *_args: object, **_kwargs: object) -> Tensor:
        return self._input_pos[0]

    def update(self, key: Tensor, value: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
        return key, value

    def is_recording_past(self, _layer: int) -> bool:
        """Return True, so that even a single row gets the convolution's earlier rows from ``update_conv_state``."""
        return True

    def get_conv_state(self, *_args: object, **_kwargs: object) -> None:
        """Return None, since ``update_conv_state`` gives the earlier rows."""

    def update_conv_state(self, mixed: Tensor, layer: int, **_given: object) -> Tensor:
        """Return the earlier rows of a convolution's inputs followed by those of this forward, [1, channels, T]."""
        state = self._state(layer)
        rows = self._input_pos if isinstance(state, ShortConvState) else self._rows_of_states()
        return state.with_earlier(mixed, rows)

    def get_recurrent_state(self, layer: int, **_given: object) -> tuple[RecurrentState, RecurrentRows]:
        """Return the arguments for the function that replaces transformers' own."""
        return self._state(layer), self._rows_of_states()

    def update_recurrent_state(self, *_given: object, **_kwargs: object) -> None:
        """Do nothing, since the state already holds the rows."""

    def _state(self, layer: int) -> Any:  # noqa: ANN401 - of either kind
        return mixer_with_state(self._decoder[layer]).kept_state

    def _rows_of_states(self) -> RecurrentRows:
        assert self._rows is not None  # a target with recurrent layers makes them
        return self._rows
