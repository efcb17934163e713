"""Paged attention in Triton: one kernel for any item of work, and one that merges the results of a query's items.

Knows pools of plain numbers [blocks, K, block_size, D] and the work that engine.attention.work.py cuts; not whose it is.

An item walks over its positions in tiles and carries maximum, sum and weighted values along (online softmax, Milakov and
Gimelshein 2018; FlashAttention-2, Dao 2023). Scores are taken times log2(e), so that all exponentials are powers of two: a
partial result has its log-sum-exp to base 2. Partial results are merged by those, which gives the softmax over all positions
(FlashDecoding, Dao et al. 2023). The queries of the J heads that read one key/value head share a tile of M rows.
Shape suffixes: T tokens of the step, I items, Q queries an item, M rows of a tile, L positions of a tile, D head size,
S sequences, N blocks a sequence at most, P partial results, H query heads, K key/value heads, J = H / K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.work import NOBODY, Work
from engine.transfer import Packed

_LOG2_E = math.log2(math.e)


class DeviceWork:
    """A step's Work and block tables as the kernels read them: int32 tensors on the device, which can be filled again.

    There may be more items and merged tokens than a work has: the others are nobody's and change nothing.
    """

    def __init__(
        self, *, num_items: int, tile_queries: int, num_merged: int, num_partials: int, tables_shape: tuple[int, int], device: torch.device
    ) -> None:
        self.num_partials = num_partials
        of_queries, of_items = (num_items, tile_queries), (num_items,)
        shapes = [of_queries, of_queries, of_queries, of_items, of_items, of_items, (num_merged,), (num_merged + 1,)]
        self._packed = Packed(shapes, dtype=torch.int32, device=device)
        self.tokens_IQ, self.positions_IQ, self.targets_IQ, self.seq_I, self.begin_I, self.end_I, self.merged_N, self.parts_N1 = (
            self._packed.tensors
        )
        self.tables_SN = torch.zeros(tables_shape, dtype=torch.int32, device=device)

    @classmethod
    def copy(cls, work: Work, block_tables: npt.NDArray[np.int64], device: torch.device) -> DeviceWork:
        """``work`` with as much room as it takes."""
        made = cls(
            num_items=len(work.seq_I),
            tile_queries=work.tokens_IQ.shape[1],
            num_merged=len(work.merged_N),
            num_partials=int(work.parts_N1[-1]),
            tables_shape=block_tables.shape,
            device=device,
        )
        made.fill(work, block_tables)
        return made

    def fill(self, work: Work, block_tables: npt.NDArray[np.int64]) -> None:
        assert work.parts_N1[-1] <= self.num_partials, "more partial results than there is room for"
        arrays = [work.tokens_IQ, work.positions_IQ, work.targets_IQ, work.seq_I, work.begin_I, work.end_I, work.merged_N, work.parts_N1]
        self._packed.send(arrays, padding=NOBODY)
        tables = Packed([block_tables.shape], dtype=torch.int32, device=self.tables_SN.device)
        tables.send([block_tables])
        self.tables_SN[: block_tables.shape[0], : block_tables.shape[1]] = tables.tensors[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes for which the kernel is compiled: ``rows`` M and ``kv_tile`` L, powers of two from 16."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rows: int
    kv_tile: int

    @classmethod
    def fitting(cls, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, rows: int, itemsize: int) -> Shape:
        """``rows``, or fewer so that queries take at most 32 KiB, but no fewer than one query has heads; keys of at most 16 KiB.

        So a tile and what is loaded ahead fit in the 99 KiB of shared memory that the smaller GPUs have.
        """
        row_bytes = _padded(head_dim) * itemsize
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            rows=max(16, min(rows, 32768 // row_bytes), triton.next_power_of_2(num_heads // num_kv_heads)),
            kv_tile=min(64, max(16, 16384 // row_bytes)),
        )

    @property
    def tile_queries(self) -> int:
        return self.rows // (self.num_heads // self.num_kv_heads)

    @property
    def num_warps(self) -> int:
        """Enough for a tile's sums to stay in registers."""
        return 8 if self.rows * _padded(self.head_dim) >= 8192 else 4


