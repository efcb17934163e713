"""Shards to requests to engine to parts: the pipeline's one entry, ``run``.

Holds at most a few shards in memory; it does not know how rows are read, asked, answered or written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from engine import Completion, Request
from pipeline.asking import ask
from pipeline.columns import OutputColumns, answered, failed, row_label
from pipeline.folder import held
from pipeline.job import Job
from pipeline.journal import FLUSH_SECONDS, Answers, Journal
from pipeline.ledger import Ledger, Resume
from pipeline.limits import NO_LIMITS, Gate, Limits, Reason, Stopped
from pipeline.progress import Progress
from pipeline.provenance import Provenance, RunRecord
from pipeline.reader import InputOptions, Reader, open_reader
from pipeline.report import Metrics, write_metrics
from pipeline.types import Part, Record, RowError, RunError, ShardRows
from pipeline.watchdog import Watchdog
from pipeline.writer import OutputOptions, PartWriter

# What is open at once: enough rows to keep the engine full while a slow one holds up its shard, in few files and little memory.
MAX_OPEN_ROWS = 4096
MAX_OPEN_SHARDS = 256
# Rows that the engine has at once: fewer than it would take, so that it asks before each step, which is when a run can stop.
MAX_IN_FLIGHT = 4096


class Stats(Protocol):
    def snapshot(self) -> Mapping[str, Any]:
        """The engine's share of metrics.json, under its public names."""
        ...


class Engine(Protocol):
    """What the runner needs of an engine: completions come back in any order, ``sampling.n`` a request or one error."""

    @property
    def stats(self) -> Stats: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        ...

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """A None among the requests says: nothing more before something has finished."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did. Rows are output rows, those of earlier runs in the same folder included.

    ``num_resumed`` input rows were answered already; ``num_cut`` answers hit a length limit. ``stopped`` is what ended the
    run early; where it is None nothing is left, else ``num_waiting`` input rows are answered and kept, and wait for the
    rest of their part, and ``num_unanswered`` are for the next run. ``parts`` is a glob for the files that the
    answers are in, ``metrics`` the content of metrics.json.
    """

    output_path: str
    parts: str
    num_rows: int
    num_ok: int
    num_errors: int
    num_cut: int
    num_resumed: int
    num_waiting: int
    num_unanswered: int
    stopped: Reason | None
    metrics: Mapping[str, Any]


