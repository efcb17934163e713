"""What a run would come to, told before it: rows, tokens, what the prefix cache saves, what does not fit, what looks amiss.

Reads and asks as a run does, row by row; it writes nothing and holds no row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from tqdm import tqdm

from engine import Completion, Outlook, Pool, Request
from pipeline.asking import Asked, ask
from pipeline.columns import OutputColumns
from pipeline.failures import Failures, FailureTally
from pipeline.job import Job
from pipeline.reader import InputOptions, Reader, open_reader
from pipeline.types import Record, RowError
from pipeline.writer import OutputOptions, PartWriter

_LONG_TAIL = 64  # equal tokens at the end of all prompts from here on are worth a word


class Forecast(Protocol):
    """What planning needs of an engine: its door, and its sums."""

    @property
    def pool(self) -> Pool: ...

    def submit(self, request: Request) -> Completion | None: ...

    def outlook(self) -> Outlook: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was found.

    Attributes:
        num_rows: input rows.
        failures: error code -> the rows that would be error rows.
        shortest_prompt, longest_prompt: tokens; rows that are too long count, those without a prompt do not.
        context_needed: most tokens of a prompt with its whole ``max_tokens``, too long or not.
        num_truncated: prompts that are cut to fit (``prompt.on_overflow``).
        columns: the schema of every part.
        lint: what looks amiss, a sentence each.
    """

    num_rows: int
    failures: Mapping[str, Failures]
    shortest_prompt: int
    longest_prompt: int
    context_needed: int
    num_truncated: int
    outlook: Outlook
    pool: Pool
    columns: pa.Schema
    lint: Sequence[str]

    @property
    def num_failed(self) -> int:
        return sum(failures.num_rows for failures in self.failures.values())

    @property
    def computed_tokens(self) -> int:
        return self.outlook.num_prompt_tokens - self.outlook.num_shared_tokens

    @property
    def mean_prompt(self) -> float:
        return self.outlook.num_prompt_tokens / max(self.outlook.num_requests, 1)

    @property
    def mean_sequence(self) -> float:
        """Tokens of a prompt and its longest answer, over all samples."""
        return self.outlook.num_sequence_tokens / max(self.outlook.num_sequences, 1)

    def num_fitting(self, num_tokens: float) -> int:
        """Sequences of so many tokens that the pool holds at once, nothing shared."""
        return self.pool.num_blocks // max(1, self.pool.blocks_for(round(num_tokens)))

    def numbers(self) -> dict[str, Any]:
        """The plan as JSON values; the names are part of the contract."""
        outlook, pool = self.outlook, self.pool
        too_long = self.failures.get("too_long", Failures(num_rows=0, first=()))
        return {
            "rows": self.num_rows,
            "rows_ok": self.num_rows - self.num_failed,
            "rows_error": self.num_failed,
            "rows_too_long": too_long.num_rows,
            "rows_too_long_first": list(too_long.first),
            "rows_error_by_code": {code: failures.num_rows for code, failures in self.failures.items()},
            "prompts_truncated": self.num_truncated,
            "prompt_tokens": outlook.num_prompt_tokens,
            "prompt_tokens_min": self.shortest_prompt,
            "prompt_tokens_mean": self.mean_prompt,
            "prompt_tokens_max": self.longest_prompt,
            "shared_tokens": outlook.num_shared_tokens,
            "computed_tokens": self.computed_tokens,
            "context_needed": self.context_needed,
            "context_limit": pool.max_len,
            "kv_bytes_per_token": pool.block_bytes // pool.block_size,
            "kv_bytes_per_block": pool.block_bytes,
            "kv_block_size": pool.block_size,
            "kv_blocks_total": pool.num_blocks,
            "kv_bytes": pool.num_blocks * pool.block_bytes,
            "kv_bytes_needed": outlook.num_needed_bytes,
            "kv_bytes_prompts": outlook.num_prompt_bytes,
            "sequences_fit_mean": self.num_fitting(self.mean_sequence),
            "sequences_fit_max": self.num_fitting(outlook.longest_sequence),
            "columns": {field.name: str(field.type) for field in self.columns},
            "lint": list(self.lint),
        }


def plan(
    job: Job, *, input: InputOptions, output: OutputOptions, forecast: Forecast, limit: int | None = None, progress: bool = True
) -> Plan:
    """Read every row of ``input`` and ask for it, as ``pipeline.run`` would, and let ``forecast`` sum up.

    Raises:
        ValueError: a run would be refused for its input or its columns; the message names the key.
    """
    reader = open_reader(input, prompt_columns=job.prompt_columns, limit=limit, output_path=output.path)
    job.check(reader.schema)
    columns = OutputColumns(reader.schema, fields=job.fields, prefix=output.prefix, token_ids=output.token_ids, logprobs=output.logprobs)
    PartWriter(output, schema=columns.schema)  # refuses what the format cannot write
    tally = _Tally()
    for asked in _asked(job, reader, progress=progress):
        tally.count(asked, forecast)
    return tally.plan(forecast, columns=columns.schema)


