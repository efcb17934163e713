"""Draws tokens by chance without sorting the vocabulary: temperature, min_p, top_k, top_p and the draw in one kernel.

Knows rows of logits and numbers; names, meaning and order of the filters are those of engine/sampling/transforms.py. Each
filter keeps the leading tokens of one same order, by logit and of equal ones by id. So all of them come to one threshold and
the number of tokens on it that are kept, and both are found by bisection over the bits of a float32: 32 halvings at most,
each a pass over the row that counts, or weighs, what is over the middle (as in RadiK, Li et al. 2024, and FlashInfer's
sorting-free sampling, Ye et al. 2025, but without rejection: one uniform number gives one token).
Shape suffixes: R rows, V vocabulary, W numbers of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sequence import Sequence
from engine.transfer import sent

_MIN_TEMPERATURE = 1e-30
_PIECE = 4096


def choose(logits_RV: Tensor, seqs: SequenceOf[Sequence], chance_R: SequenceOf[float]) -> Tensor:
    """Implements ``engine.sampling.chance.Choose``; the tokens are those of torch's way, but where rounding turns them."""
    vocab_size, device = logits_RV.shape[-1], logits_RV.device
    params = [seq.request.sampling for seq in seqs]
    top_ks = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    return draw(
        logits_RV,
        chance_R=sent(chance_R, dtype=torch.float64, device=device),
        temperature_R=sent([p.temperature for p in params], dtype=torch.float32, device=device),
        min_p_R=sent([p.min_p for p in params], dtype=torch.float32, device=device),
        top_k_R=sent(top_ks, dtype=torch.int32, device=device),
        top_p_R=sent([p.top_p for p in params], dtype=torch.float64, device=device),
    )


