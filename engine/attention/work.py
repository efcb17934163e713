"""Cuts a step's attention into items of work for the kernel: some queries, and a range of one sequence's positions.

Knows numbers only. An item is a prefill's tile, a decode, a share of a long row, or the queries of many sequences over the
prefix that they have in common: the kernel does not tell them apart. A query that several items serve gets its result by a
merge of theirs.
Shape suffixes: T tokens of the step, G tiles of queries, I items of work, Q queries a tile at most, N tokens that are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.backend import AttentionInputs
from engine.attention.prefix import shared_prefixes

Ints = npt.NDArray[np.int64]
NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """All int64.

    Attributes:
        tokens_IQ: the token of each of an item's queries, or NOBODY. A token of a sequence's own tile has the place
            ``position % Q``, whatever else is in the tile.
        positions_IQ: its position, or NOBODY.
        targets_IQ: where its result goes: row ``target`` of the output, or, where it is negative, ``-1 - target`` of the
            partial results.
        seq_I, begin_I, end_I: whose blocks an item reads, and from which position up to which.
        merged_N, parts_N1: the tokens with partial results, which lie in ``parts[n] : parts[n + 1]``, by position.
    """

    tokens_IQ: Ints
    positions_IQ: Ints
    targets_IQ: Ints
    seq_I: Ints
    begin_I: Ints
    end_I: Ints
    merged_N: Ints
    parts_N1: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tiles:
    tokens_GQ: Ints
    seq_G: Ints
    begin_G: Ints
    end_G: Ints


def cut(inputs: AttentionInputs, *, tile_queries: int, min_saved_tokens: int | None, num_items: int, min_segment: int) -> Work:
    """The work of a step.

    Args:
        tile_queries: Q, the queries of one item at most.
        min_saved_tokens: read a prefix once for its decodes where that saves so many tokens' keys and values; None: never.
        num_items: cut what has more than its share of the step's positions, when that is shared by so many items; 0: nothing.
        min_segment: cut at multiples of so many positions.
    """
    num_queries = np.diff(inputs.query_starts)
    seq_T = np.repeat(np.arange(len(num_queries)), num_queries)
    position_T = np.arange(len(seq_T)) + np.repeat(inputs.kv_lengths - inputs.query_starts[1:], num_queries)
    prefixes = [] if min_saved_tokens is None else _prefixes(inputs, num_queries, min_saved_tokens)
    shared_S = np.zeros(len(num_queries), dtype=np.int64)
    for seqs, num_shared in prefixes:
        shared_S[seqs] = num_shared
    shared = [_prefix_tiles(inputs, seqs, num_shared, tile_queries) for seqs, num_shared in prefixes]
    groups = [*shared, _own_tiles(seq_T, position_T, tile_queries, shared_S)]
    num_positions = sum(int((tiles.end_G - tiles.begin_G).sum()) for tiles in groups)
    segment = None if num_items == 0 else -(-num_positions // (num_items * min_segment)) * min_segment
    return _items(groups, position_T, segment)


def _prefixes(inputs: AttentionInputs, num_queries: Ints, min_saved_tokens: int) -> list[tuple[Ints, int]]:
    groups = shared_prefixes(inputs, np.flatnonzero(num_queries == 1), min_saved_tokens=max(1, min_saved_tokens))
    return [(seqs, num_shared) for seqs, num_shared in groups if num_shared > 0]


def _prefix_tiles(inputs: AttentionInputs, seqs: Ints, num_shared: int, tile_queries: int) -> _Tiles:
    """The decodes of ``seqs``, Q at a time, over the positions that they share."""
    num_tiles = -(-len(seqs) // tile_queries)
    tokens_GQ = np.full((num_tiles, tile_queries), NOBODY)
    tokens_GQ.reshape(-1)[: len(seqs)] = inputs.query_starts[seqs]
    constant = np.ones(num_tiles, dtype=np.int64)
    return _Tiles(tokens_GQ=tokens_GQ, seq_G=constant * seqs[0], begin_G=constant * 0, end_G=constant * num_shared)


def _own_tiles(seq_T: Ints, position_T: Ints, tile_queries: int, shared_S: Ints) -> _Tiles:
    """Each sequence's queries in tiles of Q positions, counted from 0, over the positions that it does not share."""
    starts_T = np.ones(len(seq_T), dtype=bool)
    starts_T[1:] = (np.diff(seq_T) != 0) | (np.diff(position_T // tile_queries) != 0)
    first_G = np.flatnonzero(starts_T)
    last_G = np.append(first_G[1:], len(seq_T)) - 1
    tokens_GQ = np.full((len(first_G), tile_queries), NOBODY)
    tokens_GQ[np.cumsum(starts_T) - 1, position_T % tile_queries] = np.arange(len(seq_T))
    seq_G = seq_T[first_G]
    return _Tiles(tokens_GQ=tokens_GQ, seq_G=seq_G, begin_G=shared_S[seq_G], end_G=position_T[last_G] + 1)


def _items(groups: list[_Tiles], position_T: Ints, segment: int | None) -> Work:
    """Cut tiles into segments, and give each query of each item its place among the results.

    A token is in at most one tile of each group, and its groups come in the order of the positions that they read.
    """
    tokens_GQ, seq_G, begin_G, end_G = (
        np.concatenate([getattr(tiles, name) for tiles in groups]) for name in ("tokens_GQ", "seq_G", "begin_G", "end_G")
    )
    num_parts_G = np.ones_like(seq_G) if segment is None else -(-(end_G - begin_G) // segment)
    before_GQ, num_parts_T = [], np.zeros(len(position_T), dtype=np.int64)
    offset = 0
    for tiles in groups:
        known = tiles.tokens_GQ != NOBODY
        before_GQ.append(np.where(known, num_parts_T[tiles.tokens_GQ], 0))
        parts_GQ = np.broadcast_to(num_parts_G[offset : offset + len(tiles.seq_G), None], known.shape)
        num_parts_T[tiles.tokens_GQ[known]] += parts_GQ[known]
        offset += len(tiles.seq_G)

    merged_N = np.flatnonzero(num_parts_T > 1)
    parts_N1 = np.concatenate(([0], np.cumsum(num_parts_T[merged_N])))
    first_part_T = np.zeros_like(num_parts_T)
    first_part_T[merged_N] = parts_N1[:-1]

    tile_I = np.repeat(np.arange(len(seq_G)), num_parts_G)
    part_I = np.arange(len(tile_I)) - np.repeat(np.cumsum(num_parts_G) - num_parts_G, num_parts_G)
    tokens_IQ = tokens_GQ[tile_I]
    partial_IQ = first_part_T[tokens_IQ] + np.concatenate(before_GQ)[tile_I] + part_I[:, None]
    begin_I, end_I = begin_G[tile_I], end_G[tile_I]
    if segment is not None:
        begin_I = begin_I + part_I * segment
        end_I = np.minimum(end_I, begin_I + segment)
    return Work(
        tokens_IQ=tokens_IQ,
        positions_IQ=np.where(tokens_IQ == NOBODY, NOBODY, position_T[tokens_IQ]),
        targets_IQ=np.where(num_parts_T[tokens_IQ] > 1, -1 - partial_IQ, tokens_IQ),
        seq_I=seq_G[tile_I],
        begin_I=begin_I,
        end_I=end_I,
        merged_N=merged_N,
        parts_N1=parts_N1,
    )
