"""The radix tree of published KV blocks: one node a full block, so that sequences with equal prefixes share storage.

Owns who holds which node and what may be evicted first; it does not know sequences, the free list or any tensor.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator


class Node:
    """A full block under its prefix. The edge from the parent is ``key``: the bytes of the block's int32 token ids.

    Since an edge is always a whole block, a node is never split. ``locks`` counts the live sequences whose prefix runs
    through it; a sequence locks its whole path, so a parent has at least its child's locks (I3). ``num_users`` counts the
    requests that ever had it; ``is_saved`` says that its content was computed by an earlier engine.
    """

    __slots__ = ("block", "children", "is_saved", "key", "locks", "num_users", "parent", "sorted_keys")

    def __init__(self, parent: Node | None, key: bytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, Node] = {}
        self.sorted_keys: list[bytes] = []  # the children's: the nearest one to a key stands beside it
        self.locks = 0
        self.num_users = 1
        self.is_saved = False

    def prefix(self) -> bytes:
        """The token ids from the root up to and including this block, as int32 bytes."""
        keys, node = [self.key], self
        while node.parent is not None:
            node = node.parent
            keys.append(node.key)
        return b"".join(reversed(keys))


class RadixTree:
    """Nodes under one root; unlocked leaves are evicted least recently used first, so children go before parents.

    Every unlocked leaf is either *idle* or *spared*: an idle one that somebody is about to need is spared when its turn
    comes, and goes only when no idle one is left.
    """

    def __init__(self) -> None:
        self.root = Node(None, b"", -1)
        self.num_nodes = 0
        self.num_unlocked = 0
        self._idle: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._spared: OrderedDict[Node, None] = OrderedDict()

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

    def nearest(self, parent: Node, key: bytes) -> Node | None:
        """The child of ``parent`` whose edge has the longest common beginning with ``key``; None where there is no child."""
        keys = parent.sorted_keys
        place = bisect_left(keys, key)
        beside = keys[max(place - 1, 0) : place + 1]  # no other key is nearer than the two that it would stand between
        return parent.children[max(beside, key=lambda other: num_shared(other, key))] if beside else None

    def add(self, parent: Node, key: bytes, block: int) -> Node:
        """The node under ``parent`` for ``key``: the one that is there, else a new unlocked one that holds ``block``."""
        node = parent.children.get(key)
        if node is None:
            assert parent is self.root or parent.locks, "a block is published by a sequence that holds those before it"
            node = parent.children[key] = Node(parent, key, block)
            insort(parent.sorted_keys, key)
            self.num_nodes += 1
            self.num_unlocked += 1
            self._idle[node] = None
        return node

    def lock(self, node: Node) -> None:
        assert node.parent is self.root or (node.parent is not None and node.parent.locks > node.locks), "I3: lock a path from the root on"
        if node.locks == 0:
            self.num_unlocked -= 1
            self._idle.pop(node, None)
            self._spared.pop(node, None)
        node.locks += 1

    def unlock(self, node: Node) -> None:
        assert node.locks > 0, "unlocked more often than locked"
        node.locks -= 1
        if node.locks == 0:
            self.num_unlocked += 1
            if not node.children:
                self._idle[node] = None

    def evict_idle(self, *, spare: Callable[[Node], bool]) -> int | None:
        """Drop the idle leaf that was used longest ago and return its block; None where ``spare`` speaks for every one."""
        while self._idle:
            node, _ = self._idle.popitem(last=False)
            if not spare(node):
                return self._drop(node)
            self._spared[node] = None
        return None

    def evict_spared(self) -> int:
        """Drop the spared leaf that was used longest ago and return its block. There must be one, and no idle one."""
        assert not self._idle, "idle blocks go first"
        node, _ = self._spared.popitem(last=False)
        return self._drop(node)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Assert I3 and that every unlocked leaf is idle or spared, once. For tests: it walks everything."""
        nodes = list(self.nodes())
        for node in (self.root, *nodes):
            assert node.sorted_keys == sorted(node.children), "the keys are not those of the children"
            assert node is self.root or node.parent is self.root or (node.parent and node.parent.locks >= node.locks), "I3"
        leaves = [node for node in nodes if not node.locks and not node.children]
        assert sorted(map(id, (*self._idle, *self._spared))) == sorted(map(id, leaves)), "what may be evicted is not the unlocked leaves"
        num_unlocked = sum(not node.locks for node in nodes)
        assert (self.num_nodes, self.num_unlocked) == (len(nodes), num_unlocked), "counters differ from the tree"

    def _drop(self, node: Node) -> int:
        parent = node.parent
        assert parent is not None, "the root holds no block"
        del parent.children[node.key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]
        self.num_nodes -= 1
        self.num_unlocked -= 1
        if parent is not self.root and not parent.locks and not parent.children:
            self._idle[parent] = None
            self._idle.move_to_end(parent, last=False)  # it was last used with the child that went
        return node.block


def num_shared(key: bytes, other: bytes) -> int:
    """How many leading tokens two edges have in common."""
    size = min(len(key), len(other))
    differing = int.from_bytes(key[:size], "little") ^ int.from_bytes(other[:size], "little")
    num_equal_bits = (differing & -differing).bit_length() - 1 if differing else 8 * size
    return num_equal_bits // 32  # of an int32 token id
