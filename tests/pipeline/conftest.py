"""Stand-ins that obey the protocols: a tokenizer of bytes, and an engine that answers by a script, out of order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine import Completion, Request, SamplingParams
from pipeline import InputOptions, OutputOptions, PromptOptions, Prompts, Provenance, Summary, TextJob, run

MAX_PROMPT_TOKENS = 4000


class ByteTokenizer:
    """A token a byte and no control words; the chat template writes ``[role] content`` lines, which tests can read back."""

    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def hide_control_words(self, text: str) -> str:
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        control_words: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        if any(message["content"] == "template, refuse" for message in messages):
            raise RuntimeError("no such words here")
        lines = [json.dumps(tools)] if tools else []
        lines += [f"[{message['role']}] {message['content']}" for message in messages]
        closing = "\n[assistant] " if add_generation_prompt else "" if continue_final_message else "\n"
        return self.encode("\n".join(lines) + closing, add_special_tokens=False)


class ScriptedStats:
    def snapshot(self) -> dict[str, Any]:
        return {"preemptions": 0, "time_split": {"forward": 0.0}}


class ScriptedEngine:
    """Answers with the prompt's bytes in reverse word order, longest waiting prompt last, a few requests at a time.

    ``max_waiting`` is how far it pulls ahead. ``most_in_flight`` records how far it got; ``stop_after`` raises
    KeyboardInterrupt after so many answers, ``fail_after`` RuntimeError.
    """

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
            output=OutputOptions(path=str(tmp_path / out), **settings.pop("output", {})),
            provenance=Provenance(config={"any": 1}, fingerprint=fingerprint, versions={"pagemill": "test"}),
            load_engine=lambda: engine if engine is not None else ScriptedEngine(),
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
