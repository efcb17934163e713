"""The formats that quantise: how far a block may move, what a token costs, and that no row's numbers are another's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kv.format import Filling, load_format
from engine.kv.formats.fp4 import hadamard
from engine.kv.placement import Places
from engine.kv.shape import BlockShape
from engine.kv.sizing import open_bytes
from engine.kv.store import KVStore

NAMES = ("int8", "fp8", "fp4")
SHAPE = BlockShape(block_size=16, num_kv_heads=3, head_dim=64)
PLACES = Places(num_open=4, num_filling=6)
NUM_BLOCKS = 8


def make_store(name: str, *, shape: BlockShape = SHAPE, num_layers: int = 1, dtype=torch.float32) -> KVStore:
    sizes = {"shape": shape, "num_layers": num_layers, "num_blocks": NUM_BLOCKS}
    return KVStore(load_format(name), device=torch.device("cpu"), dtype=dtype, places=PLACES, **sizes)


def pairs(*of) -> torch.Tensor:
    return torch.tensor(of, dtype=torch.int64).view(-1, 2).T.contiguous()


def stored(name: str, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> list[torch.Tensor]:
    """A block's keys and values after it was written whole, [B, K, D] each."""
    block_size, num_kv_heads, head_dim = k_BKD.shape
    store = make_store(name, shape=BlockShape(block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim))
    slots = NUM_BLOCKS * block_size + torch.arange(block_size)
    store.write(0, k_BKD, v_BKD, slots, Filling(moves_2M=pairs(), full_2F=pairs((NUM_BLOCKS, 5))))
    return [part[0].transpose(0, 1) for part in store.layer(0).gather(5 * block_size + torch.arange(block_size)[None])]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread_out(*shape: int, seed: int = 0) -> torch.Tensor:
    """Channels whose sizes differ by up to a thousand."""
    return noise(*shape, seed=seed) * torch.logspace(-1.5, 1.5, shape[-1])[torch.randperm(shape[-1])]


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_int8_moves_no_number_by_more_than_half_a_step(block_size, head_dim):
    """A step is a power of two, of which at most 127 and more than 63 make the largest of the channel or of the token."""
    k, v = spread_out(block_size, 2, head_dim), spread_out(block_size, 2, head_dim, seed=1)
    for exact, found, dim in zip((k, v), stored("int8", k, v), (0, 2), strict=True):
        most = exact.abs().amax(dim, keepdim=True)
        assert ((found - exact).abs() <= most / 63.5 / 2).all()
        steps = found / torch.exp2(torch.ceil(torch.log2(most / 127)))
        assert torch.equal(steps, steps.round()) and (steps.abs() <= 127).all()


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_fp8_moves_no_number_by_more_than_a_sixteenth_of_itself(head_dim):
    """Three bits behind the leading one, or half of the least step under 2^-6 of a range of 448."""
    k, v = spread_out(16, 2, head_dim), spread_out(16, 2, head_dim, seed=1) * 1e4
    for exact, found in zip((k, v), stored("fp8", k, v), strict=True):
        most = exact.abs().amax((0, 2), keepdim=True)
        assert ((found - exact).abs() <= exact.abs() / 16 + most / 224 * 2**-10).all()


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_fp4_values_move_by_no_more_than_half_the_widest_step_of_their_group(head_dim):
    """e2m1 steps by 2 from 4 to 6, so by a third of the largest; the group's own scale is rounded by a sixteenth of itself."""
    k, v = noise(16, 2, head_dim), noise(16, 2, head_dim, seed=1)
    _, found = stored("fp4", k, v)
    group = 8 if head_dim == 8 else 16
    most = v.unflatten(2, (-1, group)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, group).flatten(2)
    assert ((found - v).abs() <= most * (1 / 6 * 17 / 16)).all()


@pytest.mark.parametrize(("name", "most_moved"), [("int8", 0.02), ("fp8", 0.04), ("fp4", 0.15)])
@pytest.mark.parametrize("channel", [0, 5, 63])
def test_a_channel_that_stands_out_does_not_destroy_the_others(name, most_moved, channel):
    """One of 64 channels is 60 times larger; with one scale a token int8 would move the others by 11 %, 4 bits by 82 %."""
    for seed in range(10):
        k = noise(16, 1, 64, seed=seed)
        k[..., channel] *= 60
        found, _ = stored(name, k, k)
        others = torch.arange(64) != channel
        assert (found - k)[..., others].norm() < most_moved * k[..., others].norm()
        assert (found - k)[..., channel].norm() < 0.2 * k[..., channel].norm()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_what_is_no_number_is_loud(name):
    zeros = torch.zeros(16, 3, 64)
    assert not any(part.any() for part in stored(name, zeros, zeros))
    for broken in (torch.nan, torch.inf, -torch.inf):
        k, v = noise(16, 3, 64), noise(16, 3, 64, seed=1)
        k[3, 1, 7] = v[4, 2, 9] = broken
        found_k, found_v = stored(name, k, v)
        assert not (found_k[:, 1, 7].abs() < 1e30).any() and not (found_v[4, 2].abs() < 1e30).all()
        assert found_k[:, 0].isfinite().all() and found_k[:, 0].abs().max() < 10, "other heads keep their numbers"


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_eight_bits_are_exact_in_bfloat16(name):
    """So every backend reads the same numbers, whatever it computes in."""
    for part in stored(name, spread_out(16, 3, 64), spread_out(16, 3, 64, seed=1)):
        assert torch.equal(part, part.bfloat16().float())


