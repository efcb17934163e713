"""Shards to requests to engine to parts: the pipeline's one entry, ``run``.

Holds at most a few shards in memory; it does not know how rows are read, asked, answered or written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pyarrow as pa

from engine import Completion, Request
from pipeline.ahead import Ahead
from pipeline.asking import Asking, Question
from pipeline.behind import Behind
from pipeline.columns import OutputColumns, answered, failed
from pipeline.folder import held
from pipeline.job import Job
from pipeline.journal import FLUSH_SECONDS, Answers, Journal
from pipeline.ledger import Ledger, Resume
from pipeline.limits import NO_LIMITS, Gate, Limits, Reason, Stopped
from pipeline.progress import Progress
from pipeline.prometheus import PrometheusFile
from pipeline.provenance import Provenance, RunRecord
from pipeline.reader import InputOptions, Reader, open_reader
from pipeline.report import Metrics, Stats
from pipeline.summary import Summary, summarise
from pipeline.types import Part, RowError, RunError
from pipeline.watchdog import Watchdog
from pipeline.writer import OutputOptions, PartWriter

# What is open at once: enough rows to keep the engine full while a slow one holds up its shard, in few files and little memory.
MAX_OPEN_ROWS = 4096
MAX_OPEN_SHARDS = 256
# Rows that the engine has at once: fewer than it would take, so that it asks before each step, which is when a run can stop.
MAX_IN_FLIGHT = 4096
# With fewer rows ready than this, the next few dozen are asked for: enough for a few steps.
MAX_AHEAD_ROWS = 512
# Full shards that wait for the one before them to be written and uploaded; after that the engine waits too.
MAX_WAITING_PARTS = 2
_WAIT_SECONDS = 0.1  # until the clock and the signals are looked at again


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
    prometheus: PrometheusFile | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Read every row of ``input``, or of a ``reader`` that is open already, answer it, and write it to ``output``.

    Three phases: the output folder is taken, input and output are opened and checked, and nothing is changed; then
    ``load_engine`` is called, unless every part is there already; then the rows run. The engine is closed at the end.
    ``prometheus`` follows the run from before the load to its end.
    ``limit`` is a part of what is asked: rows of the input. ``limits`` end the run before its rows do, as ``stop`` does when
    it is true between two of the engine's steps, and as a KeyboardInterrupt does while rows run.

    Raises:
        ValueError: something is refused, before any row is computed.
        RunError: the run began and cannot go on; finished parts stay.
    """
    with held(output.path, scratch=output.scratch) as folder, ExitStack() as open_files:
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
        if prometheus is not None:
            open_files.enter_context(prometheus.following(metrics))
        engine = load_engine() if open_parts else None
        try:
            with _writing():
                ledger.start(record, max_model_len=None if engine is None else engine.max_model_len)
        except BaseException:
            if engine is not None:
                engine.close()
            raise
        mill = _Mill(
            open_parts,
            job=job,
            asking=Asking(job, reader, id_column=input.id_column),
            columns=columns,
            writer=writer,
            ledger=ledger,
            metrics=metrics,
            gate=gate,
            progress=Progress(metrics, enabled=progress),
            prometheus=prometheus,
            stall_seconds=limits.stall_seconds,
        )
        stopped = mill.run(engine) if engine is not None else None
        with _writing():
            return summarise(parts, ledger=ledger, metrics=metrics, suffix=writer.suffix, stopped=stopped)


@dataclass(slots=True, eq=False)
class _OpenShard:
    """A shard whose rows are being answered; ``rows[i]`` are input row ``i``'s output rows, None until they are there."""

    part: Part
    table: pa.Table
    rows: list[Answers | None]
    num_missing: int
    journal: Journal


class _Asked(NamedTuple):
    """A row that the engine has: where its answers belong, what was asked, its answers so far."""

    shard: _OpenShard
    question: Question
    request: Request
    completions: list[Completion]


