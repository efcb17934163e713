"""The lines of an OpenAI Batch API result: one for each input row, its samples as choices; failed rows in a file of their own.

Knows the response's shape and which of our columns fills which place; columns that have no place in it are not written.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import durable
from pipeline.columns import NAMES
from pipeline.writer import OutputOptions, companion_of
from pipeline.writers._json_values import encoder, json_lines

SUFFIXES = {"none": ".jsonl"}
USES = ("model",)
COMPANION = "errors"

_LOG = logging.getLogger(__name__)

# The API's own number for a log probability that is too low to say.
_LOWEST_LOGPROB = -9999.0


def check(schema: pa.Schema, *, options: OutputOptions) -> None:
    """Warn of what the answers have and the lines have no place for; no input column is in them, so no type is refused."""
    names = [name.removeprefix(options.prefix) for name in _added(schema, options=options)]
    left_out = [name for name in names if name not in NAMES]
    if left_out:
        _LOG.warning("output=openai_batch has no place for %s, which will not be written", ", ".join(left_out))
    if "logprobs" in names and "token_ids" not in names:
        _LOG.warning("output=openai_batch writes log probabilities beside token ids only; set output.token_ids=true to have them")


def write(path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, compression: str, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``; the companion holds the failed rows' lines."""
    failed = []
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for _, samples in itertools.groupby(_rows(batches, schema=schema, options=options), key=lambda row: row["row_key"]):
            first, *others = samples
            if first["status"] == "error":
                failed.append(_line(first, response=None, error={"code": first["error_code"], "message": first["error_message"]}))
            else:
                body = _completion([first, *others], model=options.model or "pagemill")
                response = {"status_code": 200, "request_id": first["row_key"], "body": body}
                stream.writelines(json_lines([_line(first, response=response, error=None)]))
    errors = companion_of(path, COMPANION)
    if failed:
        durable.replace_text(errors, "".join(json_lines(failed)))
    else:
        errors.unlink(missing_ok=True)


def _added(schema: pa.Schema, *, options: OutputOptions) -> list[str]:
    """The columns behind the input's."""
    names: list[str] = schema.names
    return names[names.index(options.prefix + "row_id") :]


def _rows(batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, options: OutputOptions) -> Iterator[Mapping[str, Any]]:
    """Our columns of every output row, under their plain names."""
    wanted = [name for name in _added(schema, options=options) if name.removeprefix(options.prefix) in NAMES]
    encode = encoder(pa.struct([schema.field(name).with_name(name.removeprefix(options.prefix)) for name in wanted]))
    for batch in batches:
        yield from encode(batch.select(wanted).to_struct_array())


def _line(row: Mapping[str, Any], *, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{row['row_key']}", "custom_id": row["row_id"], "response": response, "error": error}


def _completion(samples: Sequence[Mapping[str, Any]], *, model: str) -> dict[str, Any]:
    """The ``chat.completion`` object. Names come from the row key and the time is 0, so that equal rows give equal bytes."""
    first = samples[0]
    num_generated = sum(row["num_generated_tokens"] for row in samples)
    return {
        "id": f"chatcmpl-{first['row_key']}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [_choice(row) for row in samples],
        "usage": {
            "prompt_tokens": first["num_prompt_tokens"],
            "completion_tokens": num_generated,
            "total_tokens": first["num_prompt_tokens"] + num_generated,
            "prompt_tokens_details": {"cached_tokens": first["num_cached_tokens"]},
        },
    }


def _choice(row: Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["generation"], "refusal": None}
    if row["reasoning"] is not None:
        message["reasoning_content"] = row["reasoning"]
    return {"index": row["sample_index"], "message": message, "logprobs": _logprobs(row), "finish_reason": row["finish_reason"]}


def _logprobs(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """One entry a token of the answer, where the run keeps both columns; a part holds no token texts, so ids stand for them."""
    token_ids, logprobs = row.get("token_ids"), row.get("logprobs")
    if not token_ids or not logprobs:
        return None
    nothing: list[list[Any]] = [[]] * len(token_ids)
    top = zip(row["top_logprob_ids"] or nothing, row["top_logprobs"] or nothing, strict=True)
    content = [
        {**_token(token_id, logprob), "top_logprobs": [_token(*pair) for pair in zip(ids, values, strict=True)]}
        for token_id, logprob, (ids, values) in zip(token_ids, logprobs, top, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float | None) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "bytes": None, "logprob": _LOWEST_LOGPROB if logprob is None else logprob}
