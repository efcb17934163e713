"""Decides which block holds what: a free list, the radix tree of published blocks, private blocks and forked ones.

Every block is exactly one of free, cached, private or forked at any time (I1); it knows ids only, never what a block stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from engine.kv.radix import Node, RadixTree, num_shared
from engine.sequence import Sequence

Edge = tuple[Node, bytes]

# A copy of a block takes about as long as computing a token or two, so a part under this share of a block is not copied.
_LEAST_COPIED = 0.25


class Queue(Protocol):
    """Whoever knows what will be asked for next."""

    def begins_with(self, prefix: bytes) -> bool:
        """Whether a waiting sequence's tokens, as int32 bytes, begin with ``prefix``."""
        ...


class Saved(Protocol):
    """What blocks of earlier engines held."""

    def read(self, prefix: bytes) -> bytes | None:
        """The content of the block at the end of ``prefix``, int32 bytes of the tokens up to its last one; None where it is not there."""
        ...


@dataclass(slots=True)
class Fork:
    """A block that ``num_owners`` sequences hold outside the tree. It is read-only: the first to write takes a copy."""

    num_owners: int
    num_tokens: int


class BlockManager:
    """A pool of ``num_blocks`` blocks of ``block_size`` tokens.

    A block is born private to the sequence that fills it, becomes cached when it is full and published, stays cached
    when its last user goes, and is freed by eviction. Without ``prefix_cache`` blocks stay private and go straight back.
    Samples of one request fork: the blocks that are not cached have several owners until one of them writes.

    Memory follows need, not the pool's size. A block that is wanted is, in this order: one that was given back; a cached
    one that nothing in the queue begins with; one that was never written; a cached one that the queue will ask for.

    With ``copies_parts`` a sequence that shares only the first tokens of a cached block starts from a copy of it. That
    wants a format whose slots can be written one by one. What is not cached is looked for in ``saved``.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, prefix_cache: bool = True, copies_parts: bool = True, saved: Saved | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.tree = RadixTree()
        self._copies_parts = copies_parts
        self._saved = saved
        self._queue: Queue | None = None
        self._free: list[int] = []  # last in, first out
        self._num_touched = 0  # blocks from this one on were never given out
        self._forks: dict[int, Fork] = {}
        self._copies: list[tuple[int, int]] = []
        self._loads: list[tuple[int, bytes]] = []

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: the free ones and the cached ones that nobody uses."""
        return len(self._free) + self.num_blocks - self._num_touched + self.tree.num_unlocked

    @property
    def num_held(self) -> int:
        """Blocks that live sequences hold, each counted once however many share it."""
        return self.num_blocks - self.num_available

    @property
    def num_idle(self) -> int:
        """Cached blocks that no live sequence holds; what is neither held nor idle is free."""
        return self.tree.num_unlocked

    @property
    def num_cached(self) -> int:
        return self.tree.num_nodes

    @property
    def num_copies_due(self) -> int:
        """Copies of open forked blocks that their owners take if all of them go on to write: the last one needs none."""
        return sum(fork.num_owners - 1 for fork in self._forks.values() if fork.num_tokens < self.block_size)

    def num_own_computed(self, seq: Sequence) -> int:
        """Computed tokens of a running ``seq`` that no other sequence holds with it: what would be lost with it."""
        shared = sum(node.locks > 1 for node in seq.nodes) + sum(block in self._forks for block in seq.blocks[len(seq.nodes) :])
        return max(0, seq.num_computed - shared * self.block_size)

    def serve(self, queue: Queue) -> None:
        """Keep the blocks that ``queue`` will ask for as long as there are others to evict."""
        self._queue = queue

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> list[Node]:
        """Published blocks that hold ``seq``'s leading tokens; at least one token is always left to compute.

        A prompt whose probabilities are wanted is computed whole, since the cache has none.
        """
        if not self.prefix_cache or seq.scores_prompt:
            return []
        return self.tree.match(seq.block_key(i, self.block_size) for i in range((len(seq.tokens) - 1) // self.block_size))

    def admit(self, seq: Sequence, prefix: list[Node], *, spare: int = 0) -> bool:
        """Give a waiting ``seq`` its matched ``prefix`` and room for all its tokens; False where that is not there.

        ``spare`` blocks must stay available afterwards, so that sequences in flight have room to grow.
        """
        assert not seq.blocks and not seq.nodes and seq.num_computed == 0, "admitted twice"
        for node in prefix:
            self.tree.lock(node)
        if self.blocks_for(len(seq.tokens)) - len(prefix) + spare > self.num_available:
            for node in reversed(prefix):
                self.tree.unlock(node)
            return False
        seq.nodes = list(prefix)
        seq.blocks = [node.block for node in prefix]
        seq.num_computed = len(prefix) * self.block_size
        if seq.num_cached is None:
            for node in prefix:
                node.num_users += 1
        self._load_saved(seq)
        self._copy_part(seq)
        reserved = self.reserve(seq, seq.num_pending)
        assert reserved, "the room was counted above"
        return True

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make sure that ``seq`` has blocks of its own to write its next ``num_tokens`` tokens to.

        False, and nothing changed, where they are not there. An open block that is forked is replaced by a copy, which
        ``take_copies`` hands to the device.
        """
        index = seq.num_computed // self.block_size
        shares_open = index < len(seq.blocks) and seq.blocks[index] in self._forks
        missing = self.blocks_for(seq.num_computed + num_tokens) - len(seq.blocks)
        if missing <= 0 and not shares_open:
            return True
        if missing + shares_open > self.num_available:
            return False
        if shares_open:
            shared, seq.blocks[index] = seq.blocks[index], self._take()
            self._disown(shared)
            self._copies.append((shared, seq.blocks[index]))
        seq.blocks.extend(self._take() for _ in range(missing))
        return True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(from, to) blocks to copy before the next step writes anything, since the last call."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_loads(self) -> tuple[tuple[int, bytes], ...]:
        """Blocks to fill with saved content before the next step copies or writes anything, since the last call."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def shared_nodes(self) -> Iterator[Node]:
        """Cached blocks that several requests had or that were saved before, parents first: what may be worth saving for another day."""
        return (node for node in self.tree.nodes() if node.num_users > 1 or node.is_saved)

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Let ``child`` hold all that ``seq`` holds, without copying anything."""
        assert not child.blocks, "forked onto a sequence that holds blocks"
        child.blocks, child.nodes, child.num_computed = list(seq.blocks), list(seq.nodes), seq.num_computed
        for node in seq.nodes:
            self.tree.lock(node)
        for index in range(len(seq.nodes), len(seq.blocks)):
            num_tokens = min(self.block_size, seq.num_computed - index * self.block_size)
            self._forks.setdefault(seq.blocks[index], Fork(1, num_tokens)).num_owners += 1

    def publish(self, seq: Sequence) -> None:
        """Make ``seq``'s full computed blocks shareable.

        Where a twin published the same block first, ours is freed and theirs adopted: nobody may keep pointing at a
        block that went back to the free list.
        """
        num_full = seq.num_computed // self.block_size
        if not self.prefix_cache or num_full == len(seq.nodes):
            return
        for index in range(len(seq.nodes), num_full):
            assert seq.blocks[index] not in self._forks, "wrote to a block that others hold"
            node = self.tree.add(self._last_node(seq), seq.block_key(index, self.block_size), seq.blocks[index])
            if node.block != seq.blocks[index]:
                self._free.append(seq.blocks[index])
                seq.blocks[index] = node.block
            self.tree.lock(node)
            seq.nodes.append(node)

    def release(self, seq: Sequence) -> None:
        """Take everything from ``seq``: its private blocks are free again, its published ones stay cached."""
        for block in reversed(seq.blocks[len(seq.nodes) :]):
            if block in self._forks:
                self._disown(block)
            else:
                self._free.append(block)
        for node in reversed(seq.nodes):
            self.tree.unlock(node)
        seq.blocks, seq.nodes, seq.num_computed = [], [], 0

    def next_edge(self, seq: Sequence) -> Edge | None:
        """Where a running ``seq``'s next full block will hang in the tree; None while its tokens do not fill one."""
        index = len(seq.nodes)
        if not self.prefix_cache or (index + 1) * self.block_size > len(seq.tokens):
            return None
        return self._last_node(seq), seq.block_key(index, self.block_size)

    def edge_after(self, seq: Sequence, prefix: list[Node]) -> Edge | None:
        """The edge that a waiting ``seq`` could follow next if somebody published it; None past its last usable block."""
        index = len(prefix)
        if not self.prefix_cache or seq.scores_prompt or (index + 1) * self.block_size >= len(seq.tokens):
            return None
        return prefix[-1] if prefix else self.tree.root, seq.block_key(index, self.block_size)

    def num_stored(self, running: Collection[Sequence]) -> int:
        """Tokens stored in the blocks that ``running`` holds, shared ones counted once."""
        shared = (self.tree.num_nodes - self.tree.num_unlocked) * self.block_size
        own = sum(seq.num_computed - len(seq.nodes) * self.block_size for seq in running)
        return shared + own - sum((fork.num_owners - 1) * fork.num_tokens for fork in self._forks.values())

    def check(self, running: Collection[Sequence]) -> None:
        """Assert I1-I3 over the whole pool, given every live sequence. For tests: it walks everything."""
        cached = [node.block for node in self.tree.nodes()]
        owners = Counter(block for seq in running for block in seq.blocks[len(seq.nodes) :])
        assert sorted([*self._free, *cached, *owners]) == list(range(self._num_touched)), "I1: a block is lost or held twice"
        forked = {block: num_owners for block, num_owners in owners.items() if num_owners > 1}
        assert forked == {block: fork.num_owners for block, fork in self._forks.items()}, "I1: forked means several owners"
        locks: dict[Node, int] = {}
        for seq in running:
            assert 0 <= seq.num_computed < len(seq.tokens), "I2"
            assert len(seq.blocks) >= self.blocks_for(seq.num_computed), "computed tokens without a block"
            for index, node in enumerate(seq.nodes):
                assert node.block == seq.blocks[index], "a sequence points past its node's block"
                assert node.key == seq.block_key(index, self.block_size), "a node holds other tokens"
                locks[node] = locks.get(node, 0) + 1
        assert {node: node.locks for node in self.tree.nodes() if node.locks} == locks, "locks differ from the sequences that run through"
        self.tree.check()

    def _load_saved(self, seq: Sequence) -> None:
        """Go on from ``seq``'s cached blocks with those that an earlier engine saved; a token is left to compute.

        A block that a copy has yet to be made from cannot be filled before that, so there it ends.
        """
        if self._saved is None or not self.prefix_cache or seq.scores_prompt:
            return
        for index in range(len(seq.nodes), (len(seq.tokens) - 1) // self.block_size):
            content = self._saved.read(seq.tokens[: (index + 1) * self.block_size].tobytes())
            if content is None:
                return
            block = self._take()
            if any(source == block for source, _ in self._copies):
                self._free.append(block)
                return
            node = self.tree.add(self._last_node(seq), seq.block_key(index, self.block_size), block)
            assert node.block == block, "it would have been matched"
            node.is_saved = True
            self.tree.lock(node)
            seq.nodes.append(node)
            seq.blocks.append(block)
            seq.num_computed += self.block_size
            self._loads.append((block, content))

    def _copy_part(self, seq: Sequence) -> None:
        """Where a cached block begins like ``seq``'s next one, start from a copy of it; a token is left to compute.

        Copies are made before the step writes anything, so it does not matter if the source is evicted meanwhile.
        """
        if not self.prefix_cache or not self._copies_parts or seq.scores_prompt:
            return
        start = len(seq.blocks) * self.block_size
        next_tokens = seq.tokens[start : min(start + self.block_size, len(seq.tokens) - 1)].tobytes()
        source = self.tree.nearest(self._last_node(seq), next_tokens)
        num_tokens = 0 if source is None else num_shared(source.key, next_tokens)
        if source is None or num_tokens < _LEAST_COPIED * self.block_size:
            return
        seq.blocks.append(self._take())
        seq.num_computed += num_tokens
        if seq.blocks[-1] != source.block:  # else the source was evicted for it, and holds what is wanted
            self._copies.append((source.block, seq.blocks[-1]))

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if (block := self.tree.evict_idle(spare=self._is_wanted)) is not None:
            return block
        if self._num_touched < self.num_blocks:
            self._num_touched += 1
            return self._num_touched - 1
        return self.tree.evict_spared()

    def _is_wanted(self, node: Node) -> bool:
        return self._queue is not None and self._queue.begins_with(node.prefix())

    def _disown(self, block: int) -> None:
        fork = self._forks[block]
        fork.num_owners -= 1
        if fork.num_owners == 1:
            del self._forks[block]

    def _last_node(self, seq: Sequence) -> Node:
        return seq.nodes[-1] if seq.nodes else self.tree.root
