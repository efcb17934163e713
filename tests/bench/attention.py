"""How fast one layer's paged attention is, backend by backend: decodes, a prefill chunk, decodes behind a shared prefix.

    python tests/bench/attention.py [--backends cpu sdpa] [--seqs 64] [--context 512] [--shared 1296] [--chunk 256] [--threads 2]

The heads are the embedded model's: 9 query heads over 3 key/value heads of 64, blocks of 16, bfloat16. ``plan`` is made once a
step for all layers, ``attend`` once a layer. GB/s counts each position's keys and values once a layer, however many
sequences share them; GFLOP/s is 4 x heads x 64 for each query and position that it looks at. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import engine  # noqa: F401  before torch, whose threads it tells how to wait

# isort: split
import numpy as np
import torch

from engine.attention.backend import AttentionInputs, AttentionSpec
from engine.attention.select import select
from engine.device import usable_cpus
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """``num_seqs`` sequences whose last ``num_queries`` positions ask, behind ``num_shared`` shared and the rest own positions."""

    name: str
    num_seqs: int
    num_queries: int
    num_shared: int
    context: int

    @property
    def num_blocks(self) -> int:
        """Different blocks in the step."""
        return self.num_shared // BLOCK_SIZE + self.num_seqs * self.num_own_blocks

    @property
    def num_own_blocks(self) -> int:
        return -(-(self.context - self.num_shared) // BLOCK_SIZE)

    @property
    def num_pairs(self) -> int:
        """(query, position) pairs under the causal mask."""
        before = self.context - self.num_queries
        return self.num_seqs * (self.num_queries * before + self.num_queries * (self.num_queries + 1) // 2)

    def inputs(self, rng: np.random.Generator) -> AttentionInputs:
        """The step, in scattered blocks."""
        blocks = rng.permutation(self.num_blocks)
        num_prefix = self.num_shared // BLOCK_SIZE
        prefix = np.broadcast_to(blocks[:num_prefix], (self.num_seqs, num_prefix))
        own = blocks[num_prefix:].reshape(self.num_seqs, self.num_own_blocks)
        return AttentionInputs(
            query_starts=np.arange(self.num_seqs + 1) * self.num_queries,
            kv_lengths=np.full(self.num_seqs, self.context),
            block_tables=np.concatenate((prefix, own), axis=1),
            block_size=BLOCK_SIZE,
        )


def best_ms(call: Callable[[], object], *, budget: float) -> float:
    laps: list[float] = []
    begin = time.perf_counter()
    while len(laps) < 3 or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        call()
        laps.append(time.perf_counter() - start)
    return min(laps) * 1e3


def measure(name: str, case: Case, *, num_threads: int, budget: float) -> str:
    """One line of the table, or why the backend cannot serve."""
    spec = AttentionSpec(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        block_size=BLOCK_SIZE,
        kv_format="bf16",
        batch_invariant=False,
        num_threads=num_threads,
    )
    try:
        backend = select(name, spec=spec)
    except ValueError as reason:
        return f"{case.name:>8} {name:>10}  {reason}"
    shape = BlockShape(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    store = KVStore(backend.kv_format, shape=shape, num_layers=1, num_blocks=case.num_blocks, device=spec.device)
    num_slots = case.num_blocks * BLOCK_SIZE
    k, v = (torch.randn(num_slots, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2))
    store.write(0, k, v, torch.arange(num_slots))
    inputs = case.inputs(np.random.default_rng(0))
    q = torch.randn(case.num_seqs * case.num_queries, HEADS, HEAD_DIM).bfloat16()
    plan = backend.plan(inputs)
    plan_ms = best_ms(lambda: backend.plan(inputs), budget=budget)
    attend_ms = best_ms(lambda: backend.attend(q, store.layer(0), plan), budget=budget)
    num_positions = case.num_shared + case.num_seqs * (case.context - case.num_shared)
    read = num_positions * 2 * KV_HEADS * HEAD_DIM * 2 / attend_ms / 1e6
    flops = 4 * HEADS * HEAD_DIM * case.num_pairs / attend_ms / 1e6
    return f"{case.name:>8} {name:>10} {plan_ms:>9.3f} {attend_ms:>9.3f} {read:>8.1f} {flops:>8.1f}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["cpu", "sdpa", "reference"])
    parser.add_argument("--seqs", type=int, default=64, help="sequences that decode")
    parser.add_argument("--context", type=int, default=512, help="positions of a decode's or a prefill's sequence")
    parser.add_argument("--shared", type=int, default=1296, help="positions that all sequences of the last case share, before 104 own")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of the prefill chunk")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shared = options.shared // BLOCK_SIZE * BLOCK_SIZE
    cases = (
        Case(name="decode", num_seqs=options.seqs, num_queries=1, num_shared=0, context=options.context),
        Case(name="prefill", num_seqs=1, num_queries=options.chunk, num_shared=0, context=max(options.context, options.chunk)),
        Case(name="shared", num_seqs=options.seqs, num_queries=1, num_shared=shared, context=shared + 104),
    )
    print(f"{'case':>8} {'backend':>10} {'plan ms':>9} {'attend ms':>9} {'GB/s':>8} {'GFLOP/s':>8}")
    for case in cases:
        for name in options.backends:
            print(measure(name, case, num_threads=options.threads, budget=options.seconds), flush=True)


if __name__ == "__main__":
    main()
