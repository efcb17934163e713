"""The engine's settings as plain frozen values: which model, how to run it, how to hold its KV cache.

Knows no file format and no command line; the defaults here are the defaults everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MOST_THREADS = 1024  # over any machine; far more than that ends the process without a word


def parse_bytes(text: str | int, *, key: str) -> int:
    """Read a size such as ``"512MiB"``, ``"4GiB"``, ``"1.5GB"`` or a plain number of bytes.

    Raises:
        ValueError: the text is no size; the message names ``key``.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f'{key}: {text!r} is not a size; write for example "512MiB" or "4GiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights and tokenizer to load.

    ``path`` is a folder with safetensors, a hub id, a .gguf file, or ``package:NAME/FILE.gguf`` for one inside an installed
    Python package. ``sha256`` is what a .gguf file must hash to; ``fallback`` is the hub id to use where the package is
    missing. ``dtype`` auto is bfloat16 where the hardware multiplies it natively, else float32. ``weights`` int8 rounds the
    projections' weights and inputs to 8 bits. ``tokenizer`` (folder or hub id) and ``chat_template`` (text or a file)
    replace the model's own.
    """

    path: str
    revision: str | None = None
    sha256: str | None = None
    fallback: str | None = None
    dtype: str = "auto"
    weights: str = "native"
    tokenizer: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        known = ("auto", "float32", "bfloat16", "float16")
        _require(self.dtype in known, f"model.dtype: {self.dtype!r} is not one of {', '.join(known)}")
        _require(self.weights in ("native", "int8"), f"model.weights: {self.weights!r} is not one of native, int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a step runs.

    ``max_num_batched_tokens`` is the token budget of one step, ``max_num_seqs`` the most sequences in flight,
    ``max_model_len`` the most tokens of a prompt and its answer (None: the model's own limit). With ``batch_invariant``
    a row's numbers do not depend on its neighbours, bit for bit. ``tensor_parallel`` devices share each layer, a process
    for each. ``seed`` keys the draws of requests without one.
    """

    device: str = "auto"
    attention: str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_model_len: int | None = None
    threads: int | None = None
    batch_invariant: bool = False
    tensor_parallel: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "threads", "tensor_parallel"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"engine.{key}: {value} must be 1 or more")
        _require((self.threads or 1) <= _MOST_THREADS, f"engine.threads: {self.threads} is over {_MOST_THREADS}")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"engine.max_num_batched_tokens: {self.max_num_batched_tokens} is under engine.max_num_seqs "
            f"({self.max_num_seqs}), so not every running sequence could get a token each step; raise it or lower the other",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """How keys and values are held: ``format`` (auto is the model's dtype), ``block_size`` tokens a block.

    The pool has ``num_blocks`` blocks, or as many as fit in ``memory`` ("4GiB"), or a safe share of what is free.
    ``admission`` safe starts only rows that the pool can hold to the end of their ``max_tokens``; optimistic starts more,
    and where memory gets short the row with the least computed work gives way and is computed again later. Blocks that
    several prompts shared are kept in the folder ``persist`` for the next run, up to ``persist_size`` of them.
    """

    format: str = "auto"
    block_size: int = 16
    memory: str | int | None = None
    num_blocks: int | None = None
    prefix_cache: bool = True
    admission: str = "optimistic"
    persist: str | None = None
    persist_size: str | int = "1GiB"

    def __post_init__(self) -> None:
        _require(
            self.persist is None or self.prefix_cache,
            "kv_cache.persist: keeps what the prefix cache shares; set kv_cache.prefix_cache=true",
        )
        _require(
            self.persist is None or (self.persist != "" and "://" not in self.persist),
            f"kv_cache.persist: {self.persist!r} is no folder on this machine",
        )
        parse_bytes(self.persist_size, key="kv_cache.persist_size")
        _require(1 <= self.block_size <= 1024, f"kv_cache.block_size: {self.block_size} is not in 1..1024")
        _require(self.num_blocks is None or self.num_blocks >= 1, f"kv_cache.num_blocks: {self.num_blocks} must be 1 or more")
        _require(self.memory is None or self.num_blocks is None, "kv_cache.memory and kv_cache.num_blocks: give one of the two")
        _require(self.admission in ("safe", "optimistic"), f"kv_cache.admission: {self.admission!r} is not one of safe, optimistic")
        if self.memory is not None:
            parse_bytes(self.memory, key="kv_cache.memory")

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory, key="kv_cache.memory")

    @property
    def persist_bytes(self) -> int:
        return parse_bytes(self.persist_size, key="kv_cache.persist_size")
