"""`pagemill verify`: is a folder of answers what its record says, and do some of its rows come out again, alone?

Builds the recorded job and engine for pipeline.verify and shows the differences; it writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine import Engine, Tokenizer
from jobs._app import OK, ROWS_FAILED, guarded, make_job
from jobs._provenance import dtype_name
from jobs._record import recorded
from jobs._schema import RunConfig, absolute
from jobs._terminal import tell
from pipeline.archive import Archive
from pipeline.folder import at_hand
from pipeline.reader import open_reader
from pipeline.verify import Chosen, check_parts, check_rows

_EPILOG = """\
exit codes: 0 all equal; 3 something differs, each difference is a line; 2 no run there, or its record is damaged

Rows that a rerun replaced are computed again with the rerun's settings. Answers are equal token for token in float32 or
with engine.batch_invariant=true; in other number types a row that ran beside others may differ where two tokens are about
equally likely.
"""


def main(words: list[str]) -> int:
    """Check the folder that ``words`` name and return the exit code."""
    parser = _parser()
    options = parser.parse_args(words)
    numbers = {"rows": 0, "seed": 0}
    for word in options.numbers:
        key, _, number = word.partition("=")
        if key not in numbers or not number.isascii() or not number.isdigit():
            parser.error(f"{word}: neither rows=N nor seed=N")
        numbers[key] = int(number)
    return guarded(lambda: _read(options.folder, num_rows=numbers["rows"], seed=numbers["seed"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagemill verify",
        description="Check the folder of a run: every part against _manifest.jsonl, _shards.jsonl and errors.jsonl. "
        "With rows=N also compute N of its rows again, one at a time, and compare the answers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the output folder of a run, or its URL")
    parser.add_argument("numbers", metavar="rows=N seed=N", nargs="*", default=[], help="ok rows to compute again, and which (default 0)")
    return parser


def _read(folder: str, *, num_rows: int, seed: int) -> int:
    with at_hand(folder) as path:
        return _verify(Archive.open(path), place=absolute(folder), num_rows=num_rows, seed=seed)


def _verify(archive: Archive, *, place: str, num_rows: int, seed: int) -> int:
    found = check_parts(archive, num_chosen=num_rows, seed=seed)
    num_differences = len(found.differences)
    for line in found.differences:
        tell(line)
    num_open = len(archive.shards) - len(archive.parts)
    rest = f"; parts not finished yet: {num_open:,}" if num_open else ""
    tell(f"parts: {len(archive.parts):,}, rows: {found.num_rows:,}, error rows: {found.num_errors:,}{rest}")
    if not archive.has_rows:
        tell("the rows of this format cannot be read back: only the files were checked")
    if found.chosen:
        print(f"rows that are computed again, one at a time: {len(found.chosen):,} (seed={seed})", file=sys.stderr)
        for line in _differing_rows(archive, found.chosen, place=place):
            tell(line)
            num_differences += 1
        if num_differences > len(found.differences) and (note := _note(recorded(archive))):
            print(note, file=sys.stderr)
    tell("all equal" if num_differences == 0 else f"differences: {num_differences:,}")
    return OK if num_differences == 0 else ROWS_FAILED


def _differing_rows(archive: Archive, chosen: Sequence[Chosen], *, place: str) -> Iterator[str]:
    """The differences of all chosen rows, each computed under the settings that its answer has."""
    by_settings: dict[str, list[Chosen]] = {}
    for one in chosen:
        by_settings.setdefault(archive.settings_of(one.part, [one.row_key])[one.row_key], []).append(one)
    for rerun, rows in sorted(by_settings.items()):
        yield from _compared(archive, rows, config=recorded(archive, rerun=rerun), place=place)


def _note(config: RunConfig) -> str | None:
    """What to know about differing answers of a run whose numbers may depend on a row's neighbours; None where they may not."""
    dtype = dtype_name(config.model, config.engine)
    if dtype == "float32" or config.engine.batch_invariant:
        return None
    return (
        f"pagemill: this run computed in {dtype} without engine.batch_invariant=true, so its answers may depend on which rows ran side by "
        "side; a difference need not be a fault"
    )


def _compared(archive: Archive, chosen: Sequence[Chosen], *, config: RunConfig, place: str) -> Iterator[str]:
    """The differences of ``chosen``, whose settings are ``config``; ``place`` is the answers' folder, which is no input."""
    tokenizer = Tokenizer.load(config.model)
    job = make_job(config.job.name, tokenizer, prompt=config.prompt, sampling=config.sampling, model=config.model, engine=config.engine)
    known = list(archive.shards.values())
    reader = open_reader(config.input, prompt_columns=job.prompt_columns, limit=config.limit, known=known, output_path=place)
    job.check(reader.schema)
    alone = replace(config.kv_cache, prefix_cache=False, persist=None)  # no row may rest on what another one left
    engine = Engine.from_config(model=config.model, engine=config.engine, kv_cache=alone, tokenizer=tokenizer)
    try:
        yield from check_rows(archive, chosen, job=job, reader=reader, engine=engine)
    finally:
        engine.close()
