"""What the runner needs of a model: hidden states for the rows that are wanted, and what is read off them.

Knows batches and draws; ``TorchForward`` does it with torch's decoder over any attention backend, and the files beside
this one in other ways. Shape suffixes: T tokens of the step, W wanted rows, M rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.kv.format import Filling
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.runner.batch import Batch
from engine.sampling.drawn import Drawn
from engine.sampling.logprobs import scored


class Forward(Protocol):
    """A model over its paged keys and values."""

    def hidden(self, batch: Batch) -> Tensor:
        """Store the step's keys and values, and give ``batch.wanted_rows_W``'s hidden states, the final norm applied."""
        ...

    def logits(self, hidden_ME: Tensor) -> Tensor:
        """Rows of what ``hidden`` gave -> float32 [M, V]."""
        ...

    def greedy(self, hidden_ME: Tensor, *, num_valid_tokens: int) -> Drawn:
        """For each row what the sampler draws at temperature 0 with no other settings: the most likely id below
        ``num_valid_tokens``, of equal ones the lowest, with its log-softmax over V; NOT_A_NUMBER for NaN or +inf."""
        ...


class TorchForward:
    """torch's operators, on any device and in any dtype."""

    def __init__(self, model: Decoder, *, store: KVStore, backend: AttentionBackend[Any]) -> None:
        self.model = model
        self.store = store
        self.backend = backend

    def hidden(self, batch: Batch) -> Tensor:
        attention = self.backend.plan(batch.attention)
        return self.states(batch.token_ids_T, batch.positions_T, batch.slots_T, attention, batch.filling)[batch.wanted_rows_W]

    def states(self, token_ids_T: Tensor, positions_T: Tensor, slots_T: Tensor, attention: Any, filling: Filling | None = None) -> Tensor:
        """Store the step's keys and values, and give all rows' hidden states [T, E]; ``attention`` is the backend's plan.

        Asks nothing of the host but to launch, so that it can be recorded.
        """

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            self.store.write(layer, k_TKD, v_TKD, slots_T, filling)
            return self.backend.attend(q_THD, self.store.layer(layer), attention)

        return self.model(token_ids_T, positions_T, attend)

    def logits(self, hidden_ME: Tensor) -> Tensor:
        return self.model.logits(hidden_ME)

    def greedy(self, hidden_ME: Tensor, *, num_valid_tokens: int) -> Drawn:
        logits_MV = self.logits(hidden_ME)
        token_ids_M = logits_MV[:, :num_valid_tokens].argmax(-1)
        return Drawn(token_ids_M, scored(logits_MV, token_ids_M, num_top=[0] * len(hidden_ME)))
