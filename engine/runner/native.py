"""The step on the CPU's own kernels, one call for all layers, in bfloat16 over the packed cache.

Knows how a batch becomes that call; what the model does inside is engine/kernels/cpu/step.h.
"""

from __future__ import annotations

import math

from torch import Tensor

from engine.attention.backends.cpu import Backend
from engine.kernels.cpu.decoder import PackedDecoder
from engine.kv.packed import PackedLayer
from engine.kv.packed_codes import PackedCodesLayer
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.runner.batch import Batch
from engine.sampling.drawn import Drawn
from engine.types import NOT_A_NUMBER, Draw


class NativeForward:
    """Implements ``engine.runner.forward.Forward`` for whatever ``backend`` can serve; ``int8`` rounds the projections to 8 bits."""

    def __init__(self, model: Decoder, *, store: KVStore, backend: Backend, max_tokens: int, int8: bool = False) -> None:
        spec = backend.spec
        self.backend = backend
        self.store = store  # what the pools point into
        self.decoder = PackedDecoder(
            backend.library, model, layout=backend.layout, max_tokens=max_tokens, int8=int8, num_threads=spec.num_threads
        )
        layers = [store.layer(index) for index in range(model.spec.num_layers)]
        self.pools = [layer.pointers for layer in layers if isinstance(layer, PackedLayer | PackedCodesLayer)]
        assert len(self.pools) == len(layers), "the store was allocated with the backend's kv_format"

    def hidden(self, batch: Batch) -> Tensor:
        return self.decoder.step(
            token_ids_T=batch.token_ids_T,
            positions_T=batch.positions_T,
            slots_T=batch.slots_T,
            wanted_M=batch.wanted_rows_W,
            attention=self.backend.plan(batch.attention),
            pools=self.pools,
            filling=batch.filling,
        )

    def logits(self, hidden_ME: Tensor) -> Tensor:
        return self.decoder.head(hidden_ME)

    def greedy(self, hidden_ME: Tensor, *, num_valid_tokens: int) -> Drawn:
        token_ids, logprobs = self.decoder.head.greedy(hidden_ME, num_valid=num_valid_tokens)

        def read() -> list[Draw]:
            draws = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
            return [Draw(NOT_A_NUMBER, math.nan) if math.isnan(logprob) else Draw(token_id, logprob) for token_id, logprob in draws]

        return Drawn(token_ids, read)
