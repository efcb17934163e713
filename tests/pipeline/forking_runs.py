"""A process that starts runs with the stand-in engine: one fork for each line that it reads, so that a test can kill many.

A line is ``<input> <output>``. It answers with the fork's process id, and with its exit code when it has ended: 0 complete, 75
stopped by SIGTERM, -9 killed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pipeline.runner
from engine import SamplingParams
from pipeline import InputOptions, OutputOptions, PromptOptions, Prompts, Provenance, TextJob, durable, run

STAND_INS = runpy.run_path(str(Path(__file__).with_name("conftest.py")))
SECONDS_A_ROW = 0.002
SECONDS_A_MOMENT = 0.004  # between two of the things that a commit does, so that kills meet them


class Slow(STAND_INS["ScriptedEngine"]):  # type: ignore[misc]
    def generate(self, requests):  # type: ignore[no-untyped-def]
        for completion in super().generate(requests):
            time.sleep(SECONDS_A_ROW)
            yield completion
            if completion.finish_reason != "error":
                yield replace(completion, sample_index=1, text=completion.text.upper())


def answer_all(source: str, target: str) -> int:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    prompts = Prompts(STAND_INS["ByteTokenizer"](), options=PromptOptions(), sampling=SamplingParams(n=2), chat=False)
    summary = run(
        TextJob(prompts),
        input=InputOptions(format="jsonl", path=source, rows_per_shard=8),
        output=OutputOptions(path=target, token_ids=True),
        provenance=Provenance(config={}, fingerprint={}, versions={}),
        load_engine=lambda: Slow(max_waiting=12),
        progress=False,
        stop=lambda: bool(asked),
    )
    return 75 if summary.stopped else 0


def slowed(function: Callable[..., None]) -> Callable[..., None]:
    def wait_and_call(*arguments: object) -> None:
        time.sleep(SECONDS_A_MOMENT)
        function(*arguments)

    return wait_and_call


def main() -> None:
    pipeline.runner.FLUSH_SECONDS = 0.02
    for name in ("append_lines", "rename", "sync_file"):
        setattr(durable, name, slowed(getattr(durable, name)))
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(answer_all(*line.split()))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