def run(
    job: Job,
    *,
    input: InputOptions,
    output: OutputOptions,
    provenance: Provenance,
    load_engine: Callable[[], Engine],
    limit: int | None = None,
    limits: Limits = NO_LIMITS,
    resume: Resume = "auto",
    reader: Reader | None = None,
    progress: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Read every row of ``input``, or of a ``reader`` that is open already, answer it, and write it to ``output``.

    Three phases: the output folder is taken, input and output are opened and checked, and nothing is changed; then
    ``load_engine`` is called, unless every part is there already; then the rows run. The engine is closed at the end.
    ``limit`` is a part of what is asked: rows of the input. ``limits`` end the run before its rows do, as ``stop`` does when
    it is true between two of the engine's steps, and as a KeyboardInterrupt does while rows run.

    Raises:
        ValueError: something is refused, before any row is computed.
        RunError: the run began and cannot go on; finished parts stay.
    """
    with held(output.path, scratch=output.scratch) as folder:
        ledger = Ledger(folder, resume=resume)
        reader = reader or open_reader(input, prompt_columns=job.prompt_columns, limit=limit, known=ledger.shards, output_path=output.path)
        job.check(reader.schema)
        columns = OutputColumns(
            reader.schema, fields=job.fields, prefix=output.prefix, token_ids=output.token_ids, logprobs=output.logprobs
        )
        writer = PartWriter(output, schema=columns.schema)
        record = RunRecord(provenance, columns=columns.schema)
        ledger.refuse_other(record)
        parts = ledger.assign(reader.shards)
        open_parts = [part for part in parts if part.index not in ledger.finished]

        rows_total = sum(part.shard.num_rows for part in parts)
        metrics = Metrics(rows_total=rows_total, rows_resumed=rows_total - sum(part.shard.num_rows for part in open_parts))
        gate = Gate(limits, metrics=metrics, stop=stop)
        engine = load_engine() if open_parts else None
        try:
            with _writing():
                ledger.start(record, max_model_len=None if engine is None else engine.max_model_len)
        except BaseException:
            if engine is not None:
                engine.close()
            raise
        mill = _Mill(
            job=job,
            reader=reader,
            columns=columns,
            writer=writer,
            ledger=ledger,
            metrics=metrics,
            id_column=input.id_column,
            gate=gate,
            progress=Progress(metrics, enabled=progress),
            stall_seconds=limits.stall_seconds,
        )
        stopped = mill.run(open_parts, engine=engine) if engine is not None else None
        return _summary(parts, ledger=ledger, metrics=metrics, suffix=writer.suffix, engine=mill.engine_numbers, stopped=stopped)


@dataclass(slots=True, eq=False)
class _OpenShard:
    """A shard whose rows are being answered; ``rows[i]`` are input row ``i``'s output rows, None until they are there."""

    part: Part
    table: pa.Table
    rows: list[Answers | None]
    num_missing: int
    journal: Journal


class _Asked(NamedTuple):
    """A row that the engine has: where its answers belong, its label, what was asked, its answers so far."""

    shard: _OpenShard
    row: int
    row_id: str
    request: Request
    completions: list[Completion]


@dataclass(slots=True, kw_only=True)
class _Mill:
    """Rows through the engine: requests out of shards, completions back into their rows, full shards into parts."""

    job: Job
    reader: Reader
    columns: OutputColumns
    writer: PartWriter
    ledger: Ledger
    metrics: Metrics
    id_column: str | None
    gate: Gate
    progress: Progress
    stall_seconds: float | None
    engine_numbers: Mapping[str, Any] = field(default_factory=dict)
    _watchdog: Watchdog = field(init=False)
    _asked: dict[str | int, _Asked] = field(default_factory=dict)
    _open: list[_OpenShard] = field(default_factory=list)
    _flushed_s: float = 0.0

    def __post_init__(self) -> None:
        self._watchdog = Watchdog(self.stall_seconds, state=self._state)

    def run(self, parts: Sequence[Part], *, engine: Engine) -> Reason | None:
        """Answer the rows of ``parts``; gives what stopped it before the last one."""
        try:
            self.metrics.loaded()
            self.progress.start()
            with _writing(), self._watchdog:
                try:
                    for completion in engine.generate(self._steps(self._requests(parts))):
                        self._take(completion)
                finally:
                    self._flush()
            return self.gate.stopped
        except Stopped as stopped:
            return stopped.reason
        except KeyboardInterrupt:
            return "signal"
        except ValueError as error:  # what refuses has been asked before
            raise RuntimeError("a row broke the run off, which none may") from error
        finally:
            self.progress.close()
            self.engine_numbers = engine.stats.snapshot()
            engine.close()
            for shard in self._open:
                shard.journal.close()

    def _steps(self, requests: Iterator[Request | None]) -> Iterator[Request | None]:
        """What the engine pulls before each of its steps, to the last row's end."""
        yield from requests
        while self._asked:
            self._tick()
            yield None

    def _tick(self) -> None:
        """Between two rows or steps: the one place where stopping breaks nothing."""
        self._watchdog.progressed()
        self.gate.check()
        if time.monotonic() - self._flushed_s >= FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        for shard in self._open:
            shard.journal.flush()
        self._flushed_s = time.monotonic()

    def _requests(self, parts: Sequence[Part]) -> Iterator[Request | None]:
        """What to ask, in input order; None is: wait. A shard is opened when those that are open leave room for more rows."""
        shards = self.reader.read([part.shard for part in parts])
        for part in parts:
            while len(self._open) >= MAX_OPEN_SHARDS or sum(len(shard.rows) for shard in self._open) >= MAX_OPEN_ROWS:
                self._tick()
                yield None
            with self.metrics.time("read"):
                read = _read(shards)
            shard = self._opened(part, read.table)
            for record, wanted in self._asked_for(read.records):
                self._tick()
                if shard.rows[record.index] is not None or (asked := self._prepared(record, wanted, shard)) is None:
                    continue
                while len(self._asked) >= MAX_IN_FLIGHT or not self.gate.admits(asked.request, num_in_flight=len(self._asked)):
                    if self.gate.stopped:
                        return
                    yield None
                    self._tick()
                self._asked[asked.request.id] = asked
                self.metrics.asked()
                yield asked.request

    def _take(self, completion: Completion) -> None:
        asked = self._asked[completion.request_id]
        asked.completions.append(completion)
        if completion.finish_reason == "error" or len(asked.completions) == asked.request.sampling.n:
            del self._asked[completion.request_id]
            self.metrics.finished(asked.completions)
            self.gate.settled(asked.request)
            self._settle(asked.shard, asked.row, self._rows(asked))

    def _opened(self, part: Part, table: pa.Table) -> _OpenShard:
        """A shard to answer, with the rows that an earlier run answered."""
        journal = Journal(self.ledger.working_part(part.index), shard=part.shard, schema=self.columns.added)
        done = journal.take_over()
        self.metrics.rows_resumed += len(done)
        rows = [done.get(index) for index in range(table.num_rows)]
        shard = _OpenShard(part, table, rows=rows, num_missing=rows.count(None), journal=journal)
        self._open.append(shard)
        if shard.num_missing == 0:
            self._commit(shard)
        return shard

    def _asked_for(self, records: Iterable[Record]) -> Iterator[tuple[Record, Request | RowError]]:
        batches = ask(self.job, records)
        while True:
            with self.metrics.time("tokenise"):
                batch = next(batches, None)
            if batch is None:
                return
            yield from batch

    def _prepared(self, record: Record, wanted: Request | RowError, shard: _OpenShard) -> _Asked | None:
        """The row with its request, or None where it turned out to be an error row, which is settled at once."""
        self.metrics.rows_taken += 1
        row_id = record.row_key
        try:
            row_id = row_label(record.columns, id_column=self.id_column, row_key=record.row_key)
            if isinstance(wanted, RowError):
                raise wanted
        except Exception as error:  # whatever a row does to its own handling is that row's error
            self.metrics.finished(())
            self._settle(shard, record.index, [failed(RowError.of(error)) | {"row_id": row_id, "row_key": record.row_key}])
            return None
        return _Asked(shard, record.index, row_id, wanted, completions=[])

    def _rows(self, asked: _Asked) -> Answers:
        """The output rows of a row whose samples are all done; one error row where the engine or the job says so."""
        names = {"row_id": asked.row_id, "row_key": str(asked.request.id)}
        prompt = asked.request.prompt_token_ids if self.columns.token_ids else None
        rows = []
        for completion in sorted(asked.completions, key=lambda completion: completion.sample_index):
            try:
                if completion.finish_reason == "error":
                    raise RowError(completion.error_code or "engine_error", completion.error_message or "the engine gave no reason")
                rows.append(answered(completion, self.job.answer(completion), prompt_token_ids=prompt) | names)
            except Exception as error:
                return [failed(RowError.of(error), completion=completion) | names]
        return rows

    def _settle(self, shard: _OpenShard, index: int, rows: Answers) -> None:
        """Put input row ``index``'s output rows in their place; the last ones of a shard finish the part."""
        assert shard.rows[index] is None, "a row is settled once"
        shard.rows[index] = rows
        shard.num_missing -= 1
        self.metrics.rows_failed += rows[0]["status"] == "error"
        shard.journal.add(index, rows)
        self.progress.update()
        if shard.num_missing == 0:
            self._commit(shard)

    def _commit(self, shard: _OpenShard) -> None:
        rows = [answers for answers in shard.rows if answers is not None]
        with self.metrics.time("write"):
            table = self.columns.table(shard.table, rows)
            self.ledger.commit(
                shard.part,
                suffix=self.writer.suffix,
                write=lambda path: self.writer.write(path, table),
                rows=[row for answers in rows for row in answers],
            )
        shard.journal.close()
        self._open.remove(shard)

    def _state(self) -> str:
        oldest = next(iter(self._asked), None)
        return f"{len(self._asked)} rows are in flight, the oldest is {oldest}; {self.metrics.rows_done} are done"


def _read(shards: Iterator[ShardRows]) -> ShardRows:
    try:
        return next(shards)
    except (ValueError, OSError) as error:  # it was looked through before, so it changed or went away
        raise RunError(str(error)) from error


@contextmanager
def _writing() -> Iterator[None]:
    """A disk that is full or goes away ends the run, and is no refusal: the settings were all right."""
    try:
        yield
    except OSError as error:
        raise RunError(f"output.path: {error}") from error


def _summary(
    parts: Sequence[Part], *, ledger: Ledger, metrics: Metrics, suffix: str, engine: Mapping[str, Any], stopped: Reason | None
) -> Summary:
    finished = [ledger.finished[part.index] for part in parts if part.index in ledger.finished]
    num_rows = sum(part.rows for part in finished)
    num_errors = sum(part.errors for part in finished)
    numbers = metrics.summary(rows_ok=num_rows - num_errors, rows_error=num_errors, engine=engine)
    if metrics.rows_done or not (ledger.folder.path / "metrics.json").exists():  # a run with nothing to do leaves the last one's figures
        with _writing():
            write_metrics(ledger.folder.path, numbers)
    ledger.folder.deliver(["metrics.json"])
    num_answered = metrics.rows_resumed + metrics.rows_done
    return Summary(
        output_path=ledger.folder.name,
        parts=f"{ledger.folder.name}/part-*{suffix}",
        num_rows=num_rows,
        num_ok=num_rows - num_errors,
        num_errors=num_errors,
        num_cut=sum(part.cut for part in finished),
        num_resumed=metrics.rows_resumed,
        num_waiting=num_answered - sum(part.shard.num_rows for part in parts if part.index in ledger.finished),
        num_unanswered=metrics.rows_total - num_answered,
        stopped=stopped,
        metrics=numbers,
    )
