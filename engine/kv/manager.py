"""Decides which block holds what: a free list, the radix tree of published blocks, and the blocks private to a sequence.

Every block is exactly one of free, cached or private at any time (I1); it knows ids only, never what a block stores.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.kv.radix import Node, RadixTree
from engine.sequence import Sequence

Edge = tuple[Node, bytes]


class BlockManager:
    """A pool of ``num_blocks`` blocks of ``block_size`` tokens.

    A block is born private to the sequence that fills it, becomes cached when it is full and published, stays cached
    when its last user goes, and is freed by eviction. Without ``prefix_cache`` blocks stay private and go straight back.
    """

    def __init__(self, *, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.tree = RadixTree()
        self._free = list(range(num_blocks - 1, -1, -1))  # last in, first out: memory follows need, not the pool's size

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: the free ones and the cached ones that nobody uses."""
        return len(self._free) + self.tree.num_unlocked

    @property
    def num_held(self) -> int:
        """Blocks that live sequences hold, each counted once however many share it."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return self.tree.num_nodes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> list[Node]:
        """Published blocks that hold ``seq``'s leading tokens; at least one token is always left to compute."""
        if not self.prefix_cache:
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
        reserved = self.reserve(seq, seq.num_pending)
        assert reserved, "the room was counted above"
        return True

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make sure that ``seq`` has blocks for its next ``num_tokens`` tokens; False, and nothing changed, if not."""
        missing = self.blocks_for(seq.num_computed + num_tokens) - len(seq.blocks)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            seq.blocks.append(self._free.pop() if self._free else self.tree.evict())
        return True

    def publish(self, seq: Sequence) -> None:
        """Make ``seq``'s full computed blocks shareable.

        Where a twin published the same block first, ours is freed and theirs adopted: nobody may keep pointing at a
        block that went back to the free list.
        """
        if not self.prefix_cache:
            return
        for index in range(len(seq.nodes), seq.num_computed // self.block_size):
            node = self.tree.add(self._last_node(seq), seq.block_key(index, self.block_size), seq.blocks[index])
            if node.block != seq.blocks[index]:
                self._free.append(seq.blocks[index])
                seq.blocks[index] = node.block
            self.tree.lock(node)
            seq.nodes.append(node)

    def release(self, seq: Sequence) -> None:
        """Take everything from ``seq``: its private blocks are free again, its published ones stay cached."""
        self._free.extend(reversed(seq.blocks[len(seq.nodes) :]))
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
        if not self.prefix_cache or (index + 1) * self.block_size >= len(seq.tokens):
            return None
        return prefix[-1] if prefix else self.tree.root, seq.block_key(index, self.block_size)

    def num_stored(self, running: Collection[Sequence]) -> int:
        """Tokens stored in the blocks that ``running`` holds, shared ones counted once."""
        shared = (self.tree.num_nodes - self.tree.num_unlocked) * self.block_size
        return shared + sum(seq.num_computed - len(seq.nodes) * self.block_size for seq in running)

    def check(self, running: Collection[Sequence]) -> None:
        """Assert I1-I3 over the whole pool, given every live sequence. For tests: it walks everything."""
        cached = [node.block for node in self.tree.nodes()]
        private = [block for seq in running for block in seq.blocks[len(seq.nodes) :]]
        assert sorted(self._free + cached + private) == list(range(self.num_blocks)), "I1: a block is lost or held twice"
        locks: dict[Node, int] = {}
        for seq in running:
            assert 0 <= seq.num_computed < len(seq.tokens), "I2"
            assert len(seq.blocks) >= self.blocks_for(seq.num_computed), "computed tokens without a block"
            for index, node in enumerate(seq.nodes):
                assert node.block == seq.blocks[index], "a sequence points past its node's block"
                assert node.key == seq.block_key(index, self.block_size), "a node holds other tokens"
                locks[node] = locks.get(node, 0) + 1
        num_unlocked = 0
        for node in self.tree.nodes():
            assert node.locks == locks.get(node, 0), "locks differ from the sequences that run through"
            assert node.parent is self.tree.root or (node.parent is not None and node.parent.locks >= node.locks), "I3"
            num_unlocked += node.locks == 0
        assert len(cached) == self.tree.num_nodes and num_unlocked == self.tree.num_unlocked, "counters differ from the tree"

    def _last_node(self, seq: Sequence) -> Node:
        return seq.nodes[-1] if seq.nodes else self.tree.root
