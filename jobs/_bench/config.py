"""What `pagemill bench` is told: the keys of ``conf/bench.yaml`` and what they may hold.

Knows no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import EngineConfig, KVCacheConfig, ModelConfig, SamplingParams
from jobs._bench.tables import TableOptions
from jobs._bench.workload import Workload
from jobs._schema import JobOptions
from pipeline import InputOptions, PromptOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(Workload):
    """The synthetic workload, and what is done with it: ``repeat`` runs, each in a fresh process; ``output`` is a file that gets
    the JSON lines; ``roof`` measures the machine's limits too.

    ``answered_by`` transformers is the comparison: its ``generate`` over batches of ``engine.max_num_seqs`` rows, padded to the
    longest. With ``static_batches`` the engine takes such batches too, each begun when the one before is done.
    """

    repeat: int
    output: str | None = None
    roof: bool = True
    answered_by: str = "pagemill"
    static_batches: bool = False

    def __post_init__(self) -> None:
        Workload.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.repeat < 1:
            raise ValueError(f"bench.repeat: {self.repeat} must be 1 or more")
        if self.output == "":
            raise ValueError("bench.output: is empty; name a file, or null for stdout")
        if self.answered_by not in ("pagemill", "transformers"):
            raise ValueError(f"bench.answered_by: {self.answered_by!r} is not one of pagemill, transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The keys of ``conf/bench.yaml``. An empty ``input.path`` asks for the synthetic workload."""

    model: ModelConfig
    engine: EngineConfig
    kv_cache: KVCacheConfig
    sampling: SamplingParams
    prompt: PromptOptions
    input: InputOptions
    job: JobOptions
    bench: BenchOptions
    table: TableOptions
    seed: int
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: {self.limit} must be 1 or more, or null for all rows")
