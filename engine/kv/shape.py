"""The sizes of a block in one layer, on which its bytes and a pool's layout depend.

Knows no format: how many bytes a number takes is theirs to say.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """``block_size`` tokens, each with a key and a value of ``head_dim`` numbers for ``num_kv_heads`` heads."""

    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_numbers(self) -> int:
        """Numbers in a block's keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim
