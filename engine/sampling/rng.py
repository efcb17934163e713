"""The randomness of a draw: one number in [0, 1) for each drawn token, from who it is for and where it stands.

Knows no generator state and no other request: the same answer comes out alone, in a crowd, after preemption, in another
order, on another machine and with another version of torch.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from engine.types import Request


def uniform(request: Request, *, engine_seed: int, sample_index: int, position: int, attempt: int = 0) -> float:
    """A uniform number in [0, 1), a multiple of 2**-53, for the token at ``position`` among the generated ones.

    The key is the request's own ``sampling.seed``, else the engine's seed and the request's id; the counter is
    (``sample_index``, ``position``), with ``attempt`` as a third where it is over 0. The number is the top 53 bits of
    BLAKE2b-64 (RFC 7693), read as a little-endian integer, of the key and the counter as a JSON list, so ids of any length
    and integers of any size are told apart.
    """
    seed = request.sampling.seed
    key = ["seed", seed] if seed is not None else ["id", engine_seed, request.id]
    message = json.dumps([*key, sample_index, position, *([attempt] if attempt else [])])
    digest = blake2b(message.encode("ascii"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
