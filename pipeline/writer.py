"""What a writer is, and how a part gets onto the disk whole or not at all.

Knows no file format: a format is one module in ``pipeline/writers``, found by its file name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where answers go.

    ``format`` is a module of ``pipeline/writers``. ``ipc`` is file or stream, ``compression`` zstd, lz4 or none.
    ``prefix`` goes before every added column's name. ``token_ids`` adds the columns prompt_token_ids and token_ids,
    ``logprobs`` the answer's natural-log probabilities. ``batch_bytes`` bounds a record batch.
    """

    format: str = "arrow"
    path: str
    ipc: str = "file"
    compression: str = "zstd"
    prefix: str = ""
    token_ids: bool = False
    logprobs: bool = False
    batch_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        for key, known in (("ipc", ("file", "stream")), ("compression", ("zstd", "lz4", "none"))):
            if getattr(self, key) not in known:
                raise ValueError(f"output.{key}: {getattr(self, key)!r} is not one of {', '.join(known)}")
        if self.batch_bytes < 1:
            raise ValueError(f"output.batch_bytes: {self.batch_bytes} must be 1 or more")
