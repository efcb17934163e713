"""What an attention backend is asked for: what it must serve, what a step looks like, and the protocol it fulfils.

Knows no backend by name; each is a file of engine/attention/backends with a class ``Backend`` and a function ``refuse``.
Shape suffixes: T tokens of the step, S sequences in it, N blocks a sequence at most, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kv.format import KVFormat, KVLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a backend must serve, fixed for the life of an engine.

    Query head h reads key/value head ``h // (num_heads // num_kv_heads)``. The softmax runs over ``scale * q @ k``, each
    score s of which becomes ``c * tanh(s / c)`` where there is a ``soft_cap`` c. ``dtype`` is that of q and of the result,
    ``kv_format`` the file name of the cache's format, ``windowed`` whether some layer attends within a window,
    ``num_threads`` how many a backend that starts its own may start. Of ``num_ranks`` processes that share the model each
    has these heads.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    kv_format: str
    batch_invariant: bool
    num_threads: int = 1
    soft_cap: float | None = None
    windowed: bool = False
    num_ranks: int = 1

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    def refuse_masks(self) -> str | None:
        """The reason of a backend that knows the causal mask only, where more is asked for."""
        if self.soft_cap is None and not self.windowed:
            return None
        return "it knows neither windows nor caps of scores; use engine.attention=triton or reference"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionInputs:
    """One step as the host sees it: whose tokens are where.

    Sequence s has the query rows ``query_starts[s] : query_starts[s + 1]`` of the step, which are the last ones of its
    ``kv_lengths[s]`` positions; every position's keys and values are in the store when ``attend`` is called.

    Attributes:
        query_starts: int64 [S + 1], from 0 to T, rising.
        kv_lengths: int64 [S].
        block_tables: int64 [S, N]; position p of sequence s lies in block ``block_tables[s, p // block_size]``. Entries
            past a sequence's last block are 0 and mean nothing.
    """

    query_starts: npt.NDArray[np.int64]
    kv_lengths: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int64]
    block_size: int

    def slots(self, seqs: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The slot of each (sequence, position); the two arrays broadcast."""
        return self.block_tables[seqs, positions // self.block_size] * self.block_size + positions % self.block_size

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence has one query."""
        return len(self.kv_lengths) == self.query_starts[-1]

    def padded(self, num_seqs: int, *, block: int) -> AttentionInputs:
        """Decodes with more of them behind, ``num_seqs`` in all, each of which sees itself alone in the first slot of ``block``."""
        assert self.only_decodes and len(self.kv_lengths) <= num_seqs
        missing = num_seqs - len(self.kv_lengths)
        tables_MN = np.zeros((missing, self.block_tables.shape[1]), dtype=np.int64)
        tables_MN[:, 0] = block
        return AttentionInputs(
            query_starts=np.arange(num_seqs + 1),
            kv_lengths=np.concatenate((self.kv_lengths, np.ones(missing, dtype=np.int64))),
            block_tables=np.concatenate((self.block_tables, tables_MN)),
            block_size=self.block_size,
        )


PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """Attention over the paged store for any mix of decodes and prefill chunks, causal inside each sequence."""

    @property
    def kv_format(self) -> KVFormat:
        """The numbers of ``spec.kv_format``, laid out as this backend reads them: what the store is to be made of."""
        ...

    def plan(self, inputs: AttentionInputs) -> PlanT:
        """The work that is the same for all layers: indices, masks, groups."""
        ...

    def attend(self, q_THD: Tensor, kv: KVLayer, plan: PlanT, *, window: int | None = None) -> Tensor:
        """[T, H, D] -> [T, H, D] in q's dtype: each query looks at its own sequence up to and including itself.

        With ``window`` w it sees itself and the w - 1 positions before it; only where ``spec.windowed`` announced it.
        """
        ...


@runtime_checkable
class FixedPlans(Protocol[PlanT]):
    """What else a backend offers whose calls can be recorded and replayed: plans whose tensors keep their place and shape."""

    def fixed_plan(self, *, num_seqs: int, num_blocks: int) -> PlanT:
        """A plan for ``attend`` with room for any step of ``num_seqs`` decodes over at most ``num_blocks`` blocks each."""
        ...

    def refill(self, plan: PlanT, inputs: AttentionInputs) -> None:
        """Make it the plan of ``inputs``, which has just so many decodes. What was recorded with ``plan`` then serves them."""
        ...
