"""The radix tree of published KV blocks: one node a full block, so that sequences with equal prefixes share storage.

Owns who holds which node and what may be evicted first; it does not know sequences, the free list or any tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


class Node:
    """A full block under its prefix. The edge from the parent is ``key``: the bytes of the block's int32 token ids.

    Since an edge is always a whole block, a node is never split. ``locks`` counts the live sequences whose prefix runs
    through it; a sequence locks its whole path, so a parent has at least its child's locks (I3).
    """

    __slots__ = ("block", "children", "key", "last_used", "locks", "parent")

    def __init__(self, parent: Node | None, key: bytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_used = 0


class RadixTree:
    """Nodes under one root; unlocked leaves are evicted least recently used first, so children go before parents."""

    def __init__(self) -> None:
        self.root = Node(None, b"", -1)
        self.num_nodes = 0
        self.num_unlocked = 0
        self._clock = 0
        self._evictable: list[tuple[int, Node]] = []  # heap by last_used; stale entries are skipped when popped

    def match(self, keys: Iterable[bytes]) -> list[Node]:
        """The longest path from the root whose edges are ``keys``, in order."""
        node, path = self.root, []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def add(self, parent: Node, key: bytes, block: int) -> Node:
        """The node under ``parent`` for ``key``: the one that is there, else a new unlocked one that holds ``block``."""
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, block)
            self.num_nodes += 1
            self.num_unlocked += 1
            self._touch(node)
        return node

    def lock(self, node: Node) -> None:
        assert node.parent is self.root or (node.parent is not None and node.parent.locks > node.locks), "I3: lock a path from the root on"
        if node.locks == 0:
            self.num_unlocked -= 1
        node.locks += 1

    def unlock(self, node: Node) -> None:
        assert node.locks > 0, "unlocked more often than locked"
        node.locks -= 1
        if node.locks == 0:
            self.num_unlocked += 1
            self._touch(node)

    def evict(self) -> int:
        """Drop the unlocked leaf that was used longest ago and return its block. There must be an unlocked node."""
        while True:
            last_used, node = heapq.heappop(self._evictable)
            if node.parent is None or node.locks or node.children or node.last_used != last_used:
                continue
            parent, node.parent = node.parent, None
            del parent.children[node.key]
            self.num_nodes -= 1
            self.num_unlocked -= 1
            if parent is not self.root and not parent.locks and not parent.children:
                heapq.heappush(self._evictable, (parent.last_used, parent))
            return node.block

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _touch(self, node: Node) -> None:
        self._clock += 1  # unique, so that the heap never compares nodes
        node.last_used = self._clock
        if not node.children:
            heapq.heappush(self._evictable, (node.last_used, node))