def draw(logits_RV: Tensor, *, chance_R: Tensor, temperature_R: Tensor, min_p_R: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """One token id a row, int64 [R]: the first whose cumulative weight in id order exceeds ``chance`` times the whole.

    Args:
        logits_RV: float32; a ruled-out token has -inf.
        chance_R: float64 in [0, 1).
        temperature_R, min_p_R: float32; min_p 0 keeps all.
        top_k_R: int32; the size of the vocabulary keeps all.
        top_p_R: float64; 1 keeps all.

    A row with NaN or +inf, or without a token that is not ruled out, gives some id.
    """
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    num_rows, vocab_size = logits_RV.shape
    token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    _draw[(num_rows,)](
        logits_RV,
        token_ids_R,
        chance_R,
        temperature_R.clamp(min=_MIN_TEMPERATURE),
        min_p_R.log(),
        top_k_R,
        top_p_R,
        logits_RV.stride(0),
        vocab_size,
        W=min(_PIECE, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return token_ids_R


@triton.jit
def _key(x):
    """int32 in the order of the float32 numbers; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(key):
    """The float32 number of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(row_ptr, at, vocab_size, largest, temperature):
    """A piece of the row as ``(logit - largest) / temperature``; -inf past its end."""
    x = tl.load(row_ptr + at, mask=at < vocab_size, other=float("-inf"))
    return (x - largest) / temperature


@triton.jit
def _count_from(row_ptr, key, vocab_size, largest, temperature, W: tl.constexpr):
    """How many tokens have that key or a larger one."""
    count = 0
    for first in range(0, vocab_size, W):
        at = first + tl.arange(0, W)
        x = _scaled(row_ptr, at, vocab_size, largest, temperature)
        count += tl.sum(((_key(x) >= key) & (at < vocab_size)).to(tl.int32), 0)
    return count


@triton.jit
def _weight_from(row_ptr, key, vocab_size, largest, temperature, W: tl.constexpr):
    """The weight, float64, of the tokens that have that key or a larger one."""
    weight = tl.zeros([1], tl.float64)
    for first in range(0, vocab_size, W):
        x = _scaled(row_ptr, first + tl.arange(0, W), vocab_size, largest, temperature)
        weight += tl.sum(tl.where(_key(x) >= key, tl.exp(x).to(tl.float64), 0.0), 0)
    return tl.sum(weight, 0)


@triton.jit
def _key_by_count(row_ptr, low, wanted, vocab_size, largest, temperature, W: tl.constexpr):
    """A key, ``low`` or over it, from which on there are just ``wanted`` tokens; else the largest with more of them."""
    low, high = low.to(tl.int64), tl.full([], 1, tl.int64)  # the largest scaled logit is 0, whose key is 0
    while high - low > 1:
        middle = (low + high) // 2
        count = _count_from(row_ptr, middle.to(tl.int32), vocab_size, largest, temperature, W)
        if count >= wanted:
            low = middle
            if count == wanted:
                high = middle + 1
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _key_by_weight(row_ptr, low, wanted, vocab_size, largest, temperature, W: tl.constexpr):
    """The largest key, ``low`` or over it, from which on the tokens weigh at least ``wanted``; from ``low`` on they do."""
    low, high = low.to(tl.int64), tl.full([], 1, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        if _weight_from(row_ptr, middle.to(tl.int32), vocab_size, largest, temperature, W) >= wanted:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _first_over(row_ptr, threshold, num_level, target, vocab_size, largest, temperature, W: tl.constexpr):
    """The first kept token with which the cumulative weight exceeds ``target``; the last kept one where none does."""
    found, last_kept = vocab_size, 0
    before = target * 0.0
    num_met = 0
    for first in range(0, vocab_size, W):
        at = first + tl.arange(0, W)
        x = _scaled(row_ptr, at, vocab_size, largest, temperature)
        key = _key(x)
        on_level = ((key == threshold) & (at < vocab_size)).to(tl.int32)
        leading = (on_level == 1) & (num_met + tl.cumsum(on_level, 0) <= num_level)
        kept = ((key > threshold) & (at < vocab_size)) | leading
        weight = tl.where(kept, tl.exp(x).to(tl.float64), 0.0)
        cumulative = before + tl.cumsum(weight, 0)
        found = tl.minimum(found, tl.min(tl.where(kept & (cumulative > target), at, vocab_size), 0))
        last_kept = tl.maximum(last_kept, tl.max(tl.where(kept, at, 0), 0))
        before += tl.sum(weight, 0)
        num_met += tl.sum(on_level, 0)
    return tl.where(found < vocab_size, found, last_kept)


@triton.jit
def _draw(
    logits_ptr,
    token_ids_ptr,
    chance_ptr,
    temperature_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    row_stride,
    vocab_size,
    W: tl.constexpr,
):
    """Program (row). Kept are the tokens over ``threshold``, a key, and ``num_level`` of those on it; ``over`` is the formers' weight."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    temperature = tl.load(temperature_ptr + row)
    largest = float("-inf")
    for first in range(0, vocab_size, W):
        at = first + tl.arange(0, W)
        largest = tl.maximum(largest, tl.max(tl.load(row_ptr + at, mask=at < vocab_size, other=float("-inf")), 0))

    threshold = _key(tl.maximum(tl.load(log_min_p_ptr + row), -3.4028234663852886e38))
    top_k = tl.load(top_k_ptr + row)
    num_level = vocab_size
    if top_k < _count_from(row_ptr, threshold, vocab_size, largest, temperature, W):
        threshold = _key_by_count(row_ptr, threshold, top_k, vocab_size, largest, temperature, W)
        num_level = top_k - _count_from(row_ptr, threshold + 1, vocab_size, largest, temperature, W)

    num_over = _count_from(row_ptr, threshold + 1, vocab_size, largest, temperature, W)
    num_level = tl.minimum(num_level, _count_from(row_ptr, threshold, vocab_size, largest, temperature, W) - num_over)
    over = _weight_from(row_ptr, threshold + 1, vocab_size, largest, temperature, W)
    whole = over + num_level * tl.exp(_number(threshold)).to(tl.float64)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        wanted = whole * top_p
        if over >= wanted:
            threshold = _key_by_weight(row_ptr, threshold + 1, wanted, vocab_size, largest, temperature, W)
            over = _weight_from(row_ptr, threshold + 1, vocab_size, largest, temperature, W)
            num_level = vocab_size
        each = tl.exp(_number(threshold)).to(tl.float64)
        needed = tl.ceil((wanted - over) / each).to(tl.int32)
        num_level = tl.minimum(num_level, tl.maximum(needed, 1))
        whole = over + num_level * each

    target = whole * tl.load(chance_ptr + row)
    token_id = _first_over(row_ptr, threshold, num_level, target, vocab_size, largest, temperature, W)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
