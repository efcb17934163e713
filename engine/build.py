"""Puts an engine together, in this process or across several: the only file that sees every part.

Decides nothing about a step; what the settings come to on this machine is engine/frame.py's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.backends import cpu
from engine.config import EngineConfig, KVCacheConfig, ModelConfig
from engine.device import Device
from engine.forecast import Forecast, Pool
from engine.frame import Frame, is_fused
from engine.grammar.compiler import Grammars
from engine.kernels.cpu.draw import NativeChoice
from engine.kv.capacity import Capacity
from engine.kv.format import format_name, load_format
from engine.kv.manager import BlockManager
from engine.kv.persist import SavedBlocks
from engine.kv.shape import BlockShape
from engine.kv.sizing import Footprint, pool_size
from engine.layers.decoder import Decoder
from engine.loop import Engine
from engine.overlap import OverlappedEngine
from engine.runner.batch import Batch
from engine.runner.forward import TorchForward
from engine.runner.parallel import Alone, Group
from engine.runner.runner import ModelRunner
from engine.runner.workers import Workers
from engine.sampling.chance import Choose, choose
from engine.sampling.sampler import Sampler
from engine.scheduler.admission import Admission
from engine.scheduler.scheduler import Scheduler
from engine.stats import Stats
from engine.tokenizer import Tokenizer
from engine.weights import checkpoint_folder, load_model, read_kv_shape
from engine.weights.identity import model_identity

# These say where a model's files lie and how a chat becomes tokens; what keys and values are is in the files.
_NO_PART_OF_A_BLOCK = ("path", "revision", "sha256", "fallback", "tokenizer", "chat_template")
log = logging.getLogger(__name__)


def build(*, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig, tokenizer: Tokenizer | None = None) -> Engine:
    """Load the model and put the engine together around it.

    Raises:
        ValueError: a setting cannot be served on this machine or by this model; the message names the key.
        WorkerLost: one of the processes that share the model ended while it was loaded.
    """
    frame = Frame.of(model, engine, kv_cache)
    saved = _saved_blocks(frame, model=model, engine=engine, kv_cache=kv_cache)
    tokenizer = tokenizer or Tokenizer.load(model)
    num_valid_tokens = min(tokenizer.vocab_size, frame.spec.vocab_size)
    sampler = Sampler(num_valid_tokens=num_valid_tokens, seed=engine.seed, choose=_choose(frame.backend))
    team = _team(frame.device, model=model, engine=engine, kv_cache=kv_cache)
    with team.together():
        group = team.join(frame.device.torch_device)
        decoder = _load(frame, group, model=model, engine=engine)

        def runner(*, num_blocks: int, stats: Stats, recorded: bool = False) -> ModelRunner:
            store = frame.store(num_blocks + recorded)
            forward = frame.forward(decoder, store=store)
            if recorded:
                assert isinstance(forward, TorchForward), "a backend of the CPU offers no fixed plans"
                forward = frame.bucketed(forward, spare_block=num_blocks)
            return ModelRunner(forward, store=store, sampler=sampler, stats=stats, device=frame.device.torch_device, team=team)

        model_runner = _ready(frame, group, kv_cache, runner)
    stats = model_runner.stats
    manager = BlockManager(
        num_blocks=stats.num_blocks,
        block_size=kv_cache.block_size,
        prefix_cache=kv_cache.prefix_cache,
        copies_parts=frame.backend.kv_format.is_plain,
        saved=saved,
    )
    scheduler = Scheduler(
        kv=manager,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=frame.max_model_len,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=frame.spec.vocab_size,
        vocabulary=tokenizer,
        grammars=Grammars(tokenizer, vocab_size=num_valid_tokens),
        stats=stats,
        admission=kv_cache.admission,
    )
    loop = OverlappedEngine if frame.computes_apart else Engine
    return loop(scheduler=scheduler, runner=model_runner, tokenizer=tokenizer, saved=saved, on_close=team.close)


def build_worker(*, rank: int, port: int, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig) -> Callable[[Batch], None]:
    """Rank ``rank``'s share of the model that ``build`` loads in the process that waits at ``port``: what computes a batch."""
    frame = Frame.of(model, engine, kv_cache, rank=rank)
    frame.device.take()
    group = Group.join(port, rank=rank, num_ranks=engine.tensor_parallel, device=frame.device.torch_device)
    decoder = _load(frame, group, model=model, engine=engine)
    store = frame.store(frame.num_blocks(kv_cache, free_bytes=frame.free_bytes(group)))
    forward = frame.forward(decoder, store=store)

    @torch.inference_mode()
    def compute(batch: Batch) -> None:
        store.copy_blocks(batch.copies)
        forward.hidden(batch.to(frame.device.torch_device))

    return compute


