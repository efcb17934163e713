"""`pagemill run` with the store told by environment variables alone: killed between two uploads, it goes on on another machine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

NUM_ROWS = 60


@pytest.mark.full
def test_the_command_reads_from_a_store_and_writes_into_it(
    store, command: str, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    rows = [{"id": i, "prompt": "" if i % 20 == 7 else f"Tell me about {i}, " * (1 + i % 5)} for i in range(NUM_ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    there = f"s3://{store.bucket}"
    store.files.put_file(str(tmp_path / "in.jsonl"), f"{there}/in.jsonl")
    words = [command, "run", f"model.path={tiny_model}", "input.rows_per_shard=8", "progress=false", "sampling.max_tokens=24"]
    words += ["model.dtype=float32", "engine.batch_invariant=true", "engine.threads=1", "kv_cache.prefix_cache=false"]

    def run(source: str, target: str, *, kill_at: str = "never") -> tuple[int, str]:
        with subprocess.Popen(
            [*words, f"input.path={source}", f"output.path={target}"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            store.door = lambda request: job.kill() if re.search(kill_at, request) else None
            said = "".join(job.communicate())
        return job.returncode, said

    assert run("in.jsonl", "whole")[0] == 3
    assert run(f"{there}/in.jsonl", f"{there}/out", kill_at=r"PUT .*part-00003\.arrow\.tmp$")[0] == -signal.SIGKILL
    shutil.rmtree(tmp_path / "cache" / "outputs")
    assert run(f"{there}/in.jsonl", f"{there}/out")[0] == 3
    store.files.get(f"{there}/out", str(tmp_path / "out"), recursive=True)
    parts = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("part-*")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("part-*")} == parts
    assert len(parts) == -(-NUM_ROWS // 8)
    verify = [command, "verify", f"{there}/out", "rows=3"]
    checked = subprocess.run(verify, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout.splitlines()[-1]) == (0, "all equal"), checked.stderr
    assert not list((tmp_path / "cache" / "copies").iterdir())
    code, said = run(f"{there}/in.jsonl", f"{there}/out")
    assert code == 3
    assert f"{NUM_ROWS} rows ({NUM_ROWS} of them from an earlier run)" in said
    assert f"answers: {there}/out/part-*.arrow" in said
    code, said = run(f"{there}/in.jsonl", "s3://a-slip/out")
    assert (code, "Traceback" in said) == (2, False)
    assert "output.path: s3://a-slip/out cannot be reached: The specified bucket does not exist" in said