def _asked(job: Job, reader: Reader, *, progress: bool) -> Iterator[Asked]:
    total = sum(shard.num_rows for shard in reader.shards)
    with tqdm(total=total, unit="row", file=sys.stderr, disable=None if progress else True, delay=1.0) as bar:
        for rows in reader.read(reader.shards):
            for batch in ask(job, rows.records):
                yield from batch
                bar.update(len(batch))


@dataclass(slots=True)
class _Tally:
    """What the rows come to, row by row."""

    num_rows: int = 0
    num_truncated: int = 0
    num_blank_ends: int = 0
    longest_prompt: int = 0
    shortest_prompt: int | None = None
    context_needed: int = 0
    failed: FailureTally = field(default_factory=FailureTally)
    tail: list[int] | None = None  # what all prompts so far end with

    def count(self, asked: Asked, forecast: Forecast) -> None:
        record, request, is_cut = asked
        self.num_rows += 1
        self.num_truncated += is_cut
        if isinstance(request, RowError):
            self.failed.count(request.code, row_key=record.row_key)
            return
        self._measure(request)
        self.num_blank_ends += _ends_in_blanks(record)
        refused = forecast.submit(request)
        if refused is not None:
            self.failed.count(refused.error_code or "engine_error", row_key=record.row_key)

    def plan(self, forecast: Forecast, *, columns: pa.Schema) -> Plan:
        outlook = forecast.outlook()
        return Plan(
            num_rows=self.num_rows,
            failures=self.failed.by_code(),
            shortest_prompt=self.shortest_prompt or 0,
            longest_prompt=self.longest_prompt,
            context_needed=self.context_needed,
            num_truncated=self.num_truncated,
            outlook=outlook,
            pool=forecast.pool,
            columns=columns,
            lint=list(self._lint(outlook, forecast.pool)),
        )

    def _measure(self, request: Request) -> None:
        ids = request.prompt_token_ids
        self.longest_prompt = max(self.longest_prompt, len(ids))
        self.shortest_prompt = len(ids) if self.shortest_prompt is None else min(self.shortest_prompt, len(ids))
        self.context_needed = max(self.context_needed, len(ids) + request.sampling.max_tokens)
        self.tail = list(ids) if self.tail is None else _common_tail(self.tail, ids)

    def _lint(self, outlook: Outlook, pool: Pool) -> Iterator[str]:
        if self.num_truncated:
            yield f"{_rows(self.num_truncated)} whose prompt is too long and cut to fit (prompt.on_overflow)"
        if outlook.num_cut:
            yield (
                f"{_rows(outlook.num_cut)} that the context's end may cut before sampling.max_tokens: "
                f"there is room for {pool.max_len:,} tokens of prompt and answer together"
            )
        if outlook.num_repeated:
            yield f"{_rows(outlook.num_repeated)} with the prompt and the settings of an earlier one"
        if self.num_blank_ends:
            yield f"{_rows(self.num_blank_ends)} with blanks at the end of the prompt, which models answer worse; take them off"
        if outlook.num_shareable_tokens > outlook.num_shared_tokens:
            yield f"kv_cache.prefix_cache=true would save {outlook.num_shareable_tokens:,} tokens of prompts"
        tail = len(self.tail or ())
        if outlook.num_requests > 1 and tail >= _LONG_TAIL and outlook.num_repeated < outlook.num_requests - 1:
            yield (
                f"all prompts end with the same {tail:,} tokens, which no cache can share behind text that differs; "
                "put what is common first, for example into prompt.system"
            )
        if pool.num_blocks * pool.block_bytes < outlook.num_needed_bytes:
            yield (
                "the KV pool is smaller than what engine.max_num_seqs of the largest rows take, so rows may give way and be "
                "computed again; raise kv_cache.memory or lower engine.max_num_seqs"
            )


def _ends_in_blanks(record: Record) -> bool:
    try:
        prompt = record.columns.get("prompt")
    except RowError:  # a value that cannot be read and that a template does without
        return False
    return isinstance(prompt, str) and prompt != prompt.rstrip()


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _common_tail(tail: list[int], ids: Sequence[int]) -> list[int]:
    """The end of ``ids`` that is also ``tail``'s."""
    length = min(len(tail), len(ids))
    same = next((count for count in range(length) if tail[-1 - count] != ids[-1 - count]), length)
    return tail[len(tail) - same :]
