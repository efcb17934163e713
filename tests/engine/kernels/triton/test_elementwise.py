"""The fused kernels in the interpreter, against torch's own layers."""

from __future__ import annotations

import pytest
import torch

from engine.layers.norm import RMSNorm
from engine.layers.rope import RotaryTable, rotate
from engine.layers.spec import RopeSpec

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

from engine.kernels.triton.elementwise import add_rms_norm, rms_norm, rotate_and_store, silu_and_mul
from engine.kv.formats._plain import PlainLayer
from engine.kv.shape import BlockShape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def random(device):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype: torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


@pytest.fixture
def close(device):
    """Numbers up to 4 in size, within a rounding to ``dtype``, which the last bit of a float32 sum may turn the other way.

    Triton's interpreter cuts a bfloat16's bits off where a GPU rounds, so that a few units may come together.
    """

    def tolerance(dtype: torch.dtype) -> dict[str, float]:
        if dtype == torch.float32:
            return {"rtol": 1e-5, "atol": 1e-6}
        unit = torch.finfo(dtype).eps * (4 if device == "cpu" and dtype == torch.bfloat16 else 1)
        return {"rtol": unit, "atol": 4 * unit}

    return tolerance


@pytest.mark.parametrize("size", [64, 72, 576])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(random, close, dtype, size):
    norm = RMSNorm(size, eps=1e-5)
    norm.weight = torch.nn.Parameter(random(size, dtype=dtype), requires_grad=False)
    x, stream = random(5, size, dtype=dtype), random(5, size, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, norm.weight, eps=1e-5), norm(x), **close(dtype))
    normed, added = add_rms_norm(x, stream, norm.weight, eps=1e-5)
    torch.testing.assert_close(added, stream + x, **close(dtype))
    torch.testing.assert_close(normed, norm(stream + x), **close(dtype))


def test_norms_of_what_overflows_when_squared_are_no_numbers(random):
    x = random(3, 64, dtype=torch.float32)
    weight = torch.ones_like(x[0])
    x[1, 5] = 1e30
    for normed in (rms_norm(x, weight, eps=1e-5), add_rms_norm(x, torch.zeros_like(x), weight, eps=1e-5)[0]):
        assert normed[1].isnan().all() and normed[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [64, 200, 4864])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation(random, close, dtype, size):
    gate_up = random(3, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up, **close(dtype))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 64), (4, 2, 80), (2, 2, 12)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_and_write(random, close, device, dtype, num_heads, num_kv_heads, head_dim, normed):
    """Queries and the pool's contents; what is not written stays as it was."""
    counts = [num_heads, num_kv_heads, num_kv_heads]
    qkv = random(66, sum(counts) * head_dim, dtype=dtype)
    positions = torch.tensor([0, 1, 99, 5, 5, 63, *range(60)], device=device)
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(1))[:66].to(device)
    rotary = RotaryTable(RopeSpec(), head_dim=head_dim, max_position=100).to(device)
    norms = [RMSNorm(head_dim, eps=1e-6) for _ in range(2)]
    for norm in norms:
        norm.weight = torch.nn.Parameter(random(head_dim, dtype=dtype), requires_grad=False)

    shape = BlockShape(block_size=16, num_kv_heads=num_kv_heads, head_dim=head_dim)
    pools = [PlainLayer(shape, num_blocks=6, dtype=dtype, device=torch.device(device)) for _ in range(2)]
    for pool in pools:
        pool.keys.fill_(7)
        pool.values.fill_(7)
    found = rotate_and_store(
        qkv,
        pools[0].keys,
        pools[0].values,
        slots_T=slots,
        positions_T=positions,
        cos_PD=rotary.cos,
        sin_PD=rotary.sin,
        num_heads=num_heads,
        norms_2D=torch.stack([norm.weight for norm in norms]) if normed else None,
        eps=1e-6,
    )

    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split(counts, dim=1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    cos_sin = rotary(positions, dtype=torch.float32)
    q, k = rotate(q.float(), *cos_sin).to(dtype), rotate(k.float(), *cos_sin).to(dtype)
    pools[1].write(k, v, slots)
    torch.testing.assert_close(found, q, **close(dtype))
    torch.testing.assert_close(pools[0].keys, pools[1].keys, **close(dtype))
    assert torch.equal(pools[0].values, pools[1].values)