def _load(frame: Frame, group: Group | Alone, *, model: ModelConfig, engine: EngineConfig) -> Decoder:
    """This process's share of the weights, on its device."""
    frame.device.take()
    share = group.share(batch_invariant=engine.batch_invariant)
    return load_model(model, dtype=frame.dtype, device=frame.device.torch_device, batch_invariant=engine.batch_invariant, share=share)


def _ready(frame: Frame, group: Group | Alone, kv_cache: KVCacheConfig, runner: Callable[..., ModelRunner]) -> ModelRunner:
    """The runner over a pool of the right size, rehearsed where that is due; ``runner`` makes one over any pool."""
    began_s, step_bytes = time.perf_counter(), 0
    rehearsal = frame.rehearsal if frame.computes_apart else None
    if rehearsal is not None:
        step_bytes = rehearsal.step_bytes(runner(num_blocks=rehearsal.num_blocks, stats=Stats()), frame.device.peak_bytes)
    num_blocks = frame.num_blocks(kv_cache, free_bytes=frame.free_bytes(group), step_bytes=step_bytes)
    kv_bytes = num_blocks * frame.block_bytes + frame.bytes_beside(num_blocks)
    stats = Stats(num_blocks=num_blocks, kv_bytes=kv_bytes, device_peak=frame.device.held_bytes_peak)
    ready = runner(num_blocks=num_blocks, stats=stats, recorded=frame.is_recorded)
    if rehearsal is not None:
        rehearsal.warm_up(ready, num_blocks=num_blocks)
        stats.seconds.clear()
        stats.warm_up_s = time.perf_counter() - began_s
    return ready


def forecast(*, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig, tokenizer: Tokenizer | None = None) -> Forecast:
    """The door of the engine that ``build`` would give, with nothing behind it: no weights are read and no pool is taken.

    Raises:
        ValueError: as for ``build``, but for what only the weights would show.
    """
    frame = Frame.of(model, engine, kv_cache)
    tokenizer = tokenizer or Tokenizer.load(model)
    weights = sum(weight.numel() for weight in Decoder(frame.share).parameters()) * frame.dtype.itemsize
    free_bytes = max(0, frame.free_bytes(Alone()) - weights * engine.tensor_parallel)
    num_blocks = frame.num_blocks(kv_cache, free_bytes=free_bytes)
    admission = Admission(
        num_blocks=num_blocks,
        block_size=kv_cache.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=frame.max_model_len,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=frame.spec.vocab_size,
        vocabulary=tokenizer,
        grammars=Grammars(tokenizer, vocab_size=min(tokenizer.vocab_size, frame.spec.vocab_size)),
    )
    pool = Pool(
        num_blocks=num_blocks,
        block_size=kv_cache.block_size,
        block_bytes=frame.block_bytes,
        bytes_beside=frame.bytes_beside(num_blocks),
        max_num_seqs=engine.max_num_seqs,
        max_len=admission.max_len,
        prefix_cache=kv_cache.prefix_cache,
    )
    return Forecast(admission=admission, pool=pool)


