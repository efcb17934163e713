"""What the pipeline costs a row: read, render, tokenise, schedule and write around a model that computes nothing.

    python tests/bench/rows.py [--rows 1000000] [--words 12] [--tokens 4] [--profile]

A Parquet file of short prompts goes through the chat job with the embedded model's tokenizer, the real scheduler and block
manager, and a runner that draws the same few tokens for every row. Prints one JSON line; nothing is asserted.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine import Engine, SamplingParams, Tokenizer
from engine.kv.manager import BlockManager
from engine.scheduler.scheduler import Scheduler
from engine.stats import Stats
from engine.types import Draw, StepPlan
from jobs._app import collect_seldom, make_job
from jobs._compose import read_config
from jobs._schema import RunConfig, schema_of, typed
from pipeline import InputOptions, OutputOptions, PromptOptions, Provenance, run

BLOCK_SIZE, NUM_BLOCKS = 16, 16_384


class Scripted:
    """Draws 1, 2, 3, ... for every sequence, then the end token."""

    def __init__(self, *, num_tokens: int, end: int) -> None:
        self.num_tokens = num_tokens
        self.end = end

    def run(self, plan: StepPlan) -> list[Draw]:
        generated = [chunk.seq.num_generated for chunk in plan.sampling]
        return [Draw(1000 + count if count < self.num_tokens - 1 else self.end, -0.5) for count in generated]


def engine(tokenizer: Tokenizer, *, num_tokens: int) -> Engine:
    stats = Stats(num_blocks=NUM_BLOCKS, kv_bytes=0)
    scheduler = Scheduler(
        kv=BlockManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=tokenizer.vocab_size,
        vocabulary=tokenizer,
        stats=stats,
    )
    return Engine(scheduler=scheduler, runner=Scripted(num_tokens=num_tokens, end=tokenizer.eos_token_ids[0]), tokenizer=tokenizer)


def write_prompts(path: Path, *, num_rows: int, num_words: int) -> None:
    dice = random.Random(0)
    words = ["river", "number", "paper", "mill", "answer", "seven", "green", "market", "letter", "window", "copper", "winter"]
    with pq.ParquetWriter(path, pa.schema({"id": pa.int64(), "prompt": pa.string()})) as writer:
        for first in range(0, num_rows, 50_000):
            ids = range(first, min(first + 50_000, num_rows))
            writer.write_table(pa.table({"id": ids, "prompt": [" ".join(dice.choices(words, k=num_words)) + "?" for _ in ids]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--words", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "prompts.parquet")
        write_prompts(source, num_rows=options.rows, num_words=options.words)
        config = typed(RunConfig, read_config("config", [f"input.path={source}"], schema=schema_of(RunConfig)))
        tokenizer = Tokenizer.load(config.model)
        collect_seldom()
        sampling = SamplingParams(max_tokens=options.tokens, temperature=0.0)
        job = make_job("chat", tokenizer, prompt=PromptOptions(), sampling=sampling, model=config.model, engine=config.engine)
        profile = cProfile.Profile()
        if options.profile:
            profile.enable()
        summary = run(
            job,
            input=InputOptions(format="parquet", path=str(source)),
            output=OutputOptions(path=str(Path(folder, "answers"))),
            provenance=Provenance(config={}, fingerprint={}, versions={}),
            load_engine=lambda: engine(tokenizer, num_tokens=options.tokens),
        )
        profile.disable()
        numbers = summary.metrics
        assert summary.num_ok == options.rows
        seconds = numbers["wall_s"] - numbers["load_s"]
        line = {"rows": summary.num_ok, "rows_per_s": options.rows / seconds, "peak_rss_mb": numbers["peak_rss_bytes"] / 1e6}
        print(json.dumps(line | {"time_split": numbers["time_split"]}))
        if options.profile:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(35)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
