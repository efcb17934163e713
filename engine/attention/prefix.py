"""Finds decodes that start with the same blocks, so that a backend can read those once for all of them.

Knows block tables and lengths; what is made of a shared prefix is the backend's business.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from engine.attention.backend import AttentionInputs

Ints = npt.NDArray[np.int64]


def shared_prefixes(inputs: AttentionInputs, seqs: Ints, *, min_saved_tokens: int) -> list[tuple[Ints, int]]:
    """Split decodes into groups and the number of leading tokens that each group shares, 0 for those on their own.

    A group is worth it where reading its prefix once saves at least ``min_saved_tokens`` tokens' keys and values.
    """
    families: dict[int, list[int]] = defaultdict(list)
    for seq in seqs:
        families[int(inputs.block_tables[seq, 0])].append(int(seq))
    groups: list[tuple[Ints, int]] = []
    alone: list[int] = []
    for family in families.values():
        members = np.array(family)
        num_shared = _num_shared_tokens(inputs, members)
        if (len(family) - 1) * num_shared >= min_saved_tokens:
            groups.append((members, num_shared))
        else:
            alone += family
    return [*groups, (np.array(alone, dtype=np.int64), 0)] if alone else groups


def _num_shared_tokens(inputs: AttentionInputs, seqs: Ints) -> int:
    """Tokens in the leading blocks that all ``seqs`` have in common, short of any one's last token."""
    num_blocks = int(inputs.kv_lengths[seqs].min() - 1) // inputs.block_size
    equal = (inputs.block_tables[seqs, :num_blocks] == inputs.block_tables[seqs[0], :num_blocks]).all(axis=0)
    return (num_blocks if equal.all() else int(equal.argmin())) * inputs.block_size
