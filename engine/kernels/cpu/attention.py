"""The packed pool and the attention over it, as Python calls them: torch tensors in, pointers out to kv.h and attention.h.

Knows the C structures and the shapes, and checks both; what is computed, and in which order, the headers say.
Shape suffixes: T tokens of the step, S sequences, N blocks a sequence at most, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TOKENS_PER_GROUP = 16  # block sizes are multiples of it
LANES = 16  # head sizes are multiples of it
MAX_HEAD_DIM = 256

_Ints = npt.NDArray[np.integer[Any]]


CODES = {"int8": 1, "fp8": 2}  # kv.h's, by the format whose numbers they are


class KVLayout(ctypes.Structure):
    """kv.h's: the sizes on which the layout of a layer's pool depends; ``codes`` are those of full blocks, 0 if plain."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    codes: int

    _fields_ = (("num_kv_heads", c_int32), ("head_dim", c_int32), ("block_size", c_int32), ("codes", c_int32))


class KVPool(ctypes.Structure):
    """kv.h's: where one layer's numbers lie. The tensors must outlive it."""

    _fields_ = (
        *((name, c_void_p) for name in ("open", "filling", "codes", "exponents")),
        *((name, c_int64) for name in ("first_place", "first_open")),
    )

    @classmethod
    def plain(cls, blocks: Tensor) -> KVPool:
        """bf16 blocks in one piece of memory."""
        assert blocks.dtype == torch.bfloat16
        return cls(open=blocks.data_ptr())

    @classmethod
    def coded(cls, codes: Tensor, exponents: Tensor, *, filling: Tensor, open: Tensor) -> KVPool:
        """Quantised blocks, then the bf16 places."""
        assert filling.dtype == open.dtype == torch.bfloat16 and codes.dtype == torch.uint8 and exponents.dtype == torch.int8
        first_place = len(codes)
        return cls(open.data_ptr(), filling.data_ptr(), codes.data_ptr(), exponents.data_ptr(), first_place, first_place + len(filling))


class _Spec(ctypes.Structure):
    _fields_ = (("kv", KVLayout), ("num_heads", c_int32), ("scale", c_float), ("num_threads", c_int32), ("share_prefixes", c_int32))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_seqs", c_int32),
        ("table_stride", c_int32),
        ("query_starts", c_void_p),
        ("kv_lengths", c_void_p),
        ("block_tables", c_void_p),
    )


class _Layer(ctypes.Structure):
    _fields_ = (("pool", KVPool), ("q", c_void_p), ("q_stride", c_int64), ("out", c_void_p), ("out_stride", c_int64))


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the argument types of the functions used here."""
    library.pagemill_kv_write.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64)
    for name in ("move", "encode"):
        getattr(library, f"pagemill_kv_{name}").argtypes = (c_void_p, c_void_p, c_void_p, c_int64)
    library.pagemill_kv_decode.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_void_p)
    library.pagemill_attention_create.argtypes = (c_void_p,)
    library.pagemill_attention_create.restype = c_void_p
    library.pagemill_attention_destroy.argtypes = (c_void_p,)
    library.pagemill_attention_plan.argtypes = (c_void_p, c_void_p)
    library.pagemill_attention_num_tiles.argtypes = (c_void_p,)
    library.pagemill_attention_num_tiles.restype = c_int64
    library.pagemill_attend.argtypes = (c_void_p, c_void_p)


def kv_write(library: ctypes.CDLL, layout: KVLayout, pool: KVPool, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Store bf16 keys and values in the pool's distinct int64 slots; a token's row must be contiguous."""
    for rows_TKD in (k_TKD, v_TKD):
        assert rows_TKD.dtype == torch.bfloat16
        assert rows_TKD.shape == (len(slots_T), layout.num_kv_heads, layout.head_dim)
        assert rows_TKD.stride()[1:] == (layout.head_dim, 1)
    assert slots_T.dtype == torch.int64 and slots_T.is_contiguous()
    k, v = k_TKD.data_ptr(), v_TKD.data_ptr()
    library.pagemill_kv_write(
        ctypes.byref(layout), ctypes.byref(pool), k, k_TKD.stride(0), v, v_TKD.stride(0), slots_T.data_ptr(), len(slots_T)
    )


