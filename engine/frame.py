"""What the settings come to on this machine: the device, the backend and the sizes that an engine's parts are made with.

Reads the model's config and no weight; refuses what cannot be served by the setting's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionBackend, AttentionSpec, FixedPlans
from engine.attention.backends import cpu, flash, triton
from engine.attention.select import select
from engine.config import EngineConfig, KVCacheConfig, ModelConfig
from engine.context import max_model_len
from engine.device import Device
from engine.kv.format import format_name
from engine.kv.shape import BlockShape
from engine.kv.sizing import Footprint, pool_size
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.layers.spec import DecoderSpec
from engine.runner.buckets import BucketedForward, bucket_sizes
from engine.runner.cudagraph import CudaGraphs, EagerGraphs
from engine.runner.forward import Forward, TorchForward
from engine.runner.native import NativeForward
from engine.runner.parallel import Alone, Group
from engine.runner.rehearsal import Rehearsal
from engine.weights import read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the settings come to on this machine, for one of the processes that share the model, before a weight is read.

    ``spec`` and ``block_bytes`` are the whole model's, ``share`` and ``footprint`` what this process has of it.
    """

    device: Device
    dtype: torch.dtype
    spec: DecoderSpec
    share: DecoderSpec
    max_model_len: int
    backend: AttentionBackend[Any]
    footprint: Footprint
    num_ranks: int
    int8: bool

    @classmethod
    def of(cls, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig, *, rank: int = 0) -> Frame:
        """Raises ValueError where a setting cannot be served."""
        num_ranks = engine.tensor_parallel
        device = Device.find(engine.device, threads=engine.threads).of_rank(rank, num_ranks=num_ranks)
        dtype = device.dtype(model.dtype)
        spec = read_spec(model)
        share = spec.share(num_ranks)
        context = max_model_len(engine, spec=spec)
        kv_format = format_name(kv_cache.format, model_dtype=str(dtype).removeprefix("torch."))
        attention = _attention_spec(engine, kv_cache, share, device=device, dtype=dtype, kv_format=kv_format)
        backend = select(engine.attention, spec=attention)
        if model.weights == "int8":
            _refuse_int8(backend, attention)
        footprint = Footprint(
            kv_format=backend.kv_format,
            shape=BlockShape(block_size=kv_cache.block_size, num_kv_heads=share.num_kv_heads, head_dim=spec.head_dim),
            num_layers=spec.num_layers,
            dtype_bytes=dtype.itemsize,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
        )
        return cls(
            device=device,
            dtype=dtype,
            spec=spec,
            share=share,
            max_model_len=context,
            backend=backend,
            footprint=footprint,
            num_ranks=num_ranks,
            int8=model.weights == "int8",
        )

    def free_bytes(self, group: Group | Alone) -> int:
        """What the whole pool may take, with as much on each rank as the one with the least has free: on a CPU all have the same."""
        least = group.least(self.device.free_bytes())
        return least if self.device.kind == "cpu" else least * self.num_ranks

    @property
    def block_bytes(self) -> int:
        return self.footprint.block_bytes * self.num_ranks

    @property
    def computes_apart(self) -> bool:
        """Whether the host may go on while the device computes: other ranks would have to rehearse and record in step."""
        return self.device.computes_apart and self.num_ranks == 1

    @property
    def rehearsal(self) -> Rehearsal:
        return Rehearsal(
            block_size=self.footprint.shape.block_size,
            max_num_seqs=self.footprint.max_num_seqs,
            max_num_batched_tokens=self.footprint.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )

    def num_blocks(self, kv_cache: KVCacheConfig, *, free_bytes: int, step_bytes: int = 0) -> int:
        """Raises ValueError where not one fits."""
        return pool_size(
            kv_cache,
            block_bytes=self.block_bytes,
            free_bytes=free_bytes,
            device_kind=self.device.kind,
            bytes_beside=self.bytes_beside,
            step_bytes=step_bytes,
        )

    def store(self, num_blocks: int) -> KVStore:
        kv_format = self.backend.kv_format
        return KVStore(
            kv_format,
            shape=self.footprint.shape,
            num_layers=self.spec.num_layers,
            num_blocks=num_blocks,
            device=self.device.torch_device,
            dtype=self.dtype,
            places=None if kv_format.is_plain else self.footprint.places(num_blocks),
        )

    def forward(self, decoder: Decoder, *, store: KVStore) -> Forward:
        """A device's own kernels run the step where they, or flash-attn, run the attention; torch does where another backend does."""
        if isinstance(self.backend, cpu.Backend):
            max_tokens = self.footprint.max_num_batched_tokens
            return NativeForward(decoder, store=store, backend=self.backend, max_tokens=max_tokens, int8=self.int8)
        if is_fused(self.backend):
            from engine.runner.fused import FusedForward

            return FusedForward(decoder, store=store, backend=self.backend)
        return TorchForward(decoder, store=store, backend=self.backend)

    @property
    def is_recorded(self) -> bool:
        """Whether decodes run in fixed sizes, which are recorded before the first row."""
        return self.computes_apart and self.backend.kv_format.is_plain and isinstance(self.backend, FixedPlans)

    def bucketed(self, forward: TorchForward, *, spare_block: int) -> BucketedForward:
        return BucketedForward(
            forward,
            sizes=bucket_sizes(self.footprint.max_num_seqs),
            spare_block=spare_block,
            max_blocks=-(-self.max_model_len // self.footprint.shape.block_size),
            graphs=CudaGraphs() if self.device.kind == "cuda" else EagerGraphs(),
        )

    def bytes_beside(self, num_blocks: int) -> int:
        """What lies beside a pool of so many blocks: those that are not full, and the spare one of recorded steps."""
        return self.footprint.bytes_beside(num_blocks) * self.num_ranks + self.block_bytes * self.is_recorded


def is_fused(backend: AttentionBackend[Any]) -> bool:
    """Whether what lies around the attention runs on the Triton kernels: where these are, and the cache is plain."""
    return isinstance(backend, (triton.Backend, flash.Backend))


def _refuse_int8(backend: AttentionBackend[Any], spec: AttentionSpec) -> None:
    if not isinstance(backend, cpu.Backend):
        reason = cpu.refuse(spec) or "engine.attention names another backend"
        raise ValueError(f"model.weights: int8 runs on the CPU's own kernels only, and here they do not: {reason}")


def _attention_spec(
    engine: EngineConfig, kv_cache: KVCacheConfig, spec: DecoderSpec, *, device: Device, dtype: torch.dtype, kv_format: str
) -> AttentionSpec:
    return AttentionSpec(
        device=device.torch_device,
        dtype=dtype,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.attention_scale,
        block_size=kv_cache.block_size,
        kv_format=kv_format,
        batch_invariant=engine.batch_invariant,
        num_threads=device.num_threads,
        num_ranks=engine.tensor_parallel,
    )
