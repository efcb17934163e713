"""A decoder-only transformer's architecture as data, torch-free so that planning needs no torch.

Knows no checkpoint format and no family: engine.models turns a Hugging Face config into one of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: frequency ``theta ** (-2i / head_dim)`` for pair i, then the ``kind`` of scaling.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides the long wavelengths by ``factor``, keeps the
    short ones and blends between ``original_max_position / high_freq_factor`` and ``... / low_freq_factor``
    (Llama 3.1 release, reference code of the rope scaling).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """What Decoder builds: sizes, and the few switches in which the served families differ.

    ``num_heads`` query heads share ``num_kv_heads`` key/value heads; both have ``head_dim`` numbers. ``qk_norm`` puts an
    RMSNorm on each head's query and key before the rotation.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    @property
    def attention_scale(self) -> float:
        """The factor on query-key products before the softmax."""
        return float(self.head_dim**-0.5)

    def share(self, num_ranks: int) -> DecoderSpec:
        """What each of ``num_ranks`` devices holds: an equal part of the heads and of the feed-forward's inner numbers.

        All else is whole on each of them.

        Raises:
            ValueError: they cannot be shared evenly; the message names engine.tensor_parallel.
        """
        divisor = math.gcd(self.num_heads, self.num_kv_heads, self.intermediate_size)
        if divisor % num_ranks:
            choices = ", ".join(str(number) for number in range(1, divisor + 1) if divisor % number == 0)
            raise ValueError(
                f"engine.tensor_parallel: {num_ranks} devices cannot share this model's {self.num_heads} query heads, "
                f"{self.num_kv_heads} key/value heads and {self.intermediate_size} inner numbers of the feed-forward evenly; "
                f"choose one of {choices}"
            )
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=self.num_kv_heads // num_ranks,
            intermediate_size=self.intermediate_size // num_ranks,
        )
