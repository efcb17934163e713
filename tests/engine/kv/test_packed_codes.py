"""The kernels' quantised pool against the plain format of the same name: the same numbers, to the bit, in every tier."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cpu import build
from engine.kernels.cpu.attention import CODES
from engine.kv.format import Filling, load_format
from engine.kv.packed_codes import PackedCodesFormat
from engine.kv.placement import Places
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore

PLACES = Places(num_open=3, num_filling=5)
NUM_BLOCKS = 7


@pytest.fixture(scope="module", params=build.TIERS)
def library(request):
    try:
        return build.load(request.param)
    except build.Unavailable as reason:
        pytest.skip(str(reason))


def stores(library, name: str, shape: BlockShape) -> list[KVStore]:
    formats = PackedCodesFormat(library, name), load_format(name)
    sizes = {"shape": shape, "num_layers": 2, "num_blocks": NUM_BLOCKS, "places": PLACES}
    return [KVStore(kv_format, device=torch.device("cpu"), dtype=torch.bfloat16, **sizes) for kv_format in formats]


def pairs(*of) -> torch.Tensor:
    return torch.tensor(of, dtype=torch.int64).view(-1, 2).T.contiguous()


def numbers(count: int, num_kv_heads: int, head_dim: int, *, seed: int) -> torch.Tensor:
    """bf16 of all sizes, with zeros, the least and the largest there are among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, num_kv_heads, head_dim, generator=generator) * torch.logspace(-2, 2, head_dim)
    x[::7] *= 1e-3
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0
    x[0, 0, :4] = torch.tensor([2.0**-130, -(2.0**-130), 3.0e38, 127.0])
    return x.bfloat16()


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(3, 64, 16), (1, 16, 48), (2, 80, 32), (1, 256, 1024)])
@pytest.mark.parametrize("name", CODES)
def test_holds_the_numbers_of_the_plain_format(library, name, num_kv_heads, head_dim, block_size):
    shape = BlockShape(block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim)
    k, v = (numbers(3 * block_size, num_kv_heads, head_dim, seed=seed) for seed in range(2))
    slots = NUM_BLOCKS * block_size + torch.randperm(3 * block_size)
    filling = Filling(moves_2M=pairs(), full_2F=pairs((NUM_BLOCKS, 6), (NUM_BLOCKS + 1, 0), (NUM_BLOCKS + 2, 3)))
    read = torch.cat([block * block_size + torch.randperm(block_size) for block in (0, 6, 3)])[None]
    found = []
    for store in stores(library, name, shape):
        store.write(1, k, v, slots, filling)
        found.append(store.layer(1).gather(read))
    for packed, plain in zip(*found, strict=True):
        assert packed.is_contiguous()
        is_zero = plain == 0
        assert torch.equal(packed.float()[~is_zero], plain.float()[~is_zero])
        assert (packed[is_zero].abs() <= 2.0**-60 * plain.abs().max()).all(), "a zero is read as hardly anything"


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CODES)
def test_what_is_no_number_is_loud(library, name, broken):
    packed, _ = stores(library, name, BlockShape(block_size=16, num_kv_heads=2, head_dim=32))
    k, v = torch.randn(2, 16, 2, 32).bfloat16()
    k[3, 1, 7] = v[4, 1, 9] = broken
    packed.write(0, k, v, NUM_BLOCKS * 16 + torch.arange(16), Filling(moves_2M=pairs(), full_2F=pairs((NUM_BLOCKS, 2))))
    read_k, read_v = (part[0].float() for part in packed.layer(0).gather(32 + torch.arange(16)[None]))
    assert read_k[1, :, 7].abs().min() > 1e30 and read_v[1, 4].abs().min() > 1e30
    assert max(read_k[0].abs().max(), read_v[0].abs().max()) < 10


@pytest.mark.parametrize("name", CODES)
def test_places_are_plain_and_move_before_they_are_written(library, name):
    shape = BlockShape(block_size=16, num_kv_heads=2, head_dim=32)
    first_open = NUM_BLOCKS + PLACES.num_filling
    k, v = torch.randn(2, 18, 2, 32).bfloat16()
    found = []
    for store in stores(library, name, shape):
        store.write(0, k[:9], v[:9], first_open * 16 + torch.arange(9), Filling(moves_2M=pairs(), full_2F=pairs()))
        store.copy_blocks([(first_open, first_open + 2)])
        slots = torch.cat((NUM_BLOCKS * 16 + torch.arange(9, 16), first_open * 16 + torch.arange(2)))
        store.write(0, k[9:], v[9:], slots, Filling(moves_2M=pairs((first_open, NUM_BLOCKS)), full_2F=pairs((NUM_BLOCKS, 1))))
        read = torch.cat((16 + torch.arange(16), first_open * 16 + torch.arange(2), (first_open + 2) * 16 + torch.arange(9)))
        found.append(store.layer(0).gather(read[None]))
    for packed, plain in zip(*found, strict=True):
        assert torch.equal(packed.float()[plain != 0], plain[plain != 0])


@pytest.mark.parametrize("name", CODES)
def test_takes_the_bytes_of_its_plain_twin(library, name):
    shape = BlockShape(block_size=32, num_kv_heads=3, head_dim=64)
    layer = stores(library, name, shape)[0].layer(0)
    held = layer.codes.numel() + layer.exponents.numel()
    assert held == NUM_BLOCKS * load_format(name).bytes_per_block(shape)
