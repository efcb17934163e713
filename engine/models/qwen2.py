"""Qwen2 and Qwen2.5: a bias on the query, key and value projections, always; knows config.json only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.layers.spec import DecoderSpec
from engine.models._hf import decoder_spec, refuse_sliding_window


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """config.json -> spec."""
    refuse_sliding_window(config)
    return decoder_spec(config, qkv_bias=True)
