"""Draws tokens by chance on the CPU's own kernels, rows spread over the threads.

Knows the C structure; what a draw is engine/sampling/chance.py defines, and what it costs draw.cpp decides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceOf
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from engine.sequence import Sequence

_SETTINGS = np.dtype([("temperature", "f4"), ("min_p", "f4"), ("top_k", "i8"), ("top_p", "f8"), ("chance", "f8")])


class NativeChoice:
    """Implements ``engine.sampling.chance.Choose``."""

    def __init__(self, library: ctypes.CDLL, *, num_threads: int) -> None:
        self._draw = library.pagemill_draw
        self._draw.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32, c_void_p)
        self._num_threads = num_threads

    def __call__(self, logits_RV: Tensor, seqs: SequenceOf[Sequence], chance_R: SequenceOf[float]) -> Tensor:
        assert logits_RV.dtype == torch.float32 and logits_RV.stride(-1) == 1
        num_rows, num_tokens = logits_RV.shape
        asked = (seq.request.sampling for seq in seqs)
        settings = np.array(
            [(p.temperature, p.min_p, min(p.top_k, num_tokens), p.top_p, u) for p, u in zip(asked, chance_R, strict=True)], dtype=_SETTINGS
        )
        token_ids_R = torch.empty(num_rows, dtype=torch.int64)
        self._draw(
            logits_RV.data_ptr(), logits_RV.stride(0), num_rows, num_tokens, settings.ctypes.data, self._num_threads, token_ids_R.data_ptr()
        )
        return token_ids_R
