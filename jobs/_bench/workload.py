"""What a benchmark asks: requests of a synthetic shape, or those of a file of rows.

Makes them before any clock runs; what answers them, and how fast, is not known here.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine import Request, SamplingParams
from jobs._schema import absolute
from pipeline import InputOptions, Job, RowError
from pipeline.asking import ask
from pipeline.reader import open_reader


class Lengths(NamedTuple):
    """Each length from ``low`` to ``high`` is as likely as any other."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: int | str, *, key: str) -> Lengths:
        """``256`` or ``"64-256"``.

        Raises:
            ValueError: it is neither, or a length is under 1; the message names ``key``.
        """
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(text))
        if match is None:
            raise ValueError(f"{key}: {text!r} is not a length; write a number, or two as in 64-256")
        low = int(match[1])
        lengths = cls(low, int(match[2] or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{key}: {text} must be 1 or more" + (", the smaller number first" if match[2] else ""))
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A synthetic workload of ``rows`` prompts of random tokens, each answered with exactly as many tokens as it asks for.

    ``prompt_tokens`` and ``max_tokens`` are lengths, or ranges such as "64-256". The first ``shared_tokens`` of a prompt are one
    of ``prefixes`` beginnings, which the rows take in turn.
    """

    rows: int
    prompt_tokens: int | str
    shared_tokens: int
    prefixes: int
    max_tokens: int | str

    def __post_init__(self) -> None:
        for key in ("rows", "prefixes"):
            if getattr(self, key) < 1:
                raise ValueError(f"bench.{key}: {getattr(self, key)} must be 1 or more")
        shortest = self.prompt_lengths.low
        if not 0 <= self.shared_tokens < shortest:
            raise ValueError(f"bench.shared_tokens: {self.shared_tokens} is not in 0..{shortest - 1}, under bench.prompt_tokens")
        _ = self.answer_lengths  # refuses what is no length

    @property
    def prompt_lengths(self) -> Lengths:
        return Lengths.parse(self.prompt_tokens, key="bench.prompt_tokens")

    @property
    def answer_lengths(self) -> Lengths:
        return Lengths.parse(self.max_tokens, key="bench.max_tokens")

    def __str__(self) -> str:
        shared = f" ({self.shared_tokens} shared)" if self.shared_tokens else ""
        return f"{self.rows} rows of {self.prompt_tokens} tokens{shared}, {self.max_tokens} out"


def synthetic(workload: Workload, *, vocab_size: int, sampling: SamplingParams, seed: int) -> Iterator[Request]:
    """The requests of a synthetic workload, drawing as ``sampling`` says; the same for the same seed.

    Raises:
        ValueError: ``sampling`` would end an answer before its length.
    """
    for key in ("stop", "stop_token_ids"):
        if getattr(sampling, key):
            raise ValueError(f"sampling.{key}: would end answers of the synthetic workload before bench.max_tokens; leave it empty")
    dice = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(vocab_size) for _ in range(count)]

    prefixes = [tokens(workload.shared_tokens) for _ in range(workload.prefixes)]
    for row in range(workload.rows):
        own = tokens(dice.randint(*workload.prompt_lengths) - workload.shared_tokens)
        num_out = dice.randint(*workload.answer_lengths)
        forced = replace(sampling, max_tokens=num_out, min_tokens=0, ignore_eos=True)
        yield Request(id=row, prompt_token_ids=[*prefixes[row % workload.prefixes], *own], sampling=forced)


def from_file(source: InputOptions, *, job: Job, limit: int | None) -> Iterator[Request]:
    """The requests that ``job`` makes of the input's rows, which may bring lengths of their own in ``sampling_params``.

    Raises:
        ValueError: the input cannot be read, or a row cannot be asked; the message names it.
    """
    reader = open_reader(replace(source, path=absolute(source.path)), prompt_columns=job.prompt_columns, limit=limit)
    job.check(reader.schema)
    for shard in reader.read(reader.shards):
        for record, asked, _ in itertools.chain.from_iterable(ask(job, shard.records)):
            if isinstance(asked, RowError):
                raise ValueError(f"{record.row_key}: {asked.message}")
            yield asked