class _Mill:
    """Rows through the engine: requests out of shards, completions back into their rows, full shards into parts.

    Three threads. Rows are read and asked for ahead of this one, and full shards become parts behind it: what one thread hands
    to the next, it touches no more. All else here belongs to this one; see pipeline/README.md.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        job: Job,
        asking: Asking,
        columns: OutputColumns,
        writer: PartWriter,
        ledger: Ledger,
        metrics: Metrics,
        gate: Gate,
        progress: Progress,
        prometheus: PrometheusFile | None,
        stall_seconds: float | None,
    ) -> None:
        self._job = job
        self._columns = columns
        self._writer = writer
        self._ledger = ledger
        self._metrics = metrics
        self._gate = gate
        self._progress = progress
        self._prometheus = prometheus
        self._asking = asking
        self._ahead = Ahead(asking.batches(parts), most=MAX_AHEAD_ROWS, weigh=lambda batch: len(batch.questions))
        self._behind = Behind(self._commit, most=MAX_WAITING_PARTS)
        self._watchdog = Watchdog(stall_seconds, state=self._state)
        self._asked: dict[str | int, _Asked] = {}
        self._open: list[_OpenShard] = []
        self._flushed_s = 0.0

    def run(self, engine: Engine) -> Reason | None:
        """Answer the rows; gives what stopped it before the last one."""
        try:
            self._metrics.loaded(engine.stats)
            self._progress.start()
            with _writing(), self._watchdog, self._behind, self._ahead:
                try:
                    for completion in engine.generate(self._steps()):
                        self._take(completion)
                finally:
                    self._flush()
            return self._gate.stopped
        except Stopped as stopped:
            return stopped.reason
        except KeyboardInterrupt:
            return "signal"
        except ValueError as error:  # what refuses has been asked before
            raise RuntimeError("a row broke the run off, which none may") from error
        finally:
            self._progress.close()
            self._note_seconds()
            engine.close()
            for shard in (*self._open, *self._behind.left):
                shard.journal.close()

    def _steps(self) -> Iterator[Request | None]:
        """What the engine pulls before each of its steps, to the last row's end."""
        yield from self._requests()
        while self._asked:
            self._tick()
            yield None

    def _tick(self) -> None:
        """Between two rows or steps: the one place where stopping breaks nothing."""
        self._watchdog.progressed()
        self._check()

    def _check(self) -> None:
        self._behind.check()
        self._gate.check()
        if self._prometheus is not None:
            self._note_seconds()
            self._prometheus.update()
        if time.monotonic() - self._flushed_s >= FLUSH_SECONDS:
            self._flush()

    def _wait(self, is_ready: Callable[[float], bool]) -> None:
        """Until another thread is so far. It can be stopped here too, but nothing says that there is progress."""
        with self._metrics.time("wait"):
            while not is_ready(_WAIT_SECONDS):
                self._check()

    def _note_seconds(self) -> None:
        """What the threads ahead and behind have spent so far; each counts a piece of work when it is done with it."""
        self._metrics.seconds |= {**self._asking.seconds, "write": self._behind.seconds}

    def _flush(self) -> None:
        for shard in self._open:
            shard.journal.flush()
        self._flushed_s = time.monotonic()

    def _requests(self) -> Iterator[Request | None]:
        """What to ask, in input order; None is: wait. A shard is opened when those that are open leave room for more rows.

        What the engine gets to see, and before which of its steps, does not depend on how far the other threads are.
        """
        shard: _OpenShard | None = None
        while True:
            self._wait(self._ahead.is_ready)
            if (batch := next(self._ahead, None)) is None:
                return
            if shard is None or shard.part is not batch.part:
                while len(self._open) >= MAX_OPEN_SHARDS or sum(len(shard.rows) for shard in self._open) >= MAX_OPEN_ROWS:
                    self._tick()
                    yield None
                shard = self._opened(batch.part, batch.table)
            for question in batch.questions:
                self._tick()
                if shard.rows[question.row] is not None or (asked := self._taken_up(question, shard)) is None:
                    continue
                while len(self._asked) >= MAX_IN_FLIGHT or not self._gate.admits(asked.request, num_in_flight=len(self._asked)):
                    if self._gate.stopped:
                        return
                    yield None
                    self._tick()
                self._asked[asked.request.id] = asked
                self._metrics.asked()
                self._metrics.prompts_truncated += question.is_cut
                yield asked.request

    def _taken_up(self, question: Question, shard: _OpenShard) -> _Asked | None:
        """The row as it goes to the engine, or None where it is an error row, which is settled at once."""
        self._metrics.rows_taken += 1
        if isinstance(question.asked, Request):
            return _Asked(shard, question, question.asked, completions=[])
        self._metrics.finished(())
        self._settle(shard, question.row, [failed(question.asked) | {"row_id": question.row_id, "row_key": question.row_key}])
        return None

    def _take(self, completion: Completion) -> None:
        asked = self._asked[completion.request_id]
        asked.completions.append(completion)
        if completion.finish_reason == "error" or len(asked.completions) == asked.request.sampling.n:
            del self._asked[completion.request_id]
            self._metrics.finished(asked.completions)
            self._gate.settled(asked.request)
            self._settle(asked.shard, asked.question.row, self._rows(asked))

    def _opened(self, part: Part, table: pa.Table) -> _OpenShard:
        """A shard to answer, with the rows that an earlier run answered."""
        journal = Journal(self._ledger.working_part(part.index), shard=part.shard, schema=self._columns.added)
        done = journal.take_over()
        self._metrics.rows_resumed += len(done)
        rows = [done.get(index) for index in range(table.num_rows)]
        shard = _OpenShard(part, table, rows=rows, num_missing=rows.count(None), journal=journal)
        self._open.append(shard)
        if shard.num_missing == 0:
            self._hand_over(shard)
        return shard

    def _rows(self, asked: _Asked) -> Answers:
        """The output rows of a row whose samples are all done; one error row where the engine or the job says so."""
        names = {"row_id": asked.question.row_id, "row_key": asked.question.row_key}
        prompt = asked.request.prompt_token_ids if self._columns.token_ids else None
        rows = []
        for completion in sorted(asked.completions, key=lambda completion: completion.sample_index):
            try:
                if completion.finish_reason == "error":
                    raise RowError(completion.error_code or "engine_error", completion.error_message or "the engine gave no reason")
                rows.append(answered(completion, self._job.answer(completion), prompt_token_ids=prompt) | names)
            except Exception as error:
                return [failed(RowError.of(error), completion=completion) | names]
        return rows

    def _settle(self, shard: _OpenShard, index: int, rows: Answers) -> None:
        """Put input row ``index``'s output rows in their place; the last ones of a shard make it full."""
        assert shard.rows[index] is None, "a row is settled once"
        shard.rows[index] = rows
        shard.num_missing -= 1
        if rows[0]["status"] == "error":
            self._metrics.failures.count(rows[0]["error_code"], row_key=rows[0]["row_key"])
        shard.journal.add(index, rows)
        self._progress.update()
        if shard.num_missing == 0:
            self._hand_over(shard)

    def _hand_over(self, shard: _OpenShard) -> None:
        """Let a full shard become a part; one that has to wait for others has its answers on the disk first."""
        if not self._behind.is_idle:
            shard.journal.flush()
        self._wait(self._behind.has_room)
        self._open.remove(shard)
        self._behind.give(shard)

    def _commit(self, shard: _OpenShard) -> None:
        """Make the part of a full shard, in the thread behind, which the ledger belongs to while rows run."""
        rows = [answers for answers in shard.rows if answers is not None]
        try:
            table = self._columns.table(shard.table, rows)
            self._ledger.commit(
                shard.part,
                suffix=self._writer.suffix,
                write=lambda path: self._writer.write(path, table),
                rows=[row for answers in rows for row in answers],
            )
        except BaseException:
            shard.journal.flush()  # there is no part to hold the newest answers
            raise
        shard.journal.close()
        self._watchdog.progressed()

    def _state(self) -> str:
        oldest = next(iter(list(self._asked)), None)  # a copy: the watchdog's thread asks, and rows come and go meanwhile
        return f"{len(self._asked)} rows are in flight, the oldest is {oldest}; {self._metrics.rows_done} are done"


@contextmanager
def _writing() -> Iterator[None]:
    """A disk that is full or goes away ends the run, and is no refusal: the settings were all right."""
    try:
        yield
    except OSError as error:
        raise RunError(f"output.path: {error}") from error