def capacity(*, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig, num_bytes: int | None = None) -> Capacity:
    """What fits into a KV pool of ``num_bytes``, None for that of the settings; asks no more of the model than its config.json.

    Raises:
        ValueError: there is no such model, or its config does not tell the sizes; the message names the key.
    """
    device = Device.find(engine.device)
    dtype = device.dtype(model.dtype)
    name = format_name(kv_cache.format, model_dtype=str(dtype).removeprefix("torch."))
    of_model = read_kv_shape(model)
    footprint = Footprint(
        kv_format=load_format(name),
        shape=BlockShape(block_size=kv_cache.block_size, num_kv_heads=of_model.num_kv_heads, head_dim=of_model.head_dim),
        num_layers=of_model.num_layers,
        dtype_bytes=dtype.itemsize,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )
    settings = kv_cache if num_bytes is None else replace(kv_cache, memory=num_bytes, num_blocks=None)
    num_blocks = pool_size(
        settings,
        block_bytes=footprint.block_bytes,
        free_bytes=max(device.free_bytes(), settings.memory_bytes or 0),
        device_kind=device.kind,
        bytes_beside=footprint.bytes_beside,
    )
    return Capacity.of(
        format=name,
        num_bytes=settings.memory_bytes or num_blocks * footprint.block_bytes + footprint.bytes_beside(num_blocks),
        num_blocks=num_blocks,
        shape=footprint.shape,
        num_layers=of_model.num_layers,
        max_model_len=engine.max_model_len or of_model.max_position_embeddings,
        dtype_bytes=dtype.itemsize,
    )


def _team(device: Device, *, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig) -> Alone | Workers:
    """The processes that share the model; they load it from a folder, so that it is fetched and converted once."""
    if engine.tensor_parallel == 1:
        return Alone()
    if device.kind == "cpu":
        log.warning("engine.tensor_parallel: processes on one CPU share its cores, and torch computes, not the CPU's kernels: it is slower")
    fetched = replace(model, path=str(checkpoint_folder(model)), sha256=None, fallback=None)
    return Workers(engine.tensor_parallel, settings={"model": fetched, "engine": engine, "kv_cache": kv_cache})


def _choose(backend: AttentionBackend[Any]) -> Choose:
    """Draws come from the device's own kernels where the step does."""
    if isinstance(backend, cpu.Backend):
        return NativeChoice(backend.library, num_threads=backend.spec.num_threads)
    if is_fused(backend):
        from engine.kernels.triton import sampling

        return sampling.choose
    return choose


def _saved_blocks(frame: Frame, *, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig) -> SavedBlocks | None:
    """The blocks in ``kv_cache.persist`` that this engine would have computed, bit for bit as far as can be told beforehand."""
    if kv_cache.persist is None:
        return None
    if engine.tensor_parallel > 1:
        raise ValueError("kv_cache.persist: keeps the blocks of one process, and engine.tensor_parallel spreads them over several")
    backend = frame.backend
    identity = {
        "files": model_identity(model),
        "model": {key: value for key, value in asdict(model).items() if key not in _NO_PART_OF_A_BLOCK},
        "dtype": frame.dtype,
        "format": (format_name(kv_cache.format, model_dtype=str(frame.dtype).removeprefix("torch.")), type(backend.kv_format).__qualname__),
        "block": (frame.spec.num_layers, frame.block_bytes, asdict(frame.footprint.shape)),
        "attention": type(backend).__module__,
        "kernels": Path(backend.library._name).name if isinstance(backend, cpu.Backend) else None,
        "batch_invariant": engine.batch_invariant,
        "code": version("pagemill"),
        "torch": torch.__version__,
        "hardware": frame.device.hardware,
    }
    return SavedBlocks(
        Path(kv_cache.persist).expanduser(), identity=identity, block_bytes=frame.block_bytes, max_bytes=kv_cache.persist_bytes
    )
