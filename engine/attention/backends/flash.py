"""Attention by the flash-attn package on an NVIDIA GPU, over the paged store as it lies.

Knows what FlashAttention 2 (package flash_attn) and 3 (package flash_attn_interface, on Hopper) can be asked, and how a step
is put to them: version 3 takes any step in one call, version 2 its decodes in one and its chunks in another.
Shape suffixes: T tokens of the step, S sequences of a call, N blocks a sequence at most, H query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.backend import AttentionInputs, AttentionSpec
from engine.kv.format import KVLayer, load_format
from engine.kv.formats._plain import PlainLayer

MAX_HEAD_DIM = 256
_LEAST_CAPABILITY = (8, 0)
_FORMAT_OF_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The functions of an installed flash-attn, by their published names."""

    version: int
    flash_attn_with_kvcache: Callable[..., Tensor]
    flash_attn_varlen_func: Callable[..., Tensor]


def refuse(spec: AttentionSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"flash-attn runs on an NVIDIA GPU, not on {spec.device.type}"
    capability = torch.cuda.get_device_capability(spec.device)
    if capability < _LEAST_CAPABILITY:
        return "flash-attn needs a GPU of compute capability 8.0 or more, and this one's is {}.{}".format(*capability)
    version = installed_version(capability)
    if version is None:
        return "the package flash-attn is not installed; pip install --no-build-isolation 'pagemill[flash]'"
    if importlib.util.find_spec("triton") is None:
        return "the step around flash-attn runs on Triton kernels, and triton is not installed; pip install 'pagemill[gpu]'"
    return refuse_version(spec, version)


def refuse_version(spec: AttentionSpec, version: int) -> str | None:
    """Why that version of flash-attn cannot serve, were it and its GPU there."""
    if spec.dtype not in _FORMAT_OF_DTYPE:
        return f"flash-attn computes in bfloat16 or float16 and the model in {str(spec.dtype).removeprefix('torch.')}; set model.dtype"
    if spec.kv_format != _FORMAT_OF_DTYPE[spec.dtype]:
        wanted = _FORMAT_OF_DTYPE[spec.dtype]
        return f"flash-attn reads keys and values in the model's dtype; use kv_cache.format={wanted}, not {spec.kv_format}"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8 != 0:
        return f"flash-attn takes head sizes that are multiples of 8 up to {MAX_HEAD_DIM}, and this model's is {spec.head_dim}"
    if version == 2 and spec.block_size % 256 != 0:
        return f"FlashAttention 2 takes blocks of a multiple of 256 tokens, and kv_cache.block_size is {spec.block_size}"
    if spec.batch_invariant:
        return "engine.batch_invariant=true needs results that do not depend on the batch; use engine.attention=triton"
    return None


def installed_version(capability: tuple[int, int]) -> int | None:
    """The version of flash-attn that is installed and runs on a GPU of that compute capability; None: there is none."""
    if capability[0] == 9 and importlib.util.find_spec("flash_attn_interface") is not None:
        return 3
    if capability >= _LEAST_CAPABILITY and importlib.util.find_spec("flash_attn") is not None:
        return 2
    return None


def load_library(version: int) -> Library:
    module = importlib.import_module("flash_attn_interface" if version == 3 else "flash_attn")
    return Library(
        version=version,
        flash_attn_with_kvcache=module.flash_attn_with_kvcache,
        flash_attn_varlen_func=module.flash_attn_varlen_func,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """Some of a step's sequences as flash-attn takes them; tensors int32 but ``rows``.

    Attributes:
        rows: int64, their rows of the step, sequence by sequence.
        query_starts_S1, kv_starts_S1: where each one's queries and positions begin, from 0 to their number.
        kv_lengths_S, tables_SN: as in AttentionInputs.
    """

    rows: Tensor
    query_starts_S1: Tensor
    kv_starts_S1: Tensor
    kv_lengths_S: Tensor
    tables_SN: Tensor
    max_queries: int
    max_kv_length: int


class Backend:
    """A plan is the step's sequences in as many parts as there are calls."""

    def __init__(self, spec: AttentionSpec, *, library: Library | None = None) -> None:
        self.spec = spec
        self.kv_format = load_format(spec.kv_format)
        if library is None:
            version = installed_version(torch.cuda.get_device_capability(spec.device))
            assert version is not None, "refused"
            library = load_library(version)
        self.library = library

    def plan(self, inputs: AttentionInputs) -> list[Sequences]:
        num_queries = np.diff(inputs.query_starts)
        if self.library.version == 3:
            return [self._sequences(inputs, np.arange(len(num_queries)))]
        parts = (np.flatnonzero(num_queries == 1), np.flatnonzero(num_queries > 1))
        return [self._sequences(inputs, seqs) for seqs in parts if len(seqs) > 0]

    def fixed_plan(self, *, num_seqs: int, num_blocks: int) -> list[Sequences]:
        """Implements ``engine.attention.backend.FixedPlans``: a call for decodes reads just the lengths and the tables."""
        rows = torch.arange(num_seqs + 1, device=self.spec.device)
        starts_S1 = rows.int()
        return [
            Sequences(
                rows=rows[:-1],
                query_starts_S1=starts_S1,
                kv_starts_S1=starts_S1,
                kv_lengths_S=torch.ones_like(starts_S1[:-1]),
                tables_SN=torch.zeros(num_seqs, num_blocks, dtype=torch.int32, device=self.spec.device),
                max_queries=1,
                max_kv_length=num_blocks * self.spec.block_size,
            )
        ]

    def refill(self, plan: list[Sequences], inputs: AttentionInputs) -> None:
        (part,) = plan
        part.kv_lengths_S.copy_(self._ints(inputs.kv_lengths))
        part.tables_SN[:, : inputs.block_tables.shape[1]] = self._ints(inputs.block_tables)

    def attend(self, q_THD: Tensor, kv: KVLayer, plan: list[Sequences], *, window: int | None = None) -> Tensor:
        assert isinstance(kv, PlainLayer), "the store was allocated with this backend's kv_format"
        settings = {
            "softmax_scale": self.spec.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": self.spec.soft_cap or 0.0,
        }
        # flash-attn's order, [blocks, block_size, K, D]; it asks for adjoining numbers only in the last dimension.
        pools = kv.keys.transpose(1, 2), kv.values.transpose(1, 2)
        if len(plan) == 1:
            return self._call(q_THD, *pools, plan[0], settings)
        out_THD = torch.empty_like(q_THD)
        for part in plan:
            out_THD[part.rows] = self._call(q_THD[part.rows], *pools, part, settings)
        return out_THD

    def _call(self, q_THD: Tensor, keys: Tensor, values: Tensor, part: Sequences, settings: dict[str, Any]) -> Tensor:
        if self.library.version == 3:
            return self.library.flash_attn_with_kvcache(
                q_THD,
                keys,
                values,
                cache_seqlens=part.kv_lengths_S,
                page_table=part.tables_SN,
                cu_seqlens_q=part.query_starts_S1,
                max_seqlen_q=part.max_queries,
                **settings,
            )
        if part.max_queries == 1:
            out_S1HD = self.library.flash_attn_with_kvcache(
                q_THD[:, None], keys, values, cache_seqlens=part.kv_lengths_S, block_table=part.tables_SN, **settings
            )
            return out_S1HD[:, 0]
        return self.library.flash_attn_varlen_func(
            q_THD,
            keys,
            values,
            cu_seqlens_q=part.query_starts_S1,
            cu_seqlens_k=part.kv_starts_S1,
            max_seqlen_q=part.max_queries,
            max_seqlen_k=part.max_kv_length,
            block_table=part.tables_SN,
            **settings,
        )

    def _sequences(self, inputs: AttentionInputs, seqs: npt.NDArray[np.int64]) -> Sequences:
        num_queries, kv_lengths = np.diff(inputs.query_starts)[seqs], inputs.kv_lengths[seqs]
        query_starts = np.concatenate(([0], np.cumsum(num_queries)))
        rows = np.arange(query_starts[-1]) + np.repeat(inputs.query_starts[seqs] - query_starts[:-1], num_queries)
        num_blocks = -(-int(kv_lengths.max()) // inputs.block_size)
        return Sequences(
            rows=torch.from_numpy(rows).to(self.spec.device),
            query_starts_S1=self._ints(query_starts),
            kv_starts_S1=self._ints(np.concatenate(([0], np.cumsum(kv_lengths)))),
            kv_lengths_S=self._ints(kv_lengths),
            tables_SN=self._ints(inputs.block_tables[seqs, :num_blocks]),
            max_queries=int(num_queries.max()),
            max_kv_length=int(kv_lengths.max()),
        )

    def _ints(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self.spec.device)
