"""Steps over a paged pool full of NaN, and the naive attention that every backend is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec
from engine.attention.select import select
from engine.kernels.cpu import build
from engine.kv.format import format_name
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore


@dataclass
class Conversation:
    """One sequence's queries, keys and values at every position, and the blocks that hold it."""

    q_PHD: torch.Tensor
    k_PKD: torch.Tensor
    v_PKD: torch.Tensor
    blocks: list[int] = field(default_factory=list)


class PagedWorld:
    """Conversations of random numbers in scattered blocks; whatever slot is not theirs holds NaN."""

    def __init__(
        self,
        *,
        backend: str | Callable[[AttentionSpec], AttentionBackend] = "reference",
        num_heads=3,
        num_kv_heads=1,
        head_dim=64,
        block_size=16,
        num_blocks=400,
        seed=0,
        dtype=torch.float32,
        device="cpu",
        window=None,
        soft_cap=None,
        batch_invariant=False,
    ) -> None:
        self.spec = AttentionSpec(
            device=torch.device(device),
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            block_size=block_size,
            kv_format=format_name("auto", model_dtype=str(dtype).removeprefix("torch.")),
            batch_invariant=batch_invariant,
            soft_cap=soft_cap,
            windowed=window is not None,
        )
        self.window = window
        self.backend = select(backend, spec=self.spec) if isinstance(backend, str) else backend(self.spec)
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = list(self.random.permutation(num_blocks))
        self.store = KVStore(
            self.backend.kv_format,
            shape=BlockShape(block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim),
            num_layers=1,
            num_blocks=num_blocks,
            device=self.spec.device,
        )
        nothing = torch.full((num_blocks * block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
        self.store.write(0, nothing, nothing, torch.arange(num_blocks * block_size, device=device))

    def conversation(self, length: int, *, like: Conversation | None = None, num_shared: int = 0) -> Conversation:
        """A new sequence; its first ``num_shared`` positions (whole blocks) are those of ``like``, in the same blocks."""
        H, K, D, B = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.block_size
        assert num_shared % B == 0
        new = Conversation(*(torch.randn(length, n, D, generator=self.generator).to(self.spec.dtype) for n in (H, K, K)))
        if like is not None:
            new.k_PKD[:num_shared], new.v_PKD[:num_shared] = like.k_PKD[:num_shared], like.v_PKD[:num_shared]
            new.blocks = like.blocks[: num_shared // B]
        return self.place(new)

    def place(self, conversation: Conversation) -> Conversation:
        """Give it the blocks that it lacks and write all its keys and values but those in blocks it shares."""
        B, length = self.spec.block_size, len(conversation.q_PHD)
        num_written = len(conversation.blocks) * B
        while len(conversation.blocks) * B < length:
            conversation.blocks.append(int(self.free.pop()))
        positions = np.arange(num_written, length)
        slots = torch.from_numpy(np.array(conversation.blocks)[positions // B] * B + positions % B).to(self.spec.device)
        k, v = (part[num_written:].to(self.spec.device) for part in (conversation.k_PKD, conversation.v_PKD))
        self.store.write(0, k, v, slots)
        return conversation

    def inputs(self, chunks: list[tuple[Conversation, int, int]]) -> AttentionInputs:
        """A step over chunks (conversation, start, end)."""
        tables = np.zeros((len(chunks), max(len(c.blocks) for c, _, _ in chunks)), dtype=np.int64)
        for row, (conversation, _, _) in zip(tables, chunks, strict=True):
            row[: len(conversation.blocks)] = conversation.blocks
        return AttentionInputs(
            query_starts=np.cumsum([0] + [end - start for _, start, end in chunks]),
            kv_lengths=np.array([end for _, _, end in chunks]),
            block_tables=tables,
            block_size=self.spec.block_size,
        )

    def attend(self, chunks: list[tuple[Conversation, int, int]]) -> list[torch.Tensor]:
        """The backend's result for each chunk, computed in one step."""
        q_THD = torch.cat([c.q_PHD[start:end] for c, start, end in chunks]).to(self.spec.device)
        o_THD = self.backend.attend(q_THD, self.store.layer(0), self.backend.plan(self.inputs(chunks)), window=self.window)
        return list(o_THD.cpu().split([end - start for _, start, end in chunks]))

    def expected(self, conversation: Conversation, start: int, end: int, *, of_values=torch.Tensor.double) -> torch.Tensor:
        """Attention in float64, straight from the definition; ``of_values`` may change the values before."""
        group = self.spec.queries_per_kv
        q, k, v = (part.double() for part in (conversation.q_PHD[start:end], conversation.k_PKD[:end], of_values(conversation.v_PKD[:end])))
        scores = torch.einsum("thd,phd->htp", q, k.repeat_interleave(group, dim=1)) * self.spec.scale
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        distance = torch.arange(start, end)[:, None] - torch.arange(end)
        visible = (distance >= 0) & (distance < (self.window or end))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("htp,phd->thd", weights, v.repeat_interleave(group, dim=1))


@pytest.fixture(scope="session")
def paged_world():
    """Builds a PagedWorld, as many as a test needs; skips where its backend wants the CPU's kernels and there are none."""

    def make(*, backend="reference", **settings) -> PagedWorld:
        if backend == "cpu":
            try:
                build.load()
            except build.Unavailable as reason:
                pytest.skip(str(reason))
        return PagedWorld(backend=backend, **settings)

    return make