def attend(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    work: DeviceWork,
    *,
    shape: Shape,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """[T, H, D] over pools [blocks, K, block_size, D] -> [T, H, D] in q's dtype.

    ``soft_cap`` c turns each scaled score s into ``c * tanh(s / c)``; with ``window`` w a query sees itself and the w - 1
    positions before it.
    """
    assert q_THD.stride(-1) == 1 and keys.is_contiguous() and values.is_contiguous()
    assert work.tokens_IQ.shape[1] == shape.tile_queries
    num_heads, head_dim = shape.num_heads, shape.head_dim
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    partial_PHD = torch.empty(work.num_partials, num_heads, head_dim, dtype=torch.float32, device=q_THD.device)
    lse_PH = torch.empty(work.num_partials, num_heads, dtype=torch.float32, device=q_THD.device)
    _attend_item[(len(work.seq_I), shape.num_kv_heads)](
        q_THD,
        keys,
        values,
        out_THD,
        partial_PHD,
        lse_PH,
        work.tokens_IQ,
        work.positions_IQ,
        work.targets_IQ,
        work.seq_I,
        work.begin_I,
        work.end_I,
        work.tables_SN,
        q_THD.stride(0),
        q_THD.stride(1),
        work.tables_SN.stride(0),
        scale * (_LOG2_E if soft_cap is None else 1 / soft_cap),
        _LOG2_E * (soft_cap or 0.0),
        window or 0,
        NUM_HEADS=num_heads,
        GROUP=num_heads // shape.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        QUERIES=shape.tile_queries,
        M=shape.rows,
        L=shape.kv_tile,
        D=_padded(head_dim),
        CAPPED=soft_cap is not None,
        WINDOWED=window is not None,
        WIDENED=bool(triton.knobs.runtime.interpret) and q_THD.dtype == torch.bfloat16,
        num_warps=shape.num_warps,
    )
    if len(work.merged_N) > 0:
        grid = (len(work.merged_N), num_heads)
        _merge[grid](
            partial_PHD, lse_PH, out_THD, work.merged_N, work.parts_N1, NUM_HEADS=num_heads, HEAD_DIM=head_dim, D=_padded(head_dim)
        )
    return out_THD


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


@triton.jit
def _dot(a, b, WIDENED: tl.constexpr):
    """The product in float32. Triton's interpreter multiplies the bits of bfloat16 numbers; float32 gives the same products."""
    if WIDENED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _queries(tokens_ptr, positions_ptr, targets_ptr, item, GROUP: tl.constexpr, QUERIES: tl.constexpr, M: tl.constexpr):
    """Token, position and target of each row's query; a row that is nobody's has token -1."""
    query_M = tl.arange(0, M) // GROUP
    place_M = item * QUERIES + query_M
    token_M = tl.load(tokens_ptr + place_M, mask=query_M < QUERIES, other=-1).to(tl.int64)
    position_M = tl.load(positions_ptr + place_M, mask=query_M < QUERIES, other=-1)
    target_M = tl.load(targets_ptr + place_M, mask=query_M < QUERIES, other=0).to(tl.int64)
    return token_M, position_M, target_M


@triton.jit
def _pool_rows(table_ptr, position_L, end, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Index of each position's row among the pool's blocks x K x BLOCK_SIZE rows; any for those from ``end`` on."""
    block_L = tl.load(table_ptr + position_L // BLOCK_SIZE, mask=position_L < end, other=0).to(tl.int64)
    return (block_L * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position_L % BLOCK_SIZE


@triton.jit
def _capped_and_masked(score_ML, position_M, position_L, end, cap, window, CAPPED: tl.constexpr, WINDOWED: tl.constexpr):
    """The scores times log2(e), and minus infinity where a query does not see the position."""
    if CAPPED:  # tanh(x) = 2 * sigmoid(2 * x) - 1
        score_ML = (2.0 * tl.sigmoid(2.0 * score_ML) - 1.0) * cap
    seen_ML = (position_L < end)[None, :] & (position_L[None, :] <= position_M[:, None])
    if WINDOWED:
        seen_ML = seen_ML & (position_L[None, :] > position_M[:, None] - window)
    return tl.where(seen_ML, score_ML, float("-inf"))


@triton.jit
def _weights(score_ML, max_M):
    """A tile's weights, what the sums so far are multiplied by, and the largest score up to here: both are relative to that."""
    new_max_M = tl.maximum(max_M, tl.max(score_ML, 1))
    shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    return tl.exp2(score_ML - shift_M[:, None]), tl.exp2(max_M - shift_M), new_max_M


@triton.jit
def _store(
    out_ptr,
    partial_ptr,
    lse_ptr,
    max_M,
    sum_M,
    acc_MD,
    token_M,
    target_M,
    head_M,
    dim_D,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """What a row has found goes to its token, or where its target is negative to partial result ``-1 - target``."""
    # A query whose window lies past this range has seen nothing: its sum is 0 and its share in the merge as well.
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    result_MD = acc_MD / sum_M[:, None]
    known_MD = (token_M >= 0)[:, None] & (dim_D < HEAD_DIM)[None, :]
    out_M = target_M * NUM_HEADS + head_M
    tl.store(
        out_ptr + out_M[:, None] * HEAD_DIM + dim_D[None, :],
        result_MD.to(out_ptr.dtype.element_ty),
        mask=known_MD & (target_M >= 0)[:, None],
    )
    partial_M = (-1 - target_M) * NUM_HEADS + head_M
    is_part_M = (token_M >= 0) & (target_M < 0)
    tl.store(partial_ptr + partial_M[:, None] * HEAD_DIM + dim_D[None, :], result_MD, mask=known_MD & is_part_M[:, None])
    tl.store(lse_ptr + partial_M, max_M + tl.log2(sum_M), mask=is_part_M)


@triton.jit(do_not_specialize=["table_stride"])  # it is another one in each step, and one compilation is to serve all
def _attend_item(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    tokens_ptr,
    positions_ptr,
    targets_ptr,
    seq_ptr,
    begin_ptr,
    end_ptr,
    tables_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    score_scale,
    cap,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Program (item, key/value head). Row m of the tile is head ``m % GROUP`` of query ``m // GROUP``."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    token_M, position_M, target_M = _queries(tokens_ptr, positions_ptr, targets_ptr, item, GROUP, QUERIES, M)
    head_M = kv_head * GROUP + tl.arange(0, M) % GROUP
    dim_D = tl.arange(0, D)
    known_MD = (token_M >= 0)[:, None] & (dim_D < HEAD_DIM)[None, :]
    q_MD = tl.load(q_ptr + (token_M * q_token_stride + head_M * q_head_stride)[:, None] + dim_D[None, :], mask=known_MD, other=0.0)

    begin, end = tl.load(begin_ptr + item), tl.load(end_ptr + item)
    if WINDOWED:
        earliest = tl.min(tl.where(token_M >= 0, position_M, 2147483647)) - window + 1
        begin = tl.maximum(begin, tl.maximum(earliest, 0) // L * L)
    table_ptr = tables_ptr + tl.load(seq_ptr + item).to(tl.int64) * table_stride

    max_M, sum_M, acc_MD = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    for first in range(begin, end, L):
        position_L = first + tl.arange(0, L)
        row_L = _pool_rows(table_ptr, position_L, end, kv_head, NUM_HEADS // GROUP, BLOCK_SIZE)
        # What is out of range is read as zero and not left to its weight of zero: an unwritten slot may hold NaN.
        known_DL = (position_L < end)[None, :] & (dim_D < HEAD_DIM)[:, None]
        k_DL = tl.load(keys_ptr + row_L[None, :] * HEAD_DIM + dim_D[:, None], mask=known_DL, other=0.0)
        score_ML = _dot(q_MD, k_DL.to(q_MD.dtype), WIDENED) * score_scale
        score_ML = _capped_and_masked(score_ML, position_M, position_L, end, cap, window, CAPPED, WINDOWED)
        weight_ML, decay_M, max_M = _weights(score_ML, max_M)
        known_LD = (position_L < end)[:, None] & (dim_D < HEAD_DIM)[None, :]
        v_LD = tl.load(values_ptr + row_L[:, None] * HEAD_DIM + dim_D[None, :], mask=known_LD, other=0.0)
        sum_M = sum_M * decay_M + tl.sum(weight_ML, 1)
        acc_MD = acc_MD * decay_M[:, None] + _dot(weight_ML.to(q_MD.dtype), v_LD.to(q_MD.dtype), WIDENED)
    _store(out_ptr, partial_ptr, lse_ptr, max_M, sum_M, acc_MD, token_M, target_M, head_M, dim_D, NUM_HEADS, HEAD_DIM)


@triton.jit
def _merge(partial_ptr, lse_ptr, out_ptr, merged_ptr, parts_ptr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Program (merged token, head): the parts' mean, each weighted by two to the power of its log-sum-exp. Nobody has no parts."""
    place, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(merged_ptr + place).to(tl.int64)
    is_known = token >= 0
    first, last = tl.load(parts_ptr + place), tl.load(parts_ptr + place + 1)
    dim_D = tl.arange(0, D)
    largest = tl.load(lse_ptr + first * NUM_HEADS + head, mask=is_known, other=0.0)
    for part in range(first + 1, last):
        largest = tl.maximum(largest, tl.load(lse_ptr + part * NUM_HEADS + head))
    total = largest * 0.0
    acc_D = tl.zeros([D], tl.float32)
    for part in range(first, last):
        weight = tl.exp2(tl.load(lse_ptr + part * NUM_HEADS + head) - largest)
        total += weight
        row = (part * NUM_HEADS + head).to(tl.int64)
        acc_D += weight * tl.load(partial_ptr + row * HEAD_DIM + dim_D, mask=dim_D < HEAD_DIM, other=0.0)
    result_D = (acc_D / tl.where(is_known, total, 1.0)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim_D, result_D, mask=is_known & (dim_D < HEAD_DIM))
