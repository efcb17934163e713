"""Qwen3: a norm on each head's query and key, and a head size of its own; knows config.json only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.layers.spec import DecoderSpec
from engine.models._hf import decoder_spec, refuse_sliding_window, value


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """config.json -> spec; the family's head size is 128 whatever the hidden size."""
    refuse_sliding_window(config)
    bias = value(config, "attention_bias", False)
    return decoder_spec(config, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=128)