@pytest.mark.parametrize("name", NAMES)
def test_a_token_reads_the_same_beside_any_others(name):
    store = make_store(name)
    slots = NUM_BLOCKS * 16 + torch.arange(64)
    full = pairs(*((NUM_BLOCKS + i, 2 * i) for i in range(4)))
    store.write(0, noise(64, 3, 64), noise(64, 3, 64, seed=1), slots, Filling(moves_2M=pairs(), full_2F=full))
    written = (32 * torch.arange(4)[:, None] + torch.arange(16)).flatten()
    whole = store.layer(0).gather(written[None])
    some = torch.randperm(64)[:13]
    for together, apart in zip(whole, store.layer(0).gather(written[some][None]), strict=True):
        assert torch.equal(together[:, :, some], apart)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_are_plain_each_layer_s_own_and_move_before_they_are_written(name, dtype):
    store = make_store(name, num_layers=2, dtype=dtype)
    first_open = NUM_BLOCKS + PLACES.num_filling
    halves = [noise(2, 16, 3, 64, seed=seed).to(dtype) for seed in range(2)]  # of two layers, k and v
    nothing = Filling(moves_2M=pairs(), full_2F=pairs())
    for layer, (k, v) in enumerate(halves):
        store.write(layer, k[:9], v[:9], first_open * 16 + torch.arange(9), nothing)
    store.copy_blocks([(first_open, first_open + 3)])
    for layer, (k, v) in enumerate(halves):  # the block gets full, and another one takes its place
        slots = torch.cat((NUM_BLOCKS * 16 + torch.arange(9, 16), first_open * 16 + torch.arange(2)))
        rows_k, rows_v = torch.cat((k[9:], -k[:2])), torch.cat((v[9:], -v[:2]))
        store.write(layer, rows_k, rows_v, slots, Filling(moves_2M=pairs((first_open, NUM_BLOCKS)), full_2F=pairs((NUM_BLOCKS, 1))))
        kv = store.layer(layer)
        for found, plain in zip(kv.gather(NUM_BLOCKS * 16 + torch.arange(16)[None]), (k, v), strict=True):
            assert torch.equal(found[0].transpose(0, 1), plain.float())
        for found, expected in zip(kv.gather(16 + torch.arange(16)[None]), stored(name, k, v), strict=True):
            assert torch.equal(found[0].transpose(0, 1), expected)
    for layer, (k, v) in enumerate(halves):
        for found, plain in zip(store.layer(layer).gather((first_open * 16 + torch.arange(2))[None]), (k, v), strict=True):
            assert torch.equal(found[0].transpose(0, 1), -plain[:2].float())
        for found, plain in zip(store.layer(layer).gather(((first_open + 3) * 16 + torch.arange(9))[None]), (k, v), strict=True):
            assert torch.equal(found[0].transpose(0, 1), plain[:9].float())


@pytest.mark.parametrize(("name", "most"), [("int8", 0.54), ("fp8", 0.51), ("fp4", 0.29)])
def test_a_block_takes_the_bytes_that_are_allocated(name, most):
    layer = make_store(name).layer(0)
    held = sum(part.numel() for pool in (layer.keys, layer.values) for part in pool.parts)
    block_bytes = load_format(name).bytes_per_block(SHAPE)
    assert held == NUM_BLOCKS * block_bytes
    assert block_bytes <= most * load_format("bf16").bytes_per_block(SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_take_the_bytes_that_are_counted(dtype):
    layer = make_store("int8", num_layers=3, dtype=dtype).layer(2)
    held = sum(part.numel() * part.itemsize for part in (layer.places.keys, layer.places.values))
    assert held == open_bytes(load_format("int8"), PLACES, shape=SHAPE, num_layers=3, dtype_bytes=dtype.itemsize)
    assert open_bytes(load_format("bf16"), PLACES, shape=SHAPE, num_layers=3, dtype_bytes=dtype.itemsize) == 0


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_the_rotation_is_that_of_a_hadamard_matrix_and_its_own_inverse(head_dim):
    order = head_dim & -head_dim
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = noise(5, head_dim)
    blocks = x.unflatten(1, (-1, order)).double() @ torch.from_numpy(matrix) / order**0.5
    torch.testing.assert_close(hadamard(x).double(), blocks.flatten(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
