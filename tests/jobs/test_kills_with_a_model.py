"""Thirty kills and five requests to stop, with a real model and drawn samples: byte for byte what one run writes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

NUM_ROWS = 300


@pytest.mark.full
@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 30), (signal.SIGTERM, 5)])
def test_a_run_that_is_ended_again_and_again_writes_what_one_run_writes(
    command: str, tiny_model: str, tmp_path: Path, number: signal.Signals, times: int
) -> None:
    rows = [{"id": i, "prompt": "" if i % 50 == 7 else f"Tell me about {i}, " * (1 + i % 5), "seed": i} for i in range(NUM_ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [command, "run", f"model.path={tiny_model}", "input.path=in.jsonl", "input.rows_per_shard=16", "progress=false"]
    words += ["model.dtype=float32", "engine.batch_invariant=true", "engine.threads=1", "kv_cache.prefix_cache=false"]
    words += ["sampling.n=2", "sampling.max_tokens=24", "sampling.ignore_eos=true", "engine.max_num_seqs=16"]

    began = time.monotonic()
    assert subprocess.run([*words, "output.path=whole"], cwd=tmp_path, check=False).returncode == 3
    seconds = time.monotonic() - began
    dice, ended = random.Random(number), 0
    while ended < times:
        with subprocess.Popen([*words, "output.path=out"], cwd=tmp_path) as job:
            time.sleep(dice.uniform(0.0, seconds))
            job.send_signal(number)
            code = job.wait()
        assert code in (3, 75 if number == signal.SIGTERM else -number)
        ended += code != 3
        if code == 3:  # it came to the end: take some parts away for the next ones
            for part in dice.sample(sorted((tmp_path / "out").glob("part-*.arrow")), 12):
                part.unlink()
    assert subprocess.run([*words, "output.path=out"], cwd=tmp_path, check=False).returncode == 3
    parts = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("part-*")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("part-*")} == parts
    assert len(parts) == -(-NUM_ROWS // 16)
