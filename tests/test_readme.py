"""README.md tells the truth about the things that can be looked up: keys, defaults, columns, error codes, links."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest

from jobs import _conf
from jobs._app import read_run
from pipeline import types
from pipeline.columns import OutputColumns

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def table(readme: str, *, first: str) -> list[list[str]]:
    """The rows of the table whose header's first cell is ``first``, as lists of cells."""
    found = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", readme, re.MULTILINE)
    assert found, f"README.md has no table that begins with {first}"
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in found[1].splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_keys_and_defaults_are_those_of_the_configuration(readme: str) -> None:
    config: dict[str, Any] = asdict(read_run(["input.path=questions.jsonl"]))
    for cell, default, _ in table(readme, first="key"):
        (key,) = names(cell)
        if key in _conf.groups():
            assert names(default) == [_conf.groups()[key]]
            continue
        value: Any = config
        for step in key.split("."):
            value = value[step]
        if default == "none":
            assert value in (None, (), {})
        elif names(default) and key != "output.path":
            assert names(default) == [str(value).lower() if isinstance(value, bool) else str(value)]


def test_columns_are_those_of_a_part(readme: str) -> None:
    schema = OutputColumns(pa.schema([]), fields=(), prefix="", token_ids=False, logprobs=False).schema
    told = [(name, pa.type_for_alias(kind)) for cell, kind, _ in table(readme, first="column") for name in names(cell)]
    assert told == [(field.name, field.type) for field in schema]


def test_error_codes_are_those_that_the_code_gives(readme: str) -> None:
    told = {name for cell, _ in table(readme, first="`error_code`") for name in names(cell)}
    sources = [path for folder in ("engine", "pipeline") for path in (ROOT / folder).rglob("*.py") if path != Path(types.__file__)]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert told == {name for name in get_args(types.ErrorCode) if f'"{name}"' in code}


def test_links_lead_somewhere(readme: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", readme)
    assert links
    for link in links:
        assert (ROOT / link).exists()
