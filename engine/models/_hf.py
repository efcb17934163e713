"""Reads the keys that the families' config.json files share, and refuses what the decoder does not do.

Knows nothing of weights; a family file says in which switches it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.layers.spec import DecoderSpec, RopeSpec

_REQUIRED = object()


def decoder_spec(
    config: Mapping[str, Any], *, qkv_bias: bool, o_bias: bool = False, qk_norm: bool = False, head_dim: int | None = None
) -> DecoderSpec:
    """The spec for ``config``, the content of config.json; ``head_dim`` is the family's value where the key is absent.

    Raises:
        ValueError: a key is missing, or asks for something that is not served; the message names the key.
    """
    allow(config, "hidden_act", "silu")
    allow(config, "mlp_bias", False)
    num_heads = size(config, "num_attention_heads")
    return DecoderSpec(
        model_type=value(config, "model_type"),
        vocab_size=size(config, "vocab_size"),
        hidden_size=size(config, "hidden_size"),
        intermediate_size=size(config, "intermediate_size"),
        num_layers=size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=size(config, "num_key_value_heads", num_heads),
        head_dim=size(config, "head_dim", head_dim or size(config, "hidden_size") // num_heads),
        max_position_embeddings=size(config, "max_position_embeddings"),
        rms_norm_eps=value(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        tie_word_embeddings=value(config, "tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )


def value(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    """``config[key]``; an absent key and null give the default."""
    found = config.get(key)
    if found is not None:
        return found
    if default is _REQUIRED:
        raise ValueError(f"model.path: config.json lacks {key}")
    return default


def size(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    """``value`` that must be a whole number from 1 on."""
    found = value(config, key, default)
    if type(found) is not int or found < 1:
        raise ValueError(f"model.path: config.json has {key}={found!r}, which must be a whole number from 1 on")
    return found


def allow(config: Mapping[str, Any], key: str, only: Any) -> None:
    """Refuse a config whose ``key`` is set to anything but ``only``."""
    if value(config, key, only) != only:
        raise ValueError(f"model.path: config.json has {key}={config[key]!r}; only {only!r} is served")


def refuse_sliding_window(config: Mapping[str, Any]) -> None:
    """Qwen's configs carry a window's size even where it is switched off; only a window that is on is refused."""
    allow(config, "use_sliding_window", False)
    kinds = set(value(config, "layer_types", ())) - {"full_attention"}
    if kinds:
        raise ValueError(f"model.path: config.json has layer_types with {', '.join(sorted(kinds))}; only full_attention is served")


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    # transformers 5 writes one rope_parameters; older files have rope_theta beside an optional rope_scaling
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    params = value(config, key, {})
    theta = float(params.get("rope_theta", value(config, "rope_theta", 10000.0)))
    kind = params.get("rope_type", params.get("type", "default"))
    if params.get("partial_rotary_factor", value(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("model.path: config.json has partial_rotary_factor; only rotation of the whole head is served")
    try:
        if kind == "default":
            return RopeSpec(theta=theta)
        if kind == "linear":
            return RopeSpec(theta=theta, kind="linear", factor=float(params["factor"]))
        if kind == "llama3":
            return RopeSpec(
                theta=theta,
                kind="llama3",
                factor=float(params["factor"]),
                low_freq_factor=float(params["low_freq_factor"]),
                high_freq_factor=float(params["high_freq_factor"]),
                original_max_position=int(params["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ValueError(f"model.path: config.json's {key} of type {kind} lacks {missing}") from None
    raise ValueError(f"model.path: config.json's {key} has type {kind!r}; default, linear and llama3 are served")
