"""The tree's own promises: the nearest edge is found, and what goes first is idle, then spared, each by its last use."""

from array import array

import pytest
from hypothesis import given, strategies as st

from engine.kv.radix import RadixTree, num_shared

BLOCK = st.lists(st.sampled_from([0, 1, 255, 256, 2**31 - 1]), min_size=4, max_size=4)


def edge(tokens) -> bytes:
    return array("i", tokens).tobytes()


def shared(first, second) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


@given(blocks=st.lists(BLOCK, max_size=12), wanted=st.lists(st.sampled_from([0, 1, 255, 256, 2**31 - 1]), max_size=4))
def test_the_nearest_edge_shares_most(blocks, wanted):
    tree = RadixTree()
    for index, tokens in enumerate(blocks):
        tree.add(tree.root, edge(tokens), index)
    found = tree.nearest(tree.root, edge(wanted))
    if not blocks:
        assert found is None
    else:
        assert num_shared(found.key, edge(wanted)) == max(shared(tokens, wanted) for tokens in blocks)


@pytest.fixture
def three_paths():
    """Three unlocked paths of two blocks each; the first was used longest ago. Path i has the blocks 2 i and 2 i + 1."""
    tree = RadixTree()
    for path in range(3):
        parent = tree.add(tree.root, edge([path] * 4), 2 * path)
        tree.lock(parent)
        tree.add(parent, edge([9] * 4), 2 * path + 1)
        tree.unlock(parent)
    return tree


def test_the_one_used_longest_ago_goes_first_and_children_before_parents(three_paths):
    evicted = [three_paths.evict_idle(spare=lambda node: False) for _ in range(6)]
    assert evicted == [1, 0, 3, 2, 5, 4]
    assert three_paths.evict_idle(spare=lambda node: False) is None


def test_what_is_spared_goes_last(three_paths):
    def spare(node):
        return node.prefix().startswith(edge([0] * 4))

    evicted = [three_paths.evict_idle(spare=spare) for _ in range(4)]
    three_paths.check()
    assert evicted == [3, 2, 5, 4]
    assert three_paths.evict_idle(spare=spare) is None
    assert three_paths.evict_spared() == 1
    assert three_paths.evict_idle(spare=spare) is None
    assert three_paths.evict_spared() == 0
    assert three_paths.num_nodes == three_paths.num_unlocked == 0


def test_a_spared_block_that_is_used_again_is_idle_again(three_paths):
    assert three_paths.evict_idle(spare=lambda node: True) is None
    path = three_paths.match([edge([0] * 4), edge([9] * 4)])
    for node in path:
        three_paths.lock(node)
    for node in reversed(path):
        three_paths.unlock(node)
    three_paths.check()
    assert [three_paths.evict_idle(spare=lambda node: False) for _ in range(3)] == [1, 0, None]