def kv_fill(library: ctypes.CDLL, layout: KVLayout, pool: KVPool, *, moves_2M: Tensor | None = None, full_2F: Tensor | None = None) -> None:
    """Copy places (from, to), or quantise (place, block), int64 each."""
    for pairs, function in ((moves_2M, library.pagemill_kv_move), (full_2F, library.pagemill_kv_encode)):
        if pairs is not None:
            assert pairs.dtype == torch.int64 and pairs.is_contiguous() and len(pairs) == 2
            function(ctypes.byref(layout), ctypes.byref(pool), pairs.data_ptr(), pairs.shape[1])


def kv_decode(library: ctypes.CDLL, layout: KVLayout, pool: KVPool, blocks_N: Tensor) -> Tensor:
    """Quantised blocks as plain ones: int64 [N] -> bf16 [N, K, 2, B x D]."""
    assert blocks_N.dtype == torch.int64
    blocks_N = blocks_N.contiguous()
    out = torch.empty(len(blocks_N), layout.num_kv_heads, 2, layout.block_size * layout.head_dim, dtype=torch.bfloat16)
    library.pagemill_kv_decode(ctypes.byref(layout), ctypes.byref(pool), blocks_N.data_ptr(), len(blocks_N), out.data_ptr())
    return out


class PagedAttention:
    """attention.h's Attention: the plan of one step at a time, and the scratch of ``num_threads`` threads.

    ``share_prefixes`` False reads what sequences share once for each of them; the results are the same bits.
    """

    def __init__(
        self, library: ctypes.CDLL, *, layout: KVLayout, num_heads: int, scale: float, num_threads: int, share_prefixes: bool = True
    ) -> None:
        declare(library)
        self._library = library
        self.num_threads = num_threads
        self._shape_HD = (num_heads, layout.head_dim)
        spec = _Spec(layout, num_heads, scale, num_threads, share_prefixes)
        self.handle: int = library.pagemill_attention_create(ctypes.byref(spec))
        weakref.finalize(self, library.pagemill_attention_destroy, self.handle)

    def plan(self, *, query_starts: _Ints, kv_lengths: _Ints, block_tables: _Ints) -> None:
        """Take in a step's [S + 1], [S] and [S, N]; they are copied."""
        starts, lengths, tables = (np.ascontiguousarray(x, dtype=np.int32) for x in (query_starts, kv_lengths, block_tables))
        assert len(starts) == len(lengths) + 1 == len(tables) + 1
        batch = _Batch(len(lengths), tables.shape[1], starts.ctypes.data, lengths.ctypes.data, tables.ctypes.data)
        self._library.pagemill_attention_plan(self.handle, ctypes.byref(batch))

    @property
    def num_tiles(self) -> int:
        """Tiles of 64 positions that a layer reads for each key/value head; those that sequences share count once."""
        return int(self._library.pagemill_attention_num_tiles(self.handle))

    def attend(self, q_THD: Tensor, pool: KVPool) -> Tensor:
        """bf16 [T, H, D] of the planned step over a layer's pool -> bf16 [T, H, D]."""
        assert q_THD.dtype == torch.bfloat16 and q_THD.shape[1:] == self._shape_HD
        q_THD = q_THD if q_THD.stride()[1:] == (self._shape_HD[1], 1) else q_THD.contiguous()
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        layer = _Layer(pool, q_THD.data_ptr(), q_THD.stride(0), out_THD.data_ptr(), out_THD.stride(0))
        self._library.pagemill_attend(self.handle, ctypes.byref(layer))
        return out_THD
