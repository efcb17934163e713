"""One request in flight: its tokens, how many of them the cache holds, and which blocks hold them.

The only mutable thing that the scheduler and the KV cache share; it makes no decision of its own.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from engine.types import Request

if TYPE_CHECKING:
    from engine.kv.radix import Node


class Sequence:
    """Invariant (I2): ``0 <= num_computed < len(tokens)`` while it lives: there is always a token to compute.

    Attributes:
        tokens: int32 prompt and output token ids, in order.
        num_computed: leading tokens whose keys and values are in ``blocks``.
        blocks: block ids in position order; token ``p`` lies in ``blocks[p // block_size]``.
        nodes: radix nodes of the leading blocks that are published; ``nodes[i].block == blocks[i]``.
        max_len: most tokens it may grow to, prompt included.
    """

    __slots__ = ("blocks", "logprobs", "max_len", "nodes", "num_cached", "num_computed", "num_prompt", "request", "tokens")

    def __init__(self, request: Request, *, max_len: int) -> None:
        self.request = request
        self.tokens = array("i", request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.max_len = max_len
        self.num_computed = 0
        self.num_cached: int | None = None  # prompt tokens found in the cache at the first admission
        self.blocks: list[int] = []
        self.nodes: list[Node] = []
        self.logprobs: list[float] = []

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    def append(self, token_id: int, logprob: float) -> None:
        self.tokens.append(token_id)
        self.logprobs.append(logprob)

    def block_key(self, index: int, block_size: int) -> bytes:
        """The bytes of the int32 tokens of full block ``index``: the edge label in the radix tree."""
        return self.tokens[index * block_size : (index + 1) * block_size].tobytes()
