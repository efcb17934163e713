"""How many sequences a pool of so many bytes holds, in each format, in blocks and, to compare, contiguously.

Knows bytes and tokens; ints in, ints out. Which sequences run when is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine import plugins
from engine.kv.format import load_format
from engine.kv.placement import Places
from engine.kv.shape import BlockShape
from engine.kv.sizing import bytes_per_block, open_bytes

_LENGTHS = (1024, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A pool for the keys and values of one model.

    Attributes:
        format: the one that is chosen.
        num_bytes: what the pool takes, with what lies beside it.
        num_blocks: those of the pool.
        block_bytes: of each format, what a full block of ``shape`` takes over all layers, scales included.
        open_bytes: of each format, what a sequence takes beside its blocks: where full ones are quantised, a plain one to fill.
        max_model_len: most tokens of a sequence.
    """

    format: str
    num_bytes: int
    num_blocks: int
    block_bytes: Mapping[str, int]
    open_bytes: Mapping[str, int]
    shape: BlockShape
    num_layers: int
    max_model_len: int

    @classmethod
    def of(
        cls,
        *,
        format: str,
        num_bytes: int,
        num_blocks: int,
        shape: BlockShape,
        num_layers: int,
        max_model_len: int,
        dtype_bytes: int,
    ) -> Capacity:
        """In every format that there is: the files of ``engine/kv/formats``. The model computes in ``dtype_bytes`` a number."""
        formats = {name: load_format(name) for name in plugins.names("engine.kv.formats")}
        one = Places(num_open=1, num_filling=0)
        return cls(
            format=format,
            num_bytes=num_bytes,
            num_blocks=num_blocks,
            block_bytes={name: bytes_per_block(kv_format, shape=shape, num_layers=num_layers) for name, kv_format in formats.items()},
            open_bytes={
                name: open_bytes(kv_format, one, shape=shape, num_layers=num_layers, dtype_bytes=dtype_bytes)
                for name, kv_format in formats.items()
            },
            shape=shape,
            num_layers=num_layers,
            max_model_len=max_model_len,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the sequences that are shown: 1k, 4k, and all that the model takes."""
        return (*(length for length in _LENGTHS if length < self.max_model_len), self.max_model_len)

    @property
    def formula(self) -> str:
        """How the bytes of a token come about; what scales take is in the bytes of a number."""
        number = self.block_bytes[self.format] / (self.num_layers * self.shape.num_numbers)
        return (
            f"2 (key, value) x {self.num_layers} layers x {self.shape.num_kv_heads} KV heads x {self.shape.head_dim} head size"
            f" x {number:.4g} bytes = {self.token_bytes(self.format):,.10g} bytes a token"
        )

    def token_bytes(self, format: str) -> float:
        return self.block_bytes[format] / self.shape.block_size

    def paged(self, format: str, *, num_tokens: int) -> int:
        """Sequences of ``num_tokens`` tokens that fit, each in blocks of its own."""
        return self.num_bytes // (-(-num_tokens // self.shape.block_size) * self.block_bytes[format] + self.open_bytes[format])

    def contiguous(self, format: str) -> int:
        """Sequences that fit where each reserves ``max_model_len`` tokens in one piece, however long it gets."""
        return self.num_bytes * self.shape.block_size // (self.block_bytes[format] * self.max_model_len)

    def numbers(self) -> dict[str, Any]:
        """As JSON values; the names are part of the contract."""
        return {
            "kv_format": self.format,
            "kv_formula": self.formula,
            "kv_bytes_per_token": round(self.token_bytes(self.format)),
            "kv_bytes_per_block": self.block_bytes[self.format],
            "kv_block_size": self.shape.block_size,
            "kv_bytes": self.num_bytes,
            "kv_blocks": self.num_blocks,
            "max_model_len": self.max_model_len,
            "sequences_fit": {
                name: {
                    "kv_bytes_per_token": self.token_bytes(name),
                    "contiguous": self.contiguous(name),
                    "paged": {str(length): self.paged(name, num_tokens=length) for length in self.lengths},
                }
                for name in self.block_bytes
            },
        }
