"""Rows in, rows out, nothing lost: files of prompts through an engine into Arrow files of answers.

``run`` is the one entry; a ``Job`` says how a row is asked and answered. Knows no configuration framework and no tensor.
"""

from pipeline.job import Job, TextJob
from pipeline.limits import Limits
from pipeline.prometheus import MetricsOptions, PrometheusFile
from pipeline.prompt import PromptOptions, Prompts
from pipeline.provenance import Provenance
from pipeline.reader import InputOptions
from pipeline.runner import Engine, run
from pipeline.summary import Summary
from pipeline.types import Record, RowError, RunError
from pipeline.writer import OutputOptions

__all__ = [
    "Engine",
    "InputOptions",
    "Job",
    "Limits",
    "MetricsOptions",
    "OutputOptions",
    "PrometheusFile",
    "PromptOptions",
    "Prompts",
    "Provenance",
    "Record",
    "RowError",
    "RunError",
    "Summary",
    "TextJob",
    "run",
]
