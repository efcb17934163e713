"""The installed command: exit codes, messages without tracebacks, nothing written outside the output folder."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from jobs.__main__ import main

NOT_FOR_HELP = ("torch", "transformers", "hydra", "omegaconf", "pyarrow")


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(f"pagemill: {message}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for part in sorted(folder.glob("part-*.arrow")) for row in pa.ipc.open_file(str(part)).read_all().to_pylist()]


@pytest.mark.parametrize(("verb", "key"), [("plan", "json: false"), ("bench", "shared_tokens: 128"), ("bench", "max_num_seqs: 64")])
def test_each_verb_tells_its_own_keys(verb: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert key in shown
    assert ("rows_per_shard" in shown) and ("max_error_rate" in shown) == (verb == "plan")


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], []])
def test_help_is_there_at_once(words: list[str]) -> None:
    code = (
        f"import sys; from jobs.__main__ import main; assert main({words!r}) == 0; print([m for m in {NOT_FOR_HELP} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "kv_cache" in done.stdout
    assert "sampling" in done.stdout


def test_importing_the_engine_loads_no_torch() -> None:
    code = (
        "import sys, engine; engine.Engine, engine.Request, engine.Tokenizer; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_checked_configuration_needs_no_torch() -> None:
    code = "import sys; from jobs._app import read_run; read_run(['input.path=x']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_configuration_is_shown_with_absolute_paths(pagemill: Any, tmp_path: Path) -> None:
    done = pagemill("run", "input.path=in.jsonl", "sampling=greedy", "--cfg", "job")
    assert done.returncode == 0
    assert f"path: {tmp_path}/in.jsonl" in done.stdout
    assert "temperature: 0.0" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "input.path=in.jsonl", "engine.max_num_sequences=3"], "engine.max_num_sequences: unknown key"),
        (["input.path=in.jsonl", "sampling.top_k=many"], "sampling.top_k: value 'many'"),
        (["run", "input.path=in.jsonl", "modle=x"], "modle: unknown key, did you mean model?"),
        (["run", "input.path=in.jsonl", "job=poem"], "job: there is no 'poem'; choose one of chat, generate, score"),
        (["run", "input.path=in.jsonl", "prompt.system=(hi"], "prompt.system=(hi: Hydra cannot read this; quote"),
        (["run"], "input.path: there is no value"),
        (["walk", "input.path=in.jsonl"], "there is no command 'walk'; the commands are run, plan, verify, rerun, bench"),
        (["input.path=in.jsonl", "seed=1,2"], "seed=1,2: a comma asks for several runs, which are started with -m"),
        (["-m", "input.path=in.jsonl", "seed=1,2"], "output.path: 2 of 2 runs would share "),
        (["-m", "input.path=in.jsonl", "prompt.system=Be kind, be brief"], "prompt.system: a prompt is not swept over; quote"),
        (["-m", "input.path=in.jsonl", "seed=1,2", "prompt.system=(hi"], "prompt.system=(hi: Hydra cannot read this"),
        (["plan", "-m", "seed=1,2"], "-m: only run and bench sweep over values, not plan"),
        (["run", "input.path=in.jsonl", "model.path=/no/such/model"], "model.path: there is no folder /no/such/model"),
        (
            ["run", "input.path=in.jsonl", "metrics.prometheus=/no/such/run.prom"],
            "metrics.prometheus: there is no folder /no/such",
        ),
        (["run", "input.path=in.jsonl", "job.name=bench"], "job.name: 'bench' is a command and no job"),
    ],
)
def test_refusal_is_one_line(pagemill: Any, tmp_path: Path, words: list[str], message: str) -> None:
    refused(pagemill(*words), message)
    assert list(tmp_path.iterdir()) == []


class TestTinyModel:
    """Whole runs of a model that is small enough to answer at once."""

    @pytest.fixture
    def words(self, tiny_model: str) -> list[str]:
        return ["run", f"model.path={tiny_model}", "input.path=in.jsonl", "output.path=out", "sampling.max_tokens=3", "engine.threads=1"]

    def test_missing_input(self, pagemill: Any, words: list[str]) -> None:
        refused(pagemill(*words), "input.path: ")

    def test_missing_prompt_file(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
        refused(pagemill(*words, "prompt.system_file=nothing.txt"), "prompt.system_file: ")

    def test_job_generate_has_no_system_prompt(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
        refused(pagemill(*words, "job=generate", "prompt.system=kind"), "prompt.system: ")

    def test_model_without_weights(self, pagemill: Any, tmp_path: Path, words: list[str], tiny_model: str) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
        shutil.copytree(tiny_model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
        done = pagemill(*words, "model.path=bare")
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("pagemill: model.path: ")
        assert "Traceback" not in done.stderr

    def test_rows_come_out(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "Hi"}\n{"id": "b", "prompt": "Ho"}\n')
        done = pagemill(*words, "sampling.ignore_eos=true", "prompt.system=kind")
        assert done.returncode == 0, done.stderr
        rows = rows_of(tmp_path / "out")
        assert [row["row_id"] for row in rows] == ["a", "b"]
        assert [row["num_generated_tokens"] for row in rows] == [3, 3]
        assert [row["num_prompt_tokens"] for row in rows] == [len("kind") + len("Hi") + 5] * 2
        assert "2 rows: 2 ok, 0 with an error, 2 cut at their length limit" in done.stdout
        assert f"answers: {tmp_path}/out/part-*.arrow" in done.stdout
        assert "an answer has at most 3 tokens (sampling.max_tokens)" in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]
        record = json.loads((tmp_path / "out" / "_run.json").read_text())
        assert record["config"]["input"]["path"] == str(tmp_path / "in.jsonl")
        assert record["config"]["output"]["path"] == str(tmp_path / "out")
        assert record["fingerprint"]["model.dtype"] in ("float32", "bfloat16")
        metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
        assert metrics["peak_rss_bytes"] > metrics["kv_blocks_peak"] * metrics["kv_bytes"] / metrics["kv_blocks_total"]
        assert (metrics["peak_device_bytes"] is None) == (not torch.cuda.is_available()), "only a GPU's allocator counts"

    def test_a_scheduled_job_computes_its_system_prompt_once(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "system.txt").write_text("Be brief. " * 60)
        words += ["prompt.system_file=system.txt", "kv_cache.persist=kv", "model.dtype=float32", "output.token_ids=true"]
        numbers, answers, cached = [], [], []
        for day, own in enumerate(("", "", "the next day ")):
            (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "{own}{row}"}}\n' for row in range(4)))
            done = pagemill(*words, f"output.path=out{day}")
            assert done.returncode == 0, done.stderr
            numbers.append(json.loads((tmp_path / f"out{day}" / "metrics.json").read_text()))
            answers.append([row["token_ids"] for row in rows_of(tmp_path / f"out{day}")])
            cached.append(min(row["num_cached_tokens"] for row in rows_of(tmp_path / f"out{day}")))
        assert answers[0] == answers[1]
        assert cached[0] == 0 and min(cached[1:]) >= 592, "of about 600 tokens of system prompt"
        assert numbers[0]["computed_prompt_tokens"] - numbers[1]["computed_prompt_tokens"] >= 592
        assert [number["kv_blocks_loaded"] for number in numbers] == [0, 37, 37]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "kv", "out0", "out1", "out2", "system.txt"]

    def test_a_sweep_is_a_run_for_each_combination(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
        swept = ["output.path=out/s${seed}-t${sampling.temperature}", "seed=1,2", "sampling.temperature=0.5,1.5"]
        done = pagemill("-m", *words[1:], *swept)
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["s1-t0.5", "s1-t1.5", "s2-t0.5", "s2-t1.5"]
        alone = pagemill(*words, "output.path=alone", "seed=2", "sampling.temperature=1.5")
        assert alone.returncode == 0, alone.stderr
        assert rows_of(tmp_path / "alone") == rows_of(tmp_path / "out" / "s2-t1.5")
        assert "pagemill: run 4 of 4: seed=2 sampling.temperature=1.5" in done.stderr
        stopped = pagemill("-m", *words[1:], *swept, "output.path=more/s${seed}-t${sampling.temperature}", "max_rows=1")
        assert stopped.returncode == 75, stopped.stderr
        assert len(list((tmp_path / "more").iterdir())) == 1

    def test_failed_rows_give_3(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": ""}\nno json\n')
        done = pagemill(*words)
        assert done.returncode == 3, done.stderr
        assert [row["error_code"] for row in rows_of(tmp_path / "out")] == [None, "empty_prompt", "bad_row"]
        assert "3 rows: 1 ok, 2 with an error" in done.stdout
        assert "Traceback" not in done.stderr

    def test_rows_and_answers_are_counted_apart(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n{"prompt": "He"}\n{"prompt": ""}\n')
        words += ["sampling.n=2", "sampling.ignore_eos=true"]
        for told in ("1 more are answered and wait", "so 2 are done (1 of them from an earlier run)"):
            stopped = pagemill(*words, "max_rows=1")
            assert stopped.returncode == 75, stopped.stderr
            assert stopped.stdout.startswith("0 rows: 0 ok, 0 with an error\n") and told in stopped.stdout
        done = pagemill(*words)
        assert done.returncode == 3, done.stderr
        assert "4 rows (2 of them from an earlier run), 7 answers: 6 ok, 1 with an error, 6 cut at" in done.stdout
        again = pagemill("rerun", "out", "--where", "status=ok")
        assert "3 rows answered again, 6 answers: 6 ok, 0 with an error, 6 cut at" in again.stdout, again.stderr

    def test_other_settings_need_another_folder(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
        assert pagemill(*words).returncode == 0
        again = pagemill(*words)
        assert again.returncode == 0, again.stderr
        assert "1 row (1 of them from an earlier run)" in again.stdout
        other = pagemill(*words, "sampling.top_k=5")
        assert other.returncode == 2
        assert "sampling.top_k" in other.stderr
        assert "Traceback" not in other.stderr

    @pytest.mark.parametrize(("num_blocks", "num_carried"), [(24, 40_000), (2, 10)])
    def test_a_full_disk_gives_1_and_no_traceback(
        self, pagemill: Any, command: str, tmp_path: Path, words: list[str], num_blocks: int, num_carried: int
    ) -> None:
        row = {"prompt": "Hi", "carried": random.Random(0).randbytes(num_carried).hex()}
        (tmp_path / "in.jsonl").write_text(json.dumps(row))
        limited = ["bash", "-c", f'ulimit -f {num_blocks}; exec "$0" "$@"', command, *words]  # no file over so many KiB
        done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1, done.stderr
        assert "File too large" in done.stderr
        assert "the same command goes on from there" in done.stderr
        assert "Traceback" not in done.stderr
        assert list(tmp_path.glob("out/part-*.arrow")) == []
        assert pagemill(*words).returncode == 0
        assert [row["status"] for row in rows_of(tmp_path / "out")] == ["ok"]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_gives_75_and_the_next_run_goes_on(
        self, pagemill: Any, command: str, tmp_path: Path, words: list[str], number: signal.Signals
    ) -> None:
        count = 60
        (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "Count to {i}."}}\n' for i in range(count)))
        slow = [*words, "input.rows_per_shard=3", "engine.max_num_seqs=1", "sampling.ignore_eos=true", "sampling.max_tokens=20"]
        with subprocess.Popen([command, *slow], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
            deadline = time.monotonic() + 120
            while not list(tmp_path.glob("out/part-*.arrow")) and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            job.send_signal(number)
            output, errors = job.communicate(timeout=60)
        assert job.returncode == 75, errors
        assert "Traceback" not in errors
        assert "run the same command again" in errors
        finished = 3 * len(list(tmp_path.glob("out/part-*.arrow")))
        waiting = int((re.search(r"(\d+) more are answered", output) or [0, 0])[1])
        assert 1 <= finished < count
        assert f"{finished} ok" in output
        done = pagemill(*slow)
        assert done.returncode == 0, done.stderr
        assert f"{count} rows ({finished + waiting} of them from an earlier run): {count} ok" in done.stdout
        assert [row["row_key"] for row in rows_of(tmp_path / "out")] == [f"in.jsonl:{i}" for i in range(count)]

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into the process through /proc")
    @pytest.mark.parametrize("moment", ["before torch is loaded", "while it is loaded"])
    def test_a_signal_before_the_first_row_gives_75_at_once(self, command: str, tmp_path: Path, words: list[str], moment: str) -> None:
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
        with subprocess.Popen([command, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
            process = Path(f"/proc/{job.pid}")
            if moment == "before torch is loaded":
                while not int(re.search(r"SigCgt:\s*(\w+)", (process / "status").read_text())[1], 16) & 1 << signal.SIGTERM - 1:
                    time.sleep(0.001)
                assert "libtorch" not in (process / "maps").read_text()
            else:
                while "libtorch" not in (process / "maps").read_text():
                    time.sleep(0.001)
            job.terminate()
            _, errors = job.communicate(timeout=60)
        assert (job.returncode, errors.splitlines()[-1]) == (75, "pagemill: stopped; the same command goes on from there")
        assert "Traceback" not in errors

    def test_a_deadline_that_no_row_can_meet_is_told(self, pagemill: Any, tmp_path: Path, words: list[str]) -> None:
        """Started again and again, such a job would otherwise look as if it went on."""
        (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
        long = [*words[:-2], "engine.threads=1", "sampling.ignore_eos=true", "sampling.max_tokens=900", "sampling.n=64", "deadline=1s"]
        done = pagemill(*long)
        assert done.returncode == 75, done.stderr
        last = done.stderr.splitlines()[-1]
        assert re.fullmatch(
            r"pagemill: stopped early \(deadline\); loading took \d+\.\d s and the \d\.\d s that were left were not enough for one row, "
            r"so the same command may never get further: run it with a later deadline",
            last,
        ), last

    def test_limits_and_a_dead_stdout_have_their_exit_codes(self, pagemill: Any, command: str, tmp_path: Path, words: list[str]) -> None:
        rows = ["{}" if i % 2 else f'{{"prompt": "Count to {i}."}}' for i in range(240)]
        (tmp_path / "in.jsonl").write_text("\n".join(rows))
        done = pagemill(*words, "max_error_rate=0.3")
        assert done.returncode == 4, done.stderr
        assert "0 rows: 0 ok" in done.stdout and not (tmp_path / "out" / "errors.jsonl").exists(), "nothing else tells of the failures"
        why = "more than max_error_rate=0.3 of the rows failed, 50 of 100 so far; 50 of them with empty_prompt, the first is in.jsonl:1;"
        assert why in done.stderr
        done = pagemill(*words, "max_rows=20")
        assert done.returncode == 75, done.stderr
        assert "stopped early (max_rows)" in done.stderr
        done = pagemill(*words, "max_tokens_total=1")
        assert done.returncode == 2, done.stderr
        assert "max_tokens_total: 1 is less than the next row may need" in done.stderr
        with open("/dev/full", "w") as full:
            broken = subprocess.run(
                [command, *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False
            )
        assert broken.returncode == 3, broken.stderr
        assert "stdout cannot be written: No space left on device" in broken.stderr
        assert "Traceback" not in broken.stderr and "Exception" not in broken.stderr
        assert len(rows_of(tmp_path / "out")) == 240
