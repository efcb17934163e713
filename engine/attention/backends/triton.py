"""Attention by this project's own Triton kernels on an NVIDIA GPU: prefill chunks, decodes and shared prefixes in one launch.

Knows when the kernels can serve and how finely a step is cut for the GPU at hand; what they do is
engine/kernels/triton/attention.py. With TRITON_INTERPRET=1 they run on the CPU, thousands of times slower, for tests.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.backend import AttentionInputs, AttentionSpec
from engine.attention.work import Work, cut
from engine.kv.format import KVLayer, load_format
from engine.kv.formats._plain import PlainLayer

if TYPE_CHECKING:
    from engine.kernels.triton.attention import DeviceWork, Shape

MAX_HEAD_DIM = 256
_PLAIN_FORMATS = ("fp32", "bf16", "fp16")

# Rows of a tile, one for each query and query head: few where each sequence has one query, many for prefill.
_NARROW_ROWS, _WIDE_ROWS = 16, 64
# Reading a prefix once is worth its own items and the merge when it saves this many tokens' keys and values.
_MIN_SAVED_TOKENS = 12_000
# Positions below which an item is not worth cutting (a multiple of all tiles), and items that keep one multiprocessor busy.
_MIN_SEGMENT = 512
_ITEMS_PER_PROCESSOR = 4


def refuse(spec: AttentionSpec) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install 'pagemill[gpu]'"
    if spec.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels run on an NVIDIA GPU, not on {spec.device.type} (with TRITON_INTERPRET=1 they do, for tests)"
    if spec.kv_format not in _PLAIN_FORMATS:
        return f"the kernels read keys and values in {', '.join(_PLAIN_FORMATS)}, not in {spec.kv_format}; set kv_cache.format"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"the kernels take head sizes up to {MAX_HEAD_DIM}, and this model's is {spec.head_dim}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a step may be cut into items of work, beyond the tiles that it must be cut into.

    Attributes:
        num_items, min_segment, min_saved_tokens: as in ``engine.attention.work.cut``.
    """

    num_items: int
    min_segment: int = _MIN_SEGMENT
    min_saved_tokens: int | None = _MIN_SAVED_TOKENS

    @classmethod
    def fitting(cls, spec: AttentionSpec) -> Cut:
        """With ``batch_invariant`` a row's positions are one item's, whatever its mates: the order of sums is its own."""
        if spec.batch_invariant:
            return cls(num_items=0, min_saved_tokens=None)
        num_processors = torch.cuda.get_device_properties(spec.device).multi_processor_count if spec.device.type == "cuda" else 1
        return cls(num_items=-(-_ITEMS_PER_PROCESSOR * num_processors // spec.num_kv_heads))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TritonPlan:
    shape: Shape
    work: DeviceWork


class Backend:
    """A step of decodes alone runs in tiles of few rows; with ``batch_invariant`` all steps run in tiles of one shape."""

    def __init__(self, spec: AttentionSpec, *, cut: Cut | None = None) -> None:
        from engine.kernels.triton.attention import Shape

        self.spec = spec
        self.kv_format = load_format(spec.kv_format)
        self.cut = cut or Cut.fitting(spec)

        def shape(rows: int) -> Shape:
            return Shape.fitting(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                block_size=spec.block_size,
                rows=rows,
                itemsize=spec.dtype.itemsize,
            )

        self._wide = shape(_WIDE_ROWS)
        self._narrow = self._wide if spec.batch_invariant else shape(_NARROW_ROWS)

    def plan(self, inputs: AttentionInputs) -> TritonPlan:
        from engine.kernels.triton.attention import DeviceWork

        shape = self._narrow if inputs.only_decodes else self._wide
        return TritonPlan(shape=shape, work=DeviceWork.copy(self._work(inputs, shape), inputs.block_tables, self.spec.device))

    def fixed_plan(self, *, num_seqs: int, num_blocks: int) -> TritonPlan:
        """Implements ``engine.attention.backend.FixedPlans``.

        Each decode has its own tile, and there are at most as many tiles of shared prefixes. Where tiles are cut, each has a
        last segment, and the others are ``num_items`` at most: a segment is no less than its share of all positions.
        """
        from engine.kernels.triton.attention import DeviceWork

        queries, shares = self._narrow.tile_queries, self.cut.min_saved_tokens is not None
        num_items = num_seqs * (1 + shares) + self.cut.num_items
        merges = shares or self.cut.num_items > 0
        work = DeviceWork(
            num_items=num_items,
            tile_queries=queries,
            num_merged=num_seqs if merges else 0,
            num_partials=num_items * queries if merges else 0,
            tables_shape=(num_seqs, num_blocks),
            device=self.spec.device,
        )
        return TritonPlan(shape=self._narrow, work=work)

    def refill(self, plan: TritonPlan, inputs: AttentionInputs) -> None:
        plan.work.fill(self._work(inputs, plan.shape), inputs.block_tables)

    def _work(self, inputs: AttentionInputs, shape: Shape) -> Work:
        return cut(
            inputs,
            tile_queries=shape.tile_queries,
            min_saved_tokens=self.cut.min_saved_tokens,
            num_items=self.cut.num_items,
            min_segment=self.cut.min_segment,
        )

    def attend(self, q_THD: Tensor, kv: KVLayer, plan: TritonPlan, *, window: int | None = None) -> Tensor:
        from engine.kernels.triton.attention import attend

        assert isinstance(kv, PlainLayer), "the store was allocated with this backend's kv_format"
        spec = self.spec
        return attend(q_THD, kv.keys, kv.values, plan.work, shape=plan.shape, scale=spec.scale, soft_cap=spec.soft_cap, window=window)
