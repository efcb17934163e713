"""What a decoder does between its matrix products, each in one pass over the data: norms, the gated activation, the rotation.

Knows rows of numbers and slots of the cache. Sums are float32; a result is rounded where torch's layers round theirs, but the
rotation, which is rounded once. A row's result depends on that row alone.
Shape suffixes: T rows, E hidden size, I intermediate size, H query heads, K key/value heads, D head size, P positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_PIECE = 4096  # numbers of a row that one program of the activation takes
_PAIRS_AT_ONCE = 512  # pairs of numbers that one program rotates


def rms_norm(x_TE: Tensor, weight_E: Tensor, *, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` of each row (Zhang and Sennrich 2019)."""
    normed_TE = torch.empty_like(x_TE)
    _launch_norm(x_TE, x_TE, x_TE, normed_TE, weight_E, eps, added=False)
    return normed_TE


def add_rms_norm(x_TE: Tensor, stream_TE: Tensor, weight_E: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of ``stream + x``, and that sum."""
    normed_TE, sum_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
    _launch_norm(x_TE, stream_TE, sum_TE, normed_TE, weight_E, eps, added=True)
    return normed_TE, sum_TE


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``SiLU(gate) * up`` of rows that hold all gates and then all ups (Shazeer 2020): [T, 2 x I] -> [T, I]."""
    assert gate_up.is_contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out_TI = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    piece = min(_MAX_PIECE, triton.next_power_of_2(size))
    _silu_and_mul[(num_rows, triton.cdiv(size, piece))](gate_up, out_TI, size, PIECE=piece)
    return out_TI


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    slots_T: Tensor,
    positions_T: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    num_heads: int,
    norms_2D: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys by their positions (Su et al. 2021, half-split pairing) and store keys and values in their slots.

    Args:
        qkv: [T, (H + 2 x K) x D], all query heads, then the keys', then the values'.
        keys, values: pools [blocks, K, block_size, D], written at int64 ``slots_T``.
        cos_PD, sin_PD: float32, the angles of position p in row p, the same in both halves of D.
        norms_2D: the weights of an RMSNorm over each head before the rotation, the queries' and the keys'.

    Returns:
        The queries, [T, H, D].
    """
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    _, num_kv_heads, block_size, head_dim = keys.shape
    q_THD = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    half = triton.next_power_of_2(head_dim // 2)
    at_once = max(1, _PAIRS_AT_ONCE // half)
    _rotate_and_store[(triton.cdiv(len(qkv), at_once), num_heads + 2 * num_kv_heads)](
        qkv,
        q_THD,
        keys,
        values,
        slots_T,
        positions_T,
        cos_PD,
        sin_PD,
        qkv if norms_2D is None else norms_2D,
        len(qkv),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=half,
        N=at_once,
        NORMED=norms_2D is not None,
    )
    return q_THD


def _launch_norm(x_TE: Tensor, stream_TE: Tensor, sum_TE: Tensor, normed_TE: Tensor, weight_E: Tensor, eps: float, *, added: bool) -> None:
    assert x_TE.is_contiguous() and stream_TE.is_contiguous()
    size = x_TE.shape[1]
    _norm[(len(x_TE),)](x_TE, stream_TE, sum_TE, normed_TE, weight_E, size, eps, WIDTH=triton.next_power_of_2(size), ADDED=added)


@triton.jit
def _norm(x_ptr, stream_ptr, sum_ptr, normed_ptr, weight_ptr, size, eps, WIDTH: tl.constexpr, ADDED: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, WIDTH)
    inside = at < size
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    if ADDED:
        x = (x.to(tl.float32) + tl.load(stream_ptr + row + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    normed = (wide * _inverse_rms(tl.sum(wide * wide, 0) / size, eps)).to(x.dtype)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    tl.store(normed_ptr + row + at, (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit
def _inverse_rms(mean, eps):
    """Of a mean square; NaN, and so no row of zeros, where that overflowed."""
    return tl.rsqrt(mean + eps) + (mean - mean)


@triton.jit
def _silu_and_mul(gate_up_ptr, out_ptr, size, PIECE: tl.constexpr):
    """Program (row, piece of it)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = at < size
    gate = tl.load(gate_up_ptr + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(out_ptr + row * size + at, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])  # it is another one in each step, and one compilation is to serve all
def _rotate_and_store(
    qkv_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    norms_ptr,
    num_tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    N: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Program (N tokens, head of q, k or v); the two halves of a head, [N, HALF] each, are turned against each other."""
    token_N, head = tl.program_id(0) * N + tl.arange(0, N).to(tl.int64), tl.program_id(1)
    low = tl.arange(0, HALF)[None, :]
    high = low + HEAD_DIM // 2
    known_N = token_N < num_tokens
    inside = known_N[:, None] & (low < HEAD_DIM // 2)
    from_ptr = qkv_ptr + ((token_N * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM)[:, None]
    first = tl.load(from_ptr + low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + high, mask=inside, other=0.0).to(tl.float32)

    if head < NUM_HEADS + NUM_KV_HEADS:
        if NORMED:
            scale_N = _inverse_rms(tl.sum(first * first + second * second, 1) / HEAD_DIM, eps)
            weights_ptr = norms_ptr + tl.where(head < NUM_HEADS, 0, HEAD_DIM)
            dtype = qkv_ptr.dtype.element_ty
            weight_low = tl.load(weights_ptr + low, mask=low < HEAD_DIM // 2, other=0.0).to(tl.float32)
            weight_high = tl.load(weights_ptr + high, mask=low < HEAD_DIM // 2, other=0.0).to(tl.float32)
            first = (first * scale_N[:, None]).to(dtype).to(tl.float32) * weight_low
            second = (second * scale_N[:, None]).to(dtype).to(tl.float32) * weight_high
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        angle_N = tl.load(positions_ptr + token_N, mask=known_N, other=0) * HEAD_DIM
        cos = tl.load(cos_ptr + angle_N[:, None] + low, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angle_N[:, None] + low, mask=inside, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned

    if head < NUM_HEADS:
        to_ptr = q_ptr + ((token_N * NUM_HEADS + head) * HEAD_DIM)[:, None]
        tl.store(to_ptr + low, first.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(to_ptr + high, second.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        slot_N = tl.load(slots_ptr + token_N, mask=known_N, other=0)
        row = (((slot_N // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot_N % BLOCK_SIZE) * HEAD_DIM)[:, None]
        if head < NUM_HEADS + NUM_KV_HEADS:
            tl.store(keys_ptr + row + low, first.to(keys_ptr.dtype.element_ty), mask=inside)
            tl.store(keys_ptr + row + high, second.to(keys_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(values_ptr + row + low, first.to(values_ptr.dtype.element_ty), mask=inside)
            tl.store(values_ptr + row + high, second.to(values_ptr.dtype.element_ty), mask=inside)
