"""A million rows are looked through at 100,000 rows a second of one core, in memory that does not grow with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NUM_ROWS = 1_000_000
SCAN = """
import resource, sys, time
from pipeline.reader import InputOptions, open_reader
options = InputOptions(format=sys.argv[1], path=sys.argv[2])
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
reader = open_reader(options, prompt_columns=["prompt"], limit=None)
seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(sum(shard.num_rows for shard in reader.shards), seconds, (after - before) / 1024)
"""


@pytest.mark.full
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_million_rows(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"in.{format}"
    rows = ({"id": f"row-{i}", "prompt": f"What is {i} plus {i * 7}? Answer in one short sentence.", "n": i} for i in range(NUM_ROWS))
    if format == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    done = subprocess.run([sys.executable, "-c", SCAN, format, str(path)], capture_output=True, text=True, check=True)
    num_rows, seconds, mebibytes = map(float, done.stdout.split())
    assert num_rows == NUM_ROWS
    assert num_rows / seconds > 100_000
    assert mebibytes < 200
