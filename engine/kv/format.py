"""What a KV cache format must offer: the size of a block, and a layer's pool that is written and read by slot.

Knows no attention and no sequences; the formats themselves are the files of engine/kv/formats.
Shape suffixes: T tokens written, G rows read, L slots a row, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine import plugins

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.kv.placement import Places
    from engine.kv.shape import BlockShape

# kv_cache.format=auto keeps keys and values as the model computes them.
_FORMAT_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filling:
    """The blocks that get full in a step, int64 ids as in ``engine.kv.placement.Placement``.

    Attributes:
        moves_2M: places (from, to) to copy before anything is written.
        full_2F: (place, block) to quantise once the step's keys and values are written.
    """

    moves_2M: Tensor
    full_2F: Tensor

    def to(self, device: torch.device) -> Filling:
        """The same on ``device``."""
        return Filling(moves_2M=self.moves_2M.to(device), full_2F=self.full_2F.to(device))


class KVLayer(Protocol):
    """The keys and values of one layer, for every slot of the pool; slot = block id x block size + offset.

    Of a format that quantises, the slots of the pool are read only; what is written goes to the places behind it.
    """

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The tensors that hold all full blocks between them, block ``b``'s share of each at ``[b]``."""
        ...

    def write(self, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, filling: Filling | None = None) -> None:
        """Store a step's keys and values; the slots are distinct int64 ids. ``filling`` is for formats that quantise."""
        ...

    def gather(self, slots_GL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of int64 slots [G, L], each [G, K, L, D], contiguous. Slots never written give anything."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Make block ``target`` hold what block ``source`` holds; both are places where the format quantises."""
        ...


class KVFormat(Protocol):
    """How numbers lie in the pool."""

    @property
    def is_plain(self) -> bool:
        """Whether each slot can be written by itself. Else a block is quantised when it is full."""
        ...

    def bytes_per_block(self, shape: BlockShape) -> int:
        """Bytes of one full block's keys and values in one layer, scales included."""
        ...

    def allocate(
        self, shape: BlockShape, *, num_layers: int, num_blocks: int, device: torch.device, dtype: torch.dtype, places: Places | None
    ) -> SequenceOf[KVLayer]:
        """The layers' pools, their slots not yet written. A format that quantises has ``places`` beside them, in ``dtype``."""
        ...


def format_name(name: str, *, model_dtype: str) -> str:
    """The format that ``kv_cache.format`` stands for: itself, or with "auto" the one of the model's dtype ("float32").

    Raises:
        ValueError: there is none of that name, which no backend need be asked about.
    """
    if name == "auto":
        return _FORMAT_OF_DTYPE[model_dtype]
    load_format(name)
    return name


def load_format(name: str) -> KVFormat:
    """The format in ``engine/kv/formats/<name>.py``.

    Raises:
        ValueError: there is none of that name; the message names kv_cache.format and lists the choices.
    """
    kv_format: KVFormat = plugins.load("engine.kv.formats", name, key="kv_cache.format").FORMAT
    return kv_format
