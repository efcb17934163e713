"""Llama 2 and 3, SmolLM2 and whatever else says model_type llama: the plain decoder; knows config.json only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.layers.spec import DecoderSpec
from engine.models._hf import decoder_spec, value


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """config.json -> spec; ``attention_bias`` puts a bias on all four projections."""
    bias = value(config, "attention_bias", False)
    return decoder_spec(config, qkv_bias=bias, o_bias=bias)
