"""Every backend against full causal attention in float64, over head ratios, head sizes, block sizes and kinds of step."""

from __future__ import annotations

import pytest
import torch

from engine import plugins

BACKENDS = sorted(set(plugins.names("engine.attention.backends")) - {"flash"})  # that one runs on a GPU only: test_flash.py
NARROW = {"cpu"}  # these compute in bfloat16 only, over blocks that are a multiple of 16 tokens
INTERPRETED = {"triton"}  # a thousand times slower here than on its GPU
WIDE = sorted(set(BACKENDS) - NARROW)
QUICK = [pytest.param(name, marks=pytest.mark.full if name in INTERPRETED else ()) for name in WIDE]
WITHOUT_MASKS = {"cpu", "sdpa"}  # these know the causal mask only, and say so


def mixes(world) -> dict[str, list]:
    """Kinds of step by name; block borders, tile borders and the first position are all among them."""
    lengths = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129]
    decodes = [(world.conversation(n), n - 1, n) for n in lengths]
    long = world.conversation(200)
    trunk = world.conversation(96)
    shared = 96 // world.spec.block_size * world.spec.block_size
    branches = [world.conversation(96 + n, like=trunk, num_shared=shared) for n in (1, 5, 40, 41)]
    return {
        "one decode": [decodes[6]],
        "decodes": decodes,
        "whole prompt": [(long, 0, 200)],
        "chunk over cached context": [(long, 70, 133)],
        "chunks of several": [(decodes[-1][0], 0, 129), (decodes[-2][0], 64, 127), (long, 1, 3)],
        "decodes and chunks": [*decodes, (long, 130, 200), (trunk, 0, 50)],
        "decodes over a shared prefix": [(c, len(c.q_PHD) - 1, len(c.q_PHD)) for c in branches * 2] + decodes,
        "chunks over a shared prefix": [(c, 96, len(c.q_PHD)) for c in branches],
    }


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (7, 1), (3, 3)])
@pytest.mark.parametrize("name", QUICK)
def test_float32_equals_full_attention(paged_world, name, num_heads, num_kv_heads, head_dim, block_size):
    world = paged_world(
        backend=name,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=2400 // block_size,
    )
    for kind, chunks in mixes(world).items():
        for result, chunk in zip(world.attend(chunks), chunks, strict=True):
            error = (result.double() - world.expected(*chunk)).abs().max()
            assert error < 2e-6, kind


@pytest.mark.parametrize("name", BACKENDS)
def test_bfloat16_stays_bfloat16(paged_world, name):
    world = paged_world(backend=name, dtype=torch.bfloat16)
    for result, chunk in zip(world.attend(chunks := mixes(world)["decodes and chunks"]), chunks, strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.double(), world.expected(*chunk), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (33, None), (64, 20.0), (150, None), (None, 5.0)])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("head_dim", [80, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (7, 1)])
@pytest.mark.parametrize("name", [param for param in QUICK if param.values[0] not in WITHOUT_MASKS])
def test_windows_and_caps(paged_world, name, num_heads, num_kv_heads, head_dim, block_size, window, soft_cap):
    world = paged_world(
        backend=name,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=6400 // block_size,
        window=window,
        soft_cap=soft_cap,
    )
    for kind, chunks in mixes(world).items():
        for result, chunk in zip(world.attend(chunks), chunks, strict=True):
            assert (result.double() - world.expected(*chunk)).abs().max() < 1e-5, kind


@pytest.mark.parametrize("block_size", [16, 32, 96])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (7, 1), (16, 2)])
@pytest.mark.parametrize("name", sorted(NARROW))
def test_bfloat16_rounds_no_more_than_weights_and_result(paged_world, name, num_heads, num_kv_heads, head_dim, block_size):
    """Each weight and the result are rounded by at most 2^-8 of themselves; all else is float32."""
    world = paged_world(
        backend=name,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=5000 // block_size,
        dtype=torch.bfloat16,
    )
    for kind, chunks in mixes(world).items():
        for result, chunk in zip(world.attend(chunks), chunks, strict=True):
            bound = world.expected(*chunk, of_values=torch.abs) * 2**-7 + 1e-5
            assert ((result.double() - world.expected(*chunk)).abs() <= bound).all(), kind
