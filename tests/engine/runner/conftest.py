"""A decoder small enough to run whole steps in a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.layers.decoder import Decoder
from engine.layers.spec import DecoderSpec, RopeSpec


@pytest.fixture(scope="session")
def spec() -> DecoderSpec:
    return DecoderSpec(
        model_type="llama",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope=RopeSpec(),
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def make_decoder(spec: DecoderSpec) -> Callable[..., Decoder]:
    """Builds it with the same random weights each time, their products neither vanishing nor overflowing."""

    def make(*, batch_invariant: bool = False, device: str = "cpu") -> Decoder:
        model = Decoder(spec, batch_invariant=batch_invariant)
        random = torch.Generator().manual_seed(0)
        scales = {name: 1.0 if "embed" in name else 0.2 for name, _ in model.named_parameters()}
        weights = {name: (torch.randn(p.shape, generator=random) * scales[name]).to(device) for name, p in model.named_parameters()}
        model.load_state_dict(weights, strict=False, assign=True)
        model.lm_head.weight = model.embed_tokens.weight
        return model

    return make
