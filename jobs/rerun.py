"""`pagemill rerun`: the rows of a finished run that meet some conditions, answered again under its settings and overrides over them.

Builds the job and the engine for pipeline.rerun and tells what came out.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from engine import Tokenizer
from jobs._app import FAULT, OK, ROWS_FAILED, TOO_MANY_FAILED, going_on, guarded, load_engine, make_job, prometheus_file, too_many_failed
from jobs._provenance import provenance
from jobs._record import recorded, with_overrides, without_limits
from jobs._schema import RunConfig
from jobs._signals import INTERRUPTED, Stop
from jobs._terminal import say, tell
from pipeline import Job, OutputOptions, PrometheusFile, RunError, Summary, run
from pipeline.archive import Archive
from pipeline.columns import OutputColumns
from pipeline.lock import locked
from pipeline.reader import Reader, open_reader
from pipeline.rerun import Condition, Rerun
from pipeline.writer import PartWriter

_EPILOG = """\
examples
  pagemill rerun answers --where finish_reason=length sampling.max_tokens=2048
  pagemill rerun answers --where status=error --where error_code=too_long engine.max_model_len=8192

The new answers stand in the places of the old ones, which are kept in DIR/_rerun-001/replaced/. A rerun that was stopped goes
on with the same command.

exit codes: those of pagemill run; 0 too where no row meets the conditions
"""


def main(words: list[str]) -> int:
    """Rerun what ``words`` ask for and return the exit code."""
    options = _parser().parse_intermixed_args(words)
    return guarded(lambda: _held(options.folder, where=options.where, overrides=options.overrides))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagemill rerun",
        description="Answer some rows of a finished run again, with the settings that it was made with and the overrides over them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the output folder of a run")
    parser.add_argument(
        "--where",
        metavar="COLUMN=VALUE",
        action="append",
        required=True,
        help="take the rows of which a column has this value; given several times, all must hold",
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings to change, as for pagemill run")
    return parser


def _held(folder: str, *, where: list[str], overrides: list[str]) -> int:
    if "://" in folder:
        raise ValueError(f"{folder}: is behind a URL; copy the folder to this machine, rerun the copy, and copy that back")
    with locked(Archive.open(folder).folder, key="DIR"):
        return _rerun(Archive.open(folder), where=where, overrides=overrides)


def _rerun(archive: Archive, *, where: list[str], overrides: list[str]) -> int:
    if not archive.has_rows:
        raise ValueError(
            f"{archive.folder}: its format ({archive.config['output']['format']}) keeps no columns, so no row can be found in it"
        )
    conditions = [Condition.parse(text) for text in where]
    config = with_overrides(recorded(archive), overrides)
    prometheus = prometheus_file(config)
    tokenizer = Tokenizer.load(config.model)
    job = make_job(config.job.name, tokenizer, prompt=config.prompt, sampling=config.sampling, model=config.model, engine=config.engine)
    known = list(archive.shards.values())
    whole = open_reader(
        config.input, prompt_columns=job.prompt_columns, limit=config.limit, known=known, output_path=str(archive.folder.absolute())
    )
    columns = _columns(archive, config, job=job, reader=whole)
    words = [*(word for text in where for word in ("--where", text)), *without_limits(overrides)]
    rerun = Rerun.begin(archive, conditions, words=words)
    if rerun is None:
        tell(f"no row meets {' and '.join(where)}: nothing to do")
        return OK
    summary = _answer(rerun, config, archive=archive, tokenizer=tokenizer, job=job, whole=whole, prometheus=prometheus)
    if summary is None:
        return FAULT
    if summary.stopped == "max_error_rate":
        say(f"{too_many_failed(summary, limits=config.limits)}; nothing is replaced")
        return TOO_MANY_FAILED
    if summary.stopped:
        say(f"stopped early ({summary.stopped}), and nothing is replaced yet; {going_on(summary, limits=config.limits)}")
        return INTERRUPTED
    try:
        rerun.merge(archive, reader=whole, columns=columns, writer=PartWriter(config.output, schema=columns.schema))
        rerun.note(words, merged=True)
    except OSError as error:  # a full disk; each part is the old one or the new one
        say(f"{error}; the same command goes on from there")
        return FAULT
    _tell(summary, rerun)
    return ROWS_FAILED if summary.num_errors else OK


def _columns(archive: Archive, config: RunConfig, *, job: Job, reader: Reader) -> OutputColumns:
    """The columns of the parts, which must be those of the new answers too.

    Raises:
        ValueError: they are others.
    """
    job.check(reader.schema)
    output = config.output
    columns = OutputColumns(reader.schema, fields=job.fields, prefix=output.prefix, token_ids=output.token_ids, logprobs=output.logprobs)
    types = {field.name: str(field.type) for field in columns.schema}
    if types != dict(archive.columns):
        other = sorted({*types.items()} ^ {*archive.columns.items()})[0][0]
        raise ValueError(f"{other}: the new answers would have other columns than the parts, which cannot hold both; use a run of its own")
    return columns


def _answer(
    rerun: Rerun,
    config: RunConfig,
    *,
    archive: Archive,
    tokenizer: Tokenizer,
    job: Job,
    whole: Reader,
    prometheus: PrometheusFile | None,
) -> Summary | None:
    """Run the selected rows into the rerun's own folder; None where a full disk or the like broke it off."""
    output = config.output
    own = OutputOptions(path=str(rerun.folder), prefix=output.prefix, token_ids=output.token_ids, logprobs=output.logprobs)
    config = replace(config, output=own, resume="auto")
    stop = Stop()
    try:
        return run(
            job,
            input=config.input,
            output=own,
            provenance=provenance(config, tokenizer),
            load_engine=lambda: load_engine(config, tokenizer, saying=f"{rerun.num_rows:,} rows again: {job.announcement}", stop=stop),
            reader=rerun.reader(archive, whole),
            limits=config.limits,
            progress=config.progress,
            prometheus=prometheus,
            stop=stop,
        )
    except RunError as error:
        say(f"{error}; the same command goes on from there")
        return None


def _tell(summary: Summary, rerun: Rerun) -> None:
    rows = "1 row" if rerun.num_rows == 1 else f"{rerun.num_rows:,} rows"
    cut = f", {summary.num_cut:,} cut at their length limit" if summary.num_cut else ""
    answers = f", {summary.num_rows:,} answers" if summary.num_rows != summary.num_asked else ""
    tell(f"{rows} answered again{answers}: {summary.num_ok:,} ok, {summary.num_errors:,} with an error{cut}")
    tell(f"old answers: {rerun.folder}/replaced/part-*.arrow")
