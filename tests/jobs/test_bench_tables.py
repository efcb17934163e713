"""Pages of tables: what each table makes of figures, recomputed by definition, and a whole page as a user starts it."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from engine import Tokenizer, plugins
from engine.config import ModelConfig
from jobs._app import compose
from jobs._bench import chart
from jobs._bench.config import BenchConfig
from jobs._bench.page import Page
from jobs._bench.tables import Setup, Table, TableOptions
from jobs.bench import main

TEXTS = Path(__file__).parents[2] / "data" / "samples" / "documents.jsonl"
NAMES = plugins.names("jobs._bench.tables")
GIB, MIB = 2**30, 2**20


def load(name: str) -> Table:
    table: Table = plugins.load("jobs._bench.tables", name, key="table.tables").TABLE
    return table


def made_up(dice: random.Random) -> dict[str, Any]:
    """Figures that no run would give, so that nothing fits by chance."""
    keys = ("generated_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "answer_s_median", "kv_bytes_peak", "perplexity")
    keys += ("batch_size_mean", "kv_utilisation_mean", "step_s_p99", "load_s")
    line: dict[str, Any] = {key: dice.uniform(1, 1e6) for key in keys}
    line |= {
        key: dice.randrange(1, 10**6)
        for key in ("kv_bytes", "kv_blocks_total", "rows", "prompt_tokens", "computed_prompt_tokens", "recomputed_tokens", "steps")
    }
    line |= {key: dice.randrange(1, 10**9) for key in ("batch_size_peak", "peak_rss_bytes", "generated_tokens")}
    return {
        **line,
        "first_row_s": line["load_s"] + dice.uniform(1, 9),
        "wall_s": line["load_s"] + dice.uniform(9, 99),
        "peak_device_bytes": dice.choice([None, dice.randrange(1, 10**9)]),
        "settings": {"engine.attention": dice.choice(["cpu", "sdpa"]), "kv_cache.block_size": dice.choice([8, 16])},
        "time_to_first_token_s": {"mean": dice.uniform(1, 9)},
    }


def seconds(line: Mapping[str, Any]) -> float:
    return float(line["wall_s"] - line["load_s"])


def memory(line: Mapping[str, Any]) -> float:
    return float(line["peak_rss_bytes"] if line["peak_device_bytes"] is None else line["peak_device_bytes"]) / GIB


def ladder(found: dict[str, Any], name: str) -> list[Any]:
    line, other = found[name], found["transformers generate"]
    speed = line["generated_tokens_per_s"]
    times = [line["first_row_s"] - line["load_s"], line["answer_s_median"], seconds(line)]
    ratio = speed / other["generated_tokens_per_s"]
    return [name, line["settings"]["engine.attention"], speed, ratio, *times, memory(line), line["kv_bytes_peak"] / MIB]


def formats(found: dict[str, Any], name: str) -> list[Any]:
    def token_bytes(line: dict[str, Any]) -> float:
        return float(line["kv_bytes"] / (line["kv_blocks_total"] * line["settings"]["kv_cache.block_size"]))

    line, decode = found[f"perplexity {name}"], found.get(f"decode {name}")
    change = (line["perplexity"] - found["perplexity fp32"]["perplexity"]) / found["perplexity fp32"]["perplexity"]
    size = token_bytes(line)
    head = [name, size, size / token_bytes(found["perplexity bf16"]), line["perplexity"], change]
    if decode is None:
        return [*head, None, None, None]
    speed = decode["decode_tokens_per_s"]
    return [*head, speed, speed / found["decode bf16"]["decode_tokens_per_s"], decode["kv_bytes"] / MIB]


def reservation(found: dict[str, Any], name: str) -> list[Any]:
    line = found[name]
    ratio = line["batch_size_mean"] / found["contiguous"]["batch_size_mean"]
    counts = [line["batch_size_peak"], line["batch_size_mean"], ratio, line["recomputed_tokens"]]
    return [name, line["kv_bytes"] / MIB, line["kv_utilisation_mean"], *counts, line["generated_tokens_per_s"], seconds(line)]


def prefix(found: dict[str, Any], name: str) -> list[Any]:
    line, users = found[name], name.partition(" ")[0]
    computed = line["computed_prompt_tokens"]
    ratio = seconds(found[f"{users} users, not cached"]) / seconds(line)
    shown = name.replace("users", "user") if users == "1" else name
    return [shown, line["prompt_tokens"], computed, computed / line["rows"], line["kv_bytes_peak"] / MIB, seconds(line), ratio]


def batching(found: dict[str, Any], name: str) -> list[Any]:
    line = found[name]
    speed, other = line["generated_tokens_per_s"], found["static"]["generated_tokens_per_s"]
    return [name, line["steps"], line["batch_size_mean"], speed, speed / other, line["answer_s_median"], seconds(line)]


def long_prompts(found: dict[str, Any], name: str) -> list[Any]:
    line = found[name]
    rates = [line["prefill_tokens_per_s"], line["time_to_first_token_s"]["mean"], line["decode_tokens_per_s"], line["step_s_p99"]]
    return [name, line["steps"], line["generated_tokens"], *rates, line["kv_bytes_peak"] / MIB, memory(line)]


BY_DEFINITION: dict[str, Callable[[dict[str, Any], str], list[Any]]] = {
    "ladder": ladder,
    "formats": formats,
    "reservation": reservation,
    "prefix": prefix,
    "batching": batching,
    "long_prompts": long_prompts,
}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_what_its_definition_makes_of_the_points(name: str, quick: bool, tmp_path: Path) -> None:
    table = load(name)
    dice = random.Random(name)
    points = table.points(Setup(quick=quick, texts=str(TEXTS), folder=tmp_path))
    found = {point: made_up(dice) for point in points}
    expected = [point.removeprefix("perplexity ") for point in points if not point.startswith("decode ")]
    rows = table.rows(found)
    assert [list(row) for row in rows] == [list(table.columns)] * len(expected)
    for row, point in zip(rows, expected, strict=True):
        by_definition = BY_DEFINITION[name](found, point)
        assert list(row.values()) == [value if isinstance(value, str | None) else pytest.approx(value) for value in by_definition]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_points_are_settings_that_are_taken(name: str, quick: bool, tmp_path: Path) -> None:
    points = load(name).points(Setup(quick=quick, texts=str(TEXTS), folder=tmp_path))
    configs = {point: compose("bench", words, kind=BenchConfig) for point, words in points.items()}
    synthetic_ones = [config.bench for config in configs.values() if not config.input.path]
    workloads = {replace(bench, answered_by="pagemill", static_batches=False) for bench in synthetic_ones}
    if name not in ("prefix", "long_prompts"):
        assert len(workloads) == 1, "what is compared answers the same rows"


def test_the_contiguous_scheme_has_the_memory_of_the_blocks(tmp_path: Path) -> None:
    for quick in (True, False):
        points = load("reservation").points(Setup(quick=quick, texts=str(TEXTS), folder=tmp_path))
        pieces, blocks = (compose("bench", words, kind=BenchConfig) for words in points.values())
        assert pieces.kv_cache.block_size == pieces.engine.max_model_len == 1024 and blocks.kv_cache.block_size == 16
        assert blocks.kv_cache.num_blocks * 16 == pieces.kv_cache.num_blocks * 1024


def test_texts_are_taken_once_a_document(tmp_path: Path) -> None:
    load("formats").points(Setup(quick=False, texts=str(TEXTS), folder=tmp_path))
    samples = [json.loads(line) for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    first = {sample["document"]: sample["prompt"] for sample in reversed(samples)}
    written = [json.loads(line)["prompt"] for line in (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(written) == sorted(first.values())


def test_bars_are_as_long_as_their_numbers() -> None:
    numbers = [[3.0, 12.0, 6.0], [0.5, 0.25]]
    panels = [chart.Panel(f"a < {place}", "s & more", [(f"<{n}>", n, f"{n} s") for n in row]) for place, row in enumerate(numbers)]
    svg = ElementTree.fromstring(chart.draw(panels))
    bars = [bar for bar in svg.iter("{http://www.w3.org/2000/svg}rect") if bar.get("class") == "bar"]
    widths = [float(bar.get("width", "")) for bar in bars]
    longest = widths[1]
    assert widths[:3] == pytest.approx([longest * n / 12.0 for n in numbers[0]], abs=0.06)
    assert widths[3:] == pytest.approx([longest, longest / 2], abs=0.06)
    edges = [float(bar.get("y", "")) + side for bar in bars for side in (0, float(bar.get("height", "")))]
    assert edges == sorted(edges) and edges[-1] < float(svg.get("height", "")), "one below the other"
    assert all(float(bar.get("x", "")) + width < float(svg.get("width", "")) for bar, width in zip(bars, widths, strict=True))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["table=kv", "engine.attention=sdpa"], "engine.attention: the table ladder sets it itself; leave it out"),
        (["table=kv", "table.texts=none.jsonl"], "table.texts: there is no file "),
        (["table=kv", "table.tables=[prefix,nothing]"], "table.tables: there is no 'nothing'; choose one of batching, formats, "),
        (["table=kv", "seed=1,2"], "seed: a page of tables has points of its own"),
        (["table=kv", "table.tables=[prefix]", "table.output=/proc/none"], "table.output: /proc/none cannot be made a folder"),
        (["table=kv", "bench.output=none/lines.jsonl"], "bench.output: none/lines.jsonl cannot be written"),
        (["table.quick=true"], "table.quick: says how a page of tables is made, and none is asked for"),
        (["bench.answered_by=somebody"], "bench.answered_by: 'somebody' is not one of pagemill, transformers"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    words: list[str], refusal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words, show=False) == 2
    assert capsys.readouterr().err.startswith(f"pagemill: {refusal}")
    assert list(tmp_path.iterdir()) == []


def test_texts_without_a_prompt_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "no prompt"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        load("formats").points(Setup(quick=True, texts=str(tmp_path / "rows.jsonl"), folder=tmp_path))


def test_a_table_that_lacks_a_point_says_so_and_the_others_stand(tmp_path: Path) -> None:
    options = TableOptions(title="A page", tables=("batching", "prefix"), output=str(tmp_path / "out"))
    page = Page(options, words=["table=kv", "engine.threads=1"], folder=tmp_path)
    page.make_folder()
    dice = random.Random(1)
    about = {"date": "2026-01-02T03:04", "version": "1", "revision": None, "torch": "2", "transformers": "5", "model": "tiny"}
    about["machine"] = {"gpu": "a GPU", "cpu": "", "usable_cpus": 1, "tier": None, "memory_bytes": GIB}
    lines = [{"point": {"table": name, "point": point}, **about, **made_up(dice)} for name, point in page.points]
    lines[1] = {"point": lines[1]["point"], "error": "no memory"}
    text = page.write(lines).read_text()
    assert "continuous was not measured: no memory" in text and "| static" not in text
    assert text.count("\n| ") == 2 + 6 and "`pagemill bench table=kv engine.threads=1`" in text
    assert len(ElementTree.parse(tmp_path / "out" / "measured.svg").findall(".//*[@class='bar']")) == 6


def perplexity_by_transformers(folder: str, texts: list[str], num_tokens: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.load(ModelConfig(path=folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(text)[:num_tokens] for text in texts])
    with torch.inference_mode():
        return float(torch.exp(model(input_ids=ids, labels=ids).loss))


def test_a_quick_page_end_to_end(pagemill: Any, tiny_model: str, tmp_path: Path) -> None:
    """Every point in its own process, against what the workloads and transformers say that they must come to."""
    words = ["table=kv", "table.quick=true", f"table.texts={TEXTS}", "table.output=out", "bench.output=lines.jsonl"]
    done = pagemill("bench", *words, f"model.path={tiny_model}", "engine.threads=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"page: {tmp_path / 'out' / 'MEASURED.md'}\n"
    found: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
    for line in map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines()):
        found[line["point"]["table"]][line["point"]["point"]] = line

    generate = found["ladder"].pop("transformers generate")
    paged = found["ladder"]["paged"]
    assert generate["answered_by"] == "transformers" and paged["answered_by"] == "pagemill"
    assert all(generate[key] == paged[key] for key in ("workload", "rows", "prompt_tokens", "generated_tokens"))

    exact = found["formats"]["perplexity fp32"]
    texts = [json.loads(line)["prompt"] for line in TEXTS.read_text(encoding="utf-8").splitlines()][:6:3]
    assert exact["perplexity"] == pytest.approx(perplexity_by_transformers(tiny_model, texts, exact["prompt_tokens"] // 2), rel=1e-4)
    assert exact["scored_tokens"] == exact["prompt_tokens"] - 2
    assert found["formats"]["decode bf16"]["kv_bytes"] == 2 * 3 * 16 * (2 * 2 * 2 * 8 * 2), "rows x blocks x slots x bytes"

    pieces, blocks = found["reservation"]["contiguous"], found["reservation"]["paged"]
    assert pieces["kv_bytes"] == blocks["kv_bytes"] and pieces["batch_size_peak"] == 2
    assert pieces["kv_utilisation_mean"] < 0.40 and blocks["kv_utilisation_mean"] > 0.85
    assert blocks["batch_size_mean"] > 4 * pieces["batch_size_mean"]

    apart, shared = found["prefix"]["4 users, not cached"], found["prefix"]["4 users, cached"]
    assert apart["computed_prompt_tokens"] == 4 * (64 + 8) and shared["computed_prompt_tokens"] == 64 + 4 * 8

    static, continuous = found["batching"]["static"], found["batching"]["continuous"]
    assert static["steps"] > continuous["steps"] and static["generated_tokens"] == continuous["generated_tokens"]

    (long,) = found["long_prompts"].values()
    assert (long["prompt_tokens"], long["generated_tokens"]) == (2000, 16) and long["settings"]["engine.attention"] in ("cpu", "sdpa")

    text = (tmp_path / "out" / "MEASURED.md").read_text()
    tables = text.split("\n## ")[1:]
    assert [part.partition("\n")[0] for part in tables] == [load(name).title for name in config_tables()]
    cells = [cell.strip() for cell in tables[3].splitlines()[-1].strip("|").split("|")]
    assert cells[:4] == ["4 users, cached", f"{4 * 72}", "96", f"{96 / 4:.1f}"]
    assert statistics.mean(part.count("\n| ") for part in tables) > 2
    num_bars = len(ElementTree.parse(tmp_path / "out" / "measured.svg").findall(".//*[@class='bar']"))
    assert num_bars == sum(part.count("\n| ") - 2 for part in tables)


def config_tables() -> tuple[str, ...]:
    return compose("bench", ["table=kv"], kind=BenchConfig).table.tables
