"""Stand-ins that obey the protocols: a tokenizer of bytes, and an engine that answers by a script, out of order."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from engine import Completion, Request, SamplingParams
from pipeline import InputOptions, OutputOptions, PromptOptions, Prompts, Provenance, Summary, TextJob, run

MAX_PROMPT_TOKENS = 4000


class ByteTokenizer:
    """A token a byte and no control words; the chat template writes ``[role] content`` lines, which tests can read back."""

    has_chat_template = True

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def hide_control_words(self, text: str) -> str:
        return text

    def token_ends(self, text: str) -> list[int]:
        return [place + 1 for place, char in enumerate(text) for _ in char.encode("utf-8")]

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        control_words: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        if any(message["content"] == "template, refuse" for message in messages):
            raise RuntimeError("no such words here")
        lines = [json.dumps(tools)] if tools else []
        lines += [f"[{message['role']}] {message['content']}" for message in messages]
        closing = "\n[assistant] " if add_generation_prompt else "" if continue_final_message else "\n"
        return "\n".join(lines) + closing


class ScriptedStats:
    pool_use = 0.25

    def snapshot(self) -> dict[str, Any]:
        return {"preemptions": 0, "time_split": {"forward": 0.0}}


class ScriptedEngine:
    """Answers with the prompt's bytes in reverse word order, longest waiting prompt last, a few requests at a time.

    ``max_waiting`` is how far it pulls ahead. ``most_in_flight`` records how far it got; ``stop_after`` raises
    KeyboardInterrupt after so many answers, ``fail_after`` RuntimeError.
    """

    max_model_len = MAX_PROMPT_TOKENS

    def __init__(self, *, max_waiting: int = 64, stop_after: int | None = None, fail_after: int | None = None) -> None:
        self.max_waiting = max_waiting
        self.stop_after = stop_after
        self.fail_after = fail_after
        self.asked: list[Request] = []
        self.most_in_flight = 0
        self.closed = False
        self.stats = ScriptedStats()

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        source = iter(requests)
        waiting: list[Request] = []
        num_answers = 0
        exhausted = False
        while waiting or not exhausted:
            while not exhausted and len(waiting) < self.max_waiting:
                try:
                    request = next(source)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    assert waiting, "nothing is in flight, so waiting would never end"
                    break
                self.asked.append(request)
                waiting.append(request)
            self.most_in_flight = max(self.most_in_flight, len(waiting))
            for request in self.order(waiting)[: max(1, len(waiting) // 3)]:
                waiting.remove(request)
                yield answer(request)
                num_answers += 1
                if num_answers == self.stop_after:
                    raise KeyboardInterrupt
                if num_answers == self.fail_after:
                    raise RuntimeError("the device is gone")

    def order(self, waiting: Sequence[Request]) -> list[Request]:
        return sorted(waiting, key=lambda request: (len(request.prompt_token_ids), str(request.id)[::-1]))

    def close(self) -> None:
        self.closed = True


def expected_text(prompt: str) -> str:
    return " ".join(reversed(prompt.split(" ")))


def answer(request: Request) -> Completion:
    prompt = list(request.prompt_token_ids)
    if len(prompt) > MAX_PROMPT_TOKENS:
        return Completion(
            request_id=request.id,
            finish_reason="error",
            error_code="too_long",
            error_message=f"{len(prompt)} tokens, at most {MAX_PROMPT_TOKENS} fit",
            num_prompt_tokens=len(prompt),
        )
    text = expected_text(bytes(prompt).decode("utf-8"))
    ids = tuple(text.encode("utf-8"))
    return Completion(
        request_id=request.id,
        token_ids=ids,
        text=text,
        logprobs=tuple(-0.5 for _ in ids),
        finish_reason="length" if len(ids) % 2 else "stop",
        stop_reason=None if len(ids) % 2 else 0,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=len(prompt) // 2,
    )


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def text_job(tokenizer: ByteTokenizer) -> Callable[..., TextJob]:
    def build(*, chat: bool = False, **options: Any) -> TextJob:
        return TextJob(Prompts(tokenizer, options=PromptOptions(**options), sampling=SamplingParams(temperature=0.0), chat=chat))

    return build


@pytest.fixture
def run_job(tmp_path: Path, text_job: Callable[..., TextJob]) -> Callable[..., Summary]:
    """Run ``job=generate`` with a scripted engine; keyword arguments replace the defaults of ``run`` and its options."""

    def build(path: Path | str, *, out: str = "out", engine: Any = None, job: Any = None, **settings: Any) -> Summary:
        name = str(path)
        options = {"format": "parquet" if ".parquet" in name else "jsonl", "rows_per_shard": 8, **settings.pop("input", {})}
        fingerprint = settings.pop("fingerprint", {"model": "scripted"})
        return run(
            job or text_job(),
            input=InputOptions(path=name, **options),
            output=OutputOptions(path=out if "://" in out else str(tmp_path / out), **settings.pop("output", {})),
            provenance=Provenance(config={"any": 1}, fingerprint=fingerprint, versions={"pagemill": "test"}),
            load_engine=settings.pop("load_engine", lambda: engine if engine is not None else ScriptedEngine()),
            progress=settings.pop("progress", False),
            **settings,
        )

    return build


@pytest.fixture
def read_parts(tmp_path: Path) -> Callable[..., pa.Table]:
    """All parts of an output folder as one table, in part order."""

    def read(out: str = "out") -> pa.Table:
        tables = []
        for path in sorted((tmp_path / out).glob("part-*.arrow")):
            with pa.OSFile(str(path)) as file:
                tables.append(pa.ipc.open_file(file).read_all())
        return pa.concat_tables(tables)

    return read


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Iterable[Any], name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


class TypedColumn(NamedTuple):
    """A column as a user may have it: its Arrow type, its values in Python, and what the written rule makes of them in JSON."""

    type: pa.DataType
    values: list[Any]
    json: list[Any]


@pytest.fixture(scope="session")
def every_type() -> dict[str, TypedColumn]:
    """Three rows of every type that arrow and parquet keep; the last one is null everywhere."""
    noon = datetime(2024, 2, 29, 12, 30, 15, 123456)
    utc, berlin = noon.replace(tzinfo=UTC), noon.replace(tzinfo=ZoneInfo("Europe/Berlin"))
    odd, text, large = 2**53 + 1, 'Ünï "quoted"\n\u2028\x85\0 🚀', Decimal(10) ** 50
    empty = {"a": None, "b": None}
    turns = [{"role": "user", "content": None}]
    columns: dict[str, tuple[pa.DataType, tuple[Any, Any], tuple[Any, Any]]] = {
        "none": (pa.null(), (None, None), (None, None)),
        "flag": (pa.bool_(), (True, True), (False, False)),
        "int8": (pa.int8(), (-128, -128), (127, 127)),
        "int64": (pa.int64(), (odd, odd), (-(2**63), -(2**63))),
        "uint64": (pa.uint64(), (2**64 - 1, 2**64 - 1), (0, 0)),
        "float16": (pa.float16(), (0.5, 0.5), (math.nan, None)),
        "float32": (pa.float32(), (0.25, 0.25), (-math.inf, None)),
        "float64": (pa.float64(), (0.1, 0.1), (math.inf, None)),
        "text": (pa.string(), (text, text), ("", "")),
        "large_text": (pa.large_string(), (text, text), ("", "")),
        "text_view": (pa.string_view(), (text, text), ("", "")),
        "binary": (pa.binary(), (b"\0\xff", "AP8="), (b"", "")),
        "large_binary": (pa.large_binary(), (b"\0\xff", "AP8="), (b"", "")),
        "fixed_binary": (pa.binary(2), (b"\0\xff", "AP8="), (b"ab", "YWI=")),
        "decimal": (pa.decimal128(20, 3), (Decimal("1.100"), "1.100"), (Decimal("-0.001"), "-0.001")),
        "large_decimal": (pa.decimal256(60, 0), (large, "1" + "0" * 50), (Decimal(0), "0")),
        "date": (pa.date32(), (date(2024, 2, 29), "2024-02-29"), (date(1969, 12, 31), "1969-12-31")),
        "time_ms": (pa.time32("ms"), (time(1, 2, 3, 4000), "01:02:03.004"), (time(0), "00:00:00.000")),
        "time_us": (pa.time64("us"), (time(1, 2, 3, 4), "01:02:03.000004"), (time(0), "00:00:00.000000")),
        "time_ns": (pa.time64("ns"), (1_000, "00:00:00.000001000"), (0, "00:00:00.000000000")),
        "moment_ms": (pa.timestamp("ms"), (1, "1970-01-01T00:00:00.001"), (datetime(1, 1, 1), "0001-01-01T00:00:00.000")),
        "moment_us": (pa.timestamp("us"), (noon, "2024-02-29T12:30:15.123456"), (-1, "1969-12-31T23:59:59.999999")),
        "moment_ns": (pa.timestamp("ns"), (1, "1970-01-01T00:00:00.000000001"), (0, "1970-01-01T00:00:00.000000000")),
        "moment_utc": (pa.timestamp("us", "UTC"), (utc, "2024-02-29T12:30:15.123456Z"), (0, "1970-01-01T00:00:00.000000Z")),
        "moment_zone": (pa.timestamp("ms", "Europe/Berlin"), (berlin.replace(microsecond=0), "2024-02-29T11:30:15.000Z"),
                        (1_720_000_000_000, "2024-07-03T09:46:40.000Z")),
        "moment_offset": (pa.timestamp("us", "-03:30"), (utc, "2024-02-29T12:30:15.123456Z"), (None, None)),
        "duration": (pa.duration("us"), (timedelta(seconds=90, microseconds=5), "PT90.000005S"), (timedelta(seconds=-1), "PT-1.000000S")),
        "list": (pa.list_(pa.int32()), ([1, None], [1, None]), ([], [])),
        "large_list": (pa.large_list(pa.string()), (["a"], ["a"]), ([], [])),
        "fixed_list": (pa.list_(pa.float32(), 2), ([0.5, None], [0.5, None]), ([1.0, 2.0], [1.0, 2.0])),
        "struct": (pa.struct({"a": pa.int64(), "b": pa.struct({"c": pa.binary()})}),
                   ({"a": odd, "b": {"c": b"\0\xff"}}, {"a": odd, "b": {"c": "AP8="}}), (empty, empty)),
        "turns": (pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})), (turns, turns), ([], [])),
        "map": (pa.map_(pa.string(), pa.date32()), ([("k", date(2024, 1, 1)), ("k", None)],
                [{"key": "k", "value": "2024-01-01"}, {"key": "k", "value": None}]), ([], [])),
        "category": (pa.dictionary(pa.int32(), pa.string()), ("a", "a"), ("b", "b")),
        "small_category": (pa.dictionary(pa.int8(), pa.string()), ("a", "a"), ("a", "a")),
    }  # fmt: skip
    return {name: TypedColumn(kind, [one[0], two[0], None], [one[1], two[1], None]) for name, (kind, one, two) in columns.items()}


@pytest.fixture
def press_ctrl_c() -> Iterator[Callable[[], None]]:
    """Raises KeyboardInterrupt in the main thread, whichever thread calls it. A signal of its own: pytest has a use for SIGINT."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)
