"""The input lines of OpenAI's Batch API: ``{"custom_id", "method", "url", "body"}``, one request a line, as in ``jsonl``.

``custom_id`` is the column ``id``; of the body, ``messages`` stay, and ``tools``, ``response_format`` and all settings of
the draw (``sampling_params``) are JSON text, so the columns are the same whatever the rows ask for.

* ``max_completion_tokens`` is max_tokens, ``logprobs: true`` with ``top_logprobs: k`` is logprobs k, the role developer is
  system. The names of ``sampling.*`` that OpenAI has not (top_k, min_p, ...) are taken too. A null is as if it were absent.
* ``model`` is a column and chooses nothing: the run's model answers every row, which a warning says.
* What changes no answer is left out: metadata, user, store, service_tier, safety_identifier, prompt_cache_key.
* Anything else is an error row that names the field: another url or method is ``bad_row``, a field of the body that is not
  served (stream, audio, a tool that must be called, ...) is ``bad_params``. Images in messages are refused where messages are read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine import SamplingParams
from pipeline.reader import Reader, Scan
from pipeline.readers import _text_rows
from pipeline.readers._json_rows import JsonRows, Mapped
from pipeline.readers._lines import PACKED
from pipeline.types import RowError

SUFFIXES = tuple(stem + packed for stem in (".jsonl", ".ndjson", ".json") for packed in PACKED)

_URL = "/v1/chat/completions"
_NO_EFFECT = {"metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_SERVED_VALUES: dict[str, list[Any]] = {
    "stream": [False],
    "modalities": [["text"]],
    "parallel_tool_calls": [True],
    "tool_choice": ["auto", "none"],
}
_SAMPLING = {field.name for field in fields(SamplingParams)} - {"logprobs"}
_COLUMNS = ("id", "model", "messages", "tools", "response_format", "sampling_params")  # also where every row is an error row
_LOG = logging.getLogger(__name__)


def scan(asked: Scan) -> Reader:
    """See ``pipeline.reader.Format``."""
    requests = _Requests()
    reader = _text_rows.scan(asked, files=asked.files(SUFFIXES), parse=JsonRows(requests))
    if requests.models:
        _LOG.warning("body.model (%s) chooses no model: the run's own one answers every row", ", ".join(sorted(requests.models)[:3]))
    return reader


class _Requests:
    """Maps a line's object to columns; ``models`` are the names of models that it has met."""

    def __init__(self) -> None:
        self.models: set[str] = set()

    def __call__(self, line: dict[str, Any]) -> Mapped:
        values: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"id": line.get("custom_id")}
        try:
            body = _body(line)
            model = body.pop("model", None)
            if model is not None:
                self.models.add(str(model))
            values["model"] = model
            values |= _columns(body)
        except RowError as error:
            return values, error
        return values, None


def _body(line: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(line.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise RowError("bad_row", f"{unknown[0]}: a batch line has custom_id, method, url and body only")
    if line.get("method", "POST") != "POST":
        raise RowError("bad_row", f"method: {line['method']!r} is not POST")
    if line.get("url") != _URL:
        raise RowError("bad_row", f"url: {line.get('url')!r} is not served; only {_URL} is")
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise RowError("bad_row", "body: missing or no object")
    return {key: value for key, value in body.items() if value is not None and key not in _NO_EFFECT}


def _columns(body: dict[str, Any]) -> dict[str, Any]:
    """Takes what it knows out of ``body`` and refuses the rest."""
    for key, served in _SERVED_VALUES.items():
        if key in body and body[key] not in served:
            raise RowError("bad_params", f"body.{key}: {json.dumps(body[key])} is not served")
    tools = body.pop("tools", None)
    columns = {
        "messages": _messages(body.pop("messages", None)),
        "tools": _text(None if body.get("tool_choice") == "none" else tools),
        "response_format": _text(body.pop("response_format", None)),
        "sampling_params": _text(_sampling(body)),
    }
    unserved = sorted(body.keys() - _SERVED_VALUES.keys())
    if unserved:
        raise RowError("bad_params", f"body.{unserved[0]}: is not served; take it out")
    return columns


def _messages(messages: Any) -> Any:
    """With the role system for developer; whether they are messages at all is for the prompt to say."""
    if not isinstance(messages, list):
        return messages
    return [item | {"role": "system"} if isinstance(item, dict) and item.get("role") == "developer" else item for item in messages]


def _sampling(body: dict[str, Any]) -> dict[str, Any] | None:
    """The settings under our names, taken out of ``body``; their ranges are for SamplingParams to check."""
    most = body.pop("max_completion_tokens", None)
    if most is not None and body.setdefault("max_tokens", most) != most:
        raise RowError(
            "bad_params", f"body.max_tokens: {body['max_tokens']} differs from max_completion_tokens ({most}); give one of the two"
        )
    wanted, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise RowError("bad_params", f"body.logprobs: {wanted!r} is not true or false")
    if top is not None and not wanted:
        raise RowError("bad_params", "body.top_logprobs: needs logprobs: true")
    sampling = {key: body.pop(key) for key in sorted(body.keys() & _SAMPLING)}
    if wanted:
        sampling["logprobs"] = 0 if top is None else top
    return sampling or None


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)
